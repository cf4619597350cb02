"""Pictures of crowds of shapes, and the start model, for the study `crowd`. Each is made once and kept."""

import itertools
from pathlib import Path

from studies.dense_data import prepare_model
from studies.new_class_data import Shift, draw, to_line, write_jsonl
from tools.cached import cached
from tools.make_demo import Scenes

ROOT = Path("runs/study/crowd")
SEED = 104
VERSION = 2  # raise it when pictures or start model are made differently; records of older material are stale
WARMUP_CONFIG = Path("studies/configs/crowd_warmup.yaml")
SCENES, SHIFT = Scenes(max_objects=16, max_labels=3), Shift(contrast=0.3, noise=40.0, sizes=(0.06, 0.12))
NUM_OBJECTS = range(8, 17)  # in a picture
MAX_NEW_TOKENS = 464
SPLITS = {"warmup": 8000, "train": 2000, "tune": 128, "test": 256}  # pictures
NUM_TRAIN = SPLITS["train"]


def prepare() -> None:
    """Make `data` and `model` below `ROOT`, and the model that it starts from, if missing."""
    settings = [VERSION, SEED, SPLITS, repr(SCENES), repr(SHIFT)]
    cached(ROOT / "data", settings, "crowds of shapes", make_data)
    prepare_model(ROOT, settings, WARMUP_CONFIG, MAX_NEW_TOKENS)


def make_data(folder: Path) -> None:
    """Write a JSONL file and the pictures of each split; no picture is in two."""
    numbers = itertools.count()
    for split, count in SPLITS.items():
        (folder / split).mkdir()
        rows: list[dict] = []
        while len(rows) < count:
            number = next(numbers)
            image, objects = draw(SEED, number, SHIFT, SCENES)
            if len(objects) in NUM_OBJECTS:
                rows.append(to_line(folder, split, number, image, objects))
        write_jsonl(folder / f"{split}.jsonl", rows)
