"""`utils.config.checkpoint_files`: a checkpoint that is not there or not whole is told before anything is loaded."""

import json
import os
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.families import BUILDERS, build_family
from utils.config.checkpoint_files import adapter_problems, checkpoint_problems
from utils.config.memory import model_size
from utils.config.schema import Tuner
from utils.families import family_in
from utils.run.inputs import _describe

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 4976698672\n"
INDEX = "model.safetensors.index.json"
TOKENIZER_AND_PROCESSOR = ("tokenizer.json", "tokenizer_config.json", "preprocessor_config.json")


def shard(num_bytes: int = 8) -> bytes:
    """A safetensors file of one tensor."""
    header = json.dumps({"w": {"dtype": "BF16", "shape": [num_bytes // 2], "data_offsets": [0, num_bytes]}}).encode()
    return struct.pack("<Q", len(header)) + header + bytes(num_bytes)


def write_checkpoint(folder: Path, config: dict[str, Any]) -> Path:
    """A checkpoint whose files are there and whole, and hold next to nothing."""
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes(shard())
    for name in TOKENIZER_AND_PROCESSOR:
        (folder / name).write_text("{}")
    return folder


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A checkpoint of two shards and their index."""
    write_checkpoint(tmp_path, {"model_type": "qwen3_vl"})
    (tmp_path / "model.safetensors").unlink()
    names = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    for name in names:
        (tmp_path / name).write_bytes(shard())
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {name: name for name in names}}))
    return tmp_path


def remove(*names: str) -> Callable[[Path], None]:
    return lambda model: [(model / name).unlink() for name in names] and None


def write(name: str, content: bytes) -> Callable[[Path], None]:
    return lambda model: (model / name).write_bytes(content) and None


FIRST, SECOND = (f"model-0000{i}-of-00002.safetensors" for i in (1, 2))
CUT = "is cut off or damaged; download it again"
POINTS = "is a Git LFS pointer, not the file itself; run `git lfs pull` there"
COPY = "download it again, or copy it from the model it was made of"
FAULTS = {
    "pointer": (write(SECOND, POINTER), f"{SECOND} {POINTS}"),
    "pointers": (lambda model: [write(n, POINTER)(model) for n in (FIRST, SECOND)], f"{FIRST} (and 1 more) {POINTS}"),
    "tokenizer's pointer": (write("tokenizer.json", POINTER), f"tokenizer.json {POINTS}"),
    "no shard": (remove(FIRST), f"{FIRST} is missing, though the index of the weights names it; download it again"),
    "cut data": (lambda model: os.truncate(model / FIRST, len(shard()) - 1), f"{FIRST} {CUT}"),
    "cut header": (lambda model: os.truncate(model / FIRST, 20), f"{FIRST} {CUT}"),
    "cut length": (lambda model: os.truncate(model / FIRST, 3), f"{FIRST} {CUT}"),
    "empty": (write(FIRST, b""), f"{FIRST} {CUT}"),
    "a page": (write(FIRST, b"<!DOCTYPE html> sign in to download"), f"{FIRST} {CUT}"),
    "other JSON": (write(FIRST, struct.pack("<Q", 2) + b"[]"), f"{FIRST} {CUT}"),
    "cut index": (write(INDEX, b'{"weight_map": {"w'), f"{INDEX} {CUT}"),
    "no weights": (remove(FIRST, SECOND, INDEX), "holds no weights; download it again"),
    "no tokenizer": (remove("tokenizer.json"), f"holds no tokenizer.json or vocab.json; {COPY}"),
    "no end token": (remove("tokenizer_config.json"), f"holds no tokenizer_config.json; {COPY}"),
    "no processor": (
        remove("preprocessor_config.json"),
        f"holds no preprocessor_config.json or processor_config.json; {COPY}",
    ),
}


# The same of any checkpoint, for the programs that load one, and part of the message.
NOT_WHOLE = {
    "pointer": (lambda model: last_shard(model).write_bytes(POINTER), POINTS),
    "cut off": (lambda model: os.truncate(last_shard(model), 1000), CUT),
    "no shard": (
        write(INDEX, json.dumps({"weight_map": {"w": "model-9.safetensors"}}).encode()),
        "safetensors is missing",
    ),
    "no end token": FAULTS["no end token"],
}


def last_shard(model: Path) -> Path:
    return max(model.glob("*.safetensors"))


@pytest.mark.parametrize("name", FAULTS)
def test_CFG_16_SRV_2_each_fault_is_named_with_its_way_out(model: Path, name: str) -> None:
    """CFG-16, SRV-2."""
    spoil, message = FAULTS[name]
    assert checkpoint_problems(model) == []
    spoil(model)
    assert checkpoint_problems(model) == [message]
    assert checkpoint_problems(model, with_processor=False) == ([] if name == "no processor" else [message])


@pytest.mark.parametrize("section", ["quantization_config", "text_config"])
def test_CFG_17_quantized_weights_are_refused_by_name(model: Path, section: str) -> None:
    """CFG-17: the merged checkpoint would hold plain weights beside a config that says fp8."""
    found = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    nested = found if section == "quantization_config" else {"quantization_config": found}
    (model / "config.json").write_text(json.dumps({"model_type": "qwen3_vl", section: nested}))
    message = "config.json is of quantized weights (fp8), which are not supported; use the release in bfloat16"
    assert checkpoint_problems(model) == [message]


def test_LRN_6_an_adapter_beside_the_weights_is_refused(model: Path) -> None:
    """LRN-6: transformers would load it on top of weights that may have it merged in."""
    (model / "adapter_config.json").write_text("{}")
    (problem,) = checkpoint_problems(model)
    assert problem.startswith("holds an adapter beside the model (adapter_config.json); move it to a folder of its own")


@pytest.mark.parametrize(
    ("text", "is_refused"),
    [
        ({"use_sliding_window": True}, True),
        ({"use_sliding_window": False, "sliding_window": 4096}, False),
        ({"layer_types": ["full_attention", "sliding_attention"]}, True),
        ({"use_sliding_window": True, "layer_types": ["full_attention"]}, False),  # as for more layers than there are
    ],
)
def test_FAM_2_sliding_windows_are_refused_by_name(model: Path, text: dict[str, Any], is_refused: bool) -> None:
    """FAM-2: the learner's attention keeps segments apart, and would ignore the window."""
    for config in (text, {"text_config": text}):
        (model / "config.json").write_text(json.dumps({"model_type": "qwen3_vl"} | config))
        assert ["sliding-window" in problem for problem in checkpoint_problems(model)] == [True] * is_refused


@pytest.mark.parametrize("family", BUILDERS)
def test_SRV_2_what_transformers_writes_is_whole(tmp_path: Path, family: str) -> None:
    """SRV-2: with the family's own processor and tokenizer."""
    assert checkpoint_problems(build_family(family, tmp_path)) == []


def test_SRV_2_an_index_of_weights_in_the_old_form_counts_only_where_it_is_used(model: Path) -> None:
    """SRV-2: a download may have left those files out."""
    (model / "pytorch_model.bin.index.json").write_text('{"weight_map": {"w": "pytorch_model-1.bin"}}')
    assert checkpoint_problems(model) == []
    remove(FIRST, SECOND, INDEX)(model)
    assert [text.split(",")[0] for text in checkpoint_problems(model)] == ["pytorch_model-1.bin is missing"]


LOOKED = "no such folder (looked in {}; paths are relative to the working directory); "
HF = "download it: .venv/bin/hf download"
QWEN = f"{HF} Qwen/Qwen3-VL-8B-Instruct --local-dir models/Qwen3-VL-8B-Instruct"
CORRECT = "correct it, or put a checkpoint there (docs/training.md and docs/grpo.md tell how to make one)"
INTERN = f"{HF} OpenGVLab/InternVL3_5-8B-HF --local-dir models/InternVL3_5-8B"  # the other form is refused


@pytest.mark.parametrize(
    ("path", "way_out"),
    [
        ("Qwen/Qwen3-VL-8B-Instruct", f"{QWEN}, and write models/Qwen3-VL-8B-Instruct instead"),
        ("models/Qwen3-VL-8B-Instruct", QWEN),
        ("me/mine", f"{HF} me/mine --local-dir models/mine, and write models/mine instead"),
        ("models/Qwen3-VL-8B", f"{HF} Qwen/Qwen3-VL-8B-Instruct --local-dir models/Qwen3-VL-8B"),  # no such release
        ("models/Qwen3.5-9B", f"{HF} Qwen/Qwen3.5-9B --local-dir models/Qwen3.5-9B"),
        ("models/InternVL3_5-8B", INTERN),
        ("models/Qwen3-VL-4B-mine", CORRECT),
        ("models/qwen3vl_8b_coord", CORRECT),
    ],
)
def test_CFG_16_a_folder_that_is_not_there(tmp_path: Path, monkeypatch: Any, path: str, way_out: str) -> None:
    """CFG-16: by its name alone, without the network."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("socket.socket.connect", lambda *_: pytest.fail("asked the network"))
    assert checkpoint_problems(Path(path)) == [LOOKED.format(tmp_path / path) + way_out]
    with pytest.raises(OSError, match="config.json"):
        family_in(path)
    assert checkpoint_problems(tmp_path / "my" / "own")[0].startswith("no such folder; correct it")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("adapter_config.json", None, "holds no adapter_config.json or no adapter_model.safetensors; name the folder"),
        ("adapter_model.safetensors", None, "holds no adapter_config.json or no adapter_model.safetensors; name the"),
        ("adapter_config.json", b"", "adapter_config.json is cut off or damaged; download it again"),
        ("adapter_config.json", b"{", "adapter_config.json cannot be read as JSON (Expecting property name"),
        ("adapter_config.json", b"[]", "adapter_config.json is no JSON object; save the adapter again"),
        ("adapter_model.safetensors", POINTER, "adapter_model.safetensors is a Git LFS pointer"),
        ("adapter_model.safetensors", shard()[:-1], "adapter_model.safetensors is cut off or damaged"),
    ],
)
def test_CFG_3_an_adapter_that_is_not_there_or_not_whole(tmp_path: Path, name: str, content: Any, message: str) -> None:
    """CFG-3."""
    assert adapter_problems(tmp_path / "gone") == ["no such folder; correct it (checkpoint-N/adapter of a run)"]
    assert adapter_problems(Path("gone"))[0].startswith(f"no such folder (looked in {Path.cwd()}/gone; paths are")
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "adapter_model.safetensors").write_bytes(shard())
    assert adapter_problems(tmp_path) == []
    (tmp_path / name).unlink() if content is None else (tmp_path / name).write_bytes(content)
    (found,) = adapter_problems(tmp_path)
    assert found.startswith(message)


@pytest.mark.parametrize("content", [POINTER, b"", b"short"])
def test_CFG_16_LRN_12_what_is_no_header_is_not_read_as_one(tmp_path: Path, content: bytes) -> None:
    """CFG-16, LRN-12: its first bytes would be a length of 10^18."""
    file = tmp_path / "model.safetensors"
    file.write_bytes(content)
    assert model_size(tmp_path, Tuner()) is None
    with pytest.raises(ValueError, match=f"{file}: is truncated, or not a safetensors file; download it again"):
        _describe(file)


def test_the_check_loads_neither_torch_nor_transformers() -> None:
    code = "import sys, utils.config.checkpoint_files; print({'torch', 'transformers'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "set()\n"
