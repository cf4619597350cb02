"""Pictures of crowds of shapes, and the start model, for the study `crowd`. Each is made once and kept."""

import itertools
from pathlib import Path

import torch

from studies import new_class_data
from studies.new_class_data import MATERIALS, Shift, draw, to_line, write_jsonl
from studies.study import warm_up
from tools.make_demo import Scenes, cached
from tools.warmup_sft import load_warmup_config

ROOT = Path("runs/study/crowd")
SEED = 104
VERSION = 1  # raise it when pictures or start model are made differently; records of older material are stale
WARMUP_CONFIG = Path("studies/configs/crowd_warmup.yaml")
SCENES, SHIFT = Scenes(max_objects=16, max_labels=3), Shift(contrast=0.5, noise=25.0, sizes=(0.06, 0.12))
NUM_OBJECTS = range(8, 17)  # in a picture
MAX_NEW_TOKENS = 464
SPLITS = {"warmup": 8000, "train": 2000, "tune": 128, "test": 256}  # pictures
NUM_TRAIN = SPLITS["train"]


def prepare() -> None:
    """Make `data` and `model` below `ROOT`, and the model that it starts from, if missing."""
    scenes = MATERIALS["new_class"]
    new_class_data.prepare(scenes)
    torch.set_num_threads(1)
    settings = [VERSION, SEED, SPLITS, repr(SCENES), repr(SHIFT)]
    cached(ROOT / "data", settings, "crowds of shapes", make_data)
    cfg = load_warmup_config(WARMUP_CONFIG)
    cached(
        ROOT / "model",
        [settings, cfg.model_dump(), scenes.version],
        "start model",
        lambda to: warm_up(to, cfg, ROOT / "data" / "tune.jsonl", max_new_tokens=MAX_NEW_TOKENS),
    )


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
