"""Rollouts behind one interface: requests in, token ids out, whatever engine generates them.

Types, the checks that hold for every engine, and `ServerEngine`, the rollout servers as an engine. HTTP is
`utils.rollout.client`'s job; what a response says is `utils.parsing`'s.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from utils.capacity import EVAL_MICRO_STEP, request_seed
from utils.config.schema import Decoding
from utils.data.encoding import EncodedPrompt, prompt_chat
from utils.data.images import as_sent
from utils.data.prompts import MAX_UUID
from utils.data.samples import Sample
from utils.rollout.client import RolloutClient
from utils.sync.adapter_sync import FallbackSync
from utils.sync.weight_sync import SyncResult, WeightSync

CONTEXT_TOKENS = 8  # shown on each side of the first difference between two prompts


class StaleRollout(RuntimeError):
    """A response was made with other weights than requested; it must not be trained on as on-policy (SYN-8)."""


class PromptMismatch(RuntimeError):
    """The engine saw another prompt than the learner trains on (ROL-3)."""


@dataclass(frozen=True)
class RolloutRequest:
    """One sample to generate for.

    `messages` in ms-swift's form (string content with `<image>` markers, or content lists), `images` as paths, URLs or
    data URIs in order of appearance; `prompt_token_ids` and `vision` are the learner's own encoding,
    as in `utils.data.encoding.EncodedPrompt`.
    """

    sample_id: str
    messages: list[dict[str, Any]]
    images: list[str]
    prompt_token_ids: list[int]
    vision: dict[str, Any] = field(default_factory=dict)


def rollout_requests(samples: Iterable[Sample], prompts: Iterable[EncodedPrompt]) -> list[RolloutRequest]:
    """The requests for samples, each with its encoded prompt."""
    return [
        RolloutRequest(sample.id, prompt_chat(sample), sample.images, **vars(prompt))
        for sample, prompt in zip(samples, prompts, strict=True)
    ]


class RolloutSampling(Decoding):
    """The config's `decoding` section (greedy by default) with the limit on new tokens; `logprobs` requests those of
    the response."""

    max_new_tokens: int = 1024
    logprobs: bool = False


@dataclass(frozen=True)
class RolloutContext:
    """Which step a list of requests belongs to, and which weights must answer it.

    Attributes:
        global_step: the optimizer step that trains these samples.
        micro_step_idx: counts within that step, in dataloader order (DIS-6).
        policy_version: the weights that must have made the responses; None accepts any.
        allow_stale: accept other weights of the same run; the caller judges their age.
    """

    run_seed: int
    global_step: int
    micro_step_idx: int
    policy_version: str | None
    allow_stale: bool = False

    def seed(self, rank: int) -> int:
        """Seed of `rank`'s first request; request `i` samples with `i` more."""
        return request_seed(self.run_seed, self.global_step, self.micro_step_idx, rank)


@dataclass(frozen=True)
class RolloutResult:
    """One response (ROL-1).

    `response_token_ids`: the assistant's tokens, cut before the stop token. `prompt_token_ids`: what the engine saw.
    `weight_version`: the weights that began it; `last_weight_version` those that ended it, different only where running
    requests were held over a sync (SYN-9). `logprobs`: one per response token, where requested (the hf engine has none:
    it generates with the weights that train). `stop_token_id`: the model's stop token that ended the response, None
    where it was cut off; `stop_logprob` is that token's. With `error` set the request failed alone: no ids at all, an
    empty rollout (CON-3).
    """

    response_token_ids: list[int]
    prompt_token_ids: list[int]
    text: str
    finish_reason: str | None
    weight_version: str | None
    error: str | None = None
    logprobs: list[float] | None = None
    last_weight_version: str | None = None
    stop_token_id: int | None = None
    stop_logprob: float | None = None


class Engine(Protocol):
    """Generator with the policy's weights: `ServerEngine`, `HfEngine`, `ColocateEngine` (CFG-5) or `NoEngine`.

    Attributes:
        mode: the weight-sync mode in force, `full` or `adapter`; None where no weights are sent.
        fallback: why that is not the configured mode, None if it is.
        ledger: digest of each tensor the engine holds, by name, where `verify: always` keeps them.
    """

    mode: str | None = None
    fallback: str | None = None
    ledger: dict[str, str] = {}

    def open(self) -> None:
        """Open the communicators, where there are any; again after a server was lost (collective)."""

    def sync(self, version: str) -> SyncResult:
        """Bring the current merged weights into force under the name `version` (SYN-2; collective)."""

    def generate(
        self, requests: Sequence[RolloutRequest], sampling: RolloutSampling, context: RolloutContext
    ) -> list[RolloutResult]:
        """One result per request, in order. Every rank calls it for every micro-step, also with no requests.

        Raises:
            StaleRollout: a response of another version than `context` accepts.
        """

    def rest(self) -> None:
        """Give device memory to the learner until the next `sync` or `generate`, where both share a device."""

    def close(self) -> None:
        """Leave the engine. Servers stay up (GRP-4)."""


class UnsyncedEngine(Engine):
    """An `Engine` that needs no weights."""

    def sync(self, version: str) -> SyncResult:
        """Nothing to send."""
        return SyncResult(version=version, num_tensors=0, num_bytes=0, seconds=0.0, verified=False)


class NoEngine(UnsyncedEngine):
    """The `Engine` where nothing generates (LRN-10)."""

    def generate(
        self, requests: Sequence[RolloutRequest], sampling: RolloutSampling, context: RolloutContext
    ) -> list[RolloutResult]:
        """As `Engine.generate`, for no requests."""
        assert not requests, "this run has no engine"
        return []


class ServerEngine(Engine):
    """The configured rollout servers as one engine.

    Args:
        client: after `wait_ready`.
    """

    def __init__(self, client: RolloutClient, weight_sync: WeightSync | FallbackSync) -> None:
        self.client = client
        self._weight_sync = weight_sync

    @property
    def mode(self) -> str:
        return self._weight_sync.mode

    @property
    def fallback(self) -> str | None:
        return self._weight_sync.fallback

    @property
    def ledger(self) -> dict[str, str]:
        return self._weight_sync.ledger

    def open(self) -> None:
        self._weight_sync.open()

    def sync(self, version: str) -> SyncResult:
        return self._weight_sync.sync(version)

    def generate(
        self, requests: Sequence[RolloutRequest], sampling: RolloutSampling, context: RolloutContext
    ) -> list[RolloutResult]:
        """As `Engine.generate`; no call at all for no requests (DIS-5).

        Raises:
            utils.rollout.link.RolloutError: no responses; `utils.rollout.round.ServerGone` where a server is lost.
        """
        if not requests:
            return []
        note = {
            "global_step": context.global_step,
            "micro_step_idx": context.micro_step_idx,
            "rank": self.client.rank,
            "decoding": sampling.model_dump(),
            "weight_version": context.policy_version,
        }
        bodies = [infer_request(request) for request in requests]
        seed, is_evaluation = context.seed(self.client.rank), context.micro_step_idx == EVAL_MICRO_STEP
        outputs = self.client.infer(bodies, request_config(sampling), seed, note, in_small_rounds=is_evaluation)
        results = [read_output(output) for output in outputs]
        check_versions(requests, results, context)
        return results

    def close(self) -> None:
        self._weight_sync.close()


def infer_request(request: RolloutRequest) -> dict[str, Any]:
    """The request in ms-swift's `RolloutInferRequest` form (SRV-4). Of a long id the end is sent: it tells more."""
    images, uuid = list(map(as_sent, request.images)), request.sample_id[-MAX_UUID:]
    return {"messages": request.messages, "images": images, "uuid": uuid}


def request_config(sampling: RolloutSampling) -> dict[str, Any]:
    """The sampling in ms-swift's `RequestConfig` form; the seed is each call's own.

    What is left out would come from the model's generation_config, which a colocated engine does not read.
    """
    return {
        "max_tokens": sampling.max_new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": 0.0,
        "repetition_penalty": sampling.repetition_penalty,
        "return_details": True,
        "logprobs": sampling.logprobs,
    }


def read_output(output: dict[str, Any]) -> RolloutResult:
    """Read a `RolloutOutput` form, whose lists are per turn (always one turn here)."""
    infos = output["rollout_infos"]
    version = infos.get("weight_version")
    if infos.get("error") is not None:
        return RolloutResult([], [], "", None, version, error=str(infos["error"]))
    response = output["response"]
    choice = response["choices"][0]
    logprobs = output.get("rollout_logprobs")
    return RolloutResult(
        response_token_ids=_flat(output["response_token_ids"]),
        prompt_token_ids=list(response["prompt_token_ids"]),
        text=choice.get("message", {}).get("content") or "",
        finish_reason=choice.get("finish_reason"),
        weight_version=version,
        logprobs=_flat(logprobs) if logprobs else None,
        last_weight_version=infos.get("last_weight_version", version),
        stop_token_id=infos.get("stop_token_id"),
        stop_logprob=infos.get("stop_logprob"),
    )


def policy_step(version: str) -> int:
    """The optimizer step of weights called `run id:step` (SYN-8)."""
    return int(version.rpartition(":")[2])


def policy_lags(versions: Iterable[str | None], step: int) -> list[int]:
    """Age of each version in optimizer steps at `step`; None, where no engine responded, is left out."""
    return [step - policy_step(version) for version in versions if version is not None]


def check_versions(
    requests: Sequence[RolloutRequest], results: Sequence[RolloutResult], context: RolloutContext
) -> None:
    """Check that the expected weights made every response, from its first to its last token (SYN-8, SYN-9).

    Raises:
        StaleRollout: names the first sample of another version.
    """
    expected = context.policy_version
    if expected is None:
        return
    for request, result in zip(requests, results, strict=True):
        stale = {result.weight_version, result.last_weight_version} - {expected, None}
        if context.allow_stale:
            stale = {version for version in stale if version.partition(":")[0] != expected.partition(":")[0]}
        if result.error is None and (stale or result.weight_version is None):
            seen = " to ".join(map(str, dict.fromkeys([result.weight_version, result.last_weight_version])))
            raise StaleRollout(f"sample {request.sample_id}: made with weights {seen}, requested {expected}")


def check_prompt(
    sample_id: str, own_ids: Sequence[int], engine_ids: Sequence[int], decode: Callable[[list[int]], str]
) -> None:
    """Check that the learner's encoding of a prompt equals what the engine saw, token for token (ROL-3).

    Args:
        decode: token ids to text, for the message.

    Raises:
        PromptMismatch: shows the first differing index with the tokens around it on both sides.
    """
    if list(own_ids) == list(engine_ids):
        return
    shorter = min(len(own_ids), len(engine_ids))
    index = next((i for i in range(shorter) if own_ids[i] != engine_ids[i]), shorter)
    raise PromptMismatch(
        f"sample {sample_id}: the engine's prompt differs from the learner's at token {index}"
        f" (lengths: learner {len(own_ids)}, engine {len(engine_ids)})\n"
        f"  learner: {_around(own_ids, index, decode)}\n"
        f"  engine:  {_around(engine_ids, index, decode)}\n"
        "Learner and server must load the same model directory, chat template and image sizes."
    )


def _around(token_ids: Sequence[int], index: int, decode: Callable[[list[int]], str]) -> str:
    """`... 5='a' 6='b' >>> 7='c' <<< 8='d' ...`"""
    start, end = max(0, index - CONTEXT_TOKENS), min(len(token_ids), index + CONTEXT_TOKENS + 1)
    words = [f"{token_ids[i]}={decode([int(token_ids[i])])!r}" for i in range(start, end)]
    if index < len(token_ids):
        words[index - start] = f">>> {words[index - start]} <<<"
    else:
        words.append(">>> end <<<")
    return " ".join((["..."] if start else []) + words + (["..."] if end < len(token_ids) else []))


def _flat(turns: list[Any]) -> list[Any]:
    return [value for turn in turns for value in (turn if isinstance(turn, list) else [turn])]
