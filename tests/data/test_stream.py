"""`utils.data.stream`: the order in which ranks draw samples (DAT-3, LRN-1)."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from utils.data.samples import Sample
from utils.data.stream import SampleStream


def files(*sizes: int) -> list[list[Sample]]:
    return [[Sample(f"{f}-{i}", [], [], 1, 1, [], [], "") for i in range(n)] for f, n in enumerate(sizes)]


def ids(samples) -> list[str]:
    return [sample.id for sample in samples]


def global_ids(datasets, count: int, world_size: int, **kwargs) -> list[str]:
    """Ids at global positions 0 .. count-1, gathered from all ranks."""
    ranks = [SampleStream(datasets, rank=r, world_size=world_size, **kwargs) for r in range(world_size)]
    return [ids(ranks[position % world_size].next(1))[0] for position in range(count)]


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_lrn_1_every_sample_once_per_epoch_across_ranks(world_size):
    """LRN-1."""
    datasets = files(7, 4)
    order = global_ids(datasets, 33, world_size, seed=3)
    for epoch in range(3):
        assert sorted(order[epoch * 11 : epoch * 11 + 11]) == sorted(ids(datasets[0] + datasets[1]))
    assert order[:11] != order[11:22]
    assert order == global_ids(datasets, 33, 1, seed=3)  # the order does not depend on the number of ranks


def test_lrn_1_batches_cross_epoch_borders():
    """LRN-1."""
    stream = SampleStream(files(5), seed=1)
    drawn = ids(stream.next(3) + stream.next(4))
    assert len(set(drawn[:5])) == 5 and len(set(drawn)) == 5 and stream.position == 7


def test_lrn_1_the_seed_decides_the_order():
    """LRN-1."""
    assert global_ids(files(50), 50, 1, seed=1) == global_ids(files(50), 50, 1, seed=1)
    assert global_ids(files(50), 50, 1, seed=1) != global_ids(files(50), 50, 1, seed=2)


def test_lrn_1_a_draw_that_fails_is_drawn_again_as_a_whole():
    """LRN-1: by a checkpoint that was saved meanwhile, and in this process; here across the border of an epoch."""
    order, errors = SampleStream([range(5)], seed=1).next(9), [None] * 6 + [OSError("image")]

    class File(list):
        def __getitem__(self, index):
            if errors and (error := errors.pop(0)) is not None:
                raise error
            return super().__getitem__(index)

    stream = SampleStream([File(range(5))], seed=1)
    assert stream.next(4) == order[:4]
    with pytest.raises(OSError, match="image"):
        stream.next(3)
    assert stream.state_dict()["position"] == stream.position == 4
    assert stream.next(5) == order[4:9]


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=3), st.integers(0, 30), st.integers(1, 4), st.integers(1, 4))
def test_lrn_1_resumed_stream_goes_on_also_with_other_ranks(sizes, draws, before, after):
    """LRN-1."""
    datasets = files(*sizes)
    whole = global_ids(datasets, draws * before + 20, 1, seed=5)
    old = [SampleStream(datasets, seed=5, rank=r, world_size=before) for r in range(before)]
    for stream in old:
        stream.next(draws)
    assert all(stream.state_dict() == old[0].state_dict() for stream in old)
    state = json.loads(json.dumps(old[0].state_dict()))
    new = [SampleStream(datasets, seed=5, rank=r, world_size=after) for r in range(after)]
    for stream in new:
        stream.load_state_dict(state)
    rest = [ids(new[i % after].next(1))[0] for i in range(20)]
    assert rest == whole[draws * before :]


def test_lrn_1_state_of_other_data_is_refused():
    """LRN-1."""
    state = SampleStream(files(5), seed=1).state_dict()
    with pytest.raises(ValueError, match="sizes was"):
        SampleStream(files(6), seed=1).load_state_dict(state)
    with pytest.raises(ValueError, match="seed was"):
        SampleStream(files(5), seed=2).load_state_dict(state)


def test_dat_3_weights_mix_files():
    """DAT-3."""
    datasets, weights = files(4, 6), [2, 0.5]
    assert [len(SampleStream(datasets, weights).epoch_order(e)) for e in range(2)] == [11, 11]
    order = global_ids(datasets, 22, 2, weights=weights)
    for epoch in range(2):
        counts = Counter(order[epoch * 11 : epoch * 11 + 11])
        assert all(counts[f"0-{i}"] == 2 for i in range(4))
    assert all(Counter(order)[f"1-{i}"] == 1 for i in range(6))  # half of the second file in each epoch


def test_dat_3_the_size_of_an_epoch_counts_weights():
    stream = SampleStream([list(range(1000)), list(range(7))], [0.1, 5.5])
    assert stream.epoch_size == len(stream.epoch_order(0)) == 100 + 38


def test_dat_3_fractional_parts_add_up():
    """DAT-3: 5 samples at weight 0.5 are 2, 3, 2, 3 per epoch, each sample once in two epochs."""
    assert [len(SampleStream(files(5), [0.5]).epoch_order(e)) for e in range(4)] == [2, 3, 2, 3]
    assert sorted(global_ids(files(5), 5, 1, weights=[0.5])) == sorted(ids(files(5)[0]))
