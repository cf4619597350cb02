"""Digests of a run's data files and of its base checkpoint: each checkpoint's manifest keeps them, and a resumed run is
told by name what has changed since (LRN-12). Images are not read."""

import json
import logging
import os
import time
from collections.abc import Iterator, Sequence
from hashlib import blake2b, file_digest
from pathlib import Path
from typing import Any, BinaryIO

from utils.config.checkpoint_files import read_header
from utils.config.load import Config, exit_with
from utils.dist import Ranks, outcome_of
from utils.run.monitor import write_whole
from utils.run.resume import Checkpoint

logger = logging.getLogger(__name__)

INDEX_FOLDER = "data_index"  # in the run directory
KINDS = ("data", "base_model")  # what must not change, as `--accept-changes` names it
_MODEL_FILES = (".json", ".jinja", ".txt", ".bin", ".safetensors")  # weights, config, tokenizer, processor
_BLOCK = 64 << 10  # bytes
_SETTLED_NS = 2 * 10**9  # a file changed twice within a clock tick shows the same times; some file systems tick in 2 s

Digests = dict[str, dict[str, dict[str, Any]]]  # kind -> file -> {"bytes", "blake2b"}


def data_paths(cfg: Config) -> list[str]:
    """The path of each entry for a data file, training first."""
    return [spec.path for spec in cfg.custom.train_jsonl + (cfg.custom.val_jsonl or [])]


def data_problems(cfg: Config) -> list[str]:
    """List the data files that cannot be read, in the words of a start."""
    found = []
    for path in dict.fromkeys(data_paths(cfg)):
        try:
            with open(path, "rb"):
                pass
        except OSError as error:
            found.append(_unreadable(cfg, path, error))
    return found


def _unreadable(cfg: Config, path: str, error: OSError) -> str:
    rule = f"cannot be read: {error.strerror or error}; paths are relative to the working directory, {os.getcwd()}"
    return f"{_key_of(cfg, path)}={path}: {rule}"


class KnownDigests:
    """Digests of data files, which are read again only where size, inode or times have changed: `known.json` in the
    run's index folder remembers them for each state of a file."""

    def __init__(self, run_dir: str | os.PathLike) -> None:
        self._path = Path(run_dir) / INDEX_FOLDER / "known.json"
        self.states: dict[str, str] = {}  # those in use
        try:
            self._known = dict(json.loads(self._path.read_text()))
        except (OSError, ValueError):
            self._known = {}

    def describe(self, path: str) -> dict[str, Any]:
        """`bytes` and `blake2b` of a file."""
        state = _state(path)
        if state not in self._known:
            self._known[state] = _describe(Path(path))["blake2b"]
        if _state(path) == state and time.time_ns() - os.stat(path).st_ctime_ns > _SETTLED_NS:
            self.states[state] = self._known[state]  # a later change cannot have the same times
        return {"bytes": os.path.getsize(path), "blake2b": self._known[state]}

    def write(self, states: dict[str, str]) -> None:
        """Remember the states of files on all nodes."""
        self._path.parent.mkdir(exist_ok=True)
        write_whole(self._path, json.dumps(states, indent=1))


def _describe_model(cfg: Config) -> dict[str, dict[str, Any]]:
    others = {folder for folder in (cfg.model.reference_path, cfg.tuner.adapter_path) if folder} - {cfg.model.path}
    found = {path.name: _describe(path) for path in _model_files(cfg.model.path)}
    return found | {str(path): _describe(path) for folder in sorted(others) for path in _model_files(folder)}


def _describe_others(cfg: Config) -> Digests:
    """The files in `model.path`, by their names; those of a start policy or an adapter elsewhere, and files of rewards,
    by their paths."""
    files = cfg.rlhf.reward_files if cfg.is_grpo and cfg.rlhf else []
    return {"base_model": _describe_model(cfg), "rewards": {path: _describe(Path(path)) for path in files}}


def _model_files(folder: str) -> list[Path]:
    return [path for path in sorted(Path(folder).absolute().glob("*")) if path.suffix in _MODEL_FILES]


def _state(path: str) -> str:
    found = os.stat(path)
    return f"{path} {found.st_size} {found.st_mtime_ns} {found.st_ctime_ns} {found.st_ino}"


def _describe(path: Path) -> dict[str, Any]:
    """`bytes` and `blake2b` of a file.

    Every byte counts but in safetensors files, where the header and three blocks of 64 KiB of each tensor count (first,
    middle, last; a tensor of up to 192 KiB as a whole).
    """
    with path.open("rb") as file:
        if path.suffix == ".safetensors":
            digest = blake2b()
            for block in _sampled(file):
                digest.update(block)
        else:
            digest = file_digest(file, blake2b)
    return {"bytes": path.stat().st_size, "blake2b": digest.hexdigest()[:32]}


def _sampled(file: BinaryIO) -> Iterator[bytes]:
    """Header of a safetensors file, with its length, and three blocks of each tensor."""
    header = read_header(file)
    yield len(header).to_bytes(8, "little") + header
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
    """Digest the run's inputs, data files on each node and the rest on rank 0, and compare them with the checkpoint's;
    exit with status 2 and name every change that is not accepted, data files that cannot be read, and nodes that see
    others than rank 0 (collective).

    Args:
        accepted: kinds of `KINDS` whose files may have changed.

    Returns:
        What the next manifest keeps: `digests`, and as `accepted_changes` one line for each change that this run and
        those before it have accepted.
    """
    data, states = _data_digests(cfg, ranks)
    others, error = outcome_of(_describe_others, cfg) if ranks.is_main else (None, None)
    new: Digests = {"data": data, **ranks.gather_or_raise(others, "reading the base checkpoint", error)[0]}
    history = _accepted_changes(checkpoint, new, accepted, ranks) if checkpoint else []
    if ranks.is_main:
        KnownDigests(cfg.training.output_dir).write(states)
    return {"digests": new, "accepted_changes": history}


def _data_digests(cfg: Config, ranks: Ranks) -> tuple[dict[str, Any], dict[str, str]]:
    """Digests of the data files, and the states of files on all nodes that have them; one rank per node reads."""
    known, found, unreadable = KnownDigests(cfg.training.output_dir), {}, []

    def read() -> None:
        for path in dict.fromkeys(data_paths(cfg) * (ranks.local_rank == 0)):
            try:
                found[path] = known.describe(path)
            except OSError as error:
                unreadable.append(_unreadable(cfg, path, error))

    ranks.on_each(read, "reading the data files")
    arrived = ranks.gather((found, known.states, unreadable))
    data, _, unreadable = arrived[0]
    if unreadable:
        exit_with("\n".join(unreadable), ranks.is_main)
    if others := ranks.places(ranks.local_rank == 0 and found != data):
        rule = "make all nodes read the same files"
        exit_with(f"data files: {others} reads different files from rank 0; {rule}", ranks.is_main)
    return data, {state: digest for _, states, _ in arrived for state, digest in states.items()}


def _key_of(cfg: Config, path: str) -> str:
    """The first key of the config that names a data file."""
    files = {"train_jsonl": cfg.custom.train_jsonl, "val_jsonl": cfg.custom.val_jsonl or []}
    return next(
        f"custom.{key}[{i}]" for key, specs in files.items() for i, spec in enumerate(specs) if spec.path == path
    )


def _accepted_changes(checkpoint: Checkpoint, new: Digests, accepted: Sequence[str], ranks: Ranks) -> list[str]:
    """All changes that have been accepted so far; exit with status 2 for one that is not."""
    if checkpoint.inputs is None:
        logger.warning("%s has no digests of data and base checkpoint; changes would go unnoticed", checkpoint.path)
        return []
    old, history = checkpoint.inputs["digests"], list(checkpoint.inputs["accepted_changes"])
    changed = {kind: lines for kind in KINDS if (lines := _changes(old[kind], new[kind], kind))}
    if refused := [kind for kind in changed if kind not in accepted]:
        listed = "; ".join(f"{kind}: {change}" for kind in refused for change in changed[kind])
        what_to_do = f"restore them, or resume anyway with --accept-changes {' '.join(changed)}"
        exit_with(f"{checkpoint.path}: was trained with different files: {listed}; {what_to_do}", ranks.is_main)
    rewards = checkpoint.inputs["digests"].get("rewards", {}), new["rewards"]  # earlier versions have none
    for line in _changes(*rewards, "rewards"):
        rule = "rewards before and after do not compare; responses made ahead of their step keep theirs"
        logger.warning("since the checkpoint: %s; %s", line, rule)
    for kind, lines in changed.items():
        for line in lines:
            logger.warning("since the checkpoint, accepted by --accept-changes: %s: %s", kind, line)
            history.append(f"step {checkpoint.step}: {kind}: {line}")
    return history


def _changes(old: dict[str, dict[str, Any]], new: dict[str, dict[str, Any]], kind: str) -> list[str]:
    """What differs, one line per file. Data files that only one side has are a changed setting, not changed data."""
    lines = [
        f"{name} has other content ({old[name]['bytes']} bytes then, {new[name]['bytes']} now)"
        for name in sorted(old.keys() & new.keys())
        if old[name] != new[name]
    ]
    if kind == "base_model":  # a path is another setting, too: `reference_path` may change
        lines += [f"{name} is gone" for name in sorted(old.keys() - new.keys()) if "/" not in name]
        lines += [f"{name} is new" for name in sorted(new.keys() - old.keys()) if "/" not in name]
    return lines
