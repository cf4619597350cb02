"""Rollouts behind one interface: requests in, token ids out, whatever engine generates them.

The types, the checks that hold for every backend, and the backend that asks rollout servers over HTTP. How servers are
reached and shared is `utils.rollout.client`'s job, parsing what they say is `utils.parsing`'s.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from utils.capacity import request_seed

CONTEXT = 8  # tokens shown on each side of the first difference of two prompts


class StaleRollout(RuntimeError):
    """An answer was made with other weights than were asked for, and must not be trained on as on-policy (SYN-8)."""


class PromptMismatch(RuntimeError):
    """The engine saw another prompt than the learner will train behind (ROL-3)."""


@dataclass(frozen=True)
class RolloutRequest:
    """One sample to be answered.

    `messages` in ms-swift's form (string content with `<image>` markers, or content lists), `images` as paths, URLs or
    data URIs in order of appearance; `prompt_token_ids`, `pixel_values` [num_patches, dim] and `image_grid_thw` [n, 3]
    are the learner's own encoding, image placeholders expanded; the last two only where there are images.
    """

    sample_id: str
    messages: list[dict[str, Any]]
    images: list[str]
    prompt_token_ids: list[int]
    pixel_values: Any = None
    image_grid_thw: Any = None


@dataclass(frozen=True)
class Decoding:
    """How to sample: greedy at temperature 0, `top_k` -1 for all (CFG-12); `logprobs` asks for those of the answer."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = -1
    repetition_penalty: float = 1.0
    max_new_tokens: int = 1024
    logprobs: bool = False


@dataclass(frozen=True)
class RolloutResult:
    """One answer (ROL-1).

    `response_token_ids`: the assistant's tokens, cut before the stop token. `prompt_token_ids`: what the engine saw.
    `weight_version`: the weights that made it; `last_weight_version` those at its end, another only where running
    requests were held over a sync (SYN-9). `logprobs`: one per response token, where asked for
    (the hf backend has none: it generates with the weights that train). `stop_token_id`: which of the model's stop
    tokens the policy ended the answer with, None where it was cut off; `stop_logprob` is that token's. With `error` set
    the request failed alone: no ids at all, an empty rollout (CON-3).
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


class RolloutBackend(Protocol):
    """What every backend offers: `ServerBackend` here, `utils.rollout.hf.HfBackend`, and
    `utils.rollout.colocate.ColocateBackend`. Every rank calls it for every micro-step, with an empty list too."""

    def generate(
        self,
        requests: Sequence[RolloutRequest],
        decoding: Decoding,
        *,
        global_step: int,
        micro_step_idx: int,
        run_seed: int,
        expect_version: str | None,
        strict: bool = True,
    ) -> list[RolloutResult]:
        """One result per request, in order; see `ServerBackend.generate` for the arguments."""
        ...


class ServerBackend:
    """Rollouts from the configured servers.

    Args:
        client: a `utils.rollout.client.RolloutClient` after `wait_ready`.
    """

    def __init__(self, client: Any) -> None:
        self.client = client

    def generate(
        self,
        requests: Sequence[RolloutRequest],
        decoding: Decoding,
        *,
        global_step: int,
        micro_step_idx: int,
        run_seed: int,
        expect_version: str | None,
        strict: bool = True,
    ) -> list[RolloutResult]:
        """Answers to one micro-step's requests, in their order; no call at all for none (DIS-5).

        Args:
            global_step: the optimizer step that trains these samples.
            micro_step_idx: counts within that step, in dataloader order (DIS-6).
            expect_version: the weights that must have made the answers; None takes any.
            strict: False takes those of other weights of the same run too; how old, is the caller's business.

        Raises:
            StaleRollout: an answer of another version.
            utils.rollout.client.RolloutError: no answers, `ServerGone` where a server is lost.
        """
        if not requests:
            return []
        seed = request_seed(run_seed, global_step, micro_step_idx, self.client.rank)
        note = {"global_step": global_step, "micro_step_idx": micro_step_idx, "rank": self.client.rank}
        note |= {"decoding": asdict(decoding), "weight_version": expect_version}
        bodies = [infer_request(request) for request in requests]
        results = [read_output(output) for output in self.client.infer(bodies, request_config(decoding), seed, note)]
        if expect_version is not None:
            check_versions(requests, results, expect_version, strict)
        return results


def infer_request(request: RolloutRequest) -> dict[str, Any]:
    """The request in ms-swift's `RolloutInferRequest` form (SRV-4)."""
    return {"messages": request.messages, "images": list(request.images), "uuid": request.sample_id}


def request_config(decoding: Decoding) -> dict[str, Any]:
    """The decoding in ms-swift's `RequestConfig` form, without the seed, which is each call's own."""
    return {
        "max_tokens": decoding.max_new_tokens,
        "temperature": decoding.temperature,
        "top_p": decoding.top_p,
        "top_k": decoding.top_k,
        "repetition_penalty": decoding.repetition_penalty,
        "return_details": True,
        "logprobs": decoding.logprobs,
    }


def read_output(output: dict[str, Any]) -> RolloutResult:
    """A `RolloutOutput` form, whose lists are per turn (always one turn here), as a result."""
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
    """How many optimizer steps older than `step`'s are the weights of each version; None, where nobody answered, has
    none."""
    return [step - policy_step(version) for version in versions if version is not None]


def check_versions(
    requests: Sequence[RolloutRequest], results: Sequence[RolloutResult], expected: str, strict: bool = True
) -> None:
    """Every answer was made by the expected weights from its first to its last token (SYN-8, SYN-9).

    Args:
        strict: False lets all weights of the run that `expected` belongs to pass.

    Raises:
        StaleRollout: names the first sample of another version.
    """
    for request, result in zip(requests, results, strict=True):
        stale = {result.weight_version, result.last_weight_version} - {expected, None}
        if not strict:
            stale = {version for version in stale if version.partition(":")[0] != expected.partition(":")[0]}
        if result.error is None and (stale or result.weight_version is None):
            seen = " to ".join(map(str, dict.fromkeys([result.weight_version, result.last_weight_version])))
            raise StaleRollout(f"sample {request.sample_id}: made with weights {seen}, asked for {expected}")


def check_prompt(
    sample_id: str, own_ids: Sequence[int], engine_ids: Sequence[int], decode: Callable[[list[int]], str]
) -> None:
    """The learner's encoding of a prompt equals what the engine saw, token for token (ROL-3).

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
    start, end = max(0, index - CONTEXT), min(len(token_ids), index + CONTEXT + 1)
    words = [f"{token_ids[i]}={decode([int(token_ids[i])])!r}" for i in range(start, end)]
    if index < len(token_ids):
        words[index - start] = f">>> {words[index - start]} <<<"
    else:
        words.append(">>> end <<<")
    return " ".join((["..."] if start else []) + words + (["..."] if end < len(token_ids) else []))


def _flat(turns: list[Any]) -> list[Any]:
    return [value for turn in turns for value in (turn if isinstance(turn, list) else [turn])]
