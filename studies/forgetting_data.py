"""Images of the study of forgetting: a narrow set to learn, and the rest to keep. Made once and kept."""

import itertools
from pathlib import Path

from studies.new_class_data import Shift, draw, to_line, write_jsonl
from studies.partial_data import PORTABLE_ROOT, prepare_start
from tools.cached import cached
from tools.make_demo import COLOURS, SHAPES, Scenes

ROOT = Path("runs/study")
SEEDS = {"forgetting": 106, "forgetting_long": 107}  # of the images, by study
VERSION = 2  # raise it when images or start model are made differently; records of older material are stale
COLOUR = "yellow"
LABELS = tuple(f"{COLOUR} {shape}" for shape in SHAPES)
SHIFT = Shift(contrast=0.5, noise=20.0, sizes=(0.15, 0.32))
NARROW, REST = Scenes(colours=(COLOUR,)), Scenes(colours=tuple(colour for colour in COLOURS if colour != COLOUR))
SPLITS = {"train": (1200, 0), "tune": (64, 64), "test": (128, 128)}  # images of the narrow set and of the rest
KIND_NARROW, KIND_REST = (SHIFT, NARROW), (Shift(), REST)
FURTHER = range(20_000, 21_024)  # scenes of the further test images, behind those of all splits


def prepare(name: str) -> None:
    """Make `data` of a study, and the start model, if missing."""
    prepare_start(PORTABLE_ROOT)
    settings = [VERSION, SEEDS[name], SPLITS, repr(SHIFT)]
    cached(ROOT / name / "data", settings, "a narrow set and the rest", lambda to: make_data(to, SEEDS[name]))


def make_data(folder: Path, seed: int) -> None:
    """Write the images and a fully annotated file of each split; no scene is in two.

    The narrow set shows one colour in shifted images; the rest all other colours as the start model has learnt them.
    """
    numbers = itertools.count()
    for split, (narrow, rest) in SPLITS.items():
        (folder / split).mkdir()
        kinds = [KIND_NARROW] * narrow + [KIND_REST] * rest
        rows = [to_line(folder, split, at, *draw(seed, at, *kind)) for kind, at in zip(kinds, numbers, strict=False)]
        write_jsonl(folder / f"{split}.jsonl", rows)


def prepare_further(name: str) -> Path:
    """Make the further test images of a study, fully annotated, if missing; return their folder, with `test.jsonl`."""
    folder = ROOT / name / "further"
    settings = [VERSION, SEEDS[name], FURTHER.start, FURTHER.stop, repr(SHIFT)]
    cached(folder, settings, "further test images", lambda to: make_further(to, SEEDS[name]))
    return folder


def make_further(folder: Path, seed: int) -> None:
    """Write the images of both kinds by turns, so that each part of them has as many of either."""
    (folder / "test").mkdir()
    kinds = itertools.cycle((KIND_NARROW, KIND_REST))
    write_jsonl(
        folder / "test.jsonl",
        [to_line(folder, "test", at, *draw(seed, at, *kind)) for at, kind in zip(FURTHER, kinds, strict=False)],
    )
