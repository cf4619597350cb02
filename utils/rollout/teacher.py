"""The teacher (TGT-16): a rollout server whose weights nobody changes. It scores the finished training sequences: the
policy's own prefix and what was appended. Failures are local to the rank that sees them (CON-4)."""

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from utils.data.encoding import prompt_chat
from utils.data.images import as_sent
from utils.data.samples import Sample
from utils.rollout.backend import check_prompt
from utils.rollout.client import RolloutClient
from utils.rollout.link import CallFailed, RolloutError
from utils.rollout.round import NUM_RETRIES
from utils.targets import TEACHER_TOP_K, Segment

logger = logging.getLogger(__name__)

NUM_CALLS = 8  # of a rank, at once


@dataclass
class Teacher:
    """The teacher's server.

    Attributes:
        client: of this server alone.
        decode: token ids to text, for messages.
        model: path of the model that the server had loaded when it was connected.
        weight_version: of the server's weights then; None: as it loaded them.
    """

    client: RolloutClient
    decode: Callable[[list[int]], str]
    model: str | None = None
    weight_version: str | None = None

    def connect(
        self, tokenizer_digest: str | None, prompts: Sequence[tuple[dict[str, Any], list[int]]], longest: int | None
    ) -> None:
        """Wait for the server, and check that it reads and writes the tokens of the model that is trained.

        Args:
            prompts: requests, and the learner's own prompt token ids of each.
            longest: tokens of the longest segment that a row holds; None: no bound.

        Raises:
            RolloutError: it does not respond in time, has another tokenizer, chat template or image size, or takes
                fewer tokens.
        """
        self.client.wait_ready()
        url, health = self.client.url(0), self.client.health(0)
        theirs, taken = health.get("tokenizer_digest"), health.get("max_model_len")
        self.model, self.weight_version = health.get("model"), health.get("weight_version")
        if longest is not None and taken is not None and taken <= longest:  # vLLM wants room for one token more
            raise RolloutError(
                f"{url}: the teacher takes {taken - 1} tokens, and a prompt with its answer may have {longest}; set "
                f"rollout_server.vllm_max_model_len to {longest + 1} or more in the teacher's config, or lower "
                "global_max_length here"
            )
        if tokenizer_digest is not None and theirs != tokenizer_digest:
            raise RolloutError(
                f"{url}: the teacher's tokenizer is not that of model.path; serve a model with the same tokenizer.json"
            )
        for request, prompt_ids in prompts:
            self._ask(request, prompt_ids, prompt_ids[-1:], "start check")

    def score(self, samples: Sequence[Sample], segments: Sequence[Segment], step: int) -> None:
        """Give each segment what the teacher reports where its answer has no label; one without such tokens costs no
        call.

        Raises:
            RolloutError: names rank, step, sample and url; also where the teacher's weights have changed.
            PromptMismatch: the teacher saw other prompt tokens.
        """

        def score_one(sample: Sample, segment: Segment) -> None:
            request = {"messages": prompt_chat(sample), "images": list(map(as_sent, sample.images))}
            ids, start = segment.input_ids.tolist(), segment.answer_start
            where = f"rank {self.client.rank}, step {step + 1}, sample {sample.id}"
            token_ids, logprobs = self._ask(request, ids[:start], ids[start:], where)
            rows = segment.unlabelled_index - start
            segment.teacher_ids, segment.teacher_logprobs = token_ids[rows], logprobs[rows]

        asked = [pair for pair in zip(samples, segments, strict=True) if len(pair[1].unlabelled_index)]
        with ThreadPoolExecutor(NUM_CALLS) as pool:
            list(pool.map(lambda pair: score_one(*pair), asked))

    def _ask(
        self, request: dict[str, Any], prompt_ids: list[int], answer_ids: list[int], where: str
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return token ids int64 and log-probabilities float32, both `[len(answer_ids), TEACHER_TOP_K]`."""
        body = {"infer_request": request, "token_ids": answer_ids, "top_k": TEACHER_TOP_K}
        answer = self._post(body, where)
        if isinstance(answer, dict) and answer.get("weight_version") != self.weight_version:
            raise RolloutError(
                f"{where}: the teacher at {self.client.url(0)} has other weights than at the start "
                f"({answer.get('weight_version')}, was {self.weight_version}): another run trains it; give this run a "
                "server of its own"
            )
        if isinstance(answer, dict) and answer.get("model", self.model) != self.model:
            raise RolloutError(
                f"{where}: the teacher at {self.client.url(0)} has another model than at the start ({answer['model']}, "
                f"was {self.model}); start it again with the old one, or start a run of its own for the new one"
            )
        try:
            check_prompt(where, prompt_ids + answer_ids, answer["prompt_token_ids"], self.decode)
            token_ids = np.array(answer["top_token_ids"], dtype=np.int64)
            logprobs = np.array(answer["top_logprobs"], dtype=np.float32)
        except (KeyError, TypeError, ValueError) as error:
            raise RolloutError(f"{where}: {self.client.url(0)}/teacher/: not a teacher's answer: {error!r}") from error
        shape = (len(answer_ids), TEACHER_TOP_K)
        if not (token_ids.shape == logprobs.shape == shape and np.isfinite(logprobs).all()):
            rule = f"not {TEACHER_TOP_K} tokens with finite log-probabilities for each of ours"
            raise RolloutError(f"{where}: {self.client.url(0)}/teacher/: {rule}")
        return token_ids, logprobs

    def _post(self, body: dict[str, Any], where: str) -> Any:
        """Call `/teacher/`, again after a fault that may pass."""
        for attempt in range(NUM_RETRIES + 1):
            try:
                return self.client.post(0, "/teacher/", body, self.client.timeout_s)
            except CallFailed as failure:
                if failure.is_final or attempt == NUM_RETRIES or self.client.stop.is_set():
                    raise RolloutError(f"{where}: the teacher at {failure}") from failure
                logger.warning("%s, try %d: the teacher at %s", where, attempt + 1, failure)
                self.client.stop.wait(self.client.backoff_s * 2**attempt)
        raise AssertionError("unreachable: the last try returns or raises")
