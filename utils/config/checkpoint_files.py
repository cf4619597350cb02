"""What is wrong with a checkpoint folder, by the names, sizes and safetensors headers of its files: no tensor is read,
and the network is never asked (SRV-2, CFG-16)."""

import json
import os
import re
from pathlib import Path
from typing import Any, BinaryIO

from utils.config.released import known_model
from utils.families import family_from, read_config, text_config

_LFS_POINTER = b"version https://git-lfs"
_WEIGHTS = (".safetensors", ".bin", ".gguf")
_INDEX, _OLD_INDEX = "model.safetensors.index.json", "pytorch_model.bin.index.json"
# One file of each. Without tokenizer_config.json transformers ends answers with another token, and says nothing.
_TOKENIZER = (("tokenizer.json", "vocab.json"), ("tokenizer_config.json",))
_PROCESSOR = (("preprocessor_config.json", "processor_config.json"),)
_OWN_FOLDERS = ("models", "runs", "data")  # no owners on the Hub
_MALFORMED = (ValueError, LookupError, TypeError, AttributeError)  # JSON of another form


def checkpoint_problems(folder: Path, with_processor: bool = True) -> list[str]:
    """List why no model can be loaded from a folder, each as `FILE is ...; way out`.

    Args:
        with_processor: the image processor's files must be there, too.
    """
    if not folder.is_dir():
        return [_absence(folder)]
    try:
        config = read_config(folder)
    except (OSError, ValueError) as error:
        return [f"config.json cannot be read ({error}); it must be a local checkpoint directory"]
    try:
        family_from(config)
    except ValueError as error:
        return [str(error)]
    if quantization := config.get("quantization_config") or config.get("text_config", {}).get("quantization_config"):
        method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
        return [f"config.json is of quantized weights ({method}), which are not supported; use the release in bfloat16"]
    if _has_window(text_config(config)):
        return ["config.json asks for sliding-window attention, which packed rows lack; use a model without it"]
    there = {path.name for path in folder.iterdir()}
    if "adapter_config.json" in there:  # transformers would add it to the weights, which may hold it already
        return [
            "holds an adapter beside the model (adapter_config.json); move it to a folder of its own, which "
            "tuner.adapter_path can name"
        ]
    index = _INDEX if any(".safetensors" in name for name in there) else _OLD_INDEX
    weights = {name for name in there if name.endswith(_WEIGHTS)} | _shards(folder / index)
    files: dict[str, list[str]] = {}  # by what is wrong with them
    for name in sorted(weights | {name for name in there if name.endswith(".json")}):
        if fault := _fault(folder / name):
            files.setdefault(fault, []).append(name)
    found = [f"{first}{f' (and {len(more)} more)' * bool(more)} {fault}" for fault, (first, *more) in files.items()]
    if not weights:
        found.append("holds no weights; download it again")
    for names in (*_TOKENIZER, *_PROCESSOR * with_processor):
        if there.isdisjoint(names):
            found.append(f"holds no {' or '.join(names)}; download it again, or copy it from the model it was made of")
    return found


def _has_window(text: dict[str, Any]) -> bool:
    """Whether some layer of a language model attends to the last tokens only."""
    layers = text.get("layer_types")
    return "sliding_attention" in layers if isinstance(layers, list) else text.get("use_sliding_window") is True


def adapter_problems(folder: Path) -> list[str]:
    """List why no adapter (PEFT) can be loaded from a folder, in the form of `checkpoint_problems`."""
    if not folder.is_dir():
        looked = f" (looked in {folder.absolute()}; paths are relative to the working directory)"
        return [f"no such folder{looked * (not folder.is_absolute())}; correct it (checkpoint-N/adapter of a run)"]
    config, weights = "adapter_config.json", ("adapter_model.safetensors", "adapter_model.bin")
    there = [name for name in weights if (folder / name).exists()]
    if not (folder / config).is_file() or not there:
        return [f"holds no {config} or no {weights[0]}; name the folder that PEFT saved the adapter in"]
    found = [f"{name} {fault}" for name in (config, *there) if (fault := _fault(folder / name))]
    try:
        if not found and not isinstance(json.loads((folder / config).read_bytes()), dict):
            found.append(f"{config} is no JSON object; save the adapter again")
    except ValueError as error:
        found.append(f"{config} cannot be read as JSON ({error}); save the adapter again")
    return found


def _absence(path: Path) -> str:
    """Say that a folder is not there, and how to get it: a Hub name is known by its form, a release by its name."""
    looked = f" (looked in {path.absolute()}; paths are relative to the working directory)" * (not path.is_absolute())
    name, released = path.name, _released_as(path.name)
    is_hub_name = len(path.parts) == 2 and re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", str(path)) and not path.parent.exists()
    if released:
        source = released
    elif is_hub_name and path.parts[0] not in _OWN_FOLDERS:
        source = str(path)
    else:
        way_out = "correct it, or put a checkpoint there (docs/training.md and docs/grpo.md tell how to make one)"
        return f"no such folder{looked}; {way_out}"
    target = Path("models") / name if str(path) == source else path
    rename = f", and write {target} instead" * (target != path)
    return f"no such folder{looked}; download it: .venv/bin/hf download {source} --local-dir {target}{rename}"


def _released_as(name: str) -> str | None:
    """The Hub's name of the release that a folder is named after; None for any other folder."""
    released = known_model(name)
    if released is None:
        return None
    if released.startswith("Intern"):
        owner, endings = "OpenGVLab", ("-HF",)  # its other form has code of its own, and is refused
    else:
        owner, endings = "Qwen", ("-Instruct", "-Thinking") if "-VL-" in released else ("",)
    if name in (released, *(released + ending for ending in endings)):
        return f"{owner}/{released + endings[0] if name == released else name}"
    return None


def _shards(index: Path) -> set[str]:
    """The files that an index names; none where it is not there or cannot be read."""
    try:
        return {str(name) for name in json.loads(index.read_bytes())["weight_map"].values()}
    except (OSError, *_MALFORMED):
        return set()


def _fault(path: Path) -> str | None:
    """What is wrong with a file, and the way out."""
    try:
        with path.open("rb") as file:
            if file.read(len(_LFS_POINTER)) == _LFS_POINTER:
                return "is a Git LFS pointer, not the file itself; run `git lfs pull` there"
            file.seek(0)
            is_whole = _ends_as_told(file) if path.suffix == ".safetensors" else os.path.getsize(path) > 0
    except FileNotFoundError:
        return "is missing, though the index of the weights names it; download it again"
    except OSError as error:
        return f"cannot be read ({error.strerror}); correct its permissions, or download it again"
    except _MALFORMED:
        is_whole = False
    if path.name in (_INDEX, _OLD_INDEX):
        is_whole = bool(_shards(path))
    return None if is_whole else "is cut off or damaged; download it again"


def _ends_as_told(file: BinaryIO) -> bool:
    """True if a safetensors file ends where its header says that the last tensor ends."""
    header = json.loads(read_header(file))
    ends = [tensor["data_offsets"][1] for name, tensor in header.items() if name != "__metadata__"]
    return os.fstat(file.fileno()).st_size == file.tell() + max(ends, default=0)


def read_header(file: BinaryIO) -> bytes:
    """Read a safetensors file's header: JSON, after its own length (8 bytes, little-endian).

    Raises:
        ValueError: the file is shorter than that, or something else whose first bytes are no length.
    """
    length, size = int.from_bytes(file.read(8), "little"), os.fstat(file.fileno()).st_size
    if length > size - 8:
        raise ValueError(f"{file.name}: is truncated, or not a safetensors file; download it again")
    return file.read(length)
