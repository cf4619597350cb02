"""The rollout server's engine: vLLM's AsyncLLM with placement, image rules, and a state machine for weight updates.

`RolloutEngine` answers requests (SRV-4, SRV-9); `WeightUpdates` brings new weights in (section SYN). They meet in
`Gate`: a request passes it only while the weights are whole. No HTTP here, that is utils/server/app.py.
"""

import asyncio
import base64
import io
import itertools
import logging
import time
import uuid
from collections.abc import Awaitable
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

from utils.data.encoding import model_digest
from utils.data.images import ImageRefused, ImageStore
from utils.data.prompts import render_prompt, to_chat_messages
from utils.server.protocol import (
    ChatCompletionResponse,
    ChatMessage,
    Choice,
    RequestConfig,
    RolloutInferRequest,
    RolloutOutput,
    Usage,
    collect_images,
)
from utils.sync.wire import ADAPTER_ID

logger = logging.getLogger(__name__)

IN_MEMORY = LoRARequest("learner", ADAPTER_ID, "(in memory)")  # a filled slot is used without a look at the path
NO_VERSION = "default"  # vLLM's name for weights that were never updated
PULSE_S = 5.0  # between two questions whether the engines live, at most


class BadCall(ValueError):
    """The caller's arguments cannot be used."""


class Unavailable(RuntimeError):
    """The server cannot generate: an engine died, or its weights are a mixture after a failed update."""


@dataclass
class Gate:
    """Whether requests may go to the engine, and which weights it holds."""

    state: str = "idle"  # idle | updating | dirty
    version: str | None = None
    reason: str = ""  # why it is dirty
    num_waiting: int = 0
    num_pauses: int = 0
    opened: asyncio.Event = field(default_factory=asyncio.Event)

    def move(self, state: str, version: str | None = None, reason: str = "") -> None:
        self.state, self.version, self.reason = state, version, reason
        if state == "updating":
            self.num_pauses += 1
            self.opened.clear()
        else:
            self.opened.set()

    async def passed(self) -> None:
        """Wait until the weights are whole. Raises `Unavailable` when they are not going to be."""
        self.num_waiting += 1
        try:
            await self.opened.wait()
        finally:
            self.num_waiting -= 1
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
        self.world_size = world_size
        self.stuck_s, self.update_s = stuck_s, stuck_s
        self.boot_id = uuid.uuid4().hex
        self.gate = Gate()
        self.gate.opened.set()
        self.num_running = [0] * len(llm.engine_core.core_engines)  # per replica
        self.last_contact = time.monotonic()
        self.adapter: LoRARequest | None = None  # what requests use, once an adapter is in its slot (SYN-10)
        self._defaults = llm.model_config.get_diff_sampling_param()
        self._request_ids = itertools.count()
        self._ids_in_flight: set[str] = set()

    async def infer(self, requests: list[RolloutInferRequest], config: RequestConfig) -> list[RolloutOutput]:
        """Answers in request order; request i samples with `seed + i`. Raises `Unavailable` for all or none."""
        self.check_alive()
        answers = [asyncio.ensure_future(self._answer(r, config, config.seed_of(i))) for i, r in enumerate(requests)]
        try:
            return await asyncio.gather(*answers)
        except BaseException:  # the caller hung up or the engine died: what still runs is of no use to anyone
            for answer in answers:
                answer.cancel()
            raise

    async def probe(self, request: RolloutInferRequest, token_ids: list[int]) -> dict[str, Any]:
        """Log-probability of every prompt token (null for the first) by every replica, prefix cache not read (SYN-7).

        Raises:
            BadCall: the prompt cannot be made or does not fit.
        """
        self.check_alive()
        params = SamplingParams(
            max_tokens=1,
            temperature=0.0,
            prompt_logprobs=0,
            detokenize=False,
            skip_reading_prefix_cache=True,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        try:
            prompt = await asyncio.to_thread(self._prepare, request, token_ids)
            outputs = await self._on_every_replica(prompt, params)
        except (ValueError, VLLMClientError) as error:
            raise BadCall(str(error)) from error
        return {
            "logprobs": [_prompt_logprobs(output) for output in outputs],
            "prompt_token_ids": outputs[0].prompt_token_ids,
            "weight_version": self.gate.version,
        }

    async def warm_up(self) -> None:
        """Prove that every replica generates, and do what only the first request pays for. Raises if one cannot."""
        image = "data:image/png;base64," + base64.b64encode(_png(64)).decode()
        with_image = RolloutInferRequest(messages=[{"role": "user", "content": "<image>warm-up"}], images=[image])
        text_only = RolloutInferRequest(messages=[{"role": "user", "content": "warm-up"}])
        request = with_image if self.llm.model_config.is_multimodal_model else text_only
        prompt = await asyncio.to_thread(self._prepare, request)
        await self._on_every_replica(prompt, _sampling_params(RequestConfig(max_tokens=2), None, {}))

    def check_alive(self) -> None:
        """Raises `Unavailable` when an engine process died or hangs (SRV-6)."""
        if self.llm.errored:
            raise Unavailable("an engine process died; restart the server")
        silent_s = time.monotonic() - self.last_contact
        if silent_s > (self.update_s if self.gate.state == "updating" else self.stuck_s):
            raise Unavailable(f"an engine process has not answered for {silent_s:.0f} s; restart the server")

    async def watch(self) -> None:
        """Ask all engines for a sign of life for ever."""
        while True:
            try:
                await self.on_all_engines("get_weight_version")
            except Exception:  # whatever it was, it was no sign of life; check_alive says so
                logger.exception("an engine did not answer")
            await asyncio.sleep(min(PULSE_S, self.stuck_s / 4))

    async def on_all_engines(self, method: str, *args: Any) -> list[Any]:
        """Call a method of every engine process; waits for all of them, then raises the first error.

        vLLM's own `collective_rpc` returns the first replica's answer only, and leaves early when one fails.
        """
        core = self.llm.engine_core
        calls = [core._call_utility_async(method, *args, engine=engine) for engine in core.core_engines]
        results = await self._unless_dead(asyncio.gather(*calls, return_exceptions=True))
        self.last_contact = time.monotonic()
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return results

    async def on_all_workers(self, step: str, payload: dict[str, Any] | None = None) -> list[Any]:
        """Run a step of `WorkerExtension.weight_rpc` on every worker of every replica, in rank order.

        Raises:
            UpdateFailed: with the errors of all workers that failed.
        """
        args = ("weight_rpc", None, (step, payload or {}), {})
        answers = [a for engine in await self.on_all_engines("collective_rpc", *args) for a in engine]
        errors = [answer["error"] for answer in answers if answer["error"]]
        if errors:
            raise UpdateFailed("; ".join(errors))
        return [answer["result"] for answer in answers]

    async def abort_running(self) -> None:
        """End what the engine is running; the requests are made again or fail, as the gate says."""
        await self.llm.abort(list(self._ids_in_flight))

    async def _unless_dead(self, call: Awaitable[Any]) -> Any:
        """Await a call to the engines, but not for ever if one of them dies meanwhile."""
        task = asyncio.ensure_future(call)
        while not (await asyncio.wait({task}, timeout=1.0))[0]:
            if self.llm.errored:
                task.cancel()
                raise Unavailable("an engine process died; restart the server")
        return task.result()

    async def _answer(self, request: RolloutInferRequest, config: RequestConfig, seed: int | None) -> RolloutOutput:
        """One request, which fails alone unless the whole server cannot generate."""
        try:
            prompt = await asyncio.to_thread(self._prepare, request)
            output = await self._generate(prompt, _sampling_params(config, seed, self._defaults))
        except ImageRefused as error:
            return RolloutOutput.failed(self.model_path, self.gate.version, str(error), refused=True)
        except (ValueError, VLLMClientError) as error:
            return RolloutOutput.failed(self.model_path, self.gate.version, str(error))
        sizes = [image.size for image in prompt.get("multi_modal_data", {}).get("image", [])]
        return self._rollout_output(output, sizes)

    def _prepare(self, request: RolloutInferRequest, extra_ids: list[int] | tuple[int, ...] = ()) -> dict[str, Any]:
        """vLLM's prompt: token ids with one placeholder per image, and the images. Blocking.

        Raises:
            ValueError, ImageRefused: the request's content cannot be used.
        """
        sources = collect_images(request.messages, request.images)
        token_ids = render_prompt(self.processor, to_chat_messages(request.messages, len(sources)))
        prompt: dict[str, Any] = {"prompt_token_ids": [*token_ids, *extra_ids]}
        if sources:
            prompt["multi_modal_data"] = {"image": [self.images.open(source) for source in sources]}
        return prompt

    async def _generate(
        self, prompt: dict[str, Any], params: SamplingParams, replica: int | None = None
    ) -> RequestOutput:
        """Run one prompt on the given replica or the one with the fewest running; aborted by an update: made again.

        Raises:
            ValueError: vLLM refuses this prompt (too long, image and placeholder do not match, ...).
            Unavailable: engine dead, or weights incomplete.
        """
        for _ in range(100):
            await self.gate.passed()
            num_pauses = self.gate.num_pauses
            output = await self._run_on(self._least_loaded() if replica is None else replica, prompt, params)
            reason = output.outputs[0].finish_reason
            if reason in ("stop", "length"):
                return output
            if self.gate.num_pauses == num_pauses:  # not our doing
                raise ValueError(f"the engine ended this request with {reason!r}")
        raise Unavailable("weight updates keep interrupting this request")

    async def _on_every_replica(self, prompt: dict[str, Any], params: SamplingParams) -> list[RequestOutput]:
        replicas = range(len(self.num_running))
        return await asyncio.gather(*(self._generate(prompt, params, replica) for replica in replicas))

    def _least_loaded(self) -> int:
        return self.num_running.index(min(self.num_running))

    async def _run_on(self, replica: int, prompt: dict[str, Any], params: SamplingParams) -> RequestOutput:
        request_id = f"rollout-{next(self._request_ids)}"
        self.num_running[replica] += 1
        self._ids_in_flight.add(request_id)
        try:
            slot = {} if self.adapter is None else {"lora_request": self.adapter}
            outputs = self.llm.generate(dict(prompt), params, request_id, data_parallel_rank=replica, **slot)
            return [output async for output in outputs][-1]  # FINAL_ONLY: there is one
        except VLLMClientError as error:
            raise ValueError(str(error)) from error
        except EngineDeadError as error:
            raise Unavailable("an engine process died; restart the server") from error
        except EngineGenerateError as error:
            if self.llm.errored:
                raise Unavailable("an engine process died; restart the server") from error
            raise ValueError(f"the engine cannot process this request: {error.__cause__}") from error
        finally:
            self.num_running[replica] -= 1
            self._ids_in_flight.discard(request_id)

    def _rollout_output(self, output: RequestOutput, images_size: list[tuple[int, int]]) -> RolloutOutput:
        answer = output.outputs[0]
        token_ids, steps = list(answer.token_ids), list(answer.logprobs or [])
        stopped: dict[str, Any] = {}
        # An end-of-sequence token has no stop_reason, another stop token its id; both are the last generated token. A
        # stop string is cut from the text only: it need not end at a token border.
        if answer.finish_reason == "stop" and not isinstance(answer.stop_reason, str) and token_ids:
            stop_id = token_ids.pop()
            stopped = {"stop_token_id": stop_id}
            if steps:
                stopped["stop_logprob"] = steps.pop()[stop_id].logprob
        versions = [span.version for span in answer.weight_versions or []]
        versions = [None if version == NO_VERSION else version for version in versions] or [self.gate.version]
        infos = {"weight_version": versions[0]} | ({"last_weight_version": versions[-1]} if len(versions) > 1 else {})
        prompt_ids = list(output.prompt_token_ids)
        num_new = len(answer.token_ids)
        return RolloutOutput(
            response=ChatCompletionResponse(
                model=self.model_path,
                choices=[
                    Choice(
                        message=ChatMessage(content=answer.text),
                        finish_reason=answer.finish_reason,
                        token_ids=token_ids,
                        logprobs={"content": list(map(_logprob_entry, token_ids, steps))} if steps else None,
                    )
                ],
                usage=Usage(
                    prompt_tokens=len(prompt_ids), completion_tokens=num_new, total_tokens=len(prompt_ids) + num_new
                ),
                prompt_token_ids=prompt_ids,
                images_size=images_size or None,
            ),
            response_token_ids=[token_ids],
            rollout_logprobs=[[step[t].logprob for t, step in zip(token_ids, steps, strict=True)]] if steps else [],
            rollout_infos=infos | stopped,
        )


def _sampling_params(config: RequestConfig, seed: int | None, defaults: dict[str, Any]) -> SamplingParams:
    """vLLM's parameters; settings that are not given come from the model's generation_config."""
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


def _logprob_entry(token_id: int, step: dict[int, Any]) -> dict[str, Any]:
    """One position in OpenAI's form, with the token's id."""
    top = [{"token": e.decoded_token, "token_id": t, "logprob": e.logprob} for t, e in step.items()]
    chosen = step[token_id]
    return {
        "token": chosen.decoded_token,
        "token_id": token_id,
        "logprob": chosen.logprob,
        "top_logprobs": top if len(top) > 1 else [],
    }


def _prompt_logprobs(output: RequestOutput) -> list[float | None]:
    """One value per prompt token; the first has no predecessor."""
    pairs = zip(output.prompt_token_ids, output.prompt_logprobs, strict=True)
    return [step[token].logprob if step else None for token, step in pairs]


def _png(side: int) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (side, side)).save(buffer, "PNG")
    return buffer.getvalue()


class Conflict(RuntimeError):
    """The call does not fit the server's state, or comes from a run that does not own the server."""


class NotHolder(RuntimeError):
    """The call does not carry the token of the run that opened the communicator."""


class UpdateFailed(RuntimeError):
    """A weight update did not go through; the server is dirty until a full one has."""
