"""Images of the study of forgetting: a narrow set to learn, and the rest to keep. Made once and kept."""

import itertools
from pathlib import Path

from studies.new_class_data import Shift, draw, to_line, write_jsonl
from studies.partial_data import prepare_start
from tools.cached import cached
from tools.make_demo import COLOURS, SHAPES, Scenes

ROOT = Path("runs/study")
SEEDS = {"forgetting": 106, "forgetting_long": 107}  # of the images, by study
VERSION = 1  # raise it when images are drawn differently; records of older material are stale
COLOUR = "yellow"
LABELS = tuple(f"{COLOUR} {shape}" for shape in SHAPES)
SHIFT = Shift(contrast=0.5, noise=20.0, sizes=(0.15, 0.32))
NARROW, REST = Scenes(colours=(COLOUR,)), Scenes(colours=tuple(colour for colour in COLOURS if colour != COLOUR))
SPLITS = {"train": (1200, 0), "tune": (64, 64), "test": (128, 128)}  # images of the narrow set and of the rest


def prepare(name: str) -> None:
    """Make `data` of a study, and the start model, if missing."""
    prepare_start()
    settings = [VERSION, SEEDS[name], SPLITS, repr(SHIFT)]
    cached(ROOT / name / "data", settings, "a narrow set and the rest", lambda to: make_data(to, SEEDS[name]))


def make_data(folder: Path, seed: int) -> None:
    """Write the images and a fully annotated file of each split; no scene is in two.

    The narrow set shows one colour in shifted images; the rest all other colours as the start model has learnt them.
    """
    numbers = itertools.count()
    for split, (narrow, rest) in SPLITS.items():
        (folder / split).mkdir()
        kinds = [(SHIFT, NARROW)] * narrow + [(Shift(), REST)] * rest
        rows = [to_line(folder, split, at, *draw(seed, at, *kind)) for kind, at in zip(kinds, numbers, strict=False)]
        write_jsonl(folder / f"{split}.jsonl", rows)
