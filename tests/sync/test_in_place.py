"""SYN-1, SYN-5: parameters that are used where they arrived equal those that vLLM's own reload copies."""

import contextlib
import gc
import socket
import weakref

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

in_place = pytest.importorskip("utils.sync.in_place")

from vllm.config import VllmConfig, set_current_vllm_config  # noqa: E402
from vllm.distributed import parallel_state  # noqa: E402
from vllm.model_executor.layers import linear  # noqa: E402
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase  # noqa: E402
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding  # noqa: E402
from vllm.model_executor.model_loader.reload import (  # noqa: E402
    finalize_layerwise_reload,
    initialize_layerwise_reload,
    record_metadata_for_reloading,
)

from utils.sync.wire import ALIGNMENT  # noqa: E402

COLUMNS = 16  # float32: a row is one unit of alignment


class Packing(QuantizeMethodBase):
    """Stands for packing on CPU: sees the parameters as the loaders left them."""

    def create_weights(self, layer, *args, **kwargs):
        raise NotImplementedError

    def apply(self, layer, *args, **kwargs):
        raise NotImplementedError

    def process_weights_after_loading(self, layer):
        layer.seen_at = layer.weight.data_ptr()
        layer.packed = layer.weight.detach().clone()


class Fused(nn.Module):
    """A module of several parts, as q, k and v are in vLLM, with a bias (which vLLM never takes off the device) and a
    buffer. The weight's loader copies `source(what arrived)` and then does `twist(written part, what arrived)`."""

    def __init__(self, rows: list[int], twist=lambda target, loaded: None, source=lambda loaded: loaded):
        super().__init__()
        self.rows, self.quant_method = rows, Packing()
        self.weight = nn.Parameter(torch.zeros(sum(rows), COLUMNS), requires_grad=False)
        self.bias = nn.Parameter(torch.zeros(COLUMNS), requires_grad=False)
        self.register_buffer("scale", torch.zeros(COLUMNS))

        self.num_loads = 0

        def load_part(param, loaded_weight, part):
            self.num_loads += 1
            target = param.data.narrow(0, sum(rows[:part]), rows[part])
            target.copy_(source(loaded_weight))
            twist(target, loaded_weight)

        def load_whole(param, loaded_weight):
            param.data.copy_(loaded_weight)

        self.weight.weight_loader = load_part
        self.bias.weight_loader = self.scale.weight_loader = load_whole
        with torch.device("cpu"):
            record_metadata_for_reloading(self)

    def load(self, parts, order=None, where=in_place.parameters_in_place, bias=None, scale=None):
        """Load the parts in `order`; then bias and buffer, which complete the module."""
        initialize_layerwise_reload(self)
        with where():
            for part in order or range(len(parts)):
                self.weight.weight_loader(self.weight, parts[part], part)
            self.scale.weight_loader(self.scale, torch.ones(COLUMNS) if scale is None else scale)
            self.bias.weight_loader(self.bias, torch.ones(COLUMNS) if bias is None else bias)
        finalize_layerwise_reload(self, None)
        return self


def arrive(rows: list[int], gap_rows: int = 0, first_byte: int = 0) -> list[torch.Tensor]:
    """Parts of random numbers in one bucket, one behind the other."""
    num_rows = sum(rows) + gap_rows * len(rows)
    bucket = torch.zeros(num_rows * COLUMNS * 4 + 2 * ALIGNMENT, dtype=torch.uint8)
    start = -bucket.data_ptr() % ALIGNMENT + first_byte
    bucket = bucket[start : start + num_rows * COLUMNS * 4].view(torch.float32).view(num_rows, COLUMNS).normal_()
    first = [sum(rows[:part]) + gap_rows * part for part in range(len(rows))]
    return [bucket[begin : begin + count] for begin, count in zip(first, rows, strict=True)]


@pytest.mark.parametrize("order", [None, [2, 0, 1]])
def test_parts_that_lie_as_in_the_parameter_are_used_where_they_are(order):
    """SYN-5: and what the engine had in force before keeps its own memory (its kernels know the address)."""
    parts, bias, scale = arrive([3, 1, 2]), torch.randn(COLUMNS), torch.randn(COLUMNS)
    layer = Fused([3, 1, 2])
    in_force = layer.weight.data_ptr()
    layer.load(parts, order, bias=bias, scale=scale)
    assert layer.seen_at == parts[0].data_ptr()
    assert layer.weight.data_ptr() == in_force
    assert layer.num_loads == 3  # once each, without memory; vLLM's own way is twice
    assert torch.equal(layer.packed, torch.cat(parts)) and torch.equal(layer.weight, layer.packed)
    assert torch.equal(layer.bias, bias) and torch.equal(layer.scale, scale)


def swapped(parts):
    return [parts[1], parts[0]]  # of equal size


def elsewhere(parts):
    return [parts[0], parts[1].clone()]


def of_two_buckets(parts):
    return [parts[0], arrive([2, 2])[1]]


def transposed(parts):
    return [part.t().contiguous().t() for part in parts]


def as_float64(parts):
    return [part.double() for part in parts]


@pytest.mark.parametrize(
    ("rows", "change"),
    [([2, 2], swapped), ([2, 2], elsewhere), ([2, 2], of_two_buckets), ([4], transposed), ([4], as_float64)],
)
def test_parts_that_lie_otherwise_are_copied(rows, change):
    """SYN-1."""
    parts = change(arrive(rows))
    layer = Fused(rows).load(parts)
    assert layer.seen_at not in [part.data_ptr() for part in parts]
    assert torch.equal(layer.packed, torch.cat(parts).float())


@pytest.mark.parametrize("layout", [{"gap_rows": 1}, {"first_byte": 16}], ids=["gap", "not aligned"])
def test_a_gap_or_an_odd_address_means_a_copy(layout):
    """SYN-1: vLLM's kernels may count on the alignment of torch's own memory."""
    parts = arrive([2, 2], **layout)
    layer = Fused([2, 2]).load(parts)
    assert layer.seen_at != parts[0].data_ptr()
    assert torch.equal(layer.packed, torch.cat(parts))


def test_as_many_numbers_as_the_parameter_has_are_not_all_of_its_places():
    """SYN-1: vLLM counts numbers only; a part that comes twice, or a bias, must not pass for one that is missing."""
    first, second = arrive([2, 2])
    for parts, times_bias in (([first, first], 1), ([first, second], 1), ([first], 3)):
        layer = Fused([2, 2])
        initialize_layerwise_reload(layer)
        with in_place.parameters_in_place():
            for part in parts:
                layer.weight.weight_loader(layer.weight, part, 0)
            layer.scale.weight_loader(layer.scale, torch.ones(COLUMNS))
            for _ in range(times_bias):
                layer.bias.weight_loader(layer.bias, torch.ones(COLUMNS))
        finalize_layerwise_reload(layer, None)
        assert layer.seen_at != first.data_ptr()


@pytest.mark.parametrize(
    "twist", [lambda part, _: part.add_(1), lambda part, _: part[:1].fill_(7), lambda part, _: part[1:].mul_(2)]
)
def test_what_a_loader_does_behind_its_copy_is_not_lost(twist):
    """SYN-1: such a parameter goes vLLM's way, and what arrived stays as it is."""
    parts = arrive([2, 2])
    before, expected = torch.cat(parts), torch.cat(parts)
    twist(expected[:2], None)
    twist(expected[2:], None)
    layer = Fused([2, 2], twist)
    for _ in range(2):
        assert torch.equal(layer.load(parts).packed, expected)
        assert torch.equal(torch.cat(parts), before)


def test_a_write_to_nothing_is_none():
    """vLLM fills the padding behind a vocabulary, also where there is none."""
    parts = arrive([2, 2])
    layer = Fused([2, 2], lambda part, _: part[2:].fill_(0))
    for _ in range(2):
        assert layer.load(parts).seen_at == parts[0].data_ptr()
    assert layer.num_loads == 2  # one for each part, in both updates


def test_what_a_loader_that_only_copies_does_is_found_out_once():
    """SYN-5: for each part and each form that it comes in."""
    layer = Fused([2, 2])
    for change, num_loads in [(list, 2), (list, 2), (transposed, 6), (transposed, 8), (as_float64, 12), (list, 12)]:
        parts = change(arrive([2, 2]))
        layer.load(parts)
        assert torch.equal(layer.packed, torch.cat(parts).float())
        assert layer.num_loads == num_loads  # vLLM runs a loader again where parts must be copied
    with pytest.raises(AssertionError):  # vLLM's
        layer.load([torch.ones(3, COLUMNS), parts[1]])


def negate_if_positive(target, loaded):
    if loaded.flatten()[0].item() > 0:
        target.neg_()


def change_what_is_given(target, loaded):
    loaded.add_(1)


def move_what_is_given(target, loaded):
    loaded[:1].copy_(loaded[1:])


@pytest.mark.parametrize("twist", [negate_if_positive, change_what_is_given, move_what_is_given])
def test_a_loader_that_does_more_than_to_copy_runs_in_each_update(twist):
    """SYN-1: one that looks at the numbers, or changes what it is given."""
    ours, theirs = Fused([2, 2], twist), Fused([2, 2], twist)
    for sign in (-1, 1, 1):
        for part in (parts := arrive([2, 2])):
            part[0, 0] = sign
        again = [part.clone() for part in parts]
        ours.load(parts)
        theirs.load(again, where=contextlib.nullcontext)
    assert ours.num_loads >= 3 * 2
    if twist is negate_if_positive:  # the others are run twice on the same by vLLM
        assert torch.equal(ours.packed, theirs.packed)


def test_a_loader_that_copies_something_else_is_believed():
    """SYN-1."""
    table = torch.randn(4, COLUMNS)
    layer = Fused([4], source=lambda loaded: table)
    for _ in range(3):
        assert torch.equal(layer.load(arrive([4])).packed, table)


def test_what_is_known_of_a_modules_loaders_goes_with_it():
    gc.collect()
    before = len(in_place._loads)
    layer = Fused([2, 2]).load(arrive([2, 2]))
    assert len(in_place._loads) > before
    del in_place.layerwise.LAYERWISE_INFO[layer], layer  # which holds on to a loader's closure
    gc.collect()
    assert len(in_place._loads) == before


@given(st.lists(st.integers(1, 4), min_size=1, max_size=5), st.data())
@settings(max_examples=60, deadline=None)
def test_whatever_arrives_the_result_is_that_of_vllms_own_reload(rows, data):
    """SYN-1."""
    ours, theirs = Fused(rows), Fused(rows)
    for _ in range(3):
        layout = {"gap_rows": data.draw(st.integers(0, 1)), "first_byte": data.draw(st.sampled_from([0, 0, 4]))}
        parts = arrive(rows, **layout)
        for part in range(len(parts)):
            if data.draw(st.sampled_from([False, False, True])):
                parts[part] = data.draw(st.sampled_from([elsewhere, transposed, as_float64]))([parts[part]] * 2)[1]
        order = data.draw(st.permutations(range(len(parts))))
        ours.load(parts, order)
        theirs.load(parts, order, contextlib.nullcontext)
        assert torch.equal(ours.packed, theirs.packed) and torch.equal(ours.weight, theirs.weight)
        assert theirs.seen_at != parts[0].data_ptr()  # the plain way is another one


@pytest.mark.parametrize("twist", [lambda target, loaded: None, change_what_is_given])
def test_nothing_that_arrived_is_kept_once_its_module_is_complete(twist):
    """SYN-5: bucket memory comes back during an update, also from under biases and buffers."""
    memory = np.zeros(8 * COLUMNS * 4 + ALIGNMENT, np.uint8)
    gone = []
    weakref.finalize(memory, gone.append, True)
    bucket = torch.from_numpy(memory)
    start = -bucket.data_ptr() % ALIGNMENT
    bucket = bucket[start : start + 8 * COLUMNS * 4].view(torch.float32).view(8, COLUMNS)
    del memory
    layer = Fused([3, 3], twist)
    initialize_layerwise_reload(layer)
    with in_place.parameters_in_place():
        layer.weight.weight_loader(layer.weight, bucket[:3], 0)
        layer.weight.weight_loader(layer.weight, bucket[3:6], 1)
        layer.scale.weight_loader(layer.scale, bucket[6])
        layer.bias.weight_loader(layer.bias, bucket[7])
        del bucket
        assert gone
    finalize_layerwise_reload(layer, None)


def test_vllm_has_its_own_functions_back():
    """A failed load included."""
    allocate, count = in_place.layerwise.materialize_layer, in_place.layerwise.get_numel_loaded
    with pytest.raises(ValueError), in_place.parameters_in_place():
        assert in_place.layerwise.materialize_layer is not allocate
        raise ValueError
    assert (in_place.layerwise.materialize_layer, in_place.layerwise.get_numel_loaded) == (allocate, count)


@pytest.fixture(scope="module")
def vllm_context():
    """What vLLM's layers want around them: a config, and a world of one process, where no other test has left one."""
    is_open = torch.distributed.is_initialized()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    with set_current_vllm_config(VllmConfig()):
        parallel_state.init_distributed_environment(1, 0, address, 0, "gloo")
        parallel_state.initialize_model_parallel(1, 1)
        yield
        parallel_state.destroy_model_parallel()
        if not is_open:
            parallel_state.destroy_distributed_environment()


BF16 = {"params_dtype": torch.bfloat16}
VLLM_LAYERS = {  # the layer; rows of its parts, and how its loader calls them
    "qkv": (lambda: linear.QKVParallelLinear(64, 16, 4, 2, bias=False, **BF16), [64, 32, 32], ["q", "k", "v"]),
    "gate and up": (lambda: linear.MergedColumnParallelLinear(64, [96, 96], bias=False, **BF16), [96, 96], [0, 1]),
    "down": (lambda: linear.RowParallelLinear(64, 96, bias=False, **BF16), [96], [None]),
    "embeddings": (lambda: VocabParallelEmbedding(128, 64, **BF16), [128], [None]),
}


@pytest.mark.parametrize(("make", "rows", "names"), VLLM_LAYERS.values(), ids=VLLM_LAYERS)
def test_vllms_own_layers_take_what_arrived(make, rows, names, vllm_context, monkeypatch):
    """SYN-5, SYN-7: and multiply with it afterwards."""
    layer = make()
    record_metadata_for_reloading(layer)
    layer.quant_method.process_weights_after_loading(layer)
    process, seen_at = layer.quant_method.process_weights_after_loading, []

    def spied(layer):
        seen_at.append(layer.weight.data_ptr())
        process(layer)

    monkeypatch.setattr(layer.quant_method, "process_weights_after_loading", spied)
    for _ in range(2):
        bucket = torch.randn(sum(rows), 64).to(torch.bfloat16)
        initialize_layerwise_reload(layer)
        with in_place.parameters_in_place():
            for part, name in zip(bucket.split(rows), names, strict=True):
                layer.weight.weight_loader(layer.weight, part, *([] if name is None else [name]))
        finalize_layerwise_reload(layer, None)
        assert seen_at.pop() == bucket.data_ptr()
        x = torch.randn(3, 64).to(torch.bfloat16)
        torch.testing.assert_close(layer.quant_method.apply(layer, x), x @ bucket.T, rtol=2e-2, atol=2e-1)
        monkeypatch.setattr(in_place, "_Recorder", None)  # their loaders are known now
