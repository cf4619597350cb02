"""Pictures of many shapes, and start models that supervised training has taken as far as it gets on them.

They are those of the studies `crowd` and `faint`, and, by way of `studies.partial_data`, of `partial_faint`,
`partial_fainter` and, but for the start model, `partial_cast` and `partial_cast_long`. Each is made once and kept.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from studies import new_class_data
from studies.dense_data import prepare_model
from studies.new_class_data import MATERIALS, Shift, draw, to_line, write_jsonl
from tools.cached import cached
from tools.make_demo import Scenes

FIRST_FURTHER = 1_000_000  # scene of the further test pictures, behind those of all splits


@dataclass(frozen=True)
class Crowds:
    """What a study of crowds starts from.

    Attributes:
        name: of the study.
        seed: of its pictures.
        splits: pictures in each.
        num_objects: in a picture.
        max_new_tokens: of an answer, with room for more objects than that.
        prepare_base: makes the model that the start model is trained from, if missing.
        num_further: further test pictures.
        version: raise it when pictures or start model are made differently; records of older material are stale.
    """

    name: str
    seed: int
    splits: dict[str, int]
    num_objects: range
    shift: Shift
    max_new_tokens: int
    prepare_base: Callable[[], object]
    scenes: Scenes = Scenes(max_objects=16, max_labels=3)
    num_further: int = 1024
    version: int = 1

    @property
    def root(self) -> Path:
        return Path("runs/study") / self.name

    @property
    def settings(self) -> list:
        """What its pictures are made with."""
        return [self.version, self.seed, self.splits, repr(self.scenes), repr(self.shift)]

    def prepare(self) -> None:
        """Make `data` and `model` below `root`, and the model that it starts from, if missing."""
        self.prepare_base()
        cached(self.root / "data", self.settings, "crowds of shapes", self.make_data)
        config = Path(f"studies/configs/{self.name}_warmup.yaml")
        prepare_model(self.root, self.settings, config, self.max_new_tokens)

    def prepare_further(self) -> Path:
        """Make the further test pictures in a folder of their own, if missing."""
        folder = self.root / "further"
        settings = [self.version, self.seed, self.num_further, FIRST_FURTHER, repr(self.scenes), repr(self.shift)]
        cached(folder, settings, "further test images", self.make_further)
        return folder

    def make_further(self, folder: Path) -> None:
        self.write_splits(folder, {"test": self.num_further}, FIRST_FURTHER)

    def make_data(self, folder: Path) -> None:
        self.write_splits(folder, self.splits)

    def write_splits(self, folder: Path, splits: dict[str, int], first: int = 0) -> None:
        """Write a JSONL file and the pictures of each split; no picture is in two."""
        numbers = itertools.count(first)
        for split, count in splits.items():
            (folder / split).mkdir()
            rows: list[dict] = []
            while len(rows) < count:
                number = next(numbers)
                image, objects = draw(self.seed, number, self.shift, self.scenes)
                if len(objects) in self.num_objects:
                    rows.append(to_line(folder, split, number, image, objects))
            write_jsonl(folder / f"{split}.jsonl", rows)


CROWD = Crowds(
    "crowd",
    seed=104,
    splits={"warmup": 8000, "train": 2000, "tune": 128, "test": 256},
    num_objects=range(8, 17),
    shift=Shift(contrast=0.3, noise=40.0, sizes=(0.06, 0.12)),
    max_new_tokens=464,
    prepare_base=partial(new_class_data.prepare, MATERIALS["new_class"]),
    version=2,
)
FAINT = Crowds(
    "faint",
    seed=105,
    splits={"warmup": 8000, "train": 2000, "tune": 256, "test": 512},
    num_objects=range(6, 11),
    shift=Shift(contrast=0.2, noise=40.0, sizes=(0.06, 0.12)),
    max_new_tokens=400,
    prepare_base=CROWD.prepare,
)
