"""Checkpoint directories: write, verify, choose and delete them; lock and clean the directory of a resumed run (LRN-5).

    checkpoint-40/
      manifest.json     step, run id, ranks, resolved config, digests of the run's inputs; size and digest of every
                        other file; written last
      state/            DeepSpeed's shards (trained parameters, optimizer) and one file per rank: data position, ...
      merged/ adapter/  the finished model (LRN-6)

`checkpoint-40.partial` was never finished, and goes once another is; `checkpoint-40.deleting` is being deleted because
of `save_total_limit`.
Callers decide what a checkpoint contains.
"""

import fcntl
import functools
import hashlib
import itertools
import json
import logging
import math
import os
import random
import re
import shutil
import socket
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch

from utils.dist import DistributedError, Ranks, capture_error, outcome_of
from utils.run.monitor import best_steps, comparable_scores, evaluation_file, is_evaluated, write_whole
from utils.run.rollout_log import rollout_lines

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"
FORMAT = 1
_NAME = re.compile(r"checkpoint-(\d+)")
EARLIER_RUN = "holds an earlier run; resume it (--resume auto), choose another directory or remove it"
NUM_READERS = 8  # files hashed at a time: a merged model has one for each 4 GiB, and one core is slow
_blake2b = functools.partial(hashlib.blake2b, digest_size=16)

# Settings that a resumed run must share with its checkpoint; all others may change.
FIXED = (
    "model.path",
    "model.dtype",
    "tuner",
    "custom.trainer_variant",
    "custom.extra.rollout_matching.answer_format",
    "custom.train_jsonl",
    "training.seed",
    "training.packing",
    "deepspeed",
    *(
        f"deepspeed_file.zero_optimization.{key}"
        for key in ("stage", "offload_optimizer.device", "offload_param.device")
    ),
)

# Their product must stay: positions in the data and the schedule count steps of so many samples. Where micro-steps are
# prepared ahead, a checkpoint holds some of the old size.
BATCH = ("training.per_device_train_batch_size", "training.gradient_accumulation_steps")
AHEAD = "custom.extra.rollout_matching.async.enabled"


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint directory with a readable manifest."""

    path: Path
    step: int  # optimizer steps done
    run_id: str  # of the process that wrote it
    world_size: int
    config: dict[str, Any]  # resolved
    files: dict[str, dict[str, Any]]  # relative path -> {"bytes", "blake2b"}
    inputs: dict[str, Any] | None = None  # `utils.run.inputs.check_inputs`; None in checkpoints of earlier versions


def write_checkpoint(
    run_dir: Path,
    step: int,
    ranks: Ranks,
    write: Callable[[Path], None],
    *,
    run_id: str,
    config: Mapping[str, Any],
    inputs: Mapping[str, Any] | None = None,
    save_total_limit: int | None = None,
    eval_settings: Mapping[str, Any] | None = None,
) -> Path:
    """Make `checkpoint-STEP` (collective): `write(folder)` fills a `.partial` folder, which is then renamed.

    `write` is a collective that fails on all ranks together. `save_total_limit` is the number of complete checkpoints
    to keep, beside the best by evaluations with `eval_settings`; older ones are deleted once this one is complete, and
    so is what a killed process left of others.

    Raises:
        DistributedError: on all ranks if any rank failed (for instance on a full disk); the partial folder is removed.
    """
    final = run_dir / f"checkpoint-{step}"
    partial, where = final.with_name(final.name + ".partial"), f"saving {final}"
    try:
        if ranks.is_main:
            shutil.rmtree(partial, ignore_errors=True)
        ranks.raise_on_all_ranks(capture_error(os.makedirs, partial) if ranks.is_main else None, where)
        write(partial)
        found = partial.rglob("*") if ranks.is_main else []
        names = sorted(path.relative_to(partial).as_posix() for path in found if path.is_file())
        names = ranks.gather_or_raise(names, where)[0]
        own, error = outcome_of(_describe_files, partial, names[ranks.rank :: ranks.world_size])
        files = {name: facts for part in ranks.gather_or_raise(own, where, error) for name, facts in part.items()}
        if ranks.is_main:
            facts = {"step": step, "run_id": run_id, "world_size": ranks.world_size, "config": config, "files": files}
            facts["inputs"] = inputs
            error = capture_error(_complete, partial, final, facts)
        ranks.raise_on_all_ranks(error, where)
    except DistributedError:
        if ranks.is_main:
            logger.error("%s could not be saved; %d MiB are free there", final, shutil.disk_usage(run_dir).free >> 20)
            shutil.rmtree(partial, ignore_errors=True)  # on a full disk this makes room again
        raise
    if ranks.is_main:
        for other in run_dir.glob("checkpoint-*.partial"):
            shutil.rmtree(other, ignore_errors=True)
        if save_total_limit is not None:
            delete_old(run_dir, step, save_total_limit, eval_settings)
    ranks.fence()
    return final


def _describe_files(folder: Path, names: list[str]) -> dict[str, dict[str, Any]]:
    """Flush the named files to disk and return the size and digest of each; several files at a time."""

    def describe(name: str) -> dict[str, Any]:
        _fsync(folder / name)
        return {"bytes": (folder / name).stat().st_size, "blake2b": _digest_of(folder / name)}

    with ThreadPoolExecutor(NUM_READERS) as pool:
        return dict(zip(names, pool.map(describe, names), strict=True))


def _digest_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, _blake2b).hexdigest()


def _complete(partial: Path, final: Path, facts: dict[str, Any]) -> None:
    """Write the manifest, then rename. A damaged checkpoint of that name, which the run passed over, is kept."""
    text = json.dumps({"format": FORMAT, **facts}, default=str)
    (partial / MANIFEST).write_text(f"{text}\n{_blake2b(text.encode()).hexdigest()}\n")
    _fsync(partial / MANIFEST)
    if final.exists():
        paths = (final.with_name(f"{final.name}.damaged-{number}") for number in itertools.count(1))
        kept = final.rename(next(path for path in paths if not path.exists()))
        logger.warning("%s was damaged and is kept as %s", final, kept)
    for folder in [*(path for path in partial.rglob("*") if path.is_dir()), partial]:
        _fsync(folder)
    partial.rename(final)
    _fsync(final.parent)


def _fsync(path: Path) -> None:
    """Flush a file or folder to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def delete_old(run_dir: Path, step: int, save_total_limit: int, eval_settings: Mapping[str, Any] | None = None) -> None:
    """Delete complete checkpoints but the newest `save_total_limit` and the best of those that were evaluated, with
    `eval_settings`.

    Damaged ones are neither counted nor deleted, nor are those of steps after `step`, which was written just now. One
    whose evaluation cannot be read stays, as it may be the best.
    """
    whole = [path for path in folders_up_to(run_dir, step) if problem_of_sizes(path) is None]
    scores, were_best = comparable_scores(run_dir, eval_settings) if eval_settings else {}, best_steps(run_dir)
    evaluated = [path for path in reversed(whole) if _step_of(path) in scores]
    # Of equal ones the first. As long as none can be compared, the one that was the best stays.
    was_best = next((path for path in whole if _step_of(path) in were_best), None)
    best = max(evaluated, key=lambda path: scores[_step_of(path)], default=was_best)
    for path in run_dir.glob("checkpoint-*.deleting"):  # of a process killed halfway; in the way of a rename
        _delete(path)
    made = set(run_dir.glob("eval/step_*.json"))
    for path in whole[save_total_limit:]:
        at = _step_of(path)
        if path != best and (is_evaluated(run_dir, at) or evaluation_file(run_dir, at) not in made):
            _delete(path)


def _delete(path: Path) -> None:
    """Delete a folder, by its `.deleting` name. One that cannot be deleted is named in a warning and stays."""
    doomed = path.with_suffix(".deleting")
    if (error := capture_error(path.rename, doomed) or capture_error(shutil.rmtree, doomed)) is not None:
        logger.warning("an old checkpoint could not be deleted: %s", error)


def checkpoint_folders(run_dir: Path) -> list[Path]:
    """All folders with a checkpoint's final name, newest (largest step) first."""
    found = [path for path in run_dir.glob("checkpoint-*") if _NAME.fullmatch(path.name)]
    return sorted(found, key=_step_of, reverse=True)


def folders_up_to(run_dir: Path, step: int) -> list[Path]:
    """`checkpoint_folders` without those after `step`, which a run that has come so far passed over when it resumed:
    they are damaged, though names and sizes may look right."""
    return [path for path in checkpoint_folders(run_dir) if _step_of(path) <= step]


def _step_of(path: Path) -> int:
    return int(_NAME.fullmatch(path.name)[1])


def read_manifest(path: Path) -> Checkpoint:
    """Raises ValueError if there is no manifest or it is not as it was written."""
    try:
        text, _, digest = (path / MANIFEST).read_text().rstrip("\n").rpartition("\n")
    except (OSError, ValueError) as error:
        raise ValueError(f"{MANIFEST} cannot be read ({error})") from None
    if _blake2b(text.encode()).hexdigest() != digest:
        raise ValueError(f"{MANIFEST} was changed after it was written")
    facts = json.loads(text)
    if (written_by := facts.pop("format")) != FORMAT:
        raise ValueError(f"{MANIFEST} has format {written_by}, this version reads {FORMAT}")
    checkpoint = Checkpoint(path, **facts)
    if _NAME.fullmatch(path.name) and _step_of(path) != checkpoint.step:
        raise ValueError(f"it holds step {checkpoint.step}, its directory was renamed")
    return checkpoint


def problem_of_sizes(path: Path) -> str | None:
    """Reason why the checkpoint is not complete, judged by names and sizes; None if they are right."""
    try:
        return _problem_of_files(path, read_manifest(path).files.items())
    except ValueError as error:
        return str(error)


def problem_of(path: Path, ranks: Ranks) -> str | None:
    """Reason why the checkpoint is not complete, reading every byte; ranks split the files and agree (collective)."""
    problem = ranks.gather(problem_of_sizes(path) if ranks.is_main else None)[0]
    if problem is None:
        files = sorted(read_manifest(path).files.items())[ranks.rank :: ranks.world_size]
        problem = ranks.first(_problem_of_files(path, files, read=True))
    return problem


def _problem_of_files(path: Path, files: Iterable[tuple[str, dict[str, Any]]], read: bool = False) -> str | None:
    with ThreadPoolExecutor(NUM_READERS) as pool:
        return next(filter(None, pool.map(lambda file: _problem_of_file(path, *file, read), files)), None)


def _problem_of_file(path: Path, name: str, facts: dict[str, Any], read: bool) -> str | None:
    try:
        if (size := (path / name).stat().st_size) != facts["bytes"]:
            return f"{name} has {size} bytes, {facts['bytes']} were written"
        if read and _digest_of(path / name) != facts["blake2b"]:
            return f"{name} was changed after it was written (its digest differs)"
    except FileNotFoundError:
        return f"{name} is missing"
    except OSError as error:
        return f"{name} cannot be read ({error})"
    return None


def newest_complete(run_dir: Path, ranks: Ranks) -> tuple[Checkpoint | None, dict[str, str]]:
    """The newest complete checkpoint, and `{name: reason}` of all that were passed over (collective)."""
    passed_over = {path.name: "it was never finished" for path in sorted(run_dir.glob("checkpoint-*.partial"))}
    for path in map(Path, ranks.gather([str(path) for path in checkpoint_folders(run_dir)])[0]):
        if (problem := problem_of(path, ranks)) is None:
            return read_manifest(path), passed_over
        passed_over[path.name] = problem
    return None, passed_over


def holds_a_run(run_dir: Path) -> bool:
    """Whether a fresh start would meet another run's files."""
    return (run_dir / "run.json").exists() or bool(checkpoint_folders(run_dir))


def choose_checkpoint(run_dir: Path, wanted: str | None, config: Mapping[str, Any], ranks: Ranks) -> Checkpoint | None:
    """The checkpoint to resume from, None for a fresh start (collective; rank 0 decides what the run directory holds).

    `wanted` is null, `auto` or a checkpoint's path; the resolved config must agree with the checkpoint's in `FIXED`.

    Raises:
        ValueError: on all ranks: the run directory is in use, or the checkpoint cannot be resumed from.
    """
    used = ranks.gather(holds_a_run(run_dir))[0]
    if wanted is None:
        if used:
            raise ValueError(f"training.output_dir={run_dir}: {EARLIER_RUN}")
        return None
    checkpoint = _newest(run_dir, ranks) if wanted == "auto" else _named(Path(wanted), run_dir, used, ranks)
    if checkpoint is None:
        logger.info("training.output_dir=%s: no checkpoint yet, starting from the beginning", run_dir)
        return None
    check_compatible(checkpoint, config, ranks.world_size)
    logger.info("resuming from %s (step %d)", checkpoint.path, checkpoint.step)
    return checkpoint


def _newest(run_dir: Path, ranks: Ranks) -> Checkpoint | None:
    checkpoint, passed_over = newest_complete(run_dir, ranks)
    for name, reason in passed_over.items():
        logger.warning("%s: skipped, not deleted: %s", run_dir / name, reason)
    damaged = "; ".join(f"{name}: {reason}" for name, reason in passed_over.items() if _NAME.fullmatch(name))
    if checkpoint is None and damaged:
        raise ValueError(
            f"training.output_dir={run_dir}: none of its checkpoints is complete ({damaged}); repair one, or move them "
            "away to start from the beginning"
        )
    if checkpoint is None and (branched_from := ranks.gather(_branched_from(run_dir))[0]):
        return _named(Path(branched_from), run_dir, False, ranks)
    return checkpoint


def _branched_from(run_dir: Path) -> str | None:
    """The checkpoint of another run that this one, which has none of its own yet, has begun with.

    Raises: ValueError where run.json does not say: earlier versions may have left it torn.
    """
    path = run_dir / "run.json"
    try:
        record = json.loads(path.read_text()) if path.exists() else {}
    except ValueError as error:
        raise ValueError(
            f"{path}: is no whole JSON ({error}), so it does not say what this run, which has no checkpoint of its own "
            "yet, began with; remove it, then start the run again as at first"
        ) from None
    name = record.get("resumed_from", {}).get("checkpoint")
    return name if name and Path(name).resolve().parent != run_dir.resolve() else None


def _named(path: Path, run_dir: Path, used: bool, ranks: Ranks) -> Checkpoint:
    setting = f"training.resume_from_checkpoint={path}"
    if (problem := problem_of(path, ranks)) is not None:
        raise ValueError(f"{setting}: not a complete checkpoint: {problem}; name another one, or auto")
    checkpoint = read_manifest(path)
    if used and path.resolve().parent != run_dir.resolve():
        raise ValueError(
            f"{setting}: lies outside training.output_dir={run_dir}, which holds another run; "
            "resume that one (--resume auto), or choose another directory"
        )
    later = [folder.name for folder in checkpoint_folders(run_dir) if _step_of(folder) > checkpoint.step]
    if later:
        raise ValueError(
            f"{setting}: {run_dir} also holds {', '.join(later)}, which would no longer belong to this run; "
            "move them away, or choose another training.output_dir"
        )
    return checkpoint


def check_compatible(checkpoint: Checkpoint, config: Mapping[str, Any], world_size: int) -> None:
    """Check that a run with `config` can resume from the checkpoint; log the settings that changed.

    Raises: ValueError, with every changed setting of `FIXED`, or the two numbers of ranks.
    """
    if checkpoint.world_size != world_size:
        raise ValueError(
            f"{checkpoint.path}: was written by {checkpoint.world_size} ranks, this run has {world_size}; optimizer "
            f"shards and waiting segments belong to their ranks, so resume with {checkpoint.world_size} ranks"
        )
    old, new = _flatten(checkpoint.config), _flatten(json.loads(json.dumps(config, default=str)))
    changed = {key: (old.get(key), new.get(key)) for key in old.keys() | new.keys() if old.get(key) != new.get(key)}
    if "deepspeed_file" not in checkpoint.config:  # of an earlier version
        changed = {key: values for key, values in changed.items() if not key.startswith("deepspeed_file.")}
    fixed = [key for key in sorted(changed) if any(key == name or key.startswith(f"{name}.") for name in FIXED)]
    sizes = {math.prod(flat.get(key, 1) for key in BATCH) for flat in (old, new)}
    if len(sizes) > 1 or any(flat.get(AHEAD) for flat in (old, new)):
        fixed += sorted(changed.keys() & set(BATCH))
    if fixed:
        listed = "; ".join("{} was {}, now {}".format(key, *map(json.dumps, changed[key])) for key in fixed)
        raise ValueError(f"{checkpoint.path}: has other settings: {listed}; set them back, or start a new run")
    for key in sorted(changed.keys() - {"training.resume_from_checkpoint", "training.output_dir"}):
        logger.warning("since the checkpoint %s has changed from %s to %s", key, *map(json.dumps, changed[key]))


def _flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as dotted paths."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        flat |= _flatten(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat


class RunLock:
    """Lock on `run.lock` in the run directory, until the process ends: one live run per directory.

    Raises: ValueError, with process and host of the live run that owns it.
    """

    def __init__(self, run_dir: Path) -> None:
        run_dir.mkdir(parents=True, exist_ok=True)
        self._file: BinaryIO = (run_dir / "run.lock").open("a+b")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.seek(0)
            owner = self._file.read().decode(errors="replace").strip() or "another process"
            self._file.close()
            raise ValueError(
                f"training.output_dir={run_dir}: in use by {owner}; end that run, or choose another directory"
            ) from None
        except OSError as error:  # file systems without locks
            logger.warning("%s cannot be locked (%s): nothing keeps a second run out of it", run_dir, error)
        self._file.truncate(0)
        self._file.write(f"process {os.getpid()} on {socket.gethostname()}".encode())
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def drop_records_after(run_dir: Path, step: int, keep_evaluation: bool = True) -> None:
    """Remove what an earlier process recorded about steps after `step`, so that nothing is recorded twice.

    `RunFacts.purge_step` does the same for TensorBoard. `keep_evaluation` is False if the evaluation at `step`
    itself was not finished and will be repeated.
    """
    log = run_dir / "rollouts.jsonl"
    if log.exists():
        unfinished = None if keep_evaluation else ("eval", step)
        kept = (line for line in rollout_lines(log) if line["step"] <= step)
        write_whole(log, (json.dumps(line) + "\n" for line in kept if (line["phase"], line["step"]) != unfinished))
    for path in [*run_dir.glob("eval/step_*"), *run_dir.glob("dumps/step_*")]:
        if (found := re.fullmatch(r"step_(\d+)(\..*)?", path.name)) and int(found[1]) > step:  # others are not ours
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    for name in ("finished.json", "weights.json"):
        (run_dir / name).unlink(missing_ok=True)


def random_states(device: torch.device) -> dict[str, Any]:
    """States of all global random generators, as plain types and tensors."""
    name, keys, *rest = np.random.get_state()
    return {
        "python": random.getstate(),
        "numpy": (name, torch.from_numpy(keys.astype(np.int64)), *rest),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
    }


def set_random_states(states: Mapping[str, Any], device: torch.device) -> None:
    """Restore the states of `random_states()`."""
    random.setstate(states["python"])
    name, keys, *rest = states["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(states["torch"])
    if states["cuda"] is not None and device.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"], device)


def rank_file(checkpoint: Path, rank: int) -> Path:
    """The file with the own state of rank `rank`."""
    return checkpoint / "state" / f"rank_{rank:05d}.pt"
