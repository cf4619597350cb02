"""Draw samples of a data file with their objects, to look at before training.

    python -m tools.show_jsonl --data data/train.jsonl --output sheets --num 16 --seed 0

Writes one sheet (`sheets/train.png`), or with `--separate` one picture per sample. Samples are chosen at random from
the whole file and shown in file order. Objects with the same description have the same colour in all pictures; each
caption gives the line, the id and the number of objects.
"""

import argparse
import colorsys
import random
import zlib
from collections.abc import Sequence
from pathlib import Path

from PIL import Image, PngImagePlugin

from utils.config.load import exit_with
from utils.config.plan import at_least_one
from utils.data.images import open_image
from utils.data.samples import DataError, Sample, read_samples
from utils.run.draw import draw_objects, sheet, stack, text_panel

MARK = ("Software", "tools.show_jsonl")  # a text in each picture


def pick_samples(path: str | Path, num: int, seed: int, prompt: str | None = None) -> list[Sample]:
    """Choose `num` samples at random, in file order; all of them if the file has no more.

    Raises:
        DataError: a chosen line cannot be used, or the file cannot be read.
    """
    try:
        with open(path, "rb") as file:
            numbers = [number for number, line in enumerate(file, start=1) if line.strip()]
    except OSError:
        numbers = []  # read_samples reports the error below, with the same message as in training
    chosen = set(random.Random(seed).sample(numbers, min(num, len(numbers))))
    items = list(read_samples(path, prompt, only=chosen))
    problems = [message for item in items if not isinstance(item, Sample) for message in item.messages()]
    if problems:
        raise DataError(problems)
    return items


def colour_of(desc: str) -> str:
    """Return a dark, saturated colour that depends on the text alone."""
    hue = zlib.crc32(desc.encode()) % 360 / 360
    return "#" + "".join(f"{round(255 * part):02x}" for part in colorsys.hsv_to_rgb(hue, 0.9, 0.75))


def picture(sample: Sample, side: int) -> Image.Image:
    """Draw all objects on the sample's first image, with a caption of line, id and number of objects.

    Raises:
        OSError: the image cannot be read.
    """
    number = sample.source.rpartition(":")[2]
    own_id = "" if sample.id == sample.source else f" id {sample.id},"
    caption = f"line {number},{own_id} {len(sample.objects)} objects"
    if len(sample.images) > 1:
        caption += f", first of {len(sample.images)} images"
    if not sample.images:
        return text_panel([(f"{caption}, no image", None)], side)
    drawn = draw_objects(
        open_image(sample.images[0]), sample.objects, [colour_of(o.desc) for o in sample.objects], side
    )
    return stack([drawn, text_panel([(caption, None)], side, max_lines=3)])


def show(
    samples: Sequence[Sample], target: Path, columns: int = 4, side: int = 384, separate: bool = False
) -> list[Path]:
    """Write the pictures and return their paths. `target`: the sheet's path without its extension.

    Raises: ValueError where a picture would replace a file that is none of ours.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    pictures = [picture(sample, side) for sample in samples]
    if not separate:
        rows = [pictures[i : i + columns] for i in range(0, len(pictures), columns)]
        named = {f"{target.name}.png": sheet(rows, [""] * len(rows[0]))}
    else:
        numbers = [sample.source.rpartition(":")[2] for sample in samples]
        named = {f"{target.name}_{number}.png": image for number, image in zip(numbers, pictures, strict=True)}
    written = {target.with_name(name): image for name, image in named.items()}
    for path in written:
        if path.exists() and not is_own(path):  # an image of the data, for one
            rule = "exists, and would be overwritten; name another --output, or delete it"
            raise ValueError(f"{path}: {rule}")
    mark = PngImagePlugin.PngInfo()
    mark.add_text(*MARK)
    for path, image in written.items():
        image.save(path, pnginfo=mark)
    return list(written)


def is_own(path: Path) -> bool:
    """Whether this program has written the picture."""
    try:
        with Image.open(path) as image:
            return image.info.get(MARK[0]) == MARK[1]
    except (OSError, ValueError, Image.DecompressionBombError):
        return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--data", required=True, metavar="FILE", help="JSONL data file")
    add("--output", required=True, metavar="DIR", help="folder for the pictures")
    add("--num", type=at_least_one, default=16, metavar="N", help="number of samples (default 16)")
    add("--seed", type=int, default=0, help="seed of the random choice (default 0)")
    add("--columns", type=at_least_one, default=4, metavar="N", help="pictures per row of the sheet (default 4)")
    add("--side", type=at_least_one, default=384, metavar="PX", help="longer side of each image (default 384)")
    add("--separate", action="store_true", help="write one file per sample, named by its line")
    args = parser.parse_args()
    try:
        samples = pick_samples(args.data, args.num, args.seed, prompt="(none)")
        paths = show(samples, Path(args.output) / Path(args.data).stem, args.columns, args.side, args.separate)
    except (DataError, ValueError, OSError) as error:
        exit_with(error)
    print("\n".join(map(str, paths)))


if __name__ == "__main__":
    main()
