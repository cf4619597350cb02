"""Images, start model and offline pseudo-labels of the studies of new classes. Each is made once and kept."""

import itertools
import json
import random
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from scipy.spatial.transform import Rotation

from tools.cached import cached
from tools.evaluate import generate_with_hf
from tools.export import additions
from tools.make_demo import Scenes, build_start_model, draw_scene
from tools.warmup_sft import load_warmup_config, warm_up
from utils.config.schema import Data, Model
from utils.data.encoding import load_processor
from utils.data.samples import Sample, load_samples
from utils.geometry import Object, bins_to_pixels
from utils.parsing import TokenTable, parse_answer
from utils.rollout.backend import RolloutSampling

SIDE = 128  # pixels
NEW_LABELS = ("yellow ring", "blue triangle")
WARMUP_CONFIG = "configs/demo/warmup.yaml"
SPLITS = {
    "warmup": 6000,
    "train": 1200,
    "tune": 128,
    "test": 256,
}  # images; "tune" decides settings, "test" only scores
REPLAYED = 0.1  # warm-up images for replay, in shares of the training images
FURTHER = range(20_000, 21_024)  # scenes of the further test images, behind those of all splits


@dataclass(frozen=True)
class Shift:
    """How the images of a study differ from those of its start model's warm-up.

    Attributes:
        contrast: factor on the distance of each pixel from the image's mean; a range: each object has its own.
        noise: standard deviation added to each channel, in grey levels of 255.
        sizes: as in `Scenes`.
    """

    contrast: float | tuple[float, float] = 1.0
    noise: float = 0.0
    sizes: tuple[float, float] = Scenes.sizes

    def coloured(self, pixels: np.ndarray) -> np.ndarray:
        """Return the pixels of an image, float64 `[height, width, 3]`, before contrast and noise."""
        return pixels


@dataclass(frozen=True)
class Cast(Shift):
    """A colour cast: all colours turn about the grey axis by `hue` degrees."""

    hue: float = 0.0

    def coloured(self, pixels: np.ndarray) -> np.ndarray:
        turned = Rotation.from_rotvec(np.full(3, np.deg2rad(self.hue) / 3**0.5))
        return turned.apply(pixels.reshape(-1, 3)).reshape(pixels.shape)


@dataclass(frozen=True)
class Material:
    """What a study starts from.

    Attributes:
        seed: of its images and of its start model.
        version: raise it when it is drawn, warmed up or labelled differently; records of older material are stale.
        is_portable: all of it is the same on all processors.
    """

    name: str
    seed: int
    warmup_steps: int
    shift: Shift = Shift()
    version: int = 1
    is_portable: bool = False

    @property
    def root(self) -> Path:
        return Path("runs/study") / self.name

    @property
    def settings(self) -> list:
        facts = asdict(self)
        del facts["is_portable"]
        return [facts.pop("version"), facts, SPLITS, NEW_LABELS]


MATERIALS = {
    "new_class": Material("new_class", seed=101, warmup_steps=1500),
    "shifted": Material("shifted", 102, 700, Shift(contrast=0.5, noise=20.0, sizes=(0.15, 0.32)), version=2),
}
PORTABLE = {
    name: replace(material, name=f"{name}_portable", version=material.version + 1, is_portable=True)
    for name, material in MATERIALS.items()
}


def prepare(material: Material) -> None:
    """Make `data`, `start`, `model`, pseudo-labels and images to replay below `material.root`, if missing."""
    torch.set_num_threads(1)
    root, settings = material.root, material.settings
    cached(root / "data", settings, "synthetic scenes", lambda folder: make_data(folder, material))
    made_with = prepare_model(root, settings, material.seed, material.warmup_steps, material.is_portable)
    cached(
        root / "pseudo",
        made_with,
        "pseudo-labels",
        lambda to: write_pseudo_labels(root / "model", root / "data/train.jsonl", to),
    )
    cached(root / "replay", [settings, REPLAYED], "images to replay", lambda to: write_replay(root / "data", to))


def prepare_further(material: Material) -> Path:
    """Make the further test images, fully annotated, if missing; return their folder, with `test.jsonl`."""
    folder = material.root / "further"
    made_with = [material.settings, FURTHER.start, FURTHER.stop]
    cached(folder, made_with, "further test images", lambda to: make_further(to, material))
    return folder


def make_further(folder: Path, material: Material) -> None:
    (folder / "test").mkdir()
    scenes = ((at, *draw(material.seed, at, material.shift, Scenes())) for at in FURTHER)
    write_jsonl(folder / "test.jsonl", [to_line(folder, "test", *scene) for scene in scenes])


def prepare_model(root: Path, settings: list, seed: int, steps: int, is_portable: bool = False) -> list:
    """Make `model` below `root`, if missing, from `data/warmup.jsonl`; return all that it is made with."""
    cached(root / "start", [seed], "untrained", lambda to: build_start_model(to, SIDE, seed=seed))
    cfg = load_warmup_config(WARMUP_CONFIG)
    data = cfg.train_jsonl[0].model_copy(update={"path": str(root / "data/warmup.jsonl")})
    paths = {"model": str(root / "start"), "train_jsonl": [data], "output_dir": str(root / "model")}
    cfg = cfg.model_copy(update=paths | {"seed": seed, "steps": steps} | ({"autocast": "off"} if is_portable else {}))
    made_with = [settings, cfg.model_dump()]
    cached(root / "model", made_with, "start model", lambda _: warm_up(cfg))
    return made_with


# ---------------------------------------------------------------------------------------------------------------------
# images


def make_data(folder: Path, material: Material, warmup_shift: Shift = Shift()) -> None:
    """Write `warmup`, `train`, `train_all`, `tune` and `test` (.jsonl) and their images; no scene is in two splits.

    No warm-up scene shows a new class. Each scene of `train` shows one at least and only those are annotated;
    `train_all` annotates everything in the same images. `tune` and `test` show and annotate all classes.
    """
    numbers = itertools.count()
    for split, count in SPLITS.items():
        (folder / split).mkdir(parents=True)
        rows: list[dict] = []
        while len(rows) < count:
            number = next(numbers)
            shift = warmup_shift if split == "warmup" else material.shift
            image, objects = draw(material.seed, number, shift, Scenes())
            has_new = any(item["desc"] in NEW_LABELS for item in objects)
            if (split == "warmup" and has_new) or (split == "train" and not has_new):
                continue
            rows.append(to_line(folder, split, number, image, objects))
        write_jsonl(folder / ("train_all.jsonl" if split == "train" else f"{split}.jsonl"), rows)
        if split == "train":
            only_new = [
                row | {"objects": [item for item in row["objects"] if item["desc"] in NEW_LABELS]} for row in rows
            ]
            write_jsonl(folder / "train.jsonl", only_new)


def write_replay(data: Path, folder: Path) -> None:
    """Write to `folder/train.jsonl` the first `REPLAYED` warm-up lines, in shares of the training images."""
    lines = [json.loads(line) for line in (data / "warmup.jsonl").open()][: round(REPLAYED * SPLITS["train"])]
    write_jsonl(folder / "train.jsonl", [absolute(row, data) for row in lines])


def absolute(row: dict, folder: Path) -> dict:
    """Return a line of a file in `folder` so that it can stand in any other file."""
    return row | {"images": [str((folder / image).resolve()) for image in row["images"]]}


def draw(seed: int, number: int, shift: Shift, scenes: Scenes) -> tuple[Image.Image, list[dict]]:
    """Return scene `number` of a seed and its objects, as `draw_scene` does, with a shift."""
    image, objects = draw_scene(random.Random(f"{seed}-{number}"), SIDE, replace(scenes, sizes=shift.sizes))
    pixels = shift.coloured(np.asarray(image, dtype=np.float64))
    rng = np.random.default_rng([seed, number])
    noise = rng.normal(0, shift.noise, pixels.shape)
    contrast = own_contrasts(rng, shift.contrast, objects) if isinstance(shift.contrast, tuple) else shift.contrast
    pixels = pixels.mean() + contrast * (pixels - pixels.mean()) + noise
    return Image.fromarray(np.clip(pixels.round(), 0, 255).astype(np.uint8)), objects


def own_contrasts(rng: np.random.Generator, limits: tuple[float, float], objects: Sequence[dict]) -> np.ndarray:
    """The contrast of each pixel, float64 `[SIDE, SIDE, 1]`: evenly drawn for each object, the least between them."""
    contrast = np.full((SIDE, SIDE, 1), limits[0])
    for item in objects:
        left, top, right, bottom = item["bbox_2d"]
        contrast[top : bottom + 1, left : right + 1] = rng.uniform(*limits)
    return contrast


def to_line(folder: Path, split: str, number: int, image: Image.Image, objects: list[dict]) -> dict:
    """Save the image below `folder/split`; return its line of `folder/split.jsonl`."""
    name = f"{split}/{number:06d}.png"
    image.save(folder / name, compress_level=1)
    return {"id": f"{split}-{number:06d}", "images": [name], "width": SIDE, "height": SIDE, "objects": objects}


def write_jsonl(path: Path, rows: Sequence[dict]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


# ---------------------------------------------------------------------------------------------------------------------
# pseudo-labels


def write_pseudo_labels(
    model: Path, data: Path, folder: Path, labels: Collection[str] = NEW_LABELS, max_new_tokens: int = 128
) -> None:
    """Write to `folder/train.jsonl` the lines of `data`, completed by what `model` sees besides.

    Args:
        labels: annotated in lines that name none.
    """
    rows = [json.loads(line) for line in data.open()]
    samples = load_samples([str(data)], Data().prompt, "file")[0]
    labelled = []
    for row, sample, answer in zip(rows, samples, answers(model, samples, max_new_tokens), strict=True):
        objects = merged_objects(row, sample, answer, row.pop("annotated", labels))
        labelled.append(absolute(row, data.parent) | {"objects": objects})
    write_jsonl(folder / "train.jsonl", labelled)


def answers(model: Path, samples: Sequence[Sample], max_new_tokens: int) -> list[list[Object]]:
    """Return what `model` sees in each image, by greedy answers."""
    processor = load_processor(model)
    table = TokenTable.from_tokenizer(processor.tokenizer)
    sampling = RolloutSampling(max_new_tokens=max_new_tokens)
    results = generate_with_hf(Model(path=str(model), dtype="float32"), processor, samples, sampling, 128)
    return [parse_answer(result.response_token_ids, table).pred_objects for result in results]


def merged_objects(row: dict, sample: Sample, predictions: Sequence[Object], labels: Collection[str]) -> list[dict]:
    """Return the objects of a line and the predictions that complete it, top to bottom, left to right; in pixels."""
    objects = list(row["objects"])
    for prediction in additions(sample.objects, predictions, labels):
        box = [round(value) for value in bins_to_pixels(prediction.coords, row["width"], row["height"])]
        if box[0] < box[2] and box[1] < box[3]:
            objects.append({"desc": prediction.desc, "bbox_2d": box})
    return sorted(objects, key=lambda item: (item["bbox_2d"][1], item["bbox_2d"][0]))
