"""Weight sync into a real rollout server on CPU (SYN-5, SYN-6, SYN-11).

The model has the exact shapes of SmolLM2-135M in bfloat16 (269 MB), its weights at random: speed does not depend on
values. The two parts that no sync can avoid are timed alone in the same process, by turns with the whole.
"""

import contextlib
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import requests
import torch
import yaml
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig

from benchmarks.baselines.per_tensor_sync import sync_per_tensor
from benchmarks.harness import Result, at_least, at_most, reported, take_turns, wall
from tests.e2e.processes import run_program
from tools.plan import write_constants
from utils.config.rollout import ServerAddress
from utils.dist import Ranks
from utils.rollout.client import RolloutClient
from utils.sync.merged_weights import MergedWeights
from utils.sync.weight_sync import WeightSync
from utils.sync.wire import bucket_layouts

SMOLLM2_135M = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "tie_word_embeddings": True,
    "max_position_embeddings": 2048,
}
ROUNDS = 7
STARTS = 3  # of the engine, whose loading takes 110 ms after one and 150 ms after another, as its heap happens to lie
FIXED_S = 0.05  # that a sync may take however little it sends, on the machine where ...
LOADING_S = 0.123  # ... loading alone took so long; elsewhere in proportion
BUCKET_MIB = 32  # the largest tensor has 54 MiB; the default of 256 would hold this whole model in one bucket


def run(rounds: int = ROUNDS) -> list[Result]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model_dir = save_model(folder / "model")
        seconds = full_sync(folder, model_dir, rounds)
        results = [independence_of_cores(rounds), *full_sync_results(seconds)]
        fixed_s = FIXED_S * seconds["load"] / LOADING_S
        with server(folder, model_dir) as address:
            for use_dora in (False, True):
                results += adapter_syncs(address, model_dir, use_dora, rounds, fixed_s)
            results += sharded_sync(address, model_dir, folder / "sharded.json", rounds // 2)
        with server(folder, model_dir, num_engines=2) as address:
            results += two_engines(address, model_dir, rounds)
    return results


def independence_of_cores(rounds: int) -> Result:
    """What the same work takes on both cores at once, over on one: 1 if they are independent, 2 if they share one."""
    with ProcessPoolExecutor(2, get_context("spawn")) as pool:

        def copy_on(num_cores: int) -> None:
            list(pool.map(copy_fresh_memory, [20] * num_cores))

        copy_on(2)  # starts the processes
        seconds = take_turns({"one": wall(lambda: copy_on(1)), "two": wall(lambda: copy_on(2))}, rounds)
    return reported(
        "sync: machine, the same copies on two cores at once, over on one", "s", seconds["two"], seconds["one"]
    )


def copy_fresh_memory(times: int) -> None:
    """What packing, sending and loading mostly do: copy buckets into memory that is not there yet."""
    bucket = torch.ones(BUCKET_MIB << 20, dtype=torch.uint8)
    for _ in range(times):
        bucket.clone()


def full_sync(folder: Path, model_dir: Path, rounds: int) -> dict[str, float]:
    """Seconds with one engine, one learner rank and merged weights at hand: means over several starts of the engine."""
    starts = [full_sync_once(folder, model_dir, rounds) for _ in range(STARTS)]
    seconds = {name: statistics.mean(start[name] for start in starts) for name in starts[0]}
    num_bytes = (model_dir / "model.safetensors").stat().st_size
    write_constants("cpu", {"sync_bytes_per_s": num_bytes / seconds["sync"]})
    return seconds


def full_sync_results(seconds: dict[str, float]) -> list[Result]:
    parts = max(seconds["load"], seconds["broadcast"])
    return [
        reported("sync: broadcast alone, over loading alone", "s", seconds["broadcast"], seconds["load"]),
        reported("sync: both at once, over the larger alone", "s", seconds["both"], parts),
        reported("sync: full, over larger + 0.3 x smaller part", "s", seconds["sync"], overlapped(seconds)),
        at_most("sync: full, over that or both parts at once", "s", seconds["sync"], allowed(seconds), 1.35),
        at_least("sync: full, against one call per tensor", "s", seconds["sync"], seconds["per tensor"], 3),
    ]


def full_sync_once(folder: Path, model_dir: Path, rounds: int) -> dict[str, float]:
    """Medians in seconds, in one engine."""
    with server(folder, model_dir) as address:
        sync = open_sync(address, load(model_dir))
        tensors = dict(sync.weights.tensors())
        actions = {
            **parts_and_whole(sync, model_dir),
            "per tensor": wall(lambda: sync_per_tensor(sync, tensors, "per tensor")),
        }
        seconds = take_turns(actions, rounds)
        sync.close()
    return seconds


def parts_and_whole(sync: WeightSync, model_dir: Path) -> dict[str, Callable[[], float]]:
    """The two parts that no full sync can avoid, each alone and both at once, and the sync."""
    path = {"path": str(model_dir / "model.safetensors")}
    return {
        "broadcast": lambda: bare_broadcast(sync, "receive", {}),
        "load": lambda: bench_step(sync, "load", path),
        "sync": wall(lambda: sync.sync("full")),
        "both": lambda: bare_broadcast(sync, "both", path),
    }


def allowed(seconds: dict[str, float]) -> float:
    """What a full sync is measured against: the parts overlapped, or both at once where two cores slow each other."""
    return max(overlapped(seconds), seconds["both"])


def overlapped(seconds: dict[str, float]) -> float:
    """The larger part and 0.3 of the smaller one: what a machine with independent cores can do."""
    larger, smaller = sorted((seconds["broadcast"], seconds["load"]), reverse=True)
    return larger + 0.3 * smaller


def two_engines(address: ServerAddress, model_dir: Path, rounds: int) -> list[Result]:
    """One learner rank, a server of two engines; no bar, since they and the learner share two cores."""
    sync = open_sync(address, load(model_dir))
    walk = wall(lambda: merge(sync.weights, sync.weights.entries))
    seconds = take_turns({**parts_and_whole(sync, model_dir), "walk": walk}, rounds)
    sync.close()
    return [
        reported("sync: two engines, full, over that or both parts at once", "s", seconds["sync"], allowed(seconds)),
        reported("sync: two engines, gather and merge alone, over the sync", "s", seconds["walk"], seconds["sync"]),
    ]


def sharded_sync(address: ServerAddress, model_dir: Path, out: Path, rounds: int) -> list[Result]:
    """Two learner ranks under ZeRO-3 with DoRA on all linear layers, full syncs to one engine; no bar.

    What overlaps is seen against doing one after the other: gathering and merging alone, then what merged weights cost.
    """
    sync = open_sync(address, load(model_dir))
    merged = take_turns({"sync": wall(lambda: sync.sync("full"))}, rounds)["sync"]
    sync.close()
    arguments = (str(model_dir), address.base_url, str(address.group_port), str(rounds), str(out))
    result = run_program("benchmarks/sync_learner.py", num_ranks=2, arguments=arguments)
    if result.returncode:
        raise RuntimeError(f"the learner failed:\n{result.stdout[-4000:]}")
    seconds = json.loads(out.read_text())
    name, walk = "sync: W = 2, ZeRO-3, DoRA", seconds["gather and merge"]
    return [
        reported(f"{name}, gather and merge alone, over the sync", "s", walk, seconds["sync"]),
        reported(f"{name}, over gather and merge + sync of merged weights", "s", seconds["sync"], walk + merged),
    ]


def adapter_syncs(address: ServerAddress, model_dir: Path, use_dora: bool, rounds: int, fixed_s: float) -> list[Result]:
    """Merged syncs of a model with adapters on q and v, and on all linear layers: what can change, against all."""
    kind, results = "DoRA" if use_dora else "LoRA", []
    for targets in (["q_proj", "v_proj"], "all-linear"):
        config = LoraConfig(r=16, lora_alpha=32, use_dora=use_dora, target_modules=targets)
        sync = open_sync(address, get_peft_model(load(model_dir), config, autocast_adapter_dtype=False))
        entries = sync.weights.entries
        share = sum(e.num_bytes for e in entries if e.can_change) / sum(e.num_bytes for e in entries)
        adapted = [entry for entry in entries if entry.adapter is not None]

        def sync_full(sync: WeightSync = sync) -> float:
            sync.open()  # a new communicator gets everything
            return wall(lambda: sync.sync("full"))()

        seconds = take_turns(
            {
                "full": sync_full,
                "partial": wall(lambda sync=sync: sync.sync("partial")),
                "merge": wall(lambda sync=sync, adapted=adapted: merge(sync.weights, adapted)),
            },
            rounds,
        )
        sync.close()
        where = "q and v" if targets != "all-linear" else "all linear layers"
        name = f"sync: {kind} on {where}, after the first ({share:.0%} can change)"
        results.append(at_most(name, "s", seconds["partial"], 1.15 * share * seconds["full"] + fixed_s, 1.0))
        results.append(
            reported(f"sync: {kind} on {where}, merge alone, over the sync", "s", seconds["merge"], seconds["partial"])
        )
    return results


def save_model(folder: Path) -> Path:
    """SmolLM2-135M's shapes at random, with the demo's tokenizer (the server wants one, it is not measured)."""
    from tools.make_demo import CHAT_TEMPLATE, build_tokenizer

    torch.manual_seed(0)
    tokenizer = build_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    AutoModelForCausalLM.from_config(LlamaConfig(**SMOLLM2_135M), dtype=torch.bfloat16).save_pretrained(folder)
    return folder


def load(model_dir: Path) -> nn.Module:
    return AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.bfloat16)


def open_sync(address: ServerAddress, model: nn.Module, ranks: Ranks | None = None) -> WeightSync:
    """A sync of all ranks (default: one) with its communicator open."""
    client = RolloutClient([address], rank=0, world_size=1, decode_batch_size=4)
    client.wait_ready()
    sync = WeightSync(
        MergedWeights(model),
        ranks or Ranks(),
        client,
        [("127.0.0.1", address.group_port)],
        run_id="bench",
        bucket_bytes=BUCKET_MIB << 20,
        timeout_s=120,
        open_timeout_s=60,
        verify="off",
    )
    sync.open()
    return sync


def bare_broadcast(sync: WeightSync, step: str, body: dict[str, Any]) -> float:
    """Seconds of a worker's step that takes the sync's own buckets over the sync's own group, while this end only
    sends; in step `both` copies of them, as packing makes."""
    sizes = [b.num_bytes for b in bucket_layouts([e.num_bytes for e in sync.weights.entries], sync.bucket_bytes)]
    buffers = [torch.ones(size, dtype=torch.uint8) for size in sizes]
    options = torch.distributed.BroadcastOptions()
    options.rootRank = options.rootTensor = 0
    group, answer = sync.transport.groups[0], []
    receiver = threading.Thread(target=lambda: answer.append(bench_step(sync, step, body | {"sizes": sizes})))
    receiver.start()
    group.barrier().wait()
    for buffer in buffers:
        group.broadcast([buffer.clone() if step == "both" else buffer], options).wait()
    receiver.join()
    return answer[0]


def bench_step(sync: WeightSync, step: str, body: dict[str, Any]) -> float:
    """Seconds that the slowest worker took for a step of benchmarks/sync_worker.py."""
    return max(sync.client.post(0, f"/bench/{step}/", body, 120))


def merge(weights: MergedWeights, entries: list) -> None:
    for _ in weights.tensors(entries=entries):
        pass


@contextlib.contextmanager
def server(folder: Path, model_dir: Path, num_engines: int = 1) -> Iterator[ServerAddress]:
    """A running benchmarks/sync_server.py, which ends with the block."""
    address = ServerAddress(base_url=f"http://127.0.0.1:{free_port()}", group_port=free_port())
    config = folder / f"server_{address.group_port}.yaml"
    config.write_text(yaml.safe_dump(server_config(folder, model_dir, address, num_engines)))
    log = config.with_suffix(".log")
    environment = {**os.environ, "DS_ACCELERATOR": "cpu"}
    with log.open("w") as sink:
        command = [sys.executable, str(Path(__file__).parent / "sync_server.py"), "--config", str(config)]
        process = subprocess.Popen(command, stdout=sink, stderr=subprocess.STDOUT, env=environment)
    try:
        wait_healthy(process, address, log)
        yield address
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)


def server_config(folder: Path, model_dir: Path, address: ServerAddress, num_engines: int) -> dict[str, Any]:
    return {
        "model": {"path": str(model_dir), "dtype": "bfloat16"},
        "global_max_length": 512,
        "custom": {
            "trainer_variant": "rollout_matching_sft",
            "train_jsonl": str(folder / "none.jsonl"),
            "extra": {
                "rollout_matching": {
                    "max_new_tokens": 64,
                    "vllm": {"mode": "server", "server": {"servers": [vars(address)]}},
                },
                "rollout_server": {
                    "device": "cpu",
                    "vllm_max_model_len": 512,
                    "vllm_data_parallel_size": num_engines,
                    "cpu_kv_cache_gib": 1,
                    "vllm_engine_kwargs": {"worker_extension_cls": "benchmarks.sync_worker.BenchExtension"},
                },
            },
        },
        "training": {"output_dir": str(folder / "run")},
        "deepspeed": "zero0",
    }


def wait_healthy(process: subprocess.Popen, address: ServerAddress, log: Path, timeout_s: float = 300.0) -> None:
    session = requests.Session()
    session.trust_env = False
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(requests.RequestException):
            if session.get(address.base_url + "/health/", timeout=5).status_code == 200:
                return
        time.sleep(0.3)
    raise RuntimeError(f"the server of the sync benchmark did not come up:\n{log.read_text()[-3000:]}")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
