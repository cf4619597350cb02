"""Weight syncs as the learner drives them: the servers' update calls, the fences and the proofs (section SYN).

A tensor passes `MergedWeights`, which writes it, adapters merged in, into a given buffer; then a transport, which
broadcasts buffers to the engines of all servers at the same time; then utils/sync/vllm_worker.py, the receiving side.
"""

import contextlib
import socket
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch

from utils.dist import Ranks, capture_error
from utils.sync.merged_weights import MergedWeights, WeightEntry, whole_groups
from utils.sync.transports import GlooTransport, NcclTransport

# A server that another run owns refuses at once; a rendezvous with one that does not come takes a whole time-out.
REFUSAL_WAIT_S = 0.5


@dataclass
class SyncResult:
    """Outcome of one sync. Counts tensors and bytes that were sent (SYN-6)."""

    version: str
    num_tensors: int
    num_bytes: int
    seconds: float
    verified: bool

    @property
    def gb_per_s(self) -> float:
        return self.num_bytes / 1e9 / max(self.seconds, 1e-9)


# Mean gap of log-probabilities in half precision. Two correct engines round differently there: by 0.01 to 0.1 depending
# on the family, most with experts, while a group of weights that is missing from a sync leaves 0.5 or more.
FIRST_GAP, LEAST_GAP, LARGEST_GAP = 0.25, 0.1, 0.4


@dataclass
class Probe:
    """A fixed prompt and answer on which engine and learner must give the same log-probabilities (SYN-7, second step).

    `logprobs` computes the learner's own, float `[len(token_ids)]`, with adapters in force; a collective under ZeRO-3.
    `prompts` are further requests, with the token ids of the learner's prompts, that the engine must encode alike.
    """

    infer_request: dict[str, Any]
    token_ids: list[int]
    logprobs: Callable[[], np.ndarray]
    prompts: Sequence[tuple[dict[str, Any], list[int]]] = ()
    noise: float | None = field(default=None, init=False)  # mean gap at the first sync after `open`

    def check(self, ours: np.ndarray, theirs: Sequence[float], dtype: torch.dtype, where: str) -> None:
        """Raise RuntimeError where the engine is further off than rounding explains: in float32 1e-3 for every token,
        in half precision on average three times what rounding did at the first sync."""
        gap = np.abs(ours - np.asarray(theirs, dtype=np.float64))
        worst, bound = float(gap.max()), 1e-3
        if dtype != torch.float32:
            worst = float(gap.mean())
            bound = FIRST_GAP if self.noise is None else min(max(LEAST_GAP, 3 * self.noise), LARGEST_GAP)
        if not worst <= bound:
            raise RuntimeError(f"{where}: log-probabilities of the probe are off by {worst:.3g}, allowed {bound:.3g}")
        self.noise = worst if self.noise is None else self.noise

    def check_prompt(self, ours: list[int], theirs: list[int], where: str) -> None:
        """Raise RuntimeError unless the engine made the learner's prompt (ROL-3)."""
        if ours != theirs:
            at = next((i for i, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]), "the end")
            lengths = f"{len(theirs)} tokens, the learner's {len(ours)}"
            raise RuntimeError(f"{where}: the engine's prompt has {lengths}; they differ from token {at} on")


@dataclass(eq=False)
class WeightSync:
    """Drives syncs of merged weights on all ranks (SYN-2): fence, rank 0 sends, fence.

    The first sync through a communicator sends everything, later ones what can have changed, in whole groups (SYN-6).
    After `open` and after any failure the next one is full again. An adapter always goes whole.
    """

    mode: ClassVar[str] = "full"

    weights: MergedWeights
    ranks: Ranks
    client: Any  # a `utils.rollout.client.RolloutClient`, used on rank 0 only
    addresses: list[tuple[str, int]]  # host of this learner as the server reaches it, and group port, per server
    _: KW_ONLY
    run_id: str
    bucket_bytes: int
    timeout_s: float
    open_timeout_s: float
    verify: str = "first"  # off | first | always (SYN-7)
    probe: Probe | None = None  # for the second step of verification; None leaves it out
    on_running: str = "wait"  # running requests wait, abort (and run again) or keep (SYN-9)

    fallback: str | None = field(default=None, init=False)  # why `mode` is not the configured one
    ledger: dict[str, str] = field(default_factory=dict, init=False)  # digests as of the last verified sync
    _is_first: bool = field(default=True, init=False)  # none has gone through the communicators that are open
    _servers_are_whole: bool = field(default=False, init=False)  # all hold one whole sync; else the next one is full
    # On rank 0, per server: the engine's parameters that each tensor goes into.
    _parameters: list[dict[str, list[str]]] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        kind = NcclTransport if self.ranks.device.type == "cuda" else GlooTransport
        # The servers' own answers still arrive in time; they accept 600 s at most.
        self._join_s = min(600.0, max(self.open_timeout_s / 2, self.open_timeout_s - 4 * REFUSAL_WAIT_S))
        self.transport = kind(self.bucket_bytes, self.timeout_s, self._join_s)

    def open(self) -> None:
        """Open the communicator of every server (rank 0) and tell all ranks the outcome.

        Raises:
            RuntimeError: on every rank, with each server's url, group port and answer.
        """
        self._is_first = True  # nothing is known of servers that were restarted (SYN-7)
        if self.probe is not None:
            self.probe.noise = None  # they are judged as in a resumed run
        error = capture_error(self._open) if self.ranks.is_main else None
        self.ranks.raise_on_all_ranks(error, "opening the weight communicators")

    def _open(self) -> None:
        sizes = self.client.world_sizes
        self._servers_are_whole = False
        self.transport.close()  # left over from before a failure
        # Checked before any server is called, which would wait for us at that port.
        ours = capture_error(_check_free, self.addresses)
        problems: list[Any] = self._owners() if ours else []
        if ours is None:
            with ThreadPoolExecutor(len(sizes)) as pool:
                answers = [pool.submit(self._init_communicator, index, size) for index, size in enumerate(sizes)]
                wait(answers, REFUSAL_WAIT_S, FIRST_EXCEPTION)
                refusals = [error for answer in answers if answer.done() and (error := answer.exception())]
                if refusals:
                    self.client.cut_posts("given up, as another server refused")  # a server notices, and is free
                else:
                    ours = capture_error(self.transport.open, self.addresses, sizes)
                problems = refusals or [error for answer in answers if (error := capture_error(answer.result))]
        if problems or ours:
            self.transport.close()
            lines = [
                f"group port {p} on {host}, for {self.client.url(i)}" for i, (host, p) in enumerate(self.addresses)
            ]
            lines += [f"  server said: {problem}" for problem in problems]
            lines += [f"  this side: {ours}"] if ours else []
            text = "the weight communicator could not be opened: " + "\n".join(lines)
            raise ConnectionError(f"{text}\nWays out:\n{self.client.ways_out}") from ours or problems[0]

    def _owners(self) -> list[str]:
        """List the owners of servers that answer: most likely the group port is one of theirs, too."""
        owners = []
        for index in range(len(self.addresses)):
            with contextlib.suppress(RuntimeError):  # does not answer
                if (owner := self.client.health(index)["owner"]) is not None:
                    owners.append(f"{self.client.url(index)} belongs to run {owner}")
        return owners

    def _init_communicator(self, index: int, world_size: int) -> None:
        body = {
            "run_id": self.run_id,
            "master_address": self.addresses[index][0],
            "master_port": self.addresses[index][1],
            "world_size": world_size + 1,
            "rank_offset": 1,
            "bucket_bytes": self.bucket_bytes,
            "timeout_s": self.timeout_s,
            "open_timeout_s": self._join_s,
        }
        answer = self.client.post(index, "/init_communicator/", body, self.open_timeout_s)
        self.client.run_tokens[index] = answer["run_token"]

    def sync(self, version: str) -> SyncResult:
        """Bring every server to the learner's current merged weights under the name `version`.

        Raises:
            RuntimeError: on every rank, whichever failed, with run, version and server.
        """
        # The first fence also tells the other ranks, which take part in the same gathers, what rank 0 sends.
        chosen = self.ranks.gather(self._choose() if self.ranks.is_main else [])[0]
        entries = [self.weights.entries[index] for index in chosen]
        start = time.monotonic()
        self._servers_are_whole = False
        verify = self.verify == "always" or (self.verify == "first" and self._is_first)
        error = None
        if self.ranks.is_main:
            error = capture_error(self._send, version, entries, verify)
        elif self.weights.is_sharded:
            for _ in self.weights.tensors(materialize=False, entries=entries):  # takes part in the gathers
                pass
        self.ranks.raise_on_all_ranks(error, f"weight sync {version}")
        if verify and self.probe is not None:
            ours = self.probe.logprobs()
            error = capture_error(self._check_probe, ours) if self.ranks.is_main else None
            self.ranks.raise_on_all_ranks(error, f"proving weight sync {version}")
        self._is_first = False
        self._servers_are_whole = True
        num_bytes = sum(entry.num_bytes for entry in entries)
        return SyncResult(version, len(entries), num_bytes, time.monotonic() - start, verify)

    def close(self) -> None:
        """Tear the communicators down; the servers stay up (GRP-4)."""
        if self.ranks.is_main:
            for index in range(len(self.addresses)):
                capture_error(self.client.post, index, "/close_communicator/", {"run_id": self.run_id}, 10.0)
            self.transport.close()

    def _choose(self) -> list[int]:
        """Return indices of the entries that the next sync sends, in the model's order, tensors larger than a bucket
        last: the engine has nothing to load before the first bucket has arrived whole."""
        entries = self.weights.entries
        chosen = {entry.name for entry in entries}
        if self._servers_are_whole and self.mode == "full":  # a slot holds one update's tensors alone, frozen ones, too
            changing = {entry.name for entry in entries if entry.can_change}
            chosen = set().union(*(whole_groups(changing, own) for own in self._parameters))
        order = sorted(range(len(entries)), key=lambda index: entries[index].num_bytes > self.bucket_bytes)  # stable
        return [index for index in order if entries[index].name in chosen]

    def _send(self, version: str, entries: list[WeightEntry], verify: bool) -> None:
        """Update all servers. After a failure none is left waiting for a bucket, or answers with half an update."""
        with ThreadPoolExecutor(len(self.addresses)) as pool:
            try:
                self._update_all(pool, version, entries, verify)
            except Exception:
                self.transport.close()
                with ThreadPoolExecutor(len(self.addresses)) as aborts:  # a frozen server costs its 10 s once
                    for index in range(len(self.addresses)):
                        body = {"run_id": self.run_id}
                        aborts.submit(capture_error, self.client.post, index, "/abort_weight_update/", body, 10.0)
                raise

    def _update_all(self, pool: ThreadPoolExecutor, version: str, entries: list[WeightEntry], verify: bool) -> None:
        label = {"run_id": self.run_id, "version": version}
        metadata = {
            "run_id": self.run_id,
            "names": [entry.name for entry in entries],
            "dtype_names": [str(entry.dtype).removeprefix("torch.") for entry in entries],
            "shapes": [list(entry.shape) for entry in entries],
            "digest": verify,
        }
        servers = range(len(self.addresses))
        deadline = time.monotonic() + self.timeout_s  # of all calls together (SYN-3)

        def left() -> float:
            return max(deadline - time.monotonic(), 1.0)

        def start_and_receive(index: int) -> dict[str, Any]:
            """While the server finishes its requests and prepares, the first bucket is packed here."""
            try:
                self.client.post(index, "/start_weight_update/", {**label, "pause": self.on_running}, left())
            except RuntimeError as error:
                if self.on_running != "wait" or not getattr(error, "is_timeout", False):
                    raise
                hint = "requests may have been running still: raise sync.timeout_s, or set async.on_sync: abort"
                raise TimeoutError(f"{error}; {hint}") from error
            return self.client.post(index, "/update_weights/", metadata, left())

        def raise_early() -> None:
            for future in receiving:
                if future.done():
                    future.result()

        receiving = [pool.submit(start_and_receive, index) for index in servers]
        try:
            digests = self.transport.send(self.weights, entries, verify, raise_early)
        except Exception as error:
            self.transport.close()  # frees workers that still wait for a bucket, so that their servers answer
            if not any(future.done() and future.exception() is error for future in receiving):
                for future in receiving:
                    future.result()  # a server's own error says more than a broken connection
            raise
        answers = [future.result() for future in receiving]
        finished = list(pool.map(lambda i: self.client.post(i, "/finish_weight_update/", label, left()), servers))
        self.ledger.update(digests)
        if len(entries) == len(self.weights.entries):
            self._parameters = [answer["parameters"] for answer in answers]
        for index, (answer, end) in enumerate(zip(answers, finished, strict=True)):
            if self.mode == "full":  # the engine itself refuses an adapter's tensor that has no slot
                self._check_missing(index, end["missing"], entries)
            if verify:
                self._compare(index, answer["digests"])

    def _check_missing(self, index: int, missing: list[str], entries: list[WeightEntry]) -> None:
        """Check that the engine missed exactly what was left out on purpose: after a full update, nothing."""
        parameters = self._parameters[index]
        sent = set().union(*(parameters[entry.name] for entry in entries))
        left_out = set().union(*parameters.values()) - sent
        if wrong := sorted(left_out ^ set(missing)):
            raise RuntimeError(f"{self.client.url(index)}: parameters the engine did not get as sent: {wrong[:5]}")

    def _check_probe(self, ours: np.ndarray) -> None:
        """Check that every replica of every server computes with the learner's weights (SYN-7, second step)."""
        body = {"infer_request": self.probe.infer_request, "token_ids": self.probe.token_ids}
        for index in range(len(self.addresses)):
            for request, ids in self.probe.prompts if self._is_first else ():
                answer = self.client.post(index, "/probe/", {"infer_request": request}, self.timeout_s)
                self.probe.check_prompt(ids, answer["prompt_token_ids"], self.client.url(index))
            answer = self.client.post(index, "/probe/", body, self.timeout_s)
            for replica, logprobs in enumerate(answer["logprobs"]):
                where = f"{self.client.url(index)}, replica {replica}"
                self.probe.check(ours, logprobs[-len(self.probe.token_ids) :], self.weights.dtype, where)

    def _compare(self, index: int, received: list[dict[str, str]]) -> None:
        """Check that each worker holds, byte for byte, what was sent, now or in earlier syncs (SYN-7, first step)."""
        if len(received) != self.client.world_sizes[index]:
            raise RuntimeError(f"{self.client.url(index)}: {len(received)} workers reported digests")
        for worker, digests in enumerate(received):
            for name, digest in self.ledger.items():
                if digests.get(name) != digest:
                    where = f"{self.client.url(index)}, worker {worker}, tensor {name}"
                    raise RuntimeError(f"{where}: sent digest {digest}, received {digests.get(name)}")


def _check_free(addresses: Sequence[tuple[str, int]]) -> None:
    """Raise OSError, with the address, for one that cannot be listened on."""
    for address in addresses:
        socket.create_server(address, family=socket.AF_INET6 if ":" in address[0] else socket.AF_INET).close()
