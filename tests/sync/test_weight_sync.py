"""The merged-weight source against PEFT's own merge, and the sender's handling of failure (section SYN)."""

import contextlib
import copy
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors import safe_open
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary
from transformers import AutoModelForImageTextToText, Qwen3VLConfig, Qwen3VLForConditionalGeneration

from utils.config.load import load_config
from utils.config.released import MODELS
from utils.learner.model import apply_tuner
from utils.sync.merged_weights import _MERGE_BLOCK_BYTES, Adapter, MergedWeights, WeightEntry, _merge_into
from utils.sync.wire import bucket_layouts


@pytest.fixture(scope="module")
def base_model(start_model):
    return AutoModelForImageTextToText.from_pretrained(start_model, dtype=torch.float32)


def test_a_copy_on_a_gpu_is_complete_before_gathered_memory_is_freed_SYN_2(monkeypatch):
    """SYN-2, ZeRO-3: copies on a GPU are asynchronous. A stand-in pretends the GPU."""
    events: list[str] = []

    @contextlib.contextmanager
    def gathered(parts):
        yield
        events.append("freed")

    monkeypatch.setattr("deepspeed.zero.GatheredParameters", gathered)
    stream = SimpleNamespace(synchronize=lambda: events.append("complete"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    weights = MergedWeights(torch.nn.Linear(2, 2))
    for is_cuda in (True, False):
        sharded = SimpleNamespace(ds_id=1, is_cuda=is_cuda)
        with weights.gathered(WeightEntry("x", sharded, None)):
            events.append("copy")
    assert events == ["copy", "complete", "freed", "copy", "freed"]


def tuned(base_model, *, use_dora: bool, modules_to_save=None, dtype=torch.float32, alpha=16):
    """A PEFT model whose adapters are far from their start, so that a wrong merge shows."""
    torch.manual_seed(1)
    config = LoraConfig(
        r=4,
        lora_alpha=alpha,
        use_dora=use_dora,
        target_modules="all-linear",
        modules_to_save=modules_to_save,
        ensure_weight_tying=bool(modules_to_save),
    )
    model = get_peft_model(copy.deepcopy(base_model).to(dtype), config, autocast_adapter_dtype=False)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def merged_by_peft(model):
    return dict(copy.deepcopy(model).merge_and_unload().state_dict())


@pytest.mark.parametrize("use_dora", [False, True])
@pytest.mark.parametrize(("modules_to_save", "alpha"), [(None, 16), (["embed_tokens"], 16), (None, 6)])
def test_stream_equals_pefts_merge_bit_for_bit_in_float32_SYN_4(base_model, use_dora, modules_to_save, alpha):
    """SYN-4: with a scale that is a power of two, and with one that is not (6 / 4)."""
    model = tuned(base_model, use_dora=use_dora, modules_to_save=modules_to_save, alpha=alpha)
    expected = merged_by_peft(model)
    streamed = dict(MergedWeights(model).tensors())
    assert set(expected) - set(streamed) == {"lm_head.weight"}  # tied: travels as the embedding
    for name, tensor in streamed.items():
        assert torch.equal(tensor, expected[name]), name


@pytest.mark.parametrize("use_dora", [False, True])
def test_bf16_merge_is_rounded_once_SYN_4(base_model, use_dora):
    """SYN-4."""
    model = tuned(base_model, use_dora=use_dora, dtype=torch.bfloat16)
    exact = merged_by_peft(copy.deepcopy(model).float())
    for name, tensor in MergedWeights(model).tensors():
        assert torch.equal(tensor, exact[name].to(torch.bfloat16)), name


def test_names_and_shapes_are_the_checkpoints_SYN_4(base_model, start_model):
    """SYN-4."""
    with safe_open(start_model / "model.safetensors", "pt") as file:
        on_disk = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}
    entries = MergedWeights(tuned(base_model, use_dora=True)).entries
    assert {entry.name: entry.shape for entry in entries} == on_disk


def test_training_weights_are_never_modified_SYN_4(base_model):
    """SYN-4."""
    model = tuned(base_model, use_dora=True)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for _ in range(20):
        for _ in MergedWeights(model).tensors():
            pass
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name


def test_merging_in_blocks_of_rows_equals_merging_at_once_SYN_5(monkeypatch):
    """SYN-5."""
    torch.manual_seed(0)
    weight, a, b, m = torch.randn(37, 24), torch.randn(4, 24), torch.randn(37, 4), torch.rand(37)
    adapter = Adapter(*(torch.nn.Parameter(t) for t in (a, b)), scaling=2.0, magnitude=torch.nn.Parameter(m))
    whole, blocks = torch.empty(37, 24), torch.empty(37, 24)
    _merge_into(whole, weight, adapter)
    monkeypatch.setitem(_MERGE_BLOCK_BYTES, "cpu", 5 * 24 * 4)
    _merge_into(blocks, weight, adapter)
    torch.testing.assert_close(blocks, whole, rtol=1e-6, atol=1e-6)


# ---------------------------------------------------------------------------------------------------------------------
# merging on CUDA, as far as it can be seen without one


class OnGpu(torch.Tensor):
    """A CPU tensor that says it lies on a GPU."""

    @property
    def device(self):
        return torch.device("cuda")


@pytest.mark.parametrize("use_dora", [False, True])
def test_the_operations_for_cuda_give_pefts_merge_SYN_4(monkeypatch, use_dora):
    """SYN-4: only the kernels are CPU ones. Against PEFT's order in float64: the nearest bfloat16 number but for ties
    that rounding errors decide, and never further away than the next one."""
    torch.manual_seed(0)
    half = [torch.randn(shape).bfloat16() for shape in ((96, 64), (8, 64), (96, 8), (96,))]
    weight, a, b, magnitude = half
    exact = weight.double() + 1.5 * (b.double() @ a.double())
    if use_dora:
        exact = magnitude.double()[:, None] * exact / exact.norm(dim=1, keepdim=True)
    products = []

    def on_cuda(b, a, out_dtype):
        products.append(out_dtype)
        return (b.double() @ a.double()).to(out_dtype)

    monkeypatch.setattr(torch, "mm", on_cuda)  # `out_dtype` exists for CUDA only
    monkeypatch.setitem(_MERGE_BLOCK_BYTES, "cuda", 40 * 64 * 4)  # three blocks
    vector = torch.nn.Parameter(magnitude) if use_dora else None
    adapter = Adapter(torch.nn.Parameter(a), torch.nn.Parameter(b), scaling=1.5, magnitude=vector)
    out = torch.empty_like(weight)
    _merge_into(out, weight.as_subclass(OnGpu), adapter)
    assert products == [torch.float32] * 3
    assert (out != exact.bfloat16()).float().mean() < 0.002
    torch.testing.assert_close(out.double(), exact, rtol=2**-8, atol=1e-6)


class Walk(TorchDispatchMode):
    """Counts launches, and the peak of bytes alive, of work on the meta device.

    A launch is an operator that is neither a view nor an allocation. On CUDA each such operator of a merge is one
    kernel, for elementwise ones with other dtypes in and out too; a matrix product is at least one.
    """

    def __init__(self):
        super().__init__()
        self.launches, self.peak, self._alive = Counter(), 0, WeakIdKeyDictionary()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        inputs = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        result = function(*args, **(kwargs or {}))
        if not (function.is_view or "empty" in str(function)):
            self.launches[str(function)] += 1
        for tensor in tree_leaves(result):
            if tensor.untyped_storage()._cdata not in inputs:
                self._alive[tensor.untyped_storage()] = tensor.untyped_storage().nbytes()
        self.peak = max(self.peak, sum(self._alive.values()))
        return result


@pytest.fixture(scope="module")
def weights_8b():
    """Names and shapes of a released 8B model with the adapters of the 3 + 1 preset, LoRA or DoRA, without memory."""

    def make(use_dora: bool) -> MergedWeights:
        with torch.device("meta"):
            model = Qwen3VLForConditionalGeneration(Qwen3VLConfig.from_dict(MODELS["Qwen3-VL-8B"])).to(torch.bfloat16)
            tuner = load_config("configs/stage2/qwen3vl_8b_3v1.yaml").tuner.model_copy(update={"use_dora": use_dora})
            return MergedWeights(
                apply_tuner(model, tuner).to(torch.bfloat16)
            )  # on meta PEFT leaves adapters in float32

    return make


@pytest.mark.parametrize(("use_dora", "expected"), [(False, 3), (True, 5)])
def test_an_8b_merge_is_not_bound_by_launches_and_keeps_two_buckets_SYN_5(weights_8b, monkeypatch, use_dora, expected):
    """SYN-5: a walk over all linear layers of the language model launches fewer than 1,500 kernels, five for each
    layer with DoRA, three with LoRA. Block temporaries count in what a sync may add: two buckets, each at least as
    large as the largest tensor."""
    monkeypatch.setitem(_MERGE_BLOCK_BYTES, "meta", _MERGE_BLOCK_BYTES["cuda"])
    weights = weights_8b(use_dora)
    adapted = [entry for entry in weights.entries if entry.adapter is not None]
    assert len(adapted) == 36 * 7
    buckets: list[torch.Tensor] = []
    with Walk() as walk:
        for layout in bucket_layouts([entry.num_bytes for entry in adapted], 256 << 20):
            del buckets[:-1]  # one is on its way while the next one is made
            buckets.append(torch.empty(layout.num_bytes, dtype=torch.uint8, device="meta"))
            for entry, offset in zip(adapted[layout.first : layout.last], layout.offsets, strict=True):
                view = buckets[-1][offset : offset + entry.num_bytes].view(entry.dtype).view(entry.shape)
                weights.write(entry, view)
    print(walk.launches)
    assert walk.launches.total() == expected * len(adapted) < 1500
    largest = max(entry.num_bytes for entry in weights.entries)
    assert 2 * (256 << 20) < walk.peak <= 2 * max(256 << 20, largest)


def test_frozen_tensors_without_adapter_cannot_change_SYN_6(base_model):
    """SYN-6."""
    entries = MergedWeights(tuned(base_model, use_dora=False)).entries
    can_change = {entry.name for entry in entries if entry.can_change}
    assert "model.language_model.layers.0.self_attn.q_proj.weight" in can_change
    assert "model.language_model.norm.weight" not in can_change


def test_what_cannot_be_merged_is_refused_by_name_SYN_4(base_model):
    """SYN-4."""
    model = get_peft_model(copy.deepcopy(base_model), LoraConfig(r=4, target_modules=["embed_tokens"]))
    with pytest.raises(ValueError, match="embed_tokens"):
        MergedWeights(model)


def test_an_error_while_merging_is_raised_after_all_gathers_SYN_3(base_model, monkeypatch):
    """SYN-3: under ZeRO-3 the other ranks wait in them."""
    weights, gathered = MergedWeights(base_model), []
    monkeypatch.setattr(weights, "gathered", lambda entry: gathered.append(entry.name) or contextlib.nullcontext())
    write = weights.write

    def fails(entry, out):
        if entry is weights.entries[2]:
            raise torch.OutOfMemoryError("no room")
        write(entry, out)

    monkeypatch.setattr(weights, "write", fails)
    seen = []
    with pytest.raises(torch.OutOfMemoryError, match="no room"):
        seen.extend(name for name, _ in weights.tensors())
    assert gathered == [entry.name for entry in weights.entries]
