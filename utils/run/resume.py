"""Checkpoint directories: written aside and renamed whole, checked before use, kept or deleted; and what a run that
goes on has to put right in its run directory (LRN-5). What a checkpoint holds is others' business.

    checkpoint-40/
      manifest.json     step, run id, ranks, resolved config; size and digest of every other file; written last
      state/            DeepSpeed's shards (trained parameters, optimizer) and one file per rank: data position, ...
      merged/ adapter/  the finished model (LRN-6)

`checkpoint-40.partial` is one that was never finished, `checkpoint-40.deleting` one that `save_total_limit` was at.
"""

import fcntl
import hashlib
import itertools
import json
import logging
import os
import random
import re
import shutil
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch

from utils.dist import DistributedError, Ranks, capture_error

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"
FORMAT = 1
_NAME = re.compile(r"checkpoint-(\d+)")

# What a checkpoint belongs to; everything else may change between two processes of a run.
FIXED = (
    "model.path",
    "model.dtype",
    "tuner",
    "custom.trainer_variant",
    "custom.train_jsonl",
    "training.seed",
    "training.packing",
    "deepspeed",
)


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint directory whose manifest could be read."""

    path: Path
    step: int  # optimizer steps done
    run_id: str  # of the process that wrote it
    world_size: int
    config: dict[str, Any]  # resolved
    files: dict[str, dict[str, Any]]  # relative path -> {"bytes", "blake2b"}


# ---------------------------------------------------------------------------------------------------------------------
# writing


def write_checkpoint(
    run_dir: Path,
    step: int,
    ranks: Ranks,
    write: Callable[[Path], None],
    *,
    run_id: str,
    config: Mapping[str, Any],
    save_total_limit: int | None = None,
) -> Path:
    """Make `checkpoint-STEP` (collective): `write(folder)` fills a folder aside, which then appears under its name.

    Args:
        write: a collective that fails on all ranks together.
        save_total_limit: complete checkpoints kept, the newest; older ones are deleted once this one is complete.

    Raises:
        DistributedError: on all ranks, whichever failed (a full disk); what was written is removed.
    """
    final = run_dir / f"checkpoint-{step}"
    partial, where = final.with_name(final.name + ".partial"), f"saving {final}"
    try:
        ranks.raise_on_all_ranks(capture_error(_make_empty, partial) if ranks.is_main else None, where)
        write(partial)
        names = ranks.gather_or_raise(_files_in(partial) if ranks.is_main else None, where)[0]
        digests: dict[str, dict[str, Any]] = {}
        error = capture_error(lambda: digests.update(_digests(partial, names[ranks.rank :: ranks.world_size])))
        parts = ranks.gather_or_raise(digests, where, error)
        if ranks.is_main:
            files = {name: facts for part in parts for name, facts in part.items()}
            facts = {"step": step, "run_id": run_id, "world_size": ranks.world_size, "config": config, "files": files}
            error = capture_error(_complete, partial, final, facts)
        ranks.raise_on_all_ranks(error, where)
    except DistributedError:
        if ranks.is_main:
            logger.error("%s could not be saved; %d MiB are free there", final, shutil.disk_usage(run_dir).free >> 20)
            shutil.rmtree(partial, ignore_errors=True)  # on a full disk this is what makes room again
        raise
    if ranks.is_main and save_total_limit is not None:
        delete_old(run_dir, save_total_limit)
    ranks.fence()
    return final


def _make_empty(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)


def _files_in(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def _digests(folder: Path, names: list[str]) -> dict[str, dict[str, Any]]:
    """Size and digest of files; each is on the disk, not only in memory, when this returns."""
    found = {}
    for name in names:
        with (folder / name).open("rb") as file:
            os.fsync(file.fileno())
            digest = hashlib.file_digest(file, _digest)
            found[name] = {"bytes": os.fstat(file.fileno()).st_size, "blake2b": digest.hexdigest()}
    return found


def _digest() -> Any:
    return hashlib.blake2b(digest_size=16)


def _complete(partial: Path, final: Path, facts: dict[str, Any]) -> None:
    """The manifest, then the name. A damaged checkpoint of that name, which the run did not resume from, is kept."""
    text = json.dumps({"format": FORMAT, **facts}, default=str)
    own_digest = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
    with (partial / MANIFEST).open("w") as file:
        file.write(f"{text}\n{own_digest}\n")
        file.flush()
        os.fsync(file.fileno())
    if final.exists():
        names = (final.with_name(f"{final.name}.damaged-{number}") for number in itertools.count(1))
        kept = next(path for path in names if not path.exists())
        final.rename(kept)
        logger.warning("%s was damaged and is kept as %s", final, kept)
    for folder in [*(path for path in partial.rglob("*") if path.is_dir()), partial]:
        _fsync_folder(folder)
    partial.rename(final)
    _fsync_folder(final.parent)


def _fsync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def delete_old(run_dir: Path, save_total_limit: int) -> None:
    """Delete all complete checkpoints but the newest `save_total_limit`; damaged ones neither count nor go.

    What cannot be deleted is named in a warning and stays.
    """
    whole = [path for path in checkpoint_folders(run_dir) if problem_of_sizes(path) is None]
    doomed = [path.rename(path.with_name(path.name + ".deleting")) for path in whole[save_total_limit:]]
    for path in {*doomed, *run_dir.glob("checkpoint-*.deleting")}:  # also what a kill left of an earlier deletion
        if (error := capture_error(shutil.rmtree, path)) is not None:
            logger.warning("an old checkpoint could not be deleted: %s", error)


# ---------------------------------------------------------------------------------------------------------------------
# finding


def checkpoint_folders(run_dir: Path) -> list[Path]:
    """Everything under a checkpoint's final name, newest (largest step) first."""
    found = [path for path in run_dir.glob("checkpoint-*") if _NAME.fullmatch(path.name)]
    return sorted(found, key=_step_of, reverse=True)


def _step_of(path: Path) -> int:
    return int(_NAME.fullmatch(path.name)[1])


def read_manifest(path: Path) -> Checkpoint:
    """Raises ValueError: there is none, or it is not what was written."""
    try:
        text, _, own_digest = (path / MANIFEST).read_text().rstrip("\n").rpartition("\n")
    except (OSError, ValueError) as error:
        raise ValueError(f"{MANIFEST} cannot be read ({error})") from None
    if hashlib.blake2b(text.encode(), digest_size=16).hexdigest() != own_digest:
        raise ValueError(f"{MANIFEST} was changed after it was written")
    facts = json.loads(text)
    if (written_by := facts.pop("format")) != FORMAT:
        raise ValueError(f"{MANIFEST} has format {written_by}, this version reads {FORMAT}")
    checkpoint = Checkpoint(path, **facts)
    if _NAME.fullmatch(path.name) and _step_of(path) != checkpoint.step:
        raise ValueError(f"it holds step {checkpoint.step}, its directory was renamed")
    return checkpoint


def problem_of_sizes(path: Path) -> str | None:
    """Why this is no complete checkpoint, as far as names and sizes tell; None if they tell nothing."""
    try:
        checkpoint = read_manifest(path)
    except ValueError as error:
        return str(error)
    for name, facts in checkpoint.files.items():
        try:
            size = (path / name).stat().st_size
        except OSError:
            return f"{name} is missing"
        if size != facts["bytes"]:
            return f"{name} has {size} bytes, {facts['bytes']} were written"
    return None


def problem_of(path: Path, ranks: Ranks) -> str | None:
    """Why this is no complete checkpoint, every byte read; the same on all ranks, which share the work (collective)."""
    problem = ranks.gather(problem_of_sizes(path) if ranks.is_main else None)[0]
    if problem is not None:
        return problem
    files = read_manifest(path).files
    for problem in ranks.gather(_changed_file(path, files, sorted(files)[ranks.rank :: ranks.world_size])):
        if problem is not None:
            return problem
    return None


def _changed_file(path: Path, files: Mapping[str, Mapping[str, Any]], names: list[str]) -> str | None:
    for name in names:
        try:
            with (path / name).open("rb") as file:
                digest = hashlib.file_digest(file, _digest).hexdigest()
        except OSError as error:
            return f"{name} cannot be read ({error})"
        if digest != files[name]["blake2b"]:
            return f"{name} was changed after it was written (its digest differs)"
    return None


def newest_complete(run_dir: Path, ranks: Ranks) -> tuple[Checkpoint | None, dict[str, str]]:
    """The newest complete checkpoint, and `{name: why not}` of all that were passed over (collective)."""
    passed_over = {path.name: "it was never finished" for path in sorted(run_dir.glob("checkpoint-*.partial"))}
    for path in ranks.gather(checkpoint_folders(run_dir) if ranks.is_main else None)[0]:
        if (problem := problem_of(path, ranks)) is None:
            return read_manifest(path), passed_over
        passed_over[path.name] = problem
    return None, passed_over


def choose_checkpoint(run_dir: Path, wanted: str | None, config: Mapping[str, Any], ranks: Ranks) -> Checkpoint | None:
    """What this run goes on from, None for a fresh start (collective; rank 0 decides about the run directory).

    Args:
        wanted: `training.resume_from_checkpoint`: null, `auto` or a checkpoint's path.
        config: resolved; must agree with the checkpoint's in `FIXED`.

    Raises:
        ValueError: on all ranks: a run directory that is in use, a checkpoint that cannot be gone on from; the message
            says what to do.
    """
    output = f"training.output_dir={run_dir}"
    used = ranks.gather((run_dir / "run.json").exists() or bool(checkpoint_folders(run_dir)))[0]
    if wanted is None:
        if used:
            raise ValueError(
                f"{output}: holds an earlier run; go on with it (--resume auto), choose another directory or remove it"
            )
        return None
    if wanted != "auto":
        checkpoint = _named_checkpoint(Path(wanted), run_dir, used, ranks)
    else:
        checkpoint, passed_over = newest_complete(run_dir, ranks)
        for name, why in passed_over.items():
            logger.warning("%s: passed over and left alone: %s", run_dir / name, why)
        damaged = [name for name in passed_over if _NAME.fullmatch(name)]
        if checkpoint is None and damaged:
            raise ValueError(
                f"{output}: none of its checkpoints is complete ("
                + "; ".join(f"{name}: {passed_over[name]}" for name in damaged)
                + "); repair one, or move them away to start from the beginning"
            )
    if checkpoint is None:
        logger.info("%s: no checkpoint yet, starting from the beginning", output)
        return None
    check_compatible(checkpoint, config, ranks.world_size)
    logger.info("going on from %s (step %d)", checkpoint.path, checkpoint.step)
    return checkpoint


def _named_checkpoint(path: Path, run_dir: Path, used: bool, ranks: Ranks) -> Checkpoint:
    setting = f"training.resume_from_checkpoint={path}"
    if (problem := problem_of(path, ranks)) is not None:
        raise ValueError(f"{setting}: not a complete checkpoint: {problem}; name another one, or auto")
    checkpoint = read_manifest(path)
    if used and path.resolve().parent != run_dir.resolve():
        raise ValueError(
            f"{setting}: lies outside training.output_dir={run_dir}, which holds a run of its own; "
            "go on with that one (--resume auto), or choose another directory"
        )
    later = [folder.name for folder in checkpoint_folders(run_dir) if _step_of(folder) > checkpoint.step]
    if later:
        raise ValueError(
            f"{setting}: {run_dir} also holds {', '.join(later)}, which the steps from {checkpoint.step} on would make "
            "untrue; move them away, or choose another training.output_dir"
        )
    return checkpoint


def check_compatible(checkpoint: Checkpoint, config: Mapping[str, Any], world_size: int) -> None:
    """The run can go on from the checkpoint; names other changes in the log.

    Raises:
        ValueError: names every setting that must not change, or the two numbers of ranks.
    """
    if checkpoint.world_size != world_size:
        raise ValueError(
            f"{checkpoint.path}: was written by {checkpoint.world_size} ranks, this run has {world_size}; optimizer "
            f"shards and waiting segments belong to their ranks, so resume with {checkpoint.world_size} ranks"
        )
    old, new = _flat(checkpoint.config), _flat(json.loads(json.dumps(config, default=str)))
    changed = {key: (old.get(key), new.get(key)) for key in old.keys() | new.keys() if old.get(key) != new.get(key)}
    fixed = [key for key in sorted(changed) if any(key == name or key.startswith(f"{name}.") for name in FIXED)]
    if fixed:
        listed = "; ".join("{} was {}, now {}".format(key, *map(json.dumps, changed[key])) for key in fixed)
        raise ValueError(f"{checkpoint.path}: belongs to other settings: {listed}; set them back, or start a new run")
    for key in sorted(changed.keys() - {"training.resume_from_checkpoint", "training.output_dir"}):
        logger.warning("since the checkpoint %s has changed from %s to %s", key, *map(json.dumps, changed[key]))


def _flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as dotted paths."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat


# ---------------------------------------------------------------------------------------------------------------------
# the run directory


class RunLock:
    """`run.lock` in the run directory: one live run per directory. Released when the process ends, however it ends.

    Raises:
        ValueError: another live run holds it; the message names its process and host.
    """

    def __init__(self, run_dir: Path) -> None:
        run_dir.mkdir(parents=True, exist_ok=True)
        self._file: BinaryIO = (run_dir / "run.lock").open("a+b")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.seek(0)
            holder = self._file.read().decode(errors="replace").strip() or "another process"
            self._file.close()
            raise ValueError(
                f"training.output_dir={run_dir}: in use by {holder}; end that run, or choose another directory"
            ) from None
        except OSError as error:  # file systems without locks
            logger.warning("%s cannot be locked (%s): nothing keeps a second run out of it", run_dir, error)
        self._file.truncate(0)
        self._file.write(f"process {os.getpid()} on {socket.gethostname()}".encode())
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def drop_records_after(run_dir: Path, step: int, keep_evaluation: bool = True) -> None:
    """Take back what an earlier process recorded of steps behind `step`, so that nothing is there twice.

    Args:
        keep_evaluation: False where the evaluation at `step` itself was not finished and will be made again.

    TensorBoard is `Monitor(purge_step=...)`'s business.
    """
    log = run_dir / "rollouts.jsonl"
    if log.exists():
        kept = [line for line in log.read_bytes().split(b"\n") if _is_kept(line, step, keep_evaluation)]
        aside = log.with_suffix(".partial")
        aside.write_bytes(b"".join(line + b"\n" for line in kept))
        aside.replace(log)
    for path in [*run_dir.glob("eval/step_*"), *run_dir.glob("dumps/step_*")]:
        if int(re.match(r"step_(\d+)", path.name)[1]) > step:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    for name in ("finished.json", "weights.json"):
        (run_dir / name).unlink(missing_ok=True)


def _is_kept(line: bytes, step: int, keep_evaluation: bool) -> bool:
    try:
        record = json.loads(line)
    except ValueError:  # torn by a kill
        return False
    is_unfinished = record["phase"] == "eval" and record["step"] == step and not keep_evaluation
    return record["step"] <= step and not is_unfinished


# ---------------------------------------------------------------------------------------------------------------------
# one rank's own state


def random_states(device: torch.device) -> dict[str, Any]:
    """States of all global random generators, of plain types and tensors."""
    name, keys, *rest = np.random.get_state()
    return {
        "python": random.getstate(),
        "numpy": (name, torch.from_numpy(keys.astype(np.int64)), *rest),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
    }


def set_random_states(states: Mapping[str, Any], device: torch.device) -> None:
    """Go on from `random_states()`."""
    random.setstate(states["python"])
    name, keys, *rest = states["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(states["torch"])
    if states["cuda"] is not None and device.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"], device)


def rank_file(checkpoint: Path, rank: int) -> Path:
    """Where rank `rank` keeps its own state."""
    return checkpoint / "state" / f"rank_{rank:05d}.pt"
