"""Bucket borders, layout and digests that both ends of a weight stream share."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from utils.sync.wire import ALIGNMENT, bucket_layouts, tensor_digest


@given(st.lists(st.integers(1, 500), max_size=40), st.integers(1, 600))
def test_buckets_hold_every_tensor_once_in_order_and_respect_the_limit_SYN_5(sizes, limit):
    """SYN-5."""
    buckets = bucket_layouts(sizes, limit)
    assert [i for b in buckets for i in range(b.first, b.last)] == list(range(len(sizes)))
    for bucket in buckets:
        assert bucket.num_bytes <= limit or bucket.last - bucket.first == 1
        end = 0
        for offset, size in zip(bucket.offsets, sizes[bucket.first : bucket.last], strict=True):
            assert offset % ALIGNMENT == 0 and offset >= end
            end = offset + size
        assert end == bucket.num_bytes


def test_bucket_layout_by_hand():
    small, alone, last = bucket_layouts([10, 20, 2400, 5], 2048)
    assert (small.first, small.last, small.offsets, small.num_bytes) == (0, 2, (0, 64), 84)
    assert (alone.offsets, alone.num_bytes) == ((0,), 2400)  # larger than a bucket: travels alone, whole
    assert last.first == 3


def test_the_first_buckets_are_small_so_that_loading_begins_early():
    """An eighth, a quarter, a half, then whole ones: a 64-byte tensor eight times over is a bucket of 512 bytes."""
    assert [bucket.last - bucket.first for bucket in bucket_layouts([64] * 32, 512)] == [1, 2, 4, 8, 8, 8, 1]


@given(st.binary(min_size=1, max_size=64), st.data())
def test_digest_changes_with_any_byte_SYN_7(content, data):
    """SYN-7."""
    tensor = torch.tensor(list(content), dtype=torch.uint8)
    changed = tensor.clone()
    changed[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
    assert tensor_digest(tensor) == tensor_digest(tensor.clone())
    assert tensor_digest(tensor) != tensor_digest(changed)


def test_digest_sees_order_and_length_SYN_7():
    """SYN-7."""
    tensor = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    swapped = tensor.clone()
    swapped[[3, 4]] = swapped[[4, 3]]
    assert tensor_digest(tensor) != tensor_digest(swapped)
    assert tensor_digest(torch.zeros(4)) != tensor_digest(torch.zeros(5))
    assert tensor_digest(torch.zeros(0)) == tensor_digest(torch.zeros(0, dtype=torch.int8))


def test_digest_is_of_the_bytes_not_of_the_layout_SYN_7():
    """SYN-7."""
    tensor = torch.arange(12, dtype=torch.float32).reshape(3, 4)
    assert tensor_digest(tensor.t()) == tensor_digest(tensor.t().contiguous())
    assert tensor_digest(tensor) == tensor_digest(tensor.view(torch.int32))
