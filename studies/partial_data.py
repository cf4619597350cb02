"""Images, start model and the labels of each share for the study of partial annotation. Each is made once and kept."""

import json
import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from studies.crowd_data import Crowds
from studies.new_class_data import (
    Cast,
    Shift,
    absolute,
    draw,
    prepare_model,
    to_line,
    write_jsonl,
    write_pseudo_labels,
)
from tools.cached import cached
from tools.make_demo import COLOURS, SHAPES, Scenes
from utils.config.schema import Data

ROOT = Path("runs/study/partial")
SEED = 105
WARMUP_STEPS = 800
PORTABLE_ROOT = Path("runs/study/partial_portable")  # of shares with the same start model on all processors
VERSION = 1  # raise it when images, labels or start model are made differently; records of older material are stale
PORTABLE_VERSION = 2
SPLITS = {"warmup": 6000, "train": 1200, "tune": 128, "test": 256}  # images
FURTHER = range(20_000, 22_048)  # scenes of the further test images, behind those of all splits
LABELS = tuple(f"{colour} {shape}" for colour in COLOURS for shape in SHAPES)


def prepare_start(root: Path = ROOT) -> list:
    """Make `data` and `model` below `root`, if missing; return all that they are made with."""
    is_portable = root == PORTABLE_ROOT
    settings = [PORTABLE_VERSION if is_portable else VERSION, SEED, SPLITS]
    cached(root / "data", settings, "synthetic scenes", make_data)
    return prepare_model(root, settings, SEED, WARMUP_STEPS, is_portable)


FAINT = Crowds(
    "partial_faint",
    seed=108,
    splits={"warmup": 8000, "train": 2000, "tune": 256, "test": 512},
    num_objects=range(3, 6),
    shift=Shift(contrast=(0.0, 0.5), noise=30.0, sizes=(0.12, 0.24)),
    max_new_tokens=192,
    prepare_base=prepare_start,
    scenes=Scenes(max_objects=5, max_labels=2),
    num_further=4096,
)
FAINTER = replace(
    FAINT, name="partial_fainter", seed=109, shift=replace(FAINT.shift, contrast=0.09), prepare_base=FAINT.prepare
)
CAST = Crowds(
    "partial_cast",
    seed=114,
    splits={"train": 2000, "tune": 256, "test": 512},
    num_objects=range(1, 5),
    shift=Cast(hue=33.0),
    max_new_tokens=128,
    prepare_base=prepare_start,
    scenes=Scenes(),
    num_further=2048,
)
CAST_LONG = replace(CAST, name="partial_cast_long", seed=115)


def prepare(share: float, root: Path = ROOT) -> None:
    """Make the start model and all files of a share, if missing."""
    torch.set_num_threads(1)
    prepare_share(root, share, prepare_start(root), max_new_tokens=128)


def prepare_crowds(crowds: Crowds) -> None:
    """The same for faint shapes, of which no image is complete."""
    crowds.prepare()
    prepare_share(crowds.root, 0.0, crowds.settings, crowds.max_new_tokens)


def prepare_cast(crowds: Crowds) -> None:
    """Make the pictures with a colour cast, each annotated for one class, whether it shows it or not, if missing.

    The start model is that of the other shares: it has never seen the cast.
    """
    torch.set_num_threads(1)
    made_with = [crowds.settings, prepare_start()]
    cached(crowds.root / "data", crowds.settings, "pictures with a colour cast", crowds.make_data)
    write_files(crowds.root / "0", crowds.root / "data", ROOT / "model", made_with, one_class, crowds.max_new_tokens)


def prepare_share(root: Path, share: float, made_with: list, max_new_tokens: int) -> None:
    """Make the files of a share from `data` and `model` below `root`, if missing."""
    made_with = [*made_with, share]
    annotate = partial(annotated, share=share)
    write_files(root / f"{share:g}", root / "data", root / "model", made_with, annotate, max_new_tokens)


def write_files(
    folder: Path, source: Path, model: Path, made_with: list, annotate: Callable[[dict], dict], max_new_tokens: int
) -> None:
    """Make `data` and `pseudo` below `folder` from the images of `source` and what `model` sees in them, if missing."""
    cached(folder / "data", made_with, "annotation", lambda to: write_annotation(source, to, annotate))
    cached(
        folder / "pseudo",
        made_with,
        "pseudo-labels",
        lambda to: write_pseudo_labels(model, folder / "data/train.jsonl", to, LABELS, max_new_tokens),
    )


def make_data(folder: Path) -> None:
    """Write the images and a fully annotated file of each split; no scene is in two."""
    number = 0
    for split, count in SPLITS.items():
        (folder / split).mkdir()
        rows = [to_line(folder, split, at, *draw(SEED, at, Shift(), Scenes())) for at in range(number, number + count)]
        write_jsonl(folder / f"{split}.jsonl", rows)
        number += count


def write_annotation(source: Path, folder: Path, annotate: Callable[[dict], dict]) -> None:
    """Write what the arms train on; `annotate` returns a training line with what is annotated of it.

    `train`, `complete` (its complete images only), `train_prompted` (the prompt says what is annotated), and `tune` and
    `test`, also with such prompts.
    """
    rows = {
        split: [absolute(json.loads(line), source) for line in (source / f"{split}.jsonl").open()]
        for split in ("train", "tune", "test")
    }
    rows["train"] = [annotate(row) for row in rows["train"]]
    if complete := [row for row in rows["train"] if "annotated" not in row]:
        write_jsonl(folder / "complete.jsonl", complete)
    for split, lines in rows.items():
        write_jsonl(folder / f"{split}.jsonl", lines)
        write_jsonl(folder / f"{split}_prompted.jsonl", [prompted(row) for row in lines])


def prepare_further() -> Path:
    """Make the further test images, fully annotated, if missing: `test` and, with prompts, `test_prompted` (.jsonl)."""
    folder = ROOT / "further"
    cached(folder, [VERSION, SEED, FURTHER.start, FURTHER.stop], "further test images", make_further)
    return folder


def make_further(folder: Path) -> None:
    (folder / "test").mkdir()
    lines = [to_line(folder, "test", at, *draw(SEED, at, Shift(), Scenes())) for at in FURTHER]
    write_jsonl(folder / "test.jsonl", lines)
    write_jsonl(folder / "test_prompted.jsonl", [prompted(row) for row in lines])


def prepare_further_crowds(crowds: Crowds) -> Path:
    """The same for faint shapes."""
    source, folder = crowds.prepare_further(), crowds.root / "further_prompted"
    made_with = [crowds.settings, crowds.num_further]
    cached(folder, made_with, "prompts of further test images", lambda to: write_test(source, to))
    return folder


def write_test(source: Path, folder: Path) -> None:
    """Write the further test images of `source` to `folder`, without and with prompts."""
    lines = [absolute(json.loads(line), source) for line in (source / "test.jsonl").open()]
    write_jsonl(folder / "test.jsonl", lines)
    write_jsonl(folder / "test_prompted.jsonl", [prompted(row) for row in lines])


def annotated(row: dict, share: float) -> dict:
    """Return a line as it is, with probability `share`, or with the objects of one class that it shows.

    An image that is complete is so at all larger shares.
    """
    rng = random.Random(f"{SEED}-{row['id']}")
    if rng.random() < share:
        return row
    shown = rng.choice(sorted({item["desc"] for item in row["objects"]}))
    return row | {"annotated": [shown], "objects": [item for item in row["objects"] if item["desc"] == shown]}


def one_class(row: dict) -> dict:
    """Return a line with the objects of one class, drawn of all twelve."""
    label = random.Random(f"{SEED}-{row['id']}").choice(LABELS)
    return row | {"annotated": [label], "objects": [item for item in row["objects"] if item["desc"] == label]}


def prompted(row: dict) -> dict:
    """Return a line whose prompt names the classes that it annotates."""
    return row | {"prompt": f"{Data().prompt} {', '.join(row.get('annotated', LABELS))}"}
