"""Rows and batches: the optimum against brute force, the carry buffer, and where every label ends up."""

import itertools
import logging
import random
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from utils.packing import CarryBuffer, StartStates, choose_row, collate_packed, collate_padded, denominators, place
from utils.targets import Segment

COORD_IDS = np.arange(1000, 2000)
NO_INDEX, NOTHING = np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.float32)
NO_LABELS = {
    "coord_index": NO_INDEX,
    "coord_target": NOTHING,
    "text_index": NO_INDEX,
    "text_label": NO_INDEX,
    "text_weight": NOTHING,
}


def plain_segment(sample_id: str, length: int) -> Segment:
    """Text without supervision; every token is the length, so that a row shows who lies where."""
    return Segment(sample_id=sample_id, input_ids=np.full(length, length), answer_start=length, **NO_LABELS)


def picture(num_patches: int, value: float) -> dict[str, torch.Tensor]:
    grid = torch.tensor([[1, 2, num_patches // 2]])
    return {"pixel_values": torch.full((num_patches, 3), value), "image_grid_thw": grid}


def labelled_segment(sample_id: str, coord: int, num_patches: int | None = 4) -> Segment:
    """Six tokens, answer from 2 on: a coordinate at 3 with target `coord`, the text token 77 at 4 with weight 0.5."""
    image = num_patches is not None
    return Segment(
        sample_id=sample_id,
        input_ids=np.array([5, 6, 7, 1000 + coord, 77, 8]),
        answer_start=2,
        coord_index=np.array([3]),
        coord_target=np.array([coord], dtype=np.float32),
        text_index=np.array([4]),
        text_label=np.array([77]),
        text_weight=np.array([0.5], dtype=np.float32),
        vision=picture(num_patches, float(coord)) if image else {},
    )


DUMMY = Segment(
    sample_id="",
    input_ids=np.array([1, 2, 3]),
    answer_start=3,
    **NO_LABELS,
    vision=picture(4, 0.0),
)


def counting_positions(input_ids, vision):
    """Text row 0..L-1; multimodal rows ten times as large, so that a mix-up of rows shows."""
    row = torch.arange(len(input_ids))
    return torch.stack([row, 10 * row, 10 * row, 10 * row])


def fullest_by_brute_force(lengths, cap):
    """All subsets with the first segment; the longest, of equals the one that avoids the newest segments."""
    rest = range(1, len(lengths))
    subsets = [(0, *s) for n in range(len(lengths)) for s in itertools.combinations(rest, n)]
    fitting = [s for s in subsets if sum(lengths[i] for i in s) <= cap]
    return min(fitting, key=lambda s: (-sum(lengths[i] for i in s), sorted(s, reverse=True)))


def test_choose_row_by_hand_pck_2():
    """PCK-2."""
    assert choose_row([4], 10) == [0]
    assert choose_row([4, 7, 5, 1], 10) == [0, 2, 3]
    assert choose_row([4, 6, 5, 1], 10) == [0, 1]  # a tie with [0, 2, 3]: the newest segments stay behind
    assert choose_row([10, 1], 10) == [0]
    assert choose_row([3, 9, 9], 10) == [0]  # nothing else fits beside the oldest


def test_choose_row_equals_brute_force_pck_2():
    """PCK-2: Thousands of random cases: same total and same choice among ties."""
    rng = random.Random(0)
    for _ in range(3000):
        lengths = [rng.randint(1, 12) for _ in range(rng.randint(1, 8))]
        cap = max(lengths[0], rng.randint(1, 40))
        assert choose_row(lengths, cap) == list(fullest_by_brute_force(lengths, cap)), (lengths, cap)


@given(st.lists(st.integers(1, 60), min_size=1, max_size=9), st.integers(0, 120))
def test_choose_row_is_optimal_pck_2(lengths, extra):
    """PCK-2."""
    cap = lengths[0] + extra
    row = choose_row(lengths, cap)
    assert row[0] == 0 and row == sorted(set(row))
    best = fullest_by_brute_force(lengths, cap)
    assert sum(lengths[i] for i in row) == sum(lengths[i] for i in best) <= cap


@pytest.mark.parametrize("step", [1, 7])
def test_choose_row_is_fast_pck_2(step):
    """PCK-2: 200 segments and a cap of 16,384 in under 5 ms; `step` 7 can miss the cap, so that no early end helps."""
    rng = random.Random(1)
    lengths = [step * rng.randint(10, 400) for _ in range(200)]
    best_s = float("inf")
    for _ in range(10):
        start = time.perf_counter()
        choose_row(lengths, 16_384)
        best_s = min(best_s, time.perf_counter() - start)
    assert best_s < 0.005


def waiting(buffer: CarryBuffer) -> list[str]:
    """Samples of the waiting segments, oldest first."""
    return [segment["sample_id"] for segment in buffer.state_dict()["segments"]]


def test_buffer_keeps_order_and_serves_the_oldest_first_pck_2():
    """PCK-2."""
    buffer = CarryBuffer(cap=10, max_segments=8)
    buffer.extend([plain_segment(str(n), n) for n in (4, 7, 6, 3)])
    assert [s.sample_id for s in buffer.pop_row()] == ["4", "6"]
    buffer.extend([plain_segment("2", 2)])
    assert [s.sample_id for s in buffer.pop_row()] == ["7", "3"]
    assert waiting(buffer) == ["2"]
    assert [s.sample_id for s in buffer.pop_row()] == ["2"]
    assert buffer.pop_row() == [] and len(buffer) == 0


@given(st.lists(st.lists(st.integers(1, 30), max_size=4), max_size=12))
def test_buffer_loses_and_doubles_nothing_pck_1(micro_steps):
    """PCK-1: Every segment leaves exactly once, whole, and the oldest waiting one is in every row."""
    buffer, arrived, left = CarryBuffer(cap=30, max_segments=100), [], []
    for lengths in micro_steps:
        fresh = [plain_segment(f"{len(arrived) + i}", n) for i, n in enumerate(lengths)]
        arrived += fresh
        buffer.extend(fresh)
        oldest = waiting(buffer)[:1]
        row = buffer.pop_row()
        assert [s.sample_id for s in row][:1] == oldest
        assert [int(s.sample_id) for s in row] == sorted(int(s.sample_id) for s in row)
        assert sum(len(s.input_ids) for s in row) <= 30
        left += row
    while len(buffer):
        left += buffer.pop_row()
    assert sorted(id(s) for s in left) == sorted(id(s) for s in arrived)


def test_too_long_segment_stops_when_it_is_made_pck_3():
    """PCK-3."""
    with pytest.raises(ValueError, match="sample big.*11 tokens.*global_max_length is 10") as error:
        CarryBuffer(cap=10, max_segments=4).extend([plain_segment("big", 11)])
    for way_out in ("per_device_train_batch_size", "packing_buffer", "global_max_length", "max_new_tokens"):
        assert way_out in str(error.value)


def test_overfull_buffer_stops_pck_3():
    """PCK-3: Three segments of 6 fit one by one: one leaves, two stay, one more than allowed."""
    buffer = CarryBuffer(cap=10, max_segments=1)
    buffer.extend([plain_segment("a", 6), plain_segment("b", 6)])
    buffer.pop_row()
    buffer.extend([plain_segment("c", 6), plain_segment("d", 6)])
    with pytest.raises(ValueError, match="2 segments wait.*packing_buffer is 1.*ways out"):
        buffer.pop_row()


def test_a_smaller_buffer_is_refused_when_a_run_resumes_pck_3_LRN_5():
    """PCK-3, LRN-5: not after the answers of a whole step, at each start anew."""
    buffer = CarryBuffer(cap=10, max_segments=3)
    buffer.extend([plain_segment(name, 6) for name in "abc"])
    CarryBuffer(cap=10, max_segments=3).load_state_dict(buffer.state_dict())
    with pytest.raises(ValueError, match="training.packing_buffer=2: 3 sequences of the checkpoint wait for a row"):
        CarryBuffer(cap=10, max_segments=2).load_state_dict(buffer.state_dict())


def test_growth_is_warned_of_long_before_overflow_pck_7(caplog):
    """PCK-7: 4 x 300 tokens arrive and 3 x 300 leave per micro-step: the buffer grows by one each time; a batch of 3
    fits."""
    buffer = CarryBuffer(cap=1000, max_segments=64)
    with caplog.at_level(logging.WARNING):
        for step in range(20):
            buffer.extend([plain_segment(f"{step}.{i}", 300) for i in range(4)])
            buffer.pop_row()
    assert "per_device_train_batch_size: 3 fits" in caplog.text
    assert "raise global_max_length to 1334" in caplog.text
    assert len(caplog.records) == 1, "once"
    resumed = CarryBuffer(cap=1000, max_segments=64)
    resumed.load_state_dict(buffer.state_dict())
    resumed.extend([plain_segment(f"again.{i}", 300) for i in range(4)])
    resumed.pop_row()
    assert len(caplog.records) == 1, "a resumed run has warned, too"
    warned_at = int(caplog.text.split(" wait, training.packing_buffer is 64")[0].rsplit(" ", 1)[1])
    assert warned_at <= 16


def test_rows_that_empty_the_buffer_say_nothing_of_what_a_row_carries_pck_7(caplog):
    """PCK-7: five rows of one segment, because no other waited; those that leave some behind carry 900."""
    buffer = CarryBuffer(cap=1000, max_segments=64)
    for step in range(40):
        buffer.extend([plain_segment(f"{step}.{i}", 300) for i in range(1 if step < 5 else 4)])
        buffer.pop_row()
    assert "a row carries 900" in caplog.text and "per_device_train_batch_size: 3 fits" in caplog.text


def test_no_warning_while_rows_keep_up_pck_7(caplog):
    """PCK-7."""
    rng = random.Random(2)
    buffer = CarryBuffer(cap=1000, max_segments=64)
    for step in range(300):
        buffer.extend([plain_segment(f"{step}.{i}", rng.randint(50, 350)) for i in range(4)])
        buffer.pop_row()
    assert not caplog.records


# Segments per micro-step, and the least and most of their tokens: 80 to 96 % of 1000, so that a few wait now and then.
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("batch", "low", "high"), [(2, 200, 600), (3, 100, 500), (8, 50, 190)])
def test_no_warning_where_a_few_segments_wait_pck_7(caplog, batch, low, high, seed):
    """PCK-7: where few wait rows are less full, as if the buffer had to grow; it does not."""
    rng, most = random.Random(seed), 0
    buffer = CarryBuffer(cap=1000, max_segments=512)
    for _ in range(1000):
        buffer.extend([plain_segment("", rng.randint(low, high)) for _ in range(batch)])
        buffer.pop_row()
        most = max(most, len(buffer))
    assert 0 < most < 16 and not caplog.records


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("batch", "low", "high"), [(2, 300, 750), (3, 200, 500), (8, 50, 220)])
def test_slow_growth_is_warned_of_before_a_fifth_of_the_buffer_is_full_pck_7(caplog, batch, low, high, seed):
    """PCK-7: 105 to 108 % of a row arrive, of which not all fits one."""
    rng, buffer = random.Random(seed), CarryBuffer(cap=1000, max_segments=512)
    while len(buffer) < 512 / 5:
        buffer.extend([plain_segment("", rng.randint(low, high)) for _ in range(batch)])
        buffer.pop_row()
    assert "grows without end" in caplog.text


def test_indivisible_segments_are_warned_of_pck_7(caplog):
    """PCK-7: Two segments of 60 % arrive on average 1000 of 1000 tokens with small ones, yet only one big one fits a
    row."""
    buffer = CarryBuffer(cap=1000, max_segments=64)
    for step in range(30):
        buffer.extend([plain_segment(f"{step}.{i}", n) for i, n in enumerate((600, 600 if step % 2 else 200))])
        buffer.pop_row()
    assert "grows without end" in caplog.text


def test_buffer_state_survives_a_checkpoint_lrn_5(tmp_path):
    """LRN-5: The restored buffer gives the same rows; the file loads without pickled classes."""
    buffer = CarryBuffer(cap=12, max_segments=8)
    segments = [labelled_segment("a", 1), labelled_segment("b", 2), labelled_segment("c", 3)]
    buffer.extend([place(segment, counting_positions) for segment in segments])
    buffer.pop_row()
    torch.save(buffer.state_dict(), tmp_path / "buffer.pt")
    restored = CarryBuffer(cap=12, max_segments=8)
    restored.load_state_dict(torch.load(tmp_path / "buffer.pt", weights_only=True))
    assert waiting(restored) == ["c"]
    before, after = buffer.pop_row()[0], restored.pop_row()[0]
    assert torch.equal(before.vision["pixel_values"], after.vision["pixel_values"])
    assert np.array_equal(before.input_ids, after.input_ids)
    assert torch.equal(before.position_ids, after.position_ids)
    assert isinstance(after.coord_index, np.ndarray) and after.coord_target.dtype == np.float32
    assert restored.state_dict()["lengths"] == buffer.state_dict()["lengths"]


def test_packed_row_moves_everything_with_its_segment_pck_4():
    """PCK-4."""
    segments = [labelled_segment("a", 10), plain_segment("p", 3), labelled_segment("b", 20, num_patches=8)]
    batch = collate_packed(segments, counting_positions, COORD_IDS, DUMMY)
    assert batch.input_ids.tolist() == [[5, 6, 7, 1010, 77, 8, 3, 3, 3, 5, 6, 7, 1020, 77, 8]]
    assert batch.attention_mask is None
    assert batch.position_ids[0].tolist() == [[0, 1, 2, 3, 4, 5, 0, 1, 2, 0, 1, 2, 3, 4, 5]]
    assert torch.equal(batch.position_ids[1], 10 * batch.position_ids[0])
    assert batch.coord_pos.tolist() == [2, 11]  # the states before tokens 3 and 9 + 3
    assert batch.coord_target.tolist() == [10.0, 20.0]
    assert batch.text_pos.tolist() == [3, 12]
    assert batch.text_label.tolist() == [77, 77]
    assert batch.text_weight.tolist() == [0.5, 0.5]
    assert batch.unlabelled_pos.tolist() == [1, 4, 10, 13]  # `p` is a prompt alone
    assert batch.cu_seqlens.tolist() == [0, 6, 9, 15]
    assert batch.vision["image_grid_thw"].tolist() == [[1, 2, 2], [1, 2, 4]]
    assert batch.vision["pixel_values"][:, 0].tolist() == [10.0] * 4 + [20.0] * 8
    assert batch.sample_ids == ["a", "p", "b"]
    assert batch.num_tokens == 15 and batch.num_labels == 4


def test_padded_batch_holds_the_same_labels_pck_6():
    """PCK-6."""
    segments = [plain_segment("p", 8), labelled_segment("a", 10)]
    batch = collate_padded(segments, counting_positions, COORD_IDS, DUMMY)
    assert batch.input_ids.shape == (2, 8) and batch.position_ids.shape == (4, 2, 8)
    assert batch.input_ids[1].tolist() == [5, 6, 7, 1010, 77, 8, 0, 0]
    assert batch.attention_mask.tolist() == [[1] * 8, [1] * 6 + [0] * 2]
    assert batch.coord_pos.tolist() == [8 + 2] and batch.text_pos.tolist() == [8 + 3]
    assert batch.unlabelled_pos.tolist() == [8 + 1, 8 + 4]  # neither prompt nor padding
    assert batch.num_tokens == 14


@pytest.mark.parametrize("collate", [collate_packed, collate_padded])
def test_dummy_image_only_where_none_is_pck_8(collate):
    """PCK-8."""
    with_image = collate([labelled_segment("a", 1)], counting_positions, COORD_IDS, DUMMY)
    assert with_image.vision["image_grid_thw"].shape == (1, 3) and with_image.input_ids.numel() == 6
    without = collate([labelled_segment("a", 1, num_patches=None)], counting_positions, COORD_IDS, DUMMY)
    assert without.vision["pixel_values"].shape == (4, 3) and without.num_tokens == 6 and without.sample_ids == ["a"]
    assert without.coord_pos.tolist() == [2]
    empty = collate([], counting_positions, COORD_IDS, DUMMY)
    assert empty.input_ids.tolist() == [[1, 2, 3]]
    assert empty.num_labels == 0 and empty.num_tokens == 0 and empty.sample_ids == []
    assert empty.unlabelled_pos.tolist() == []
    assert denominators([empty]) == {"text": 0.0, "coord": 0.0, "reference_kl": 0.0}


@pytest.mark.parametrize("collate", [collate_packed, collate_padded])
@pytest.mark.parametrize("index", [1, 4, 6], ids=["in the prompt", "no coordinate token", "in the next segment"])
def test_row_check_names_the_sample_tgt_8(collate, index):
    """TGT-8: `1` is a prompt token, `4` text, and `6 + 3` of the row a coordinate, but the neighbour's."""
    broken = labelled_segment("broken", 5)
    broken.coord_index = np.array([index if index < 6 else 9])
    with pytest.raises(ValueError, match="sample broken: .*answer \\[2, 6\\)"):
        collate([broken, labelled_segment("fine", 6)], counting_positions, COORD_IDS, DUMMY)


@pytest.mark.parametrize("collate", [collate_packed, collate_padded])
def test_row_check_names_the_sample_whose_index_lies_behind_the_row_tgt_8(collate):
    """TGT-8: the last segment's own length. An image keeps the dummy, which would follow it, away."""
    broken = replace(
        labelled_segment("broken", 5), coord_index=np.array([6]), vision={"pixel_values": torch.ones(1, 1)}
    )
    with pytest.raises(ValueError, match="sample broken: .*answer \\[2, 6\\).* at supervised index 6"):
        collate([broken], counting_positions, COORD_IDS, DUMMY)


@pytest.mark.parametrize("collate", [collate_packed, collate_padded])
def test_a_first_token_has_no_predecessor_tgt_8(collate):
    """TGT-8: nothing predicts it, even where the answer is said to begin with it."""
    broken = replace(labelled_segment("broken", 5), answer_start=0, coord_index=np.array([0]))
    broken.input_ids[0] = broken.input_ids[3]  # a coordinate
    with pytest.raises(ValueError, match="sample broken: .* at supervised index 0"):
        collate([labelled_segment("fine", 6), broken], counting_positions, COORD_IDS, DUMMY)


def test_images_that_do_not_fit_name_the_sample_pck_4():
    """PCK-4."""

    def refuse(input_ids, vision):
        raise ValueError("3 image tokens")

    with pytest.raises(ValueError, match="sample a: 3 image tokens"):
        collate_packed([labelled_segment("a", 1)], refuse, COORD_IDS, DUMMY)


def test_denominators_are_total_weights_pck_5():
    """PCK-5."""
    rows = [[labelled_segment("a", 1), labelled_segment("b", 2)], [labelled_segment("c", 3)]]
    batches = [collate_packed(row, counting_positions, COORD_IDS, DUMMY) for row in rows]
    assert denominators(batches) == {"text": 1.5, "coord": 3.0, "reference_kl": 6.0}


def test_batch_moves_to_a_device():
    batch = collate_padded([labelled_segment("a", 1)], counting_positions, COORD_IDS, DUMMY)
    batch.start = StartStates(torch.zeros(2, 4), num_chunks=3)
    batch = batch.to("meta")
    assert batch.start.states.is_meta and batch.start.num_chunks == 3 and batch.unlabelled_pos.is_meta
    assert batch.input_ids.is_meta and batch.attention_mask.is_meta and batch.vision["pixel_values"].is_meta
    assert batch.sample_ids == ["a"] and batch.num_tokens == 6
