"""Launch settings of one rollout server: resolved from config and machine, checked, printed, passed to vLLM."""

import dataclasses
import os
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from utils.config.checkpoint_files import checkpoint_problems
from utils.config.load import require_server
from utils.config.rollout import is_loopback
from utils.config.schema import Config, Model, ServerAddress, ServerSettings
from utils.families import expert_problem, family_from, longest_sequence, read_config, split_problem, text_config


@dataclasses.dataclass(frozen=True)
class Launch:
    """The sections of the config that the server reads, and what is resolved for this server on this machine."""

    settings: ServerSettings
    model: Model
    address: ServerAddress
    device: str  # cuda | cpu
    num_devices: int | None  # visible CUDA devices; None on CPU
    data_parallel_size: int
    lora_rank: int | None  # of the engine's slots; None without slots
    image_roots: tuple[str, ...]
    stuck_s: float  # an engine that has not answered for so long counts as hung
    seed: int

    @property
    def path_prefix(self) -> str:
        """Path of `base_url`, without the trailing slash."""
        return urlsplit(self.address.base_url).path.rstrip("/")

    @property
    def url(self) -> str:
        """The address as it is listened on: plain HTTP, whatever scheme clients use."""
        host = f"[{self.address.host}]" if ":" in self.address.host else self.address.host  # IPv6
        return f"http://{host}:{self.address.port}{self.path_prefix}/"

    @property
    def world_size(self) -> int:
        return self.settings.vllm_tensor_parallel_size * self.data_parallel_size


def resolve(cfg: Config, index: int) -> Launch:
    """Return the launch of server `index`; ConfigError if the config has none. Counts devices, touches none."""
    address = require_server(cfg, index)
    settings = cfg.server_settings(index)
    num_devices = count_cuda_devices() if settings.device != "cpu" else 0
    device = settings.device if settings.device != "auto" else "cuda" if num_devices else "cpu"
    replicas = settings.vllm_data_parallel_size
    if replicas == "auto":
        replicas = max(1, num_devices // settings.vllm_tensor_parallel_size) if device == "cuda" else 1
    slot_rank = next((size for size in (8, 16, 32, 64, 128, 256, 320, 512) if size >= cfg.tuner.rank), cfg.tuner.rank)
    return Launch(
        settings=settings,
        model=cfg.model,
        address=address,
        device=device,
        num_devices=num_devices if device == "cuda" else None,
        data_parallel_size=replicas,
        lora_rank=slot_rank if settings.vllm_enable_lora else None,
        image_roots=tuple(cfg.image_roots(index)),
        stuck_s=cfg.connection.timeout_s / 2,
        seed=cfg.training.seed,
    )


def count_cuda_devices() -> int:
    """Count visible CUDA devices through the driver's management library, without a CUDA context."""
    import torch

    return torch.cuda.device_count()


def describe(launch: Launch) -> str:
    """Return the start-up print of SRV-2."""
    settings = launch.settings
    memory = f"{settings.cpu_kv_cache_gib} GiB key-value cache per engine"
    if launch.device == "cuda":
        memory = f"{settings.vllm_gpu_memory_utilization:g} of each device"
    lines = {
        "model": f"{launch.model.path} ({launch.model.dtype})",
        "listen": launch.url,
        "host": launch.address.host,
        "port": launch.address.port,
        "device": launch.device,
        "tensor parallel": settings.vllm_tensor_parallel_size,
        "data parallel": launch.data_parallel_size,
        "max model length": settings.vllm_max_model_len,
        "memory": memory,
        "image roots": ", ".join(launch.image_roots) or "(none)",
        "image urls": "fetched" if settings.allow_image_urls else "refused",
        "access": "token required" if os.environ.get("ROLLOUT_SERVER_TOKEN") else "no token, loopback only",
    }
    return "rollout server\n" + "\n".join(f"  {key:<17} {value}" for key, value in lines.items())


def problems_of(launch: Launch, token: str | None) -> list[str]:
    """List all reasons not to start, found without loading anything (SRV-2, SRV-3)."""
    problems, host, settings = [], launch.address.host, launch.settings
    if not is_loopback(host):
        if not settings.allow_remote:
            problems.append(f"host {host} is not loopback; set rollout_server.allow_remote: true to allow that")
        if not token:
            problems.append(f"host {host} is not loopback; set a token in ROLLOUT_SERVER_TOKEN for all clients")
    if launch.device == "cuda" and launch.world_size != launch.num_devices:
        sizes = f"tensor_parallel_size {settings.vllm_tensor_parallel_size} x data_parallel_size"
        problems.append(
            f"{sizes} {launch.data_parallel_size} = {launch.world_size}, but {launch.num_devices} CUDA devices are "
            "visible; they must be equal (see CUDA_VISIBLE_DEVICES, or make server GPUS=...)"
        )
    problems += model_problems(Path(launch.model.path), settings.vllm_max_model_len)
    problems = problems or cpu_problems(launch) or split_problems(launch) or slot_problems(launch)
    return problems + argument_problems(settings.vllm_engine_kwargs)


def argument_problems(kwargs: dict[str, Any]) -> list[str]:
    """List names that vLLM does not know, where it is installed; its import takes seconds."""
    if not kwargs or find_spec("vllm") is None:
        return []
    from vllm.engine.arg_utils import AsyncEngineArgs

    known = [field.name for field in dataclasses.fields(AsyncEngineArgs)]
    problems = []
    for name in sorted(set(kwargs) - set(known)):
        near = get_close_matches(name, known, 1)
        way_out = f"did you mean {near[0]}?" if near else "delete it"
        problems.append(f"rollout_server.vllm_engine_kwargs.{name}: vLLM has no such argument; {way_out}")
    return problems


def cpu_problems(launch: Launch) -> list[str]:
    """List what vLLM 0.32's CPU kernels for recurrent mixers and for experts cannot do."""
    if launch.device == "cuda":
        return []
    config = read_config(launch.model.path)
    family, settings = family_from(config), launch.settings
    problems = []
    if family.mixer is not None and launch.model.dtype != "bfloat16":
        problems.append(f"model.dtype={launch.model.dtype}: {family.name} on CPU needs bfloat16")
    if family.mixer is not None and settings.vllm_enable_prefix_caching:
        problems.append(f"rollout_server.vllm_enable_prefix_caching: {family.name} on CPU needs false")
    if settings.vllm_enable_lora and "num_experts_per_tok" in text_config(config):
        reason = "as experts with slots want a GPU"
        problems.append(f"rollout_server.vllm_enable_lora: {family.name} on CPU needs false, {reason}")
    return problems


def split_problems(launch: Launch) -> list[str]:
    """List numbers of devices among which the model's attention heads, or its experts, cannot be divided."""
    settings, text = launch.settings, text_config(read_config(launch.model.path))
    devices = settings.vllm_tensor_parallel_size
    if rule := split_problem(text, devices):
        return [f"rollout_server.vllm_tensor_parallel_size={devices}: {rule}"]
    rule = expert_problem(text, launch.world_size, settings.vllm_engine_kwargs)
    return [f"rollout_server.vllm_data_parallel_size={launch.data_parallel_size}: {rule}"] if rule else []


def slot_problems(launch: Launch) -> list[str]:
    """List what empties LoRA slots behind our back: with experts, replicas without requests run dummy batches beside
    those that have some, and vLLM 0.32 removes all adapters after each."""
    has_experts = "num_experts_per_tok" in text_config(read_config(launch.model.path))
    if not (launch.settings.vllm_enable_lora and has_experts and launch.data_parallel_size > 1):
        return []
    way_out = "a model with experts needs 1 where vllm_enable_lora is true; set it to 1, or vllm_enable_lora to false"
    return [f"rollout_server.vllm_data_parallel_size={launch.data_parallel_size}: {way_out}"]


def model_problems(path: Path, max_model_len: int) -> list[str]:
    """List what is wrong with the model directory, and a length that the model cannot hold."""
    if found := checkpoint_problems(path):
        return [f"model.path={path}: {rule}" for rule in found]
    longest = longest_sequence(read_config(path))
    if longest and max_model_len > longest:
        key = f"rollout_server.vllm_max_model_len={max_model_len}"
        return [f"{key}: the model in {path} ends at {longest} positions; lower it"]
    return []


def engine_args(launch: Launch) -> Any:
    """Return vLLM's engine arguments."""
    from vllm.config import WeightTransferConfig
    from vllm.engine.arg_utils import AsyncEngineArgs

    settings, on_cuda = launch.settings, launch.device == "cuda"
    kwargs: dict[str, Any] = {
        "model": launch.model.path,
        "dtype": launch.model.dtype,
        "seed": launch.seed,
        "tensor_parallel_size": settings.vllm_tensor_parallel_size,
        "data_parallel_size": launch.data_parallel_size,
        "max_model_len": settings.vllm_max_model_len,
        "enable_lora": settings.vllm_enable_lora,
        "enable_prefix_caching": settings.vllm_enable_prefix_caching,
        "worker_extension_cls": "utils.sync.vllm_worker.WorkerExtension",
        "weight_transfer_config": WeightTransferConfig(backend="stream_nccl" if on_cuda else "stream_gloo"),
        "mm_processor_kwargs": launch.model.processor_kwargs or None,
    }
    optional = {"max_lora_rank": launch.lora_rank, "max_num_seqs": settings.vllm_max_num_seqs}
    kwargs |= {name: value for name, value in optional.items() if value is not None}
    if on_cuda:
        kwargs["gpu_memory_utilization"] = settings.vllm_gpu_memory_utilization
    else:
        kwargs["enforce_eager"] = True
        kwargs["enable_chunked_prefill"] = False  # vLLM 0.32 on CPU dies at a chunk of a prompt with a seed of its own
        if settings.vllm_tensor_parallel_size == 1:  # see set_environment
            kwargs["distributed_executor_backend"] = "uni"
    return AsyncEngineArgs(**kwargs | settings.vllm_engine_kwargs)
