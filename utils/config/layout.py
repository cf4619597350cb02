"""Which process runs on which device, and the commands that put it there (`--dry-run`, CFG-16)."""

from dataclasses import dataclass

from utils.config.rules import is_colocate
from utils.config.schema import SCRIPTS, Config, ServerAddress, ServerSettings


@dataclass(frozen=True)
class Layout:
    """`places`: (device, process) for every device; `commands`: what starts them so, servers first."""

    places: list[tuple[str, str]]
    commands: list[str]


def plan_layout(cfg: Config, world_size: int, file: str) -> Layout | None:
    """Devices in order: the servers of this machine, then the learners. Servers elsewhere count from 0 on their own.

    GPU numbers are those that `GPUS=` takes; learners are taken to have GPUs unless all servers are on CPU. None where
    a server takes whatever devices it finds.
    """
    places: list[tuple[str, str]] = []
    commands: list[str] = []
    used = 0  # GPUs of this machine
    addresses = cfg.servers()
    settings = [cfg.server_settings(index) if cfg.rs else None for index in range(len(addresses))]
    if any(own is None or own.world_size is None for own in settings):
        return None
    for index, (address, own) in enumerate(zip(addresses, settings, strict=True)):
        host = "" if _is_here(address) else f"{address.host}: "
        first = 0 if host else used
        gpus = _gpus(first, own.world_size) if own.device != "cpu" else []
        used += 0 if host else len(gpus)
        places += [
            (host + (f"GPU {gpus[rank]}" if gpus else "CPU"), _server_process(index, rank, own, address))
            for rank in range(own.world_size)
        ]
        arguments = f' ARGS="--server-index {index}"' if len(addresses) > 1 else ""
        commands.append(f"{host}make server{_option(gpus)} CONFIG={file}{arguments}")
    on_cpu = bool(settings) and all(own.device == "cpu" for own in settings)
    gpus = [] if on_cpu else _gpus(used, world_size)
    places += [
        (f"GPU {gpus[rank]}" if gpus else "CPU", _learner_process(cfg, rank, len(addresses)))
        for rank in range(world_size)
    ]
    target = "grpo" if cfg.custom.trainer_variant == "grpo" else "train"
    commands.append(f"make {target}{_option(gpus) or f' RANKS={world_size}'} CONFIG={file}")
    return Layout(places, commands)


def _is_here(address: ServerAddress) -> bool:
    return address.host in ("localhost", "::1") or address.host.startswith("127.")


def _gpus(first: int, count: int) -> list[int]:
    return list(range(first, first + count))


def _option(gpus: list[int]) -> str:
    return f" GPUS={','.join(map(str, gpus))}" if gpus else ""


def _server_process(index: int, rank: int, own: ServerSettings, address: ServerAddress) -> str:
    replica, part = divmod(rank, own.vllm_tensor_parallel_size)
    share = f", tensor-parallel rank {part}" if own.vllm_tensor_parallel_size > 1 else ""
    return f"rollout_server.py, server {index} (port {address.port}), replica {replica}{share}: generates"


def _learner_process(cfg: Config, rank: int, num_servers: int) -> str:
    tasks = ["trains"]
    if is_colocate(cfg):
        tasks.append(f"generates (engine {rank // cfg.rm.vllm.tensor_parallel_size})")
    elif not num_servers:
        tasks.append("generates")
    if rank == 0:
        tasks += ["sends weights", "writes logs"] if num_servers else ["writes logs"]
    return f"{SCRIPTS[cfg.custom.trainer_variant]}, rank {rank}: {', '.join(tasks)}"
