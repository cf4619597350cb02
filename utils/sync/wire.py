"""Conventions of both ends of a weight stream: bucket borders, byte layout, tensor digests, network interface."""

import contextlib
import os
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from utils.config.rollout import is_loopback

ADAPTER_ID = 1  # the engine's LoRA slot that adapter sync fills
ALIGNMENT = 64  # bytes, as in memory that torch allocates: tensors are read where they arrived
_DIGEST_CHUNK = 1 << 22  # elements hashed at once, so that hashing never needs a copy of a large tensor
_MULTIPLIER = 0x9E3779B97F4A7C15 - (1 << 64)  # odd 64-bit constant as a signed integer


@dataclass(frozen=True)
class BucketLayout:
    """One bucket: tensors `[first, last)` of the update, their byte offsets in the bucket, and its size in bytes."""

    first: int
    last: int
    offsets: tuple[int, ...]
    num_bytes: int


def bucket_layouts(sizes: Sequence[int], bucket_bytes: int) -> list[BucketLayout]:
    """Cut tensors of `sizes` bytes into consecutive buckets of at most `bucket_bytes`.

    The first bucket is an eighth of that, the next a quarter, then a half: the engine has nothing to load before the
    first one is packed and sent. A tensor is never split: one larger than its bucket's limit travels alone in a bucket
    of its own size. Both ends call this with the same arguments, so no border is ever sent.
    """
    buckets: list[BucketLayout] = []
    first, end, offsets = 0, 0, []
    for index, size in enumerate(sizes):
        offset = -(-end // ALIGNMENT) * ALIGNMENT
        if offsets and offset + size > bucket_bytes >> max(0, 3 - len(buckets)):
            buckets.append(BucketLayout(first, index, tuple(offsets), end))
            first, offset, offsets = index, 0, []
        offsets.append(offset)
        end = offset + size
    if offsets:
        buckets.append(BucketLayout(first, len(sizes), tuple(offsets), end))
    return buckets


def is_adapter_tensor(name: str) -> bool:
    """Return whether a tensor of an update belongs in a LoRA slot (PEFT's names)."""
    return name.endswith((".lora_A.weight", ".lora_B.weight"))


def tensor_digest(tensor: torch.Tensor) -> str:
    """Return a 64-bit digest of a tensor's bytes, computed on its own device; equal bytes give equal digests anywhere.

    Every 32-bit word is mixed with its position before summation, so swapped or shifted values change the digest.
    It guards against faults, not against an adversary.
    """
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    num_words = flat.numel() // 4
    words, tail = flat[: 4 * num_words].view(torch.int32), flat[4 * num_words :]
    total = _mix(tail, num_words).sum()
    for start in range(0, num_words, _DIGEST_CHUNK):
        total += _mix(words[start : start + _DIGEST_CHUNK], start).sum()
    return f"{int(total) & 0xFFFFFFFFFFFFFFFF:016x}:{flat.numel()}"


@contextlib.contextmanager
def loopback_if_local(address: str) -> Iterator[None]:
    """Inside, new Gloo groups listen on loopback exactly when the learner's `address` is a loopback address.

    Gloo knows no passwords. A learner on one node has its own groups on loopback (`Ranks.open`), where a server on
    another machine is not reached. Not thread-safe: Gloo reads its interface from the environment.
    """
    key = "GLOO_SOCKET_IFNAME"
    given = os.environ.get(key)
    is_local = is_loopback(address) and "lo" in (name for _, name in socket.if_nameindex())
    wanted = "lo" if is_local and given is None else None if not is_local and given == "lo" else given
    try:
        _set_variable(key, wanted)
        yield
    finally:
        _set_variable(key, given)


def _set_variable(key: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(key, None)
    else:
        os.environ[key] = value


def _mix(words: torch.Tensor, start: int) -> torch.Tensor:
    """Bijective mixing of `word + position * constant` (int64 arithmetic wraps), after splitmix64's finaliser."""
    position = torch.arange(start + 1, start + 1 + words.numel(), device=words.device, dtype=torch.int64)
    mixed = (words.to(torch.int64) + position * _MULTIPLIER) * _MULTIPLIER
    mixed ^= mixed >> 29
    return mixed * _MULTIPLIER
