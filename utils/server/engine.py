"""The rollout server's engine: vLLM's AsyncLLM with placement on replicas, image rules and signs of life.

`RolloutEngine` answers requests (SRV-4, SRV-9); `WeightUpdates` brings new weights in (section SYN). They meet in
`EngineWeights`: a request waits there until the weights are whole. HTTP is utils/server/app.py's.
"""

import asyncio
import itertools
import logging
import math
import time
import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from PIL import Image
from vllm import SamplingParams
from vllm.exceptions import VLLMClientError
from vllm.lora.request import LoRARequest
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

from utils.data.encoding import model_digest, tokenizer_digest
from utils.data.prompts import TooLarge, render_prompt, to_chat_messages
from utils.server.images import ImageRefused, ImageStore, PixelBudget
from utils.server.protocol import (
    ChatCompletionResponse,
    ChatMessage,
    Choice,
    ProbeCall,
    RequestConfig,
    RolloutInferRequest,
    RolloutOutput,
    TeacherCall,
    Usage,
    collect_images,
)
from utils.sync.wire import ADAPTER_ID

logger = logging.getLogger(__name__)

ADAPTER = LoRARequest("learner", ADAPTER_ID, "(in memory)")  # vLLM uses a filled slot without a look at the path
CALL_IMAGES = 16  # a call's images have at most so many times the pixels of a request's
MAX_LOGPROBS = 1 << 20  # of a call; each takes about 1 KiB
NUM_RETRIES = 2  # of a request that the engine ends with an error
NO_VERSION = "default"  # vLLM's name for weights that were never updated
WATCH_INTERVAL_S = 5.0  # at most, between two checks that the engines are alive


class BadCall(ValueError):
    """The caller's arguments cannot be used."""


class Unavailable(RuntimeError):
    """The server cannot generate: an engine died, or its weights are a mixture after a failed update."""


class Conflict(RuntimeError):
    """The call does not fit the server's state, or comes from a run that does not own the server."""


class NotOwner(RuntimeError):
    """The call does not carry the token of the run that opened the communicator."""


class UpdateFailed(RuntimeError):
    """A weight update failed; the server is dirty until a full one succeeds."""


@dataclass
class EngineWeights:
    """State and version of the engine's weights; requests wait here while an update is in progress."""

    state: str = "idle"  # idle | updating | dirty
    version: str | None = None
    reason: str = ""  # why it is dirty
    num_waiting: int = 0
    num_updates: int = 0
    num_failed: int = 0  # updates
    keeps_running: bool = False  # requests are held over an update ("keep"), and so answered by old and new weights
    _settled: asyncio.Event = field(default_factory=asyncio.Event)

    def move(self, state: str, version: str | None = None, reason: str = "") -> None:
        self.state = state
        self.version = version
        self.reason = reason
        if state == "updating":
            self.num_updates += 1
            self._settled.clear()
        else:
            self.num_failed += state == "dirty"
            self._settled.set()

    async def wait_whole(self) -> None:
        """Wait for the end of an update. Raises `Unavailable` when it leaves the weights incomplete."""
        self.num_waiting += 1
        try:
            if self.state == "updating":
                await self._settled.wait()
        finally:
            self.num_waiting -= 1
        self.check()

    def check(self) -> None:
        if self.state == "dirty":
            raise Unavailable(f"the weights are incomplete until a full update has gone through: {self.reason}")


class RolloutEngine:
    """Answers requests with the engine's current weights.

    Args:
        processor: the model's processor (or tokenizer), whose chat template writes the prompts.
        world_size: devices, TP x DP.
        stuck_s: an engine that has not answered for so long counts as hung; in a weight update for `update_s`.
    """

    def __init__(
        self, llm: AsyncLLM, processor: Any, images: ImageStore, model_path: str, world_size: int, stuck_s: float
    ) -> None:
        self.llm = llm
        self.processor = processor
        self.images = images
        self.model_path = model_path
        self.model_digest = model_digest(model_path)
        self.tokenizer_digest = tokenizer_digest(model_path)
        self.max_model_len: int = llm.model_config.max_model_len
        self.logprobs_mode: str = llm.model_config.logprobs_mode
        self.world_size = world_size
        self.stuck_s = stuck_s
        self.update_s = stuck_s
        self.boot_id = uuid.uuid4().hex
        self.weights = EngineWeights()
        self.num_running = [0] * len(llm.engine_core.core_engines)  # per replica
        self.last_contact = time.monotonic()
        self.adapter: LoRARequest | None = None  # for all requests, once an adapter is in its slot (SYN-10)
        self._defaults = llm.model_config.get_diff_sampling_param()
        self._request_ids = itertools.count()
        self._writer = ThreadPoolExecutor(1, "writer")  # of answers; more threads would take turns with the loop
        self.ids_in_flight: set[str] = set()  # `_generate` runs an aborted request again or, if dirty, fails

    async def infer(self, requests: list[RolloutInferRequest], config: RequestConfig) -> list[RolloutOutput]:
        """Answer in request order; request i samples with `seed + i`.

        Raises:
            Unavailable: for all or none.
            BadCall: every request is too large, or all answers together may be.
        """
        self.check_alive()
        num_tokens = len(requests) * min(config.max_tokens or self.max_model_len, self.max_model_len)
        if config.logprobs and num_tokens * (1 + (config.top_logprobs or 0)) > MAX_LOGPROBS:
            sizes = f"{len(requests)} requests x max_tokens x (1 + top_logprobs)"
            raise BadCall(f"{sizes} is at most {MAX_LOGPROBS}; send fewer at once, or lower one of these")
        pixels = PixelBudget(CALL_IMAGES * self.images.max_pixels, "call")
        answers = [
            asyncio.ensure_future(self._answer(request, config, config.seed_of(index), pixels))
            for index, request in enumerate(requests)
        ]
        try:
            outputs = await asyncio.gather(*answers)
        except BaseException:  # the caller hung up or the engine died: nobody can use what still runs
            for answer in answers:
                answer.cancel()
            raise
        if outputs and all("too_large" in output.rollout_infos for output in outputs):
            raise BadCall(outputs[0].rollout_infos["error"])
        return outputs

    async def probe(self, call: ProbeCall) -> dict[str, Any]:
        """Score every prompt token (null for the first) on every replica, without reading the prefix cache (SYN-7).

        Raises `BadCall` if the prompt cannot be rendered or does not fit.
        """
        self.check_alive()
        try:
            prompt = await asyncio.to_thread(self._prepare, call.infer_request, call.token_ids)
            outputs = await self._on_every_replica(prompt, scoring_params(0))
        except (ValueError, VLLMClientError) as error:
            raise BadCall(str(error)) from error
        loop = asyncio.get_running_loop()
        return {
            "logprobs": await loop.run_in_executor(self._writer, lambda: list(map(prompt_logprobs, outputs))),
            "prompt_token_ids": outputs[0].prompt_token_ids,
            "weight_version": self.weights.version,
        }

    async def teach(self, call: TeacherCall) -> dict[str, Any]:
        """Return the most likely tokens, with log-probabilities, where each of `token_ids` is, from the replica with
        the fewest running (TGT-16).

        Raises `BadCall` if the prompt cannot be rendered or does not fit.
        """
        self.check_alive()
        try:
            prompt = await asyncio.to_thread(self._prepare, call.infer_request, call.token_ids)
            output = await self._generate(prompt, scoring_params(call.top_k))
            steps = output.prompt_logprobs[-len(call.token_ids) :]
            loop = asyncio.get_running_loop()
            found = await loop.run_in_executor(self._writer, lambda: [top_logprobs(step, call.top_k) for step in steps])
        except (ValueError, VLLMClientError) as error:
            raise BadCall(str(error)) from error
        return {
            "top_token_ids": [list(step) for step in found],
            "top_logprobs": [list(step.values()) for step in found],
            "prompt_token_ids": list(output.prompt_token_ids),
            "model": self.model_path,
            "weight_version": self.weights.version,
        }

    async def warm_up(self) -> None:
        """Prove that every replica generates, and do what only a first request pays for. Raises if one cannot."""
        is_multimodal = self.llm.model_config.is_multimodal_model
        messages = [{"role": "user", "content": "<image>warm-up" if is_multimodal else "warm-up"}]
        token_ids = render_prompt(self.processor, to_chat_messages(messages, int(is_multimodal)))
        images = {"multi_modal_data": {"image": [Image.new("RGB", (64, 64))]}} if is_multimodal else {}
        prompt = {"prompt_token_ids": token_ids} | images
        await self._on_every_replica(prompt, sampling_params(RequestConfig(max_tokens=2), None, {}))

    def check_alive(self) -> None:
        """Raises `Unavailable` when an engine process died or hangs (SRV-6)."""
        if self.llm.errored:
            raise Unavailable("an engine process died; restart the server")
        silent_s = time.monotonic() - self.last_contact
        if silent_s > (self.update_s if self.weights.state == "updating" else self.stuck_s):
            raise Unavailable(f"an engine process has not answered for {silent_s:.0f} s; restart the server")

    async def watch(self) -> None:
        """Call all engines in turn for ever, so that `check_alive` knows when one last answered."""
        while True:
            try:
                await self.on_all_engines("get_weight_version")
            except Exception:  # no sign of life, whatever the error; check_alive reports it
                logger.exception("an engine did not answer")
            await asyncio.sleep(min(WATCH_INTERVAL_S, self.stuck_s / 4))

    async def on_all_engines(self, method: str, *args: Any) -> list[Any]:
        """Call a method of every engine process; wait for all, unless one dies, then raise the first error.

        vLLM's own `collective_rpc` returns only the first replica's answer, and returns early when one fails.
        """
        core = self.llm.engine_core
        calls = [core._call_utility_async(method, *args, engine=engine) for engine in core.core_engines]
        answers = asyncio.gather(*calls, return_exceptions=True)
        while not (await asyncio.wait({answers}, timeout=1.0))[0]:
            if self.llm.errored:
                answers.cancel()
                raise Unavailable("an engine process died; restart the server")
        self.last_contact = time.monotonic()
        for answer in answers.result():
            if isinstance(answer, BaseException):
                raise answer
        return answers.result()

    async def on_all_workers(self, step: str, payload: dict[str, Any] | None = None) -> list[Any]:
        """Run a step of `WorkerExtension.weight_rpc` on every worker, in rank order. Raises `UpdateFailed`."""
        args = ("weight_rpc", None, (step, payload or {}), {})
        answers = [a for engine in await self.on_all_engines("collective_rpc", *args) for a in engine]
        if errors := [answer["error"] for answer in answers if answer["error"]]:
            raise UpdateFailed("; ".join(errors))
        return [answer["result"] for answer in answers]

    async def _answer(
        self, request: RolloutInferRequest, config: RequestConfig, seed: int | None, pixels: PixelBudget
    ) -> RolloutOutput:
        """Answer one request, which fails alone unless the whole server cannot generate."""
        try:
            prompt = await asyncio.to_thread(self._prepare, request, budgets=[pixels])
            output = await self._generate(prompt, sampling_params(config, seed, self._defaults))
            sizes = [image.size for image in prompt.get("multi_modal_data", {}).get("image", [])]
            return await asyncio.get_running_loop().run_in_executor(self._writer, self._rollout_output, output, sizes)
        except (ValueError, VLLMClientError) as error:
            kind = {ImageRefused: "refused", TooLarge: "too_large"}.get(type(error))
            return RolloutOutput.failed(self.model_path, self.weights.version, str(error), kind)

    def _prepare(
        self,
        request: RolloutInferRequest,
        extra_ids: list[int] | tuple[int, ...] = (),
        budgets: Sequence[PixelBudget] = (),
    ) -> dict[str, Any]:
        """Return vLLM's prompt: token ids, one placeholder per image, and the images. Blocking; raises ValueError."""
        sources = collect_images(request.messages, request.images)
        messages = to_chat_messages(request.messages, len(sources))
        token_ids = render_prompt(self.processor, messages, self.max_model_len)
        prompt: dict[str, Any] = {"prompt_token_ids": [*token_ids, *extra_ids]}
        if sources:
            prompt["multi_modal_data"] = {"image": self.images.open_all(sources, budgets)}
        return prompt

    async def _generate(
        self, prompt: dict[str, Any], params: SamplingParams, replica: int | None = None
    ) -> RequestOutput:
        """Run one prompt on the given replica or the one with the fewest running; again where an update aborts it, and
        where its answer may be a mixture: vLLM's pause ("wait") does not wait for a request that it preempted, and a
        request whose images it still prepares is not aborted by a failing update.

        Raises:
            ValueError, VLLMClientError: vLLM refuses this prompt (too long, image and placeholder do not match, ...).
            Unavailable: engine dead, or weights incomplete.
        """
        num_errors, weights = 0, self.weights
        for _ in range(100):
            await weights.wait_whole()
            num_updates, num_failed, adapter = weights.num_updates, weights.num_failed, self.adapter
            least_loaded = self.num_running.index(min(self.num_running))
            output = await self._run_on(least_loaded if replica is None else replica, prompt, params)
            reason, spans = output.outputs[0].finish_reason, output.outputs[0].weight_versions or []
            if reason in ("stop", "length"):
                is_whole = len({span.version for span in spans}) <= 1 or weights.keeps_running
                # One that was queued over an update names the slot, or none, as it was before.
                if is_whole and weights.num_failed == num_failed and self.adapter is adapter:
                    return output
            elif reason == "error" and num_errors < NUM_RETRIES:  # vLLM: may pass, e.g. where its caches disagreed
                num_errors += 1
            elif weights.num_updates == num_updates:  # no update aborted it
                raise ValueError(f"the engine ended this request with {reason!r}")
        raise Unavailable("weight updates keep interrupting this request")

    async def _on_every_replica(self, prompt: dict[str, Any], params: SamplingParams) -> list[RequestOutput]:
        replicas = range(len(self.num_running))
        return await asyncio.gather(*(self._generate(prompt, params, replica) for replica in replicas))

    async def _run_on(self, replica: int, prompt: dict[str, Any], params: SamplingParams) -> RequestOutput:
        request_id = f"rollout-{next(self._request_ids)}"
        self.num_running[replica] += 1
        self.ids_in_flight.add(request_id)
        try:
            slot = {} if self.adapter is None else {"lora_request": self.adapter}
            outputs = self.llm.generate(dict(prompt), params, request_id, data_parallel_rank=replica, **slot)
            return [output async for output in outputs][-1]  # FINAL_ONLY: there is one
        except (EngineDeadError, EngineGenerateError) as error:
            if isinstance(error, EngineDeadError) or self.llm.errored:
                raise Unavailable("an engine process died; restart the server") from error
            raise ValueError(f"the engine cannot process this request: {error.__cause__}") from error
        finally:
            self.num_running[replica] -= 1
            self.ids_in_flight.discard(request_id)

    def _rollout_output(self, output: RequestOutput, images_size: list[tuple[int, int]]) -> RolloutOutput:
        """Raises ValueError where a generated token has no finite log-probability, which JSON cannot say."""
        answer = output.outputs[0]
        token_ids, steps = list(answer.token_ids), list(answer.logprobs or [])
        logprobs = [step[token].logprob for token, step in zip(token_ids, steps, strict=True)] if steps else []
        if not all(map(math.isfinite, logprobs)):
            raise ValueError("the log-probability of a generated token is not finite under these sampling settings")
        versions = [span.version for span in answer.weight_versions or []]
        versions = [None if version == NO_VERSION else version for version in versions] or [self.weights.version]
        infos = {"weight_version": versions[0]} | ({"last_weight_version": versions[-1]} if len(versions) > 1 else {})
        # An end-of-sequence token has no stop_reason, another stop token its id; both are the last generated token. A
        # stop string is cut from the text only: it need not end at a token border.
        if answer.finish_reason == "stop" and not isinstance(answer.stop_reason, str) and token_ids:
            infos["stop_token_id"] = token_ids.pop()
            if steps:
                infos["stop_logprob"] = logprobs.pop()
                steps.pop()
        prompt_ids, num_new = list(output.prompt_token_ids), len(answer.token_ids)
        choice = Choice(
            message=ChatMessage(content=answer.text),
            finish_reason=answer.finish_reason,
            token_ids=token_ids,
            logprobs={"content": list(map(_logprob_entry, token_ids, steps))} if steps else None,
        )
        total = len(prompt_ids) + num_new
        response = ChatCompletionResponse(
            model=self.model_path,
            choices=[choice],
            usage=Usage(prompt_tokens=len(prompt_ids), completion_tokens=num_new, total_tokens=total),
            prompt_token_ids=prompt_ids,
            images_size=images_size or None,
        )
        return RolloutOutput(
            response=response,
            response_token_ids=[token_ids],
            rollout_logprobs=[logprobs] if steps else [],
            rollout_infos=infos,
        )


def sampling_params(config: RequestConfig, seed: int | None, defaults: dict[str, Any]) -> SamplingParams:
    """Return vLLM's parameters; settings that are not given come from the model's generation_config."""
    named = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    given = {name: getattr(config, name) for name in named if getattr(config, name) is not None}
    return SamplingParams(
        **{name: defaults[name] for name in named if name in defaults} | given,
        presence_penalty=config.presence_penalty,
        frequency_penalty=config.frequency_penalty,
        seed=seed,
        max_tokens=config.max_tokens,
        stop=config.stop,
        logprobs=(config.top_logprobs or 0) if config.logprobs else None,
        skip_special_tokens=False,
        spaces_between_special_tokens=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def scoring_params(num_logprobs: int) -> SamplingParams:
    """Return the parameters of a prompt that is scored, with `num_logprobs` most likely tokens at each of its own."""
    return SamplingParams(
        max_tokens=1,
        temperature=0.0,
        prompt_logprobs=num_logprobs,
        flat_logprobs=True,  # an object for each of 12000 x 20 would hold up the others for seconds (SRV-10)
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def top_logprobs(step: dict[int, Any], top_k: int) -> dict[int, float]:
    """Return the log-probabilities of the `top_k` most likely tokens of a position, best first.

    vLLM adds the prompt's own token where it is none of these. Raises ValueError for one that JSON cannot say.
    """
    top = sorted((entry.rank, token, entry.logprob) for token, entry in step.items() if entry.rank <= top_k)
    if not all(math.isfinite(logprob) for *_, logprob in top):
        raise ValueError("the log-probability of a token is not finite")
    return {token: logprob for _, token, logprob in top}


def prompt_logprobs(output: RequestOutput) -> list[float | None]:
    """Return one value per prompt token; the first has no predecessor."""
    pairs = zip(output.prompt_token_ids, output.prompt_logprobs, strict=True)
    return [step[token].logprob if step else None for token, step in pairs]


def _logprob_entry(token_id: int, step: dict[int, Any]) -> dict[str, Any]:
    """Return one position in OpenAI's form, with the token's id, without tokens that sampling ruled out (-inf)."""
    possible = {token: entry for token, entry in step.items() if math.isfinite(entry.logprob)}
    top = {t: {"token": e.decoded_token, "token_id": t, "logprob": e.logprob} for t, e in possible.items()}
    return top[token_id] | {"top_logprobs": list(top.values()) if len(step) > 1 else []}
