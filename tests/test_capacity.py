"""Seeds, rounds and requests_per_server of requests (DIS-2 to DIS-6)."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from utils.capacity import (
    call_seed,
    capacity_slots,
    check_capacity,
    chunk_size,
    request_seed,
    requests_per_server,
    rounds,
    small_round,
)

SERVERS = st.lists(st.integers(1, 9), min_size=1, max_size=6)


@st.composite
def plans(draw):
    """(W, d, server sizes) that pass check_capacity."""
    sizes = draw(SERVERS)
    d = draw(st.integers(1, 9))
    return draw(st.integers(1, min(d * sum(sizes), 40))), d, sizes


@given(plans(), st.data())
def test_dis_4_no_device_above_its_capacity(plan, data):
    """DIS-4: however many requests each rank has in its round, all ranks' rounds at once fit every server."""
    num_learners, d, sizes = plan
    chunk = chunk_size(d, sum(sizes), num_learners)
    held = [0] * len(sizes)
    for rank in range(num_learners):
        num = data.draw(st.integers(0, chunk))
        own = requests_per_server(num, rank, num_learners, d, sizes)
        slots = capacity_slots(rank, num_learners, d, sizes)
        assert sum(own) == num
        assert all(0 <= share <= count for share, count in zip(own, slots, strict=True))
        assert own == requests_per_server(num, rank, num_learners, d, sizes)  # DIS-5
        held = [a + b for a, b in zip(held, own, strict=True)]
    assert all(count <= d * size for count, size in zip(held, sizes, strict=True))


@given(plans())
def test_dis_4_slots_are_dealt_out_exactly_once(plan):
    """DIS-4: the ranks' slots add up to `d * s_i` on every server, and every rank owns a full chunk at least."""
    num_learners, d, sizes = plan
    chunk = chunk_size(d, sum(sizes), num_learners)
    slots = [capacity_slots(rank, num_learners, d, sizes) for rank in range(num_learners)]
    assert [sum(column) for column in zip(*slots, strict=True)] == [d * size for size in sizes]
    assert all(chunk <= sum(own) <= chunk + 1 for own in slots)


@given(plans(), st.data())
def test_dis_4_slots_equal_a_slot_by_slot_count(plan, data):
    """DIS-4: against an independent walk over the line of slots."""
    num_learners, d, sizes = plan
    rank = data.draw(st.integers(0, num_learners - 1))
    line = [i for i, size in enumerate(sizes) for _ in range(d * size)]
    own = line[math.floor(rank * len(line) / num_learners) : math.floor((rank + 1) * len(line) / num_learners)]
    assert capacity_slots(rank, num_learners, d, sizes) == [own.count(i) for i in range(len(sizes))]


@given(st.integers(1, 9), st.integers(1, 6), st.integers(1, 9), st.data())
def test_dis_4_equal_servers_and_one_learner_get_contiguous_chunks(d, num_servers, size, data):
    """DIS-4: chunks of ceil(N / number of servers)."""
    num = data.draw(st.integers(0, d * num_servers * size))
    step = math.ceil(num / num_servers)
    chunks = [len(range(num)[i * step : (i + 1) * step]) for i in range(num_servers)]
    assert requests_per_server(num, 0, 1, d, [size] * num_servers) == chunks


def test_dis_4_by_hand():
    """DIS-4: d=2, servers of 1 and 2 devices: slots 0 0 1 1 1 1; W=2 splits them 0 0 1 | 1 1 1."""
    assert capacity_slots(0, 2, 2, [1, 2]) == [2, 1]
    assert capacity_slots(1, 2, 2, [1, 2]) == [0, 3]
    assert requests_per_server(3, 0, 2, 2, [1, 2]) == [2, 1]
    assert requests_per_server(2, 0, 2, 2, [1, 2]) == [2, 0]  # ceil(2 * 2/3) = 2, nothing left
    assert requests_per_server(3, 1, 2, 2, [1, 2]) == [0, 3]


def test_dis_4_a_round_above_the_chunk_is_refused():
    """DIS-4: DIS-3: five requests do not fit a chunk of three."""
    with pytest.raises(ValueError, match="5 requests in one round of at most 3"):
        requests_per_server(5, 0, 2, 2, [1, 2])


@given(st.integers(0, 500), st.integers(1, 60))
def test_dis_3_rounds_keep_order_and_size(num, chunk):
    """DIS-3, DIS-5: all requests once, in order, at most a chunk at a time; none for none."""
    cut = rounds(num, chunk)
    assert [i for part in cut for i in part] == list(range(num))
    assert all(1 <= len(part) <= chunk for part in cut)
    assert len(cut) == math.ceil(num / chunk)


def test_dis_2_message_has_the_numbers_and_three_ways_out():
    """DIS-2: 1 * 3 < 4 stops; 4 * 1 = 4 does not."""
    check_capacity(4, 1, 4, "rlhf.decode_batch_size")
    with pytest.raises(ValueError) as error:
        check_capacity(1, 3, 4, "rlhf.decode_batch_size")
    message = str(error.value)
    assert message.startswith("rlhf.decode_batch_size=1 on 3 rollout device(s)") and "4 learners" in message
    assert "matching" not in message
    assert "to at least 2" in message and "more devices" in message and "fewer learners" in message


@given(st.integers(1, 20), st.integers(1, 20), st.integers(1, 100))
def test_dis_2_passes_exactly_when_a_chunk_is_at_least_one(d, num_devices, num_learners):
    """DIS-2: `d * S < W` and `chunk = 0` are the same thing."""
    if chunk_size(d, num_devices, num_learners) >= 1:
        check_capacity(d, num_devices, num_learners, "d")
    else:
        with pytest.raises(ValueError):
            check_capacity(d, num_devices, num_learners, "d")


def test_dis_6_request_seed_is_fixed():
    """DIS-6: these numbers must never change: runs are reproduced from them."""
    assert request_seed(0, 0, 0, 0) == 1242697157
    assert request_seed(42, 7, 3, 1) == 556214478
    assert request_seed(-1, 0, 0, 0) != request_seed(0, 0, 0, 0)


@given(st.integers(0, 2**31 - 1), st.integers(0, 10**7), st.integers(0, 4096), st.integers(0, 4096))
def test_dis_6_seeds_lie_in_range(run_seed, step, micro, rank):
    """DIS-6: what the server's own sampler takes."""
    assert 0 <= request_seed(run_seed, step, micro, rank) < 2**31


def test_dis_6_seeds_of_a_small_run_do_not_collide():
    """DIS-6: 20 steps x 4 micro-steps x 4 ranks x 8 requests are 2,560 different seeds."""
    bases = [request_seed(0, step, micro, rank) for step in range(20) for micro in range(4) for rank in range(4)]
    assert len({call_seed(base, i) for base in bases for i in range(8)}) == 2560


@given(st.integers(0, 2**31 - 1), st.integers(0, 1000), st.integers(0, 1000))
def test_dis_6_a_request_has_one_seed_wherever_its_call_begins(base, first, offset):
    """DIS-6 with SRV-4: the server adds the offset within the call modulo 2^31."""
    assert (call_seed(base, first) + offset) % 2**31 == call_seed(base, first + offset)


def test_dis_6_wraps():
    """DIS-6: (2^31 - 1) + 1 is seed 0."""
    assert call_seed(2**31 - 1, 1) == 0


@pytest.mark.parametrize(
    ("d", "sizes", "num_learners", "size", "num_running"),
    [
        (16, [1, 1, 1], 1, 3, 48),
        (16, [6], 2, 3, 48),
        (1, [5, 5, 6], 1, 3, 15),  # 1 + 1 + 1, five times
        (8, [1, 6], 1, 7, 56),  # 2 + 5 or 1 + 2 would leave server 1 idle
        (1, [2], 1, 1, 2),
        (4, [1, 2], 2, 3, 6),  # 4 and 2 slots; 2 + 1, twice
    ],
)
def test_small_rounds_keep_most_slots_busy_DIS_3(d, sizes, num_learners, size, num_running):
    """DIS-3: of a list longer than all slots."""
    assert small_round(0, num_learners, d, sizes) == size
    shares = requests_per_server(size, 0, num_learners, d, sizes)
    slots = capacity_slots(0, num_learners, d, sizes)
    assert size * min(own // share for own, share in zip(slots, shares, strict=True) if share) == num_running
