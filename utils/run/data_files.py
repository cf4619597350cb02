"""The data files of a run: opened by all ranks, and checked against the config before anything heavy starts."""

import logging
import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from utils.config.load import Config, exit_with, problem
from utils.config.rules import length_limit
from utils.config.schema import RM, RS
from utils.data.encoding import grid_of, num_prompt_tokens, special_words
from utils.data.images import MAX_IMAGE_BYTES
from utils.data.index import NO_LENGTH, Checks, Index, IndexedFile, check_indexes, ensure_index, index_path
from utils.data.mistakes import report_skipped
from utils.data.samples import MAX_SHOWN, DataError, LineReader, Sample, warn_of_polygons
from utils.dist import Ranks
from utils.geometry import normal_label
from utils.parsing import TokenTable
from utils.rollout.link import is_loopback_url
from utils.run.inputs import INDEX_FOLDER, Digests, data_paths

logger = logging.getLogger(__name__)


def open_data(
    cfg: Config, ranks: Ranks, digests: Digests, processor: Any, table: TokenTable | None, rewards: Sequence[str]
) -> tuple[list[IndexedFile], list[IndexedFile]]:
    """Training and validation files whose samples all fit: rows, engines, and what servers may read (collective).

    Exit status 2 where they do not; the next start checks the files anew, since images can be made smaller, or moved,
    without a change of the file.
    """
    train, val = load_data(cfg, ranks, digests, processor, rewards)
    ranks.fence()  # no rank has still to open an index that rank 0 then forgets
    try:
        check_lengths(cfg, ranks.is_main, train, processor, val)
        check_ground_truth(cfg, ranks, train, table)
        check_images(cfg, ranks.is_main, train, val)
    except SystemExit:
        for file in [*train, *val] * ranks.is_main:
            file.index.forget()
        raise
    return train, val


def load_data(
    cfg: Config, ranks: Ranks, digests: Digests, processor: Any, rewards: Sequence[str] = ()
) -> tuple[list[IndexedFile], list[IndexedFile]]:
    """Training and validation files, whose lines rank 0 has checked in this run or an earlier one (DAT-6; collective).

    Exit status 2 with every problem listed; with `on_bad_sample: skip` bad lines are left out instead, and reported.
    """
    grids, special = grid_of(processor, cfg.rm.format), special_words(processor, cfg.rm.format)
    reader = LineReader(cfg.data.prompt, cfg.data.object_order, cfg.rm.format, grids, special, cfg.is_detection)
    checks = Checks(reader, partial(num_prompt_tokens, processor=processor), rewards)
    model_files = {name: found for name, found in digests["base_model"].items() if not name.endswith(".safetensors")}
    limits = [cfg.model.image_min_pixels, cfg.model.image_max_pixels]
    settings = [reader.prompt, reader.object_order, reader.form.name, list(rewards), model_files, limits]
    settings.append(reader.needs_objects)
    folder, skips_bad = Path(cfg.training.output_dir) / INDEX_FOLDER, cfg.data.on_bad_sample == "skip"
    paths = data_paths(cfg)
    targets = [index_path(folder, path, digests["data"][path]["blake2b"], settings) for path in paths]

    def check_files(alive: Callable[[], None]) -> str | None:
        files = dict(zip(targets, paths, strict=True))  # a file for both training and validation is one
        indexes = [ensure_index(target, path, checks, alive) for target, path in files.items()]
        try:
            check_indexes(indexes, folder, skips_bad)
        except DataError as error:
            return str(error)
        if skips_bad:
            bad = chain.from_iterable(index.bad_lines() for index in indexes)
            print(report_skipped(bad, cfg.training.output_dir), end="", flush=True)
        return None

    if problems := ranks.on_main(check_files):
        exit_with(problems, ranks.is_main)
    indexes = list(map(Index, targets))
    warn_of_polygons(sum(i.num_polygons for i in indexes), sum(i.num_objects for i in indexes), reader.form)
    warn_of_unknown_labels(cfg, indexes)
    train, val, left = [], [], cfg.training.eval_limit
    for spec in cfg.custom.train_jsonl:
        train.append(IndexedFile(spec.path, indexes.pop(0), reader, spec.annotated, spec.teacher_forced_ratio))
    for spec in cfg.custom.val_jsonl or []:
        val.append(IndexedFile(spec.path, indexes.pop(0), reader, spec.annotated, spec.teacher_forced_ratio, left))
        left = None if left is None else left - len(val[-1])
    return train, val


def warn_of_unknown_labels(cfg: Config, indexes: Sequence[Index]) -> None:
    """Name labels of `annotated` and of `new_labels` that no object of their files has: they may be misspelt.

    Args:
        indexes: of the training files, then of the validation files.
    """
    files = [*cfg.custom.train_jsonl, *(cfg.custom.val_jsonl or [])]
    for spec, index in zip(files, indexes, strict=True):
        _warn_of_unknown(f"annotated of {spec.path}", spec.annotated or [], [index])
    if validation := indexes[len(cfg.custom.train_jsonl) :]:
        _warn_of_unknown(f"{RM}.eval.new_labels", cfg.rm.eval.new_labels, validation)


def _warn_of_unknown(what: str, labels: Sequence[str], indexes: Sequence[Index]) -> None:
    known = [index.labels for index in indexes]
    unknown = [label for label in labels if not any(own is None or normal_label(label) in own for own in known)]
    if unknown:
        logger.warning("%s: no object there is called %s; is it misspelt?", what, ", ".join(unknown))


def check_lengths(
    cfg: Config, is_main: bool, train: Sequence[IndexedFile], processor: Any, val: Sequence[IndexedFile] = ()
) -> None:
    """Exit with status 2 and name the samples whose prompt + `max_new_tokens` fits no row or engine (CFG-15).

    Nothing is generated for a file that is only teacher-forced (DAT-5), nor for validation without an evaluation.
    """
    (path, limit), key = length_limit(cfg), cfg.rollout_path("max_new_tokens")
    files = [(f, cfg.rm.max_new_tokens * is_asked) for f, is_asked in with_generation(cfg, train, val)]

    def reason(sample: Sample, new_tokens: int) -> str:
        try:
            needed = num_prompt_tokens(sample, processor) + new_tokens
        except ValueError as error:
            return f"{sample.source}: {error}"
        return f"{sample.source}: prompt + {key}={new_tokens} make {needed} tokens"

    found = [
        (file, index, new_tokens)
        for file, new_tokens in files
        for index in np.flatnonzero((file.num_tokens > limit - new_tokens) | (file.num_tokens == NO_LENGTH))
    ]
    if found:
        reasons = [reason(file[index], new_tokens) for file, index, new_tokens in found[:MAX_SHOWN]]
        rule = f"{len(found)} of {sum(len(file) for file, _ in files)} samples do not fit; raise it, lower {key} or "
        line = problem(cfg, path, rule + "model.image_max_pixels or remove these samples")
        if limit == math.inf:
            line = problem(cfg, "custom.train_jsonl", f"{len(found)} samples cannot be encoded; mend or remove them")
        exit_with(f"{line}\n{DataError(reasons, len(found) - len(reasons))}", is_main)


def check_ground_truth(cfg: Config, ranks: Ranks, train: Sequence[IndexedFile], table: TokenTable | None) -> None:
    """Exit with status 2 and name the training samples whose prompt and whole ground truth fit no row (collective).

    A sample becomes such a sequence where it is teacher-forced or its answer is of no use, so that it would stop the
    run when it is drawn, and the resumed run as well (PCK-3). Where all fit, later starts need not look (DAT-6).
    """
    limit = cfg.global_max_length
    if cfg.is_grpo or limit is None or table is None:
        return

    def lengths(alive: Callable[[], None]) -> str | None:
        found = []
        unknown = [file for file in train if not file.index.truth_fits(limit)]
        for file in unknown:
            for index in np.flatnonzero(file.num_tokens + file.max_answer_tokens.astype(np.int64) >= limit):
                alive()
                sample = file[index]
                needed = file.num_tokens[index] + len(table.encode(cfg.rm.format.write(sample.objects))) + 1
                if needed > limit:
                    found.append(f"{sample.source}: prompt and ground truth make {needed} tokens")
        if not found:
            for file in unknown:
                file.index.note_truth_fits(limit)
            return None
        rule = f"{len(found)} training samples do not fit; raise it, or remove them"
        return f"{problem(cfg, 'global_max_length', rule)}\n{DataError(found[:MAX_SHOWN], len(found[MAX_SHOWN:]))}"

    if problems := ranks.on_main(lengths):
        exit_with(problems, ranks.is_main)


def with_generation(
    cfg: Config, train: Sequence[IndexedFile], val: Sequence[IndexedFile]
) -> list[tuple[IndexedFile, bool]]:
    """Each file, and whether anything is generated for it."""
    generates = [cfg.forced_ratio(spec.teacher_forced_ratio) < 1 for spec in cfg.custom.train_jsonl]
    generates += [bool(cfg.training.eval_steps or cfg.training.eval_at_start)] * len(val)
    return list(zip([*train, *val], generates, strict=True))


def check_images(cfg: Config, is_main: bool, train: Sequence[IndexedFile], val: Sequence[IndexedFile] = ()) -> None:
    """Exit with status 2 and name images that a rollout server would not read: they have too many pixels or bytes
    (SRV-10), or lie where a server on this machine may not read (SRV-5). Servers elsewhere may see other paths and
    links."""
    if not (cfg.rs and cfg.servers()):
        return
    files = [file for file, is_asked in with_generation(cfg, train, val) if is_asked]
    problems = [_too_many_pixels(cfg, files), _too_many_bytes(files)]
    here = [index for index, address in enumerate(cfg.servers()) if is_loopback_url(address.base_url)]
    problems += [_outside_roots(cfg, files, index) for index in here]
    if found := list(filter(None, dict.fromkeys(problems))):
        exit_with("\n".join(found), is_main)


def _too_many_pixels(cfg: Config, files: Sequence[IndexedFile]) -> str | None:
    limit = min(cfg.server_settings(index).max_image_pixels for index in range(len(cfg.servers())))
    found = [(file, index) for file in files for index in np.flatnonzero(file.num_pixels > limit)]
    if not found:
        return None
    most = max(int(file.num_pixels.max(initial=0)) for file in files)
    rule = f"the images of {len(found)} samples have more pixels, {most} at most; raise it or make them smaller"
    return f"{problem(cfg, f'{RS}.max_image_pixels', rule)}\n{_sources(found)}"


def _too_many_bytes(files: Sequence[IndexedFile]) -> str | None:
    found = [(file, index) for file in files for index in np.flatnonzero(file.num_larger(MAX_IMAGE_BYTES))]
    if not found:
        return None
    rule = f"a server reads image files of at most {MAX_IMAGE_BYTES >> 20} MiB; {len(found)} samples have a larger one"
    return f"{rule}: save it smaller, as PNG or JPEG\n{_sources(found)}"


def _sources(found: Sequence[tuple[IndexedFile, int]]) -> DataError:
    named = [file[index].source for file, index in found[:MAX_SHOWN]]
    return DataError(named, len(found) - len(named))


def _outside_roots(cfg: Config, files: Sequence[IndexedFile], index: int) -> str | None:
    roots = [Path(root).resolve() for root in cfg.image_roots(index)]
    found = [
        f"{file.path}:{number}: an image in {folder}"
        for file in files
        for folder, number in file.folders.items()
        if not any(Path(folder).is_relative_to(root) for root in roots)
    ]
    rule = "images lie outside the folders that a server may read (links are resolved); add theirs and start it again"
    return f"{problem(cfg, f'{RS}.allowed_image_roots', rule)}\n{DataError(found)}" if found else None
