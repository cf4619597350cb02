"""Distribution of the learners' requests over the rollout servers, and their seeds. Plain integers only.

Symbols: `W` learners, server `i` of `s_i` devices, `S` their sum, `d` = `decode_batch_size`. All servers' slots form
one line, `d * s_i` for server `i`; rank `r` owns the slots `[floor(r*d*S/W), floor((r+1)*d*S/W))` (DIS-4).

Why no device is ever overloaded: a rank owns `C >= chunk = floor(d*S/W)` slots, so with `N <= chunk` requests
`ceil(N * c_i / C) <= c_i`, and no two ranks own the same slot, so all ranks together stay within `d * s_i`.
"""

import hashlib
import struct
from collections.abc import Sequence
from itertools import accumulate, pairwise

SEED_MODULUS = 2**31
EVAL_MICRO_STEP = 1 << 20  # seeds of evaluation rollouts never meet those of training


def request_seed(run_seed: int, global_step: int, micro_step_idx: int, rank: int) -> int:
    """Seed of the first request of one rank's micro-step, in [0, 2^31), the same on every platform (DIS-6).

    `global_step` is the optimizer step that trains the sample. The seed is BLAKE2b of the four numbers, not their sum:
    requests count upwards from it, so sums of neighbouring steps and ranks would overlap.
    """
    key = struct.pack("<4q", run_seed, global_step, micro_step_idx, rank)
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") % SEED_MODULUS


def call_seed(base: int, req_idx: int) -> int:
    """Seed of the call whose first request is number `req_idx` of the micro-step; its request `i` adds `i` (SRV-4)."""
    return (base + req_idx) % SEED_MODULUS


def check_capacity(decode_batch_size: int, num_devices: int, num_learners: int, key: str) -> None:
    """Check that every learner can have at least one request running at a time (DIS-2).

    Args:
        key: path of `decode_batch_size` in the config, for the message.

    Raises:
        ValueError: names the three numbers and three ways out.
    """
    if decode_batch_size * num_devices >= num_learners:
        return
    raise ValueError(
        f"{key}={decode_batch_size} on {num_devices} rollout device(s) allows "
        f"{decode_batch_size * num_devices} request(s) at once, too few for {num_learners} learners. Ways out: raise "
        f"{key} to at least {-(-num_learners // num_devices) if num_devices else 1}; give the servers more devices (in "
        "stage 2, or list more servers); launch fewer learners."
    )


def chunk_size(decode_batch_size: int, num_devices: int, num_learners: int) -> int:
    """Maximum number of requests one learner sends per round, `floor(d * S / W)` (DIS-3); `check_capacity`: >= 1."""
    return decode_batch_size * num_devices // num_learners


def capacity_slots(rank: int, num_learners: int, decode_batch_size: int, server_sizes: Sequence[int]) -> list[int]:
    """This rank's slots on each server, `c_i` (DIS-4); `server_sizes`: devices of each server, in configured order."""
    borders = [decode_batch_size * size for size in accumulate(server_sizes, initial=0)]
    first, last = (end * borders[-1] // num_learners for end in (rank, rank + 1))
    return [max(0, min(last, end) - max(first, start)) for start, end in pairwise(borders)]


def requests_per_server(
    num_requests: int, rank: int, num_learners: int, decode_batch_size: int, server_sizes: Sequence[int]
) -> list[int]:
    """Split one round's requests over the servers: the first go to server 0, the next to server 1, ... (DIS-4).

    Guarantees: the counts sum to `num_requests`, and none exceeds the rank's own slots on that server.

    Raises:
        ValueError: more requests than one round may hold; split them with `rounds` first.
    """
    chunk = chunk_size(decode_batch_size, sum(server_sizes), num_learners)
    if not 0 <= num_requests <= chunk:
        raise ValueError(f"{num_requests} requests in one round of at most {chunk}")
    slots = capacity_slots(rank, num_learners, decode_batch_size, server_sizes)
    counts: list[int] = []
    for own in slots:
        counts.append(min(num_requests - sum(counts), -(-num_requests * own // max(1, sum(slots)))))
    return counts


def small_round(rank: int, num_learners: int, decode_batch_size: int, server_sizes: Sequence[int]) -> int:
    """Requests per round where the rounds of one long list run side by side and fill slots as they free up: chunk / 16
    to chunk / 8, or at most two per server; of these sizes the one with which most requests run at once."""
    ours = rank, num_learners, decode_batch_size, server_sizes
    chunk, slots = chunk_size(decode_batch_size, sum(server_sizes), num_learners), capacity_slots(*ours)
    sizes = range(max(1, chunk // 16), min(chunk, max(2 * len(slots), chunk // 8)) + 1)
    shares = {size: requests_per_server(size, *ours) for size in sizes}
    return max(sizes, key=lambda size: size * min(own // n for own, n in zip(slots, shares[size], strict=True) if n))


def rounds(num_requests: int, chunk: int) -> list[range]:
    """The request numbers of each round, in order (DIS-3); no rounds for no requests (DIS-5).

    Raises:
        ValueError: a chunk below 1, which `check_capacity` rules out.
    """
    if chunk < 1:
        raise ValueError(f"a round of {chunk} requests; call check_capacity first")
    return [range(start, min(start + chunk, num_requests)) for start in range(0, num_requests, chunk)]
