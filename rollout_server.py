"""The rollout server: vLLM behind a small HTTP front, on devices of its own; it generates and takes weights in.

Launch: `python rollout_server.py --config FILE [--server-index I] [--dry-run]`, or `make server GPUS=0,1 CONFIG=FILE`.
Host and port are those of `servers[I].base_url` in the config; what vLLM is started with is
`custom.extra.rollout_server`. Endpoints: utils/server/app.py. Ctrl-C or SIGTERM ends it with all its processes.
"""

import argparse
import asyncio
import contextlib
import ctypes
import dataclasses
import ipaddress
import json
import os
import signal
import socket
import sys
import threading
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

EXIT_USAGE = 2
SHUTDOWN_S = 8.0  # then what has not ended by itself is killed; a loaded machine needs time for that, too (SRV-7)
PARENT_PID = "ROLLOUT_SERVER_PARENT_PID"  # environment variable: who spawns processes here
ON_CPU = "ROLLOUT_SERVER_ON_CPU"  # environment variable: set where they are for the CPU


def die_with_parent() -> None:
    """Have the kernel kill this process when the one that spawned it ends, however that ends (SRV-7)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() != int(os.environ.get(PARENT_PID, os.getppid())):  # it ended before the line above
            os._exit(1)
    os.environ[PARENT_PID] = str(os.getpid())  # for this process's own children


def sleep_while_waiting() -> None:
    """Have this process of vLLM's sleep until the next message comes.

    vLLM 0.32 spins for a second first, so that an engine spins while its worker works: a core that others need. Asleep
    it can miss the word that a message has come, and would look after 5 s only.
    """
    from vllm.distributed.device_communicators import shm_broadcast

    shm_broadcast.SpinCondition.__init__.__defaults__ = (0.001,)  # busy_loop_s
    shm_broadcast.SHM_READER_RECHECK_INTERVAL_MS = 5


def begin_as_child() -> None:
    """What each process that vLLM spawns (engines, workers, coordinator) does first: it imports the main file first."""
    die_with_parent()
    if os.environ.get(ON_CPU):
        sleep_while_waiting()


if __name__ == "__mp_main__":
    begin_as_child()


@dataclasses.dataclass(frozen=True)
class Launch:
    """Everything the server is started with, resolved."""

    host: str
    port: int
    prefix: str  # path part of base_url, without the trailing slash
    device: str  # cuda | cpu
    num_devices: int | None  # visible CUDA devices
    tensor_parallel_size: int
    data_parallel_size: int
    model_path: str
    dtype: str
    seed: int
    max_model_len: int
    max_num_seqs: int | None
    gpu_memory_utilization: float
    cpu_kv_cache_gib: int
    max_lora_rank: int | None  # None without LoRA slots
    enable_prefix_caching: bool
    min_pixels: int | None
    max_pixels: int | None
    image_roots: tuple[str, ...]
    allow_image_urls: bool
    allow_remote: bool
    engine_kwargs: dict[str, Any]
    stuck_s: float  # an engine that has not answered for so long counts as hung

    @property
    def world_size(self) -> int:
        return self.tensor_parallel_size * self.data_parallel_size


def slot_rank(rank: int) -> int:
    """The smallest LoRA slot of vLLM that holds an adapter of `rank`."""
    return next((size for size in (8, 16, 32, 64, 128, 256, 320, 512) if size >= rank), rank)


def resolve(cfg: Any, index: int) -> Launch:
    """The launch settings of server `index`; looks at devices, touches none."""
    from utils.config.load import require_server

    url = urlsplit(require_server(cfg, index).base_url)
    settings = cfg.server_settings(index)
    num_devices = count_cuda_devices() if settings.device != "cpu" else 0
    device = settings.device if settings.device != "auto" else "cuda" if num_devices else "cpu"
    data_parallel_size = settings.vllm_data_parallel_size
    if data_parallel_size == "auto":
        data_parallel_size = max(1, num_devices // settings.vllm_tensor_parallel_size) if device == "cuda" else 1
    return Launch(
        host=url.hostname or "127.0.0.1",
        port=url.port or 80,
        prefix=url.path.rstrip("/"),
        device=device,
        num_devices=num_devices if device == "cuda" else None,
        tensor_parallel_size=settings.vllm_tensor_parallel_size,
        data_parallel_size=data_parallel_size,
        model_path=cfg.model.path,
        dtype=cfg.model.dtype,
        seed=cfg.training.seed,
        max_model_len=settings.vllm_max_model_len,
        max_num_seqs=settings.vllm_max_num_seqs,
        gpu_memory_utilization=settings.vllm_gpu_memory_utilization,
        cpu_kv_cache_gib=settings.cpu_kv_cache_gib,
        max_lora_rank=slot_rank(cfg.tuner.rank) if settings.vllm_enable_lora else None,
        enable_prefix_caching=settings.vllm_enable_prefix_caching,
        min_pixels=cfg.model.image_min_pixels,
        max_pixels=cfg.model.image_max_pixels,
        image_roots=tuple(cfg.image_roots(index)),
        allow_image_urls=settings.allow_image_urls,
        allow_remote=settings.allow_remote,
        engine_kwargs=dict(settings.vllm_engine_kwargs),
        stuck_s=cfg.connection.timeout_s / 2,
    )


def count_cuda_devices() -> int:
    """Visible CUDA devices, counted by the driver's management library: no CUDA context is made."""
    import torch

    return torch.cuda.device_count()


def describe(launch: Launch) -> str:
    """The start-up print of SRV-2."""
    memory = (
        f"{launch.gpu_memory_utilization:g} of each device"
        if launch.device == "cuda"
        else f"{launch.cpu_kv_cache_gib} GiB key-value cache per engine"
    )
    lines = {
        "model": f"{launch.model_path} ({launch.dtype})",
        "listen": f"http://{launch.host}:{launch.port}{launch.prefix}/",
        "host": launch.host,
        "port": launch.port,
        "device": launch.device,
        "tensor parallel": launch.tensor_parallel_size,
        "data parallel": launch.data_parallel_size,
        "max model length": launch.max_model_len,
        "memory": memory,
        "image roots": ", ".join(launch.image_roots) or "(none)",
        "image urls": "fetched" if launch.allow_image_urls else "refused",
        "access": "token required" if os.environ.get("ROLLOUT_SERVER_TOKEN") else "no token, loopback only",
    }
    return "rollout server\n" + "\n".join(f"  {key:<17} {value}" for key, value in lines.items())


def problems_of(launch: Launch, token: str | None) -> list[str]:
    """All reasons not to start, found without loading anything (SRV-2, SRV-3)."""
    problems = []
    if not is_loopback(launch.host):
        if not launch.allow_remote:
            problems.append(f"host {launch.host} is not loopback; set rollout_server.allow_remote: true to allow that")
        if not token:
            problems.append(f"host {launch.host} is not loopback; set a token in ROLLOUT_SERVER_TOKEN for all clients")
    if launch.device == "cuda" and launch.world_size != launch.num_devices:
        problems.append(
            f"tensor_parallel_size {launch.tensor_parallel_size} x data_parallel_size {launch.data_parallel_size} = "
            f"{launch.world_size}, but {launch.num_devices} CUDA devices are visible; "
            "they must be equal (see CUDA_VISIBLE_DEVICES, or make server GPUS=...)"
        )
    return problems + model_problems(Path(launch.model_path), launch.max_model_len)


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def model_problems(path: Path, max_model_len: int) -> list[str]:
    """What is wrong with the model directory, and a length that the model cannot hold."""
    try:
        config = json.loads((path / "config.json").read_text())
    except (OSError, ValueError) as error:
        return [f"model.path={path}: config.json cannot be read ({error}); it must be a local checkpoint directory"]
    weights = [file for pattern in ("*.safetensors", "*.bin", "*.gguf") for file in path.glob(pattern)]
    unreadable = [file.name for file in weights if not os.access(file, os.R_OK)]
    if not weights or unreadable:
        return [f"model.path={path}: {'cannot read ' + ', '.join(unreadable) if unreadable else 'holds no weights'}"]
    text_config = config.get("text_config", config)
    longest = text_config.get("max_position_embeddings")
    scaled = (text_config.get("rope_scaling") or text_config.get("rope_parameters") or {}).get("factor")
    if longest and not scaled and max_model_len > longest:
        rule = f"the model in {path} ends at {longest} positions; lower it"
        return [f"rollout_server.vllm_max_model_len={max_model_len}: {rule}"]
    return []


def listen(host: str, port: int) -> socket.socket:
    """The server's socket, listening from now on: a busy port is found before anything is loaded.

    Raises:
        OSError: the port is taken (with its holder, where that can be seen) or the address is not this machine's.
    """
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    # With the protocol named asyncio turns Nagle's delay off, else every answer waits 40 ms for an acknowledgement.
    server = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections of a former server may be lingering
    try:
        server.bind(address)
        server.listen(1024)
    except OSError as error:
        from utils.dist import port_holder

        server.close()
        raise OSError(f"cannot listen on {host}:{port}: {error.strerror}{port_holder(port)}") from error
    return server


class LoadingAnswer:
    """Answers every request with 503 "loading" until the engine is up, so that clients can tell slow from absent."""

    BODY = b'{"status": "loading", "detail": "the model is being loaded"}'

    def __init__(self, server: socket.socket) -> None:
        self._server = server
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> "LoadingAnswer":
        self._server.settimeout(0.2)
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._stopped.set()
        self._thread.join()
        self._server.settimeout(None)

    def _run(self) -> None:
        head = b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nConnection: close\r\n"
        answer = head + b"Content-Length: %d\r\n\r\n" % len(self.BODY) + self.BODY
        while not self._stopped.is_set():
            with contextlib.suppress(OSError):  # accept timed out, or the client went away
                connection, _ = self._server.accept()
                with connection:
                    connection.settimeout(1.0)
                    connection.recv(65536)
                    connection.sendall(answer)


def set_environment(launch: Launch) -> None:
    """Variables that vLLM reads at import and in its processes. It never talks to anyone outside."""
    for name in ("VLLM_NO_USAGE_STATS", "VLLM_DO_NOT_TRACK", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        os.environ[name] = "1"
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"  # children begin with die_with_parent
    os.environ[PARENT_PID] = str(os.getpid())
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.getenv("PYTHONPATH")])])
    if launch.device == "cpu":
        os.environ[ON_CPU] = "1"
        os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(launch.cpu_kv_cache_gib)
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        # One kernel, some 100 KB, per layer shape and number of tokens: the default of 1024 grows for hours.
        os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "256")
        threads = max(1, (os.cpu_count() or 1) // (2 * launch.world_size))  # half the cores are the learner's
        os.environ.setdefault("OMP_NUM_THREADS", str(threads))


def engine_args(launch: Launch) -> Any:
    """vLLM's engine arguments. Raises ValueError for a name in `vllm_engine_kwargs` that vLLM does not know."""
    from vllm.config import WeightTransferConfig
    from vllm.engine.arg_utils import AsyncEngineArgs

    known = {field.name for field in dataclasses.fields(AsyncEngineArgs)}
    if unknown := sorted(set(launch.engine_kwargs) - known):
        raise ValueError(f"rollout_server.vllm_engine_kwargs: vLLM has no argument {', '.join(unknown)}")
    pixels = {"min_pixels": launch.min_pixels, "max_pixels": launch.max_pixels}
    kwargs: dict[str, Any] = {
        "model": launch.model_path,
        "dtype": launch.dtype,
        "seed": launch.seed,
        "tensor_parallel_size": launch.tensor_parallel_size,
        "data_parallel_size": launch.data_parallel_size,
        "max_model_len": launch.max_model_len,
        "enable_lora": launch.max_lora_rank is not None,
        "enable_prefix_caching": launch.enable_prefix_caching,
        "worker_extension_cls": "utils.sync.vllm_worker.WorkerExtension",
        "weight_transfer_config": WeightTransferConfig(
            backend="stream_nccl" if launch.device == "cuda" else "stream_gloo"
        ),
        "mm_processor_kwargs": {key: value for key, value in pixels.items() if value is not None} or None,
    }
    if launch.max_lora_rank is not None:
        kwargs["max_lora_rank"] = launch.max_lora_rank
    if launch.max_num_seqs is not None:
        kwargs["max_num_seqs"] = launch.max_num_seqs
    if launch.device == "cuda":
        kwargs["gpu_memory_utilization"] = launch.gpu_memory_utilization
    else:
        kwargs["enforce_eager"] = True
        kwargs["enable_chunked_prefill"] = False  # vLLM 0.32 on CPU dies at a chunk of a prompt with a seed of its own
    return AsyncEngineArgs(**kwargs | launch.engine_kwargs)


async def serve(launch: Launch, server_socket: socket.socket, token: str | None) -> None:
    """Load the model and answer until a signal says stop."""
    with LoadingAnswer(server_socket):  # importing vLLM alone takes seconds
        import uvicorn
        from vllm.v1.engine.async_llm import AsyncLLM

        from utils.data.encoding import load_processor
        from utils.data.images import ImageStore
        from utils.server.app import make_app
        from utils.server.engine import RolloutEngine
        from utils.server.weight_updates import WeightUpdates

        # In the main thread: the engines' lives are tied to the thread that starts them.
        llm = AsyncLLM.from_engine_args(engine_args(launch))
        processor = load_processor(launch.model_path, launch.min_pixels, launch.max_pixels)
        images = ImageStore(launch.image_roots, launch.allow_image_urls)
        engine = RolloutEngine(llm, processor, images, launch.model_path, launch.world_size, launch.stuck_s)
        await engine.warm_up()
    updates = WeightUpdates(engine, "nccl" if launch.device == "cuda" else "gloo")
    app = make_app(engine, updates, token, launch.prefix)
    config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=1, timeout_keep_alive=75)
    front = uvicorn.Server(config)
    front.capture_signals = contextlib.nullcontext  # ours below; uvicorn would end the process before the engines

    def stop() -> None:
        if not front.should_exit:
            print("rollout server: stopping", flush=True)
            threading.Thread(target=kill_after, args=(SHUTDOWN_S,), daemon=True).start()
        front.should_exit = True

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop)
    print(f"rollout server: ready on http://{launch.host}:{launch.port}{launch.prefix}/", flush=True)
    try:
        await front.serve(sockets=[server_socket])
    finally:
        server_socket.close()
        llm.shutdown(timeout=3)


def kill_after(seconds: float) -> None:
    """Last resort of a shutdown: ending this process makes the kernel end its children."""
    threading.Event().wait(seconds)
    print("rollout server: engines did not end in time and are killed", file=sys.stderr, flush=True)
    os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", required=True, help="YAML file")
    parser.add_argument("--server-index", type=int, default=0, help="which of the config's servers to start")
    parser.add_argument("--dry-run", action="store_true", help="print the resolved config and plan, start nothing")
    args = parser.parse_args()

    from utils.config.load import ConfigError, dump_yaml, exit_with, load_config_or_exit

    cfg = load_config_or_exit(args.config)
    try:
        launch = resolve(cfg, args.server_index)
    except ConfigError as error:
        exit_with(error)
    if args.dry_run:
        print(dump_yaml(cfg))
    print(describe(launch), flush=True)
    token = os.environ.get("ROLLOUT_SERVER_TOKEN") or None
    problems = problems_of(launch, token)
    if args.dry_run:
        print("".join(f"would not start: {problem}\n" for problem in problems), end="")
        return
    server_socket = None
    try:
        server_socket = None if problems else listen(launch.host, launch.port)
    except OSError as error:
        problems.append(str(error))
    if problems:
        print("\n".join(f"{args.config}: {problem}" for problem in problems), file=sys.stderr)
        sys.exit(EXIT_USAGE)
    set_environment(launch)
    os.environ.pop("ROLLOUT_SERVER_TOKEN", None)  # the engines' processes need none
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(serve(launch, server_socket, token))


if __name__ == "__main__":
    main()
