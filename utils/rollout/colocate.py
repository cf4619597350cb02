"""Rollouts by a vLLM engine inside the learner's own processes, on its devices; weights are handed over in memory.

With `tensor_parallel_size` t, t neighbouring ranks hold one engine together: each has its slice of the weights and
its own copy of the scheduler (vLLM's `external_launcher`). The copies stay in step because all ranks of a group submit
the same requests in the same order. Importing this module imports vLLM. utils/sync/vllm_worker.py loads the weights.
"""

import os
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from vllm import LLM, SamplingParams
from vllm.config import WeightTransferConfig
from vllm.outputs import RequestOutput
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind

from utils.capacity import call_seed
from utils.config.schema import Model, Vllm
from utils.data.images import open_image
from utils.data.prompts import render_prompt, to_chat_messages
from utils.dist import Ranks, capture_error
from utils.families import family_in
from utils.rollout.backend import Engine, RolloutContext, RolloutRequest, RolloutResult, RolloutSampling, check_versions
from utils.sync.merged_weights import MergedWeights
from utils.sync.vllm_worker import WorkerExtension
from utils.sync.weight_sync import Probe, SyncResult

CPU_CACHE_GIB = "1"  # keys and values of a CPU engine; VLLM_CPU_KVCACHE_SPACE overrides it
SeededRequest = tuple[list[dict[str, Any]], list[str], int]  # messages, images, seed


class ColocateWorker(WorkerExtension):
    """Mixed into vLLM's worker class: a weight update whose tensors are in this process already."""

    def _weight_load(self, weights: list[tuple[str, torch.Tensor]]) -> None:
        self.weight_transfer_engine.update.load(weights)


class ColocateEngine(Engine):
    """A vLLM engine in this process as an `Engine` (ROL-7).

    Args:
        model, vllm: sections of the config. After a sync that `vllm.sync.verify` wants proven, `probe` shows that the
            engine computes with the learner's weights (SYN-7, second step; nothing travels, so there are no digests).
        weights: the training model's merged weights.
        processor: the model's processor; its chat template writes the prompts.
        options: `max_model_len`, `decode_batch_size` and `seed` of `start_engine`.
    """

    def __init__(
        self,
        model: Model,
        vllm: Vllm,
        weights: MergedWeights,
        ranks: Ranks,
        processor: Any,
        probe: Probe | None = None,
        **options: int,
    ) -> None:
        self.weights = weights
        self.ranks = ranks
        self.processor = processor
        self.probe = probe
        self.verify = vllm.sync.verify
        self.bucket_bytes = vllm.sync.bucket_mib << 20
        self.tensor_parallel_size = vllm.tensor_parallel_size
        self.version: str | None = None  # of the weights that the engine holds
        self.num_syncs = 0
        self.sleeps = ranks.device.type != "cpu" and current_platform.is_sleep_mode_available()
        self.llm = start_engine(
            model,
            ranks.device,
            tensor_parallel_size=vllm.tensor_parallel_size,
            gpu_memory_utilization=vllm.gpu_memory_utilization,
            sleeps=self.sleeps,
            **options,
        )
        self.is_awake = True
        self.rest()

    def sync(self, version: str) -> SyncResult:
        """As `Engine.sync` (SYN-4). No request runs meanwhile: generation is synchronous.

        Raises:
            RuntimeError: on every rank, whatever rank failed.
        """
        self.ranks.fence()
        start = time.monotonic()
        error = capture_error(self._wake) or capture_error(self._weight_rpc, "start")

        def load() -> None:
            nonlocal error
            for bucket in self._buckets():  # to the end even after an error: other ranks are in the same gathers
                error = error or capture_error(self._weight_rpc, "load", {"weights": bucket})

        unmerged = capture_error(load)
        error = error or unmerged or capture_error(self._finish)
        if error is not None:
            capture_error(self._weight_rpc, "abort")
        self.ranks.raise_on_all_ranks(error, f"weight sync {version}")
        verify = self.verify == "always" or (self.verify == "first" and self.num_syncs == 0)
        if verify and self.probe is not None:
            ours = self.probe.logprobs()
            self.ranks.raise_on_all_ranks(capture_error(self._check_probe, ours), f"proving weight sync {version}")
        self.version = version
        self.num_syncs += 1
        return SyncResult(
            version=version,
            num_tensors=len(self.weights.entries),
            num_bytes=sum(entry.num_bytes for entry in self.weights.entries),
            seconds=time.monotonic() - start,
            verified=verify,
        )

    def generate(
        self, requests: Sequence[RolloutRequest], sampling: RolloutSampling, context: RolloutContext
    ) -> list[RolloutResult]:
        """As `Engine.generate`. With tensor parallelism a collective: all ranks, any number of requests."""
        seed = context.seed(self.ranks.rank)
        submitted, own = self._gather_group(
            [(request.messages, request.images, call_seed(seed, index)) for index, request in enumerate(requests)]
        )
        params, prompts = [sampling_params(sampling, seed) for _, _, seed in submitted], []

        def prepare() -> None:
            prompts.extend(vllm_prompt(self.processor, messages, images) for messages, images, _ in submitted)
            self._wake()

        error = capture_error(prepare) if submitted else None
        if self.tensor_parallel_size > 1:  # or the others of a group would wait in its forward
            self.ranks.raise_on_all_ranks(error, "preparing the engine")
        elif error is not None:
            raise error
        if not submitted:
            return []
        outputs = self.llm.generate(prompts, params, use_tqdm=False)
        results = [read_output(output, self.version) for output in outputs[own]]
        check_versions(requests, results, context)
        return results

    def rest(self) -> None:
        """Give the engine's memory to the learner, where the engine can sleep (ROL-7)."""
        if self.sleeps and self.is_awake:
            self.llm.sleep(level=1)
        self.is_awake = False

    def close(self) -> None:
        """End the engine; the process groups stay."""
        self.llm.llm_engine.engine_core.shutdown()

    def _gather_group(self, own: list[SeededRequest]) -> tuple[list[SeededRequest], slice]:
        """All requests of this rank's tensor-parallel group in rank order, and which of them are this rank's."""
        size = self.tensor_parallel_size
        if size == 1:
            return own, slice(None)
        everyone = self.ranks.gather_or_raise(own, "generating")
        first = self.ranks.rank // size * size
        before = sum(map(len, everyone[first : self.ranks.rank]))
        return sum(everyone[first : first + size], []), slice(before, before + len(own))

    def _buckets(self) -> Iterator[list[tuple[str, torch.Tensor]]]:
        """The merged tensors in order, about `bucket_bytes` at a time."""
        bucket, num_bytes = [], 0
        for name, tensor in self.weights.tensors():
            bucket.append((name, tensor))
            num_bytes += tensor.numel() * tensor.element_size()
            if num_bytes >= self.bucket_bytes:
                yield bucket
                bucket, num_bytes = [], 0
        if bucket:
            yield bucket

    def _finish(self) -> None:
        """Put the loaded weights in force and drop caches made with the old ones (SYN-9)."""
        if missing := self._weight_rpc("finish"):
            raise RuntimeError(f"tensors the engine did not get: {missing[:5]}")
        self.llm.reset_mm_cache()
        self.llm.llm_engine.reset_encoder_cache()
        if not self.llm.reset_prefix_cache():
            raise RuntimeError("vLLM did not drop its prefix cache")

    def _weight_rpc(self, step: str, payload: dict[str, Any] | None = None) -> Any:
        """Run a step of `WorkerExtension.weight_rpc` on this rank's worker. Nothing is serialised."""
        answer = self.llm.collective_rpc("weight_rpc", args=(step, payload or {}))[0]
        if answer["error"] is not None:
            raise RuntimeError(answer["error"])
        return answer["result"]

    def _check_probe(self, ours: np.ndarray) -> None:
        where = f"the engine of rank {self.ranks.rank}"
        # Greedy: sampling without a seed would draw from the learner's own random numbers.
        greedy = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)
        for request, ids in self.probe.prompts if self.num_syncs == 0 else ():
            prompt = vllm_prompt(self.processor, request["messages"], request["images"])
            output = self.llm.generate([prompt], greedy, use_tqdm=False)[0]
            self.probe.check_prompt(ids, list(output.prompt_token_ids), where)
        request, token_ids = self.probe.infer_request, self.probe.token_ids
        prompt = vllm_prompt(self.processor, request["messages"], request["images"], token_ids)
        params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False)
        output = self.llm.generate([prompt], params, use_tqdm=False)[0]
        steps = output.prompt_logprobs[-len(token_ids) :]
        theirs = [step[token].logprob for token, step in zip(token_ids, steps, strict=True)]
        self.probe.check(ours, theirs, self.weights.dtype, where)

    def _wake(self) -> None:
        """Give the engine its memory until `rest`: over all micro-steps of a step."""
        if self.sleeps and not self.is_awake:
            self.llm.wake_up()
        self.is_awake = True


def start_engine(
    model: Model,
    device: torch.device,
    *,
    tensor_parallel_size: int,
    gpu_memory_utilization: float,
    max_model_len: int,
    decode_batch_size: int,
    seed: int = 0,
    sleeps: bool = False,
) -> LLM:
    """Start vLLM in this process, as one of the ranks that `torch.distributed` already knows (collective).

    Args:
        max_model_len: tokens of prompt and response.
        decode_batch_size: sequences per device (CFG-11).
    """
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_NO_USAGE_STATS"] = "1"
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")  # as in utils.server.process
    kwargs: dict[str, Any] = {"gpu_memory_utilization": gpu_memory_utilization}
    if device.type == "cpu":
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", CPU_CACHE_GIB)
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        kwargs = {"enforce_eager": True, "enable_chunked_prefill": False}  # as in utils.server.launch.engine_args
        if family_in(model.path).mixer is not None:  # vLLM caches recurrent states at the ends of chunks only
            kwargs["enable_prefix_caching"] = False
    set_num_threads, num_threads = torch.set_num_threads, torch.get_num_threads()
    gpus = [device] if torch.cuda.is_available() else []
    with torch.random.fork_rng(gpus):  # vLLM's workers seed all ranks alike
        llm = LLM(
            model=model.path,
            dtype=model.dtype,
            seed=seed,
            tensor_parallel_size=tensor_parallel_size,
            distributed_executor_backend="external_launcher",
            max_model_len=max_model_len,
            max_num_seqs=decode_batch_size * tensor_parallel_size,
            enable_sleep_mode=sleeps,
            logprobs_mode="processed_logprobs",  # those that tokens are drawn from
            worker_extension_cls=f"{__name__}.{ColocateWorker.__name__}",
            # Only its loading is used: the communicator is never opened.
            weight_transfer_config=WeightTransferConfig(backend="stream_gloo"),
            mm_processor_kwargs=model.processor_kwargs or None,
            **kwargs,
        )
    torch.set_num_threads = set_num_threads  # vLLM's CPU worker replaces it with a warning
    torch.set_num_threads(num_threads)  # its GPU worker leaves one
    return llm


def vllm_prompt(
    processor: Any, messages: list[dict[str, Any]], images: Sequence[str], extra_ids: Sequence[int] = ()
) -> dict[str, Any]:
    """vLLM's prompt: token ids with one placeholder per image, and the images; vLLM expands the placeholders itself."""
    token_ids = render_prompt(processor, to_chat_messages(messages, len(images)))
    prompt: dict[str, Any] = {"prompt_token_ids": [*token_ids, *extra_ids]}
    if images:
        prompt["multi_modal_data"] = {"image": [open_image(image) for image in images]}
    return prompt


def sampling_params(sampling: RolloutSampling, seed: int) -> SamplingParams:
    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        repetition_penalty=sampling.repetition_penalty,
        seed=seed,
        max_tokens=sampling.max_new_tokens,
        logprobs=0 if sampling.logprobs else None,
        skip_special_tokens=False,
        spaces_between_special_tokens=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def read_output(output: RequestOutput, version: str | None) -> RolloutResult:
    """Read vLLM's output; the stop token, the last one generated, is cut (ROL-1)."""
    completion = output.outputs[0]
    token_ids = list(completion.token_ids)
    logprobs = [step[token].logprob for token, step in zip(token_ids, completion.logprobs or [], strict=False)]
    is_stopped = completion.finish_reason == "stop"
    num_kept = len(token_ids) - is_stopped
    return RolloutResult(
        response_token_ids=token_ids[:num_kept],
        prompt_token_ids=list(output.prompt_token_ids),
        text=completion.text,
        finish_reason=completion.finish_reason,
        weight_version=version,
        logprobs=logprobs[:num_kept] if completion.logprobs else None,
        stop_token_id=token_ids[-1] if is_stopped else None,
        stop_logprob=logprobs[-1] if is_stopped and logprobs else None,
    )
