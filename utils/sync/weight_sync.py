"""Merged weights, streamed from the learner's shards into the rollout engines' memory (section SYN of the contract).

Three parts, in the order a tensor passes them: `MergedWeights` lists every checkpoint tensor of the training model and
writes it, adapters merged in, into a given buffer; a transport (`GlooTransport`, `NcclTransport`) broadcasts buckets to
the engines of all servers at the same time; `WeightSync` drives the servers' update calls, the fences and the proofs.
All contact with vLLM's trainer side of weight transfer is in this module; the receiving side is
utils/sync/vllm_worker.py.
"""

import contextlib
import logging
import math
import socket
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn

from utils.dist import Ranks
from utils.sync.wire import loopback_if_local, plan_buckets, tensor_digest

logger = logging.getLogger(__name__)

# A server that another run holds says so at once; meeting one that does not come takes a whole time-out.
REFUSAL_S = 0.5
# Float32 rows merged at once: bounds the scratch memory, whatever the tensor's size. On CPU a block stays in a core's
# cache, and in memory that malloc does not hand back and fetch again page by page; on CUDA a block is five launches.
_MERGE_BLOCK_BYTES = {"cpu": 512 << 10, "cuda": 4 << 20}


@dataclass(frozen=True)
class Adapter:
    """One LoRA or DoRA adapter of a linear layer: `W + scaling * B @ A`, for DoRA renormalised to `magnitude`."""

    a: nn.Parameter  # [r, in]
    b: nn.Parameter  # [out, r]
    scaling: float
    magnitude: nn.Parameter | None  # [out]


@dataclass(frozen=True)
class WeightEntry:
    """One tensor of the merged checkpoint: its name there, full shape, dtype, and what it is made of."""

    name: str
    shape: tuple[int, ...]
    weight: nn.Parameter
    adapter: Adapter | None

    @property
    def dtype(self) -> torch.dtype:
        return self.weight.dtype

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.weight.element_size()

    @property
    def parts(self) -> list[nn.Parameter]:
        """The parameters that must be whole (gathered) before the tensor can be made."""
        if self.adapter is None:
            return [self.weight]
        parts = [self.weight, self.adapter.a, self.adapter.b]
        return parts if self.adapter.magnitude is None else [*parts, self.adapter.magnitude]

    @property
    def can_change(self) -> bool:
        """False for frozen tensors without an adapter: training cannot change them."""
        return any(part.requires_grad for part in self.parts)


class MergedWeights:
    """Every tensor of the model in checkpoint names and shapes, adapters merged in (SYN-4); only reads the model.

    Args:
        model: a transformers model or a PEFT model around one, before or after `deepspeed.initialize`, any ZeRO stage.
    """

    def __init__(self, model: nn.Module) -> None:
        base = model.get_base_model() if hasattr(model, "get_base_model") else model
        seen: set[int] = set()
        self.entries: list[WeightEntry] = []
        for name, weight, adapter in _effective_parameters(base, ""):
            if id(weight) not in seen:  # a tied tensor (lm_head) travels once, under its first name
                seen.add(id(weight))
                self.entries.append(WeightEntry(name, _full_shape(weight), weight, adapter))
        self.dtype = self.entries[0].dtype  # that the engine computes in

    @property
    def is_sharded(self) -> bool:
        """Whether ZeRO-3 holds the parameters in shards, so that reading one is a collective."""
        return any(hasattr(entry.weight, "ds_id") for entry in self.entries)

    @contextlib.contextmanager
    def gathered(self, entry: WeightEntry) -> Iterator[None]:
        """The entry's parameters are whole inside. Under ZeRO-3 a collective: all ranks, same entries, same order."""
        if not hasattr(entry.weight, "ds_id"):
            yield
            return
        import deepspeed

        with deepspeed.zero.GatheredParameters(entry.parts):
            yield
            if entry.weight.is_cuda:  # the memory is taken back when the block ends: the copy must have landed
                torch.cuda.current_stream().synchronize()

    def write(self, entry: WeightEntry, out: torch.Tensor) -> None:
        """Write the merged tensor into `out` (its shape and dtype). Call inside `gathered`."""
        with torch.no_grad():
            if entry.adapter is None:
                out.copy_(entry.weight.data)
            else:
                _merge_into(out, entry.weight.data, entry.adapter)

    def tensors(
        self, materialize: bool = True, entries: Sequence[WeightEntry] | None = None
    ) -> Iterator[tuple[str, torch.Tensor | None]]:
        """`(name, merged tensor)` of `entries` (default: all) in order, one alive at a time. Every rank must exhaust it
        under ZeRO-3; ranks that do not want the tensors pass `materialize=False` and get None."""
        for entry in self.entries if entries is None else entries:
            with self.gathered(entry):
                merged = None
                if materialize:
                    merged = torch.empty(entry.shape, dtype=entry.dtype, device=entry.weight.device)
                    self.write(entry, merged)
            yield entry.name, merged


def _effective_parameters(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Parameter, Adapter | None]]:
    """Walk the model as if PEFT's wrappers were not there: `(checkpoint name, parameter in force, adapter)`."""
    from peft.tuners.lora import LoraLayer
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils import ModulesToSaveWrapper

    if isinstance(module, ModulesToSaveWrapper):
        yield from _effective_parameters(module.modules_to_save[module.active_adapters[0]], prefix)
        return
    if isinstance(module, LoraLayer):
        base = module.get_base_layer()
        for name, parameter in base.named_parameters():
            yield prefix + name, parameter, _adapter_of(module, prefix) if name == "weight" else None
        return
    if isinstance(module, BaseTunerLayer):
        raise ValueError(f"{prefix}: {type(module).__name__} cannot be merged for the rollout server; use LoRA or DoRA")
    for name, parameter in module.named_parameters(recurse=False):
        yield prefix + name, parameter, None
    for name, child in module.named_children():
        yield from _effective_parameters(child, f"{prefix}{name}.")


def _adapter_of(layer: nn.Module, prefix: str) -> Adapter | None:
    active = [name for name in layer.active_adapters if name in layer.lora_A or name in layer.lora_embedding_A]
    if not active:
        return None
    if len(active) > 1 or not isinstance(layer.get_base_layer(), nn.Linear) or layer.lora_bias[active[0]]:
        raise ValueError(f"{prefix}: only one adapter, without bias, on a linear layer can be merged while streaming")
    name = active[0]
    vector = layer.lora_magnitude_vector[name].weight if name in layer.lora_magnitude_vector else None
    return Adapter(layer.lora_A[name].weight, layer.lora_B[name].weight, layer.scaling[name], vector)


def _merge_into(out: torch.Tensor, weight: torch.Tensor, adapter: Adapter) -> None:
    """`out = W + s * B@A`, or DoRA's `m * (W + s * B@A) / ||W + s * B@A||`, in float32, rounded once into `out`.

    Row by row independent, hence done in blocks of rows; the order of operations is PEFT's, so that float32 results are
    the same bits. Source: Hu et al. 2021 (LoRA) eq. 3; Liu et al. 2024 (DoRA) eq. 5.
    """
    a = adapter.a.data.float()
    rows = max(1, _MERGE_BLOCK_BYTES[weight.device.type] // (4 * weight.shape[1]))
    for start in range(0, weight.shape[0], rows):
        block = slice(start, start + rows)
        merged = (adapter.b.data[block].float() @ a).mul_(adapter.scaling)
        merged.add_(weight[block])
        if adapter.magnitude is not None:
            norm = torch.linalg.norm(merged, dim=1)
            merged.mul_((adapter.magnitude.data[block].float() / norm).view(-1, 1))
        out[block].copy_(merged)


def whole_groups(names: set[str], parameters: Mapping[str, Sequence[str]]) -> set[str]:
    """`names` and every tensor that must travel with one of them (SYN-6).

    An engine rebuilds a module from what an update brings for it, so all tensors of a module travel together: q, k, v
    and their biases; gate and up; a layer's experts.

    Args:
        parameters: the engine's parameters that each tensor goes into; a parameter's module is its name up to the last
            dot. Two checkpoint tensors: `{"q_proj.weight": ["attn.qkv_proj.weight"], "k_proj.weight": [...]}`.
    """
    modules = {name: {parameter.rpartition(".")[0] for parameter in goes} for name, goes in parameters.items()}
    whole: set[str] = set()
    while whole != names:  # a tensor that goes into two modules ties both together
        whole = names
        touched = set().union(*(modules[name] for name in names))
        names = names | {name for name, own in modules.items() if own & touched}
    return whole


def _full_shape(parameter: nn.Parameter) -> tuple[int, ...]:
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


class Transport(Protocol):
    """Rank 0's end of the data path to all servers. `alive` raises once a server's side of the transfer failed."""

    def open(self, addresses: list[tuple[str, int]], world_sizes: list[int]) -> None: ...
    def send(
        self, weights: MergedWeights, entries: Sequence[WeightEntry], digest: bool, alive: Callable[[], None]
    ) -> dict[str, str]: ...
    def close(self) -> None: ...


class GlooTransport:
    """Buckets over Gloo, one group per server, every bucket to all servers at the same time (SYN-11); for CPU.

    A bucket is packed while the one before it is on its way. What is in flight, being packed and gathered together
    never exceeds two buckets (SYN-5): where it would, the bucket in flight is waited for first.
    """

    def __init__(self, bucket_bytes: int, timeout_s: float) -> None:
        self.bucket_bytes = bucket_bytes
        self.timeout_s = timeout_s
        self._groups: list[torch.distributed.ProcessGroup] = []

    def open(self, addresses: list[tuple[str, int]], world_sizes: list[int]) -> None:
        """Host one store per `(address, group port)` and wait until all workers of that server have joined.

        One after the other: vLLM points the process's stdout elsewhere meanwhile, and two threads doing that at once
        (vLLM 0.32) lose it for good. It costs nothing, since the workers of all servers are on their way already.
        """
        timeout = timedelta(seconds=self.timeout_s)
        try:
            for address, world_size in zip(addresses, world_sizes, strict=True):
                with loopback_if_local(address[0]):
                    self._groups.append(_open_group(address, world_size + 1, timeout))
        except Exception as error:
            traceback.clear_frames(error.__traceback__)  # they would keep the store, and with it the port
            raise

    def send(
        self, weights: MergedWeights, entries: Sequence[WeightEntry], digest: bool, alive: Callable[[], None]
    ) -> dict[str, str]:
        """Stream `entries`; returns their digests by name when asked, else nothing.

        After a failure the walk goes on without sending, because other ranks are in the same gathers; it raises after.
        """
        digests: dict[str, str] = {}
        budget = 2 * max(self.bucket_bytes, max(entry.num_bytes for entry in entries))
        broadcasts = _Broadcasts(self._groups, alive, time.monotonic() + self.timeout_s)
        is_sharded = weights.is_sharded
        for bucket in plan_buckets([entry.num_bytes for entry in entries], self.bucket_bytes):
            broadcasts.wait(at_most_bytes=budget - bucket.num_bytes)
            buffer = broadcasts.take(bucket.num_bytes)
            for entry, offset in zip(entries[bucket.first : bucket.last], bucket.offsets, strict=True):
                if is_sharded:
                    broadcasts.wait(at_most_bytes=budget - bucket.num_bytes - entry.num_bytes)
                    broadcasts.spare = None  # its bytes are for what is gathered
                view = buffer[offset : offset + entry.num_bytes].view(entry.dtype).view(entry.shape)
                with weights.gathered(entry):
                    weights.write(entry, view)
                if digest:
                    digests[entry.name] = tensor_digest(view)
            broadcasts.start(buffer)
            del buffer, view  # or they would keep a finished bucket alive while the next one is made
        broadcasts.wait(at_most_bytes=0)
        if broadcasts.failure is not None:
            raise broadcasts.failure
        return digests

    def close(self) -> None:
        """Leave the groups; the receiving side notices and must be opened anew. Frees the ports at once: a store that
        lived on would hand its old keys to the next one on the same port."""
        for group in self._groups:
            with contextlib.suppress(RuntimeError):
                group.shutdown()
        self._groups.clear()


def _open_group(address: tuple[str, int], world_size: int, timeout: timedelta) -> torch.distributed.ProcessGroup:
    """Rank 0's end of what vLLM's `stateless_init_torch_distributed_process_group` opens on the others.

    Not by that function, whose store listens on every interface of the machine; this one listens on `address` only.
    """
    from vllm.distributed.utils import get_tcp_uri, init_gloo_process_group

    host, port = address
    listener = socket.create_server(address, family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    store = torch.distributed.TCPStore(
        host, port, world_size, True, timeout, multi_tenant=True, master_listen_fd=listener.detach()
    )
    return init_gloo_process_group(
        torch.distributed.PrefixStore(get_tcp_uri(host, port), store), 0, world_size, timeout
    )


class _Broadcasts:
    """Broadcasts under way, oldest first. Keeps the first failure and from then on does nothing.

    `spare` is the memory of the bucket that finished last: fresh memory would cost as much as filling it (page faults).
    """

    def __init__(self, groups: list[Any], alive: Callable[[], None], deadline: float) -> None:
        self.failure: Exception | None = None
        self.spare: torch.Tensor | None = None
        self._groups, self._alive, self._deadline = groups, alive, deadline
        self._under_way: list[tuple[torch.Tensor, list[Any]]] = []

    def start(self, buffer: torch.Tensor) -> None:
        if self.failure is None:
            options = torch.distributed.BroadcastOptions()
            options.rootRank, options.asyncOp = 0, True
            try:
                self._under_way.append((buffer, [group.broadcast([buffer], options) for group in self._groups]))
            except RuntimeError as error:
                self._fail(error)

    def take(self, num_bytes: int) -> torch.Tensor:
        """Memory for the next bucket, uint8 `[num_bytes]`: the spare one where it is large enough."""
        spare, self.spare = self.spare, None
        if spare is not None and _storage_bytes(spare) >= num_bytes:
            return torch.empty(0, dtype=torch.uint8).set_(spare.untyped_storage(), 0, (num_bytes,))
        del spare
        return torch.empty(num_bytes, dtype=torch.uint8)

    def wait(self, at_most_bytes: int) -> None:
        """Until at most that many bytes are under way."""
        while self._under_way and sum(_storage_bytes(buffer) for buffer, _ in self._under_way) > max(0, at_most_bytes):
            try:
                self._finish(self._under_way[0][1])
            except (RuntimeError, TimeoutError) as error:
                self._fail(error)
                return
            self.spare = self._under_way.pop(0)[0]

    def _finish(self, works: list[Any]) -> None:
        pause_s = 1e-5
        while not all(work.is_completed() for work in works):
            self._alive()
            if time.monotonic() > self._deadline:
                raise TimeoutError("a bucket was not taken by all servers before RM.vllm.sync.timeout_s")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 1e-3)
        for work in works:
            work.wait()  # completed: returns at once, or raises the transport's error

    def _fail(self, error: Exception) -> None:
        traceback.clear_frames(error.__traceback__)  # whoever keeps the error must not keep the groups' ports
        self.failure = error
        self._under_way, self._groups, self.spare = [], [], None


def _storage_bytes(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().nbytes()


class NcclTransport:
    """vLLM's own NCCL trainer engine functions, the same packed broadcast fanned out to one communicator per server.

    For CUDA. Written over `vllm.distributed.weight_transfer` as it is; not run on the machines this was developed on.
    """

    def __init__(self, bucket_bytes: int, timeout_s: float) -> None:
        self.bucket_bytes = bucket_bytes
        self.timeout_s = timeout_s
        self._groups: list[Any] = []

    def open(self, addresses: list[tuple[str, int]], world_sizes: list[int]) -> None:
        from utils.sync.rendezvous import open_nccl

        for (host, port), world_size in zip(addresses, world_sizes, strict=True):
            self._groups.append(open_nccl(host, port, 0, world_size + 1))

    def send(
        self, weights: MergedWeights, entries: Sequence[WeightEntry], digest: bool, alive: Callable[[], None]
    ) -> dict[str, str]:
        from vllm.distributed.weight_transfer.packed_tensor import packed_nccl_broadcast_producer

        digests: dict[str, str] = {}
        walk = weights.tensors(entries=entries)

        def stream() -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in walk:
                alive()
                if digest:
                    digests[name] = tensor_digest(tensor)
                yield name, tensor

        try:
            packed_nccl_broadcast_producer(
                iterator=stream(),
                group=self,
                src=0,
                post_iter_func=lambda pair: pair[1],
                buffer_size_bytes=self.bucket_bytes,
                num_buffers=2,
            )
            torch.cuda.current_stream().synchronize()
        except Exception:
            self.close()  # ncclBroadcast cannot time out: without the abort a dead peer would hold this rank for ever
            for _ in walk:  # other ranks are in the same gathers
                pass
            raise
        return digests

    def broadcast(self, tensor: torch.Tensor, src: int, stream: Any = None) -> None:
        """What vLLM's producer calls for every bucket: enqueue it on every server's communicator."""
        for group in self._groups:
            group.broadcast(tensor, src=src, stream=stream)

    def close(self) -> None:
        for group in self._groups:
            group.destroy()
        self._groups = []


@dataclass
class SyncReport:
    """What one sync did: for the log and TensorBoard. Tensors and bytes are those that were sent (SYN-6)."""

    version: str
    num_tensors: int
    num_bytes: int
    seconds: float
    verified: bool

    @property
    def gb_per_s(self) -> float:
        return self.num_bytes / 1e9 / max(self.seconds, 1e-9)


@dataclass(frozen=True)
class Probe:
    """A fixed prompt and answer on which engine and learner must give the same log-probabilities (SYN-7, second step).

    `logprobs` computes the learner's own, float `[len(token_ids)]`, with adapters in force; a collective under ZeRO-3.
    """

    infer_request: dict[str, Any]
    token_ids: list[int]
    logprobs: Callable[[], np.ndarray]

    def check(self, ours: np.ndarray, theirs: Sequence[float], dtype: torch.dtype, where: str) -> None:
        """Raises RuntimeError where the engine is further off than rounding explains: in float32 1e-3 for every token,
        in half precision 0.05 on average (two correct engines round differently there, token by token)."""
        gap = np.abs(ours - np.asarray(theirs, dtype=np.float64))
        worst = float(gap.max() if dtype == torch.float32 else gap.mean())
        bound = 1e-3 if dtype == torch.float32 else 0.05
        if not worst <= bound:
            raise RuntimeError(f"{where}: log-probabilities of the probe are off by {worst:.3g}, allowed {bound}")


class WeightSync:
    """Drives syncs of merged weights on all ranks (SYN-2): fence, rank 0 sends, fence.

    The first sync through a communicator sends everything, later ones what can have changed, in whole groups (SYN-6).
    After `open` and after any failure the next one is full again. `mode` is in force; `fallback` says why it is not the
    configured one, where it is not.

    Args:
        weights: what to send.
        ranks: the learner's ranks; rank 0 alone talks to servers.
        client: `post(server index, path, body, timeout_s)`, `health(server index)`, `run_tokens` and `world_sizes`;
            used on rank 0 only.
        addresses: `(host of this learner as the server reaches it, group port)` per server.
        verify: `off`, `first` or `always` (SYN-7).
        probe: what the second step of verification compares; None leaves it out.
        on_running: what becomes of running requests: `wait`, `abort` (made again) or `keep` (SYN-9).
    """

    mode = "full"
    fallback: str | None = None

    def __init__(
        self,
        weights: MergedWeights,
        ranks: Ranks,
        client: Any,
        addresses: list[tuple[str, int]],
        *,
        run_id: str,
        bucket_bytes: int,
        timeout_s: float,
        open_timeout_s: float,
        verify: str = "first",
        probe: Probe | None = None,
        on_running: str = "wait",
    ) -> None:
        self.weights, self.ranks, self.client, self.addresses = weights, ranks, client, addresses
        self.run_id, self.bucket_bytes, self.timeout_s, self.verify = run_id, bucket_bytes, timeout_s, verify
        self.open_timeout_s, self.probe, self.on_running = open_timeout_s, probe, on_running
        transport = NcclTransport if ranks.device.type == "cuda" else GlooTransport
        self.transport: Transport = transport(bucket_bytes, timeout_s)
        self.num_syncs = 0
        self.ledger: dict[str, str] = {}  # digest of every tensor the servers hold, as of the last verified sync
        self._servers_are_whole = False  # they hold all tensors of one sync; else the next one is full
        self._parameters: list[dict[str, list[str]]] = []  # rank 0, per server: what each tensor goes into there

    def open(self) -> None:
        """Open the communicator of every server (rank 0) and let all ranks know the outcome.

        Raises:
            RuntimeError: on every rank, with each server's url, group port and answer.
        """
        error = attempt(self._open) if self.ranks.is_main else None
        self.ranks.raise_together(error, "opening the weight communicators")

    def _open(self) -> None:
        sizes = self.client.world_sizes
        self._servers_are_whole = False
        self.transport.close()  # left over from before a failure
        if (taken := attempt(_check_free, self.addresses)) is not None:  # or a server would wait for us at that port
            raise ConnectionError(_open_message(self.addresses, self._owners(), taken)) from taken
        with ThreadPoolExecutor(len(sizes)) as pool:
            answers = [pool.submit(self._init_communicator, index, size) for index, size in enumerate(sizes)]
            wait(answers, REFUSAL_S, FIRST_EXCEPTION)
            is_refused = any(answer.done() and answer.exception() for answer in answers)
            ours = None if is_refused else attempt(self.transport.open, self.addresses, sizes)
            problems = [error for error in (attempt(answer.result) for answer in answers) if error is not None]
        if problems or ours is not None:
            self.transport.close()
            raise ConnectionError(_open_message(self.addresses, problems, ours)) from (problems or [ours])[0]

    def _owners(self) -> list[str]:
        """Whose the servers are, as far as they say: most likely the group ports' holder, too."""
        owners = []
        for index in range(len(self.addresses)):
            with contextlib.suppress(RuntimeError):  # one that does not answer
                if (owner := self.client.health(index)["owner"]) is not None:
                    owners.append(f"{self.client.url(index)} belongs to run {owner}")
        return owners

    def _init_communicator(self, index: int, world_size: int) -> None:
        host, port = self.addresses[index]
        body = {
            "run_id": self.run_id,
            "master_address": host,
            "master_port": port,
            "world_size": world_size + 1,
            "rank_offset": 1,
            "bucket_bytes": self.bucket_bytes,
            "timeout_s": self.timeout_s,
        }
        answer = self.client.post(index, "/init_communicator/", body, self.open_timeout_s)
        self.client.run_tokens[index] = answer["run_token"]

    def sync(self, version: str) -> SyncReport:
        """Bring every server to the learner's current merged weights under the name `version`.

        Raises:
            RuntimeError: on every rank, whatever rank failed, with run, version and server.
        """
        # The first fence also tells the other ranks, which take part in the same gathers, what rank 0 sends.
        chosen = self.ranks.gather(self._choose() if self.ranks.is_main else [])[0]
        entries = [self.weights.entries[index] for index in chosen]
        start = time.monotonic()
        self._servers_are_whole = False
        verify = self.verify == "always" or (self.verify == "first" and self.num_syncs == 0)
        error = None
        if self.ranks.is_main:
            error = attempt(self._send, version, entries, verify)
        elif self.weights.is_sharded:
            self._walk(entries)
        self.ranks.raise_together(error, f"weight sync {version}")
        if verify and self.probe is not None:
            ours = self.probe.logprobs()
            error = attempt(self._check_probe, ours) if self.ranks.is_main else None
            self.ranks.raise_together(error, f"proving weight sync {version}")
        self.num_syncs += 1
        self._servers_are_whole = True
        num_bytes = sum(entry.num_bytes for entry in entries)
        return SyncReport(version, len(entries), num_bytes, time.monotonic() - start, verify)

    def close(self) -> None:
        """Tear the communicators down; the servers stay up (GRP-4)."""
        if self.ranks.is_main:
            for index in range(len(self.addresses)):
                attempt(self.client.post, index, "/close_communicator/", {"run_id": self.run_id}, 10.0)
            self.transport.close()

    def _choose(self) -> list[int]:
        """Indices of the entries that the next sync sends, in the model's order but for tensors larger than a bucket.

        Those come last: the engine has nothing to load before the first bucket has arrived whole.
        """
        entries = self.weights.entries
        chosen = {entry.name for entry in entries}
        if self._servers_are_whole:
            changing = {entry.name for entry in entries if entry.can_change}
            chosen = set().union(*(whole_groups(changing, own) for own in self._parameters)) or chosen
        order = sorted(range(len(entries)), key=lambda index: entries[index].num_bytes > self.bucket_bytes)  # stable
        return [index for index in order if entries[index].name in chosen]

    def _walk(self, entries: Sequence[WeightEntry]) -> None:
        """Take part in the gathers of a sync without sending."""
        for _ in self.weights.tensors(materialize=False, entries=entries):
            pass

    def _send(self, version: str, entries: list[WeightEntry], verify: bool) -> None:
        """Rank 0's part. After a failure no server is left waiting for a bucket, nor answers with half an update."""
        with ThreadPoolExecutor(len(self.addresses)) as pool:
            try:
                self._update_all(pool, version, entries, verify)
            except Exception:
                self.transport.close()
                for index in range(len(self.addresses)):
                    attempt(self.client.post, index, "/abort_weight_update/", {"run_id": self.run_id}, 10.0)
                raise

    def _update_all(self, pool: ThreadPoolExecutor, version: str, entries: list[WeightEntry], verify: bool) -> None:
        label = {"run_id": self.run_id, "version": version}
        metadata = self._metadata(entries, verify)

        def start_and_receive(index: int) -> dict[str, Any]:
            """While the server finishes its requests and makes ready, the first bucket is packed here."""
            self.client.post(index, "/start_weight_update/", {**label, "pause": self.on_running}, self.timeout_s)
            return self.client.post(index, "/update_weights/", metadata, self.timeout_s)

        receiving = [pool.submit(start_and_receive, index) for index in range(len(self.addresses))]
        try:
            digests = self.transport.send(self.weights, entries, verify, lambda: _raise_early(receiving))
        except Exception:
            self.transport.close()  # frees workers that still wait for a bucket, so that their servers answer
            for future in receiving:
                future.result()  # a server's own words say more than a broken connection
            raise
        answers = [future.result() for future in receiving]
        finished = self._post_all(pool, "/finish_weight_update/", label)
        self.ledger.update(digests)
        if len(entries) == len(self.weights.entries):
            self._parameters = [answer["parameters"] for answer in answers]
        for index, (answer, end) in enumerate(zip(answers, finished, strict=True)):
            self._check_missing(index, end["missing"], entries)
            if verify:
                self._compare(index, answer["digests"])

    def _check_missing(self, index: int, missing: list[str], entries: list[WeightEntry]) -> None:
        """What the engine did not get is exactly what was left out on purpose: after a full update, nothing."""
        parameters = self._parameters[index]
        sent = set().union(*(parameters[entry.name] for entry in entries))
        left_out = set().union(*parameters.values()) - sent
        if wrong := sorted(left_out ^ set(missing)):
            raise RuntimeError(f"{self.client.url(index)}: parameters the engine did not get as sent: {wrong[:5]}")

    def _metadata(self, entries: list[WeightEntry], verify: bool) -> dict[str, Any]:
        return {
            "run_id": self.run_id,
            "names": [entry.name for entry in entries],
            "dtype_names": [str(entry.dtype).removeprefix("torch.") for entry in entries],
            "shapes": [list(entry.shape) for entry in entries],
            "digest": verify,
        }

    def _check_probe(self, ours: np.ndarray) -> None:
        """SYN-7, second step: every replica of every server computes with the weights that the learner has."""
        body = {"infer_request": self.probe.infer_request, "token_ids": self.probe.token_ids}
        for index in range(len(self.addresses)):
            answer = self.client.post(index, "/probe/", body, self.timeout_s)
            for replica, logprobs in enumerate(answer["logprobs"]):
                where = f"{self.client.url(index)}, replica {replica}"
                self.probe.check(ours, logprobs[-len(self.probe.token_ids) :], self.weights.dtype, where)

    def _compare(self, index: int, received: list[dict[str, str]]) -> None:
        """SYN-7, first step: what each worker holds is, byte for byte, what was sent, now or in earlier syncs."""
        if len(received) != self.client.world_sizes[index]:
            raise RuntimeError(f"{self.client.url(index)}: {len(received)} workers reported digests")
        for worker, digests in enumerate(received):
            for name, digest in self.ledger.items():
                if digests.get(name) != digest:
                    where = f"{self.client.url(index)}, worker {worker}, tensor {name}"
                    raise RuntimeError(f"{where}: sent digest {digest}, received {digests.get(name)}")

    def _submit_all(self, pool: ThreadPoolExecutor, path: str, body: dict[str, Any]) -> list[Future]:
        posts = range(len(self.addresses))
        return [pool.submit(self.client.post, index, path, body, self.timeout_s) for index in posts]

    def _post_all(self, pool: ThreadPoolExecutor, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        return [future.result() for future in self._submit_all(pool, path, body)]


def attempt(function: Callable[..., Any], *args: Any) -> Exception | None:
    """Run `function`; hand its error back instead of raising, so that collectives around it stay aligned."""
    try:
        function(*args)
    except Exception as error:  # noqa: BLE001  (raised again, on all ranks, at the next fence)
        return error
    return None


def _raise_early(futures: list[Future]) -> None:
    for future in futures:
        if future.done():
            future.result()


def _check_free(addresses: Sequence[tuple[str, int]]) -> None:
    """Raises OSError, with the address, where one cannot be listened at."""
    for address in addresses:
        socket.create_server(address, family=socket.AF_INET6 if ":" in address[0] else socket.AF_INET).close()


def _open_message(addresses: list[tuple[str, int]], problems: Sequence[Exception | str], ours: Exception | None) -> str:
    lines = [f"group port {port} on {host}" for host, port in addresses]
    lines += [f"  server said: {problem}" for problem in problems]
    lines += [f"  this side: {ours}"] if ours is not None else []
    ways_out = "free or change the group port (RM.vllm.server), restart the server, or set RM.rollout_backend: hf"
    return "the weight communicator could not be opened: " + "\n".join(lines) + f"\nways out: {ways_out}"
