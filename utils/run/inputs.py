"""Digests of a run's data files and of its base checkpoint: each checkpoint's manifest keeps them, and a resumed run is
told by name what has changed since (LRN-12). Images are not read."""

import json
import logging
from collections.abc import Iterator, Sequence
from hashlib import blake2b, file_digest
from pathlib import Path
from typing import Any, BinaryIO

from utils.config.load import Config, exit_with
from utils.dist import Ranks, capture_error
from utils.run.resume import Checkpoint

logger = logging.getLogger(__name__)

KINDS = ("data", "base_model")  # as `--accept-changes` names them
_MODEL_FILES = (".json", ".jinja", ".txt", ".bin", ".safetensors")  # weights, config, tokenizer, processor
_BLOCK = 64 << 10  # bytes

Digests = dict[str, dict[str, dict[str, Any]]]  # kind -> file -> {"bytes", "blake2b"}


def digests(cfg: Config) -> Digests:
    """Digests of all data files, by their paths, and of the files in `model.path`, by their names.

    Every byte counts but in safetensors files, where the header and three blocks of 64 KiB of each tensor count (first,
    middle, last; a tensor of up to 192 KiB as a whole). So a model of 16 GB costs well below 1 GB of reading.

    Raises: OSError, ValueError for a file that cannot be read.
    """
    data = [spec.path for spec in cfg.custom.train_jsonl + (cfg.custom.val_jsonl or [])]
    model = [path for path in sorted(Path(cfg.model.path).glob("*")) if path.suffix in _MODEL_FILES]
    return {
        "data": {path: _describe(Path(path)) for path in data},
        "base_model": {path.name: _describe(path) for path in model},
    }


def _describe(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        if path.suffix == ".safetensors":
            digest = blake2b()
            for block in _sampled(file):
                digest.update(block)
        else:
            digest = file_digest(file, blake2b)
    return {"bytes": path.stat().st_size, "blake2b": digest.hexdigest()[:32]}


def _sampled(file: BinaryIO) -> Iterator[bytes]:
    """Header of a safetensors file (its length, 8 bytes little-endian, then JSON) and three blocks of each tensor."""
    length = file.read(8)
    header = file.read(int.from_bytes(length, "little"))
    yield length + header
    offset = 8 + len(header)
    for name, tensor in sorted(json.loads(header).items()):
        if name == "__metadata__":
            continue
        start, end = tensor["data_offsets"]
        starts = range(start, end, _BLOCK)
        if len(starts) > 3:
            starts = (start, (start + end) // 2, end - _BLOCK)
        for at in starts:
            file.seek(offset + at)
            yield file.read(min(_BLOCK, end - at))


def check_inputs(cfg: Config, checkpoint: Checkpoint | None, accepted: Sequence[str], ranks: Ranks) -> dict[str, Any]:
    """Read the run's inputs on rank 0 and compare them with the checkpoint's; exit with status 2 and name every change
    that is not accepted (collective).

    Args:
        accepted: kinds of `KINDS` whose files may have changed.

    Returns:
        What the next manifest keeps: `digests`, and as `accepted_changes` one line for each change that this run and
        those before it have accepted.

    """
    found: Digests = {}
    error = capture_error(lambda: found.update(digests(cfg))) if ranks.is_main else None
    new: Digests = ranks.gather_or_raise(found, "reading data files and base checkpoint", error)[0]
    if checkpoint is None:
        return {"digests": new, "accepted_changes": []}
    if checkpoint.inputs is None:
        logger.warning("%s has no digests of data and base checkpoint: nothing tells if they changed", checkpoint.path)
        return {"digests": new, "accepted_changes": []}
    old, history = checkpoint.inputs["digests"], list(checkpoint.inputs["accepted_changes"])
    changed = {kind: lines for kind in KINDS if (lines := _changes(old[kind], new[kind], kind))}
    if refused := [kind for kind in changed if kind not in accepted]:
        listed = "; ".join(f"{kind}: {change}" for kind in refused for change in changed[kind])
        what_to_do = f"put them back, or resume all the same with --accept-changes {' '.join(changed)}"
        exit_with(f"{checkpoint.path}: was trained from other files: {listed}; {what_to_do}", ranks.is_main)
    for kind, lines in changed.items():
        for line in lines:
            logger.warning("since the checkpoint, accepted by --accept-changes: %s: %s", kind, line)
            history.append(f"step {checkpoint.step}: {kind}: {line}")
    return {"digests": new, "accepted_changes": history}


def _changes(old: dict[str, dict[str, Any]], new: dict[str, dict[str, Any]], kind: str) -> list[str]:
    """What differs, one line per file. Data files that only one side has are a changed setting, not changed data."""
    lines = [
        f"{name} has other content ({old[name]['bytes']} bytes then, {new[name]['bytes']} now)"
        for name in sorted(old.keys() & new.keys())
        if old[name] != new[name]
    ]
    if kind == "base_model":
        lines += [f"{name} is gone" for name in sorted(old.keys() - new.keys())]
        lines += [f"{name} is new" for name in sorted(new.keys() - old.keys())]
    return lines
