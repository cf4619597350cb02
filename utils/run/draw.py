"""Pictures for people to look at: objects drawn onto images, sheets of such images, highlighted text."""

import contextlib
import functools
from collections.abc import Sequence

from PIL import Image, ImageDraw, ImageFont

from utils.geometry import Object, bins_to_pixels

GROUND_TRUTH, PREDICTION = "#1a9850", "#d73027"
MAX_DESC = 28  # characters of a label that are drawn
FONTS = ("NotoSansCJK-Regular.ttc", "DejaVuSans.ttf")  # Pillow's own has little beyond ASCII
GAP = 8  # pixels around images and texts


@functools.cache
def font_of(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    """The installed font with the most scripts, else Pillow's own, which draws an empty box for what it lacks."""
    for name in FONTS:
        with contextlib.suppress(OSError):
            return ImageFont.truetype(name, size)
    return ImageFont.load_default(size=size)


def draw_objects(
    image: Image.Image,
    objects: Sequence[Object],
    colours: str | Sequence[str],
    side: int = 256,
    labels: Sequence[str] | None = None,
) -> Image.Image:
    """A copy of `image`, its longer side scaled to `side` pixels, with every object's outline and label.

    `colours` is one for all objects, or one each; a label is by default the object's desc.
    """
    size = tuple(max(round(pixels * side / max(image.size)), 1) for pixels in image.size)
    canvas = image.convert("RGB").resize(size)
    draw = ImageDraw.Draw(canvas)
    font = font_of(max(10, side // 20))
    colours = [colours] * len(objects) if isinstance(colours, str) else colours
    labels = [object_.desc for object_ in objects] if labels is None else labels
    for object_, colour, label in zip(objects, colours, labels, strict=True):
        coords = bins_to_pixels(object_.coords, *size)
        points = list(zip(coords[0::2], coords[1::2], strict=True))
        if object_.kind == "bbox_2d":
            draw.rectangle([points[0], points[1]], outline=colour, width=2)
        else:
            draw.polygon(points, outline=colour, width=2)
        text = printable(label if len(label) <= MAX_DESC else label[: MAX_DESC - 1] + "…")
        left = max(min(min(coords[0::2]), canvas.width - draw.textlength(text, font=font)), 0)
        top = max(min(coords[1::2]) - side // 16, 0)
        box = draw.textbbox((left, top), text, font=font)
        draw.rectangle(box, fill="white")
        draw.text((left, top), text, fill=colour, font=font)
    return canvas


def printable(text: str) -> str:
    """The text on one line: characters that cannot be seen, line breaks included, are escaped."""
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def sheet(rows: Sequence[Sequence[Image.Image]], titles: Sequence[str]) -> Image.Image:
    """Images in rows under column titles, on white."""
    column_width = max(image.width for row in rows for image in row) + GAP
    heights = [max(image.height for image in row) + GAP for row in rows]
    top = 28  # below the titles
    canvas = Image.new("RGB", (GAP + len(titles) * column_width, top + sum(heights)), "white")
    draw = ImageDraw.Draw(canvas)
    for column, title in enumerate(titles):
        draw.text((GAP + column * column_width, 5), title, fill="black", font=font_of(16))
    for row, height in zip(rows, heights, strict=True):
        for column, image in enumerate(row):
            canvas.paste(image, (GAP + column * column_width, top))
        top += height
    return canvas


def text_panel(runs: Sequence[tuple[str, str | None]], width: int, max_lines: int = 40) -> Image.Image:
    """Text wrapped to `width` pixels, on white; after `max_lines` lines it is cut, and the last line says so.

    `runs` are (text, background) in reading order, background None for plain; control characters are shown escaped.
    """
    font, line_height = font_of(14), 19
    advance_of = functools.cache(font.getlength)
    pieces: list[tuple[int, float, float, str, str | None]] = []  # line, left, right, text, background
    line, x = 0, float(GAP)
    for text, background in runs:
        start, piece = x, ""
        for char in printable(text):
            if x + advance_of(char) > width - GAP and x > GAP:
                pieces.append((line, start, x, piece, background))
                line, x, start, piece = line + 1, float(GAP), float(GAP), ""
            piece, x = piece + char, x + advance_of(char)
        pieces.append((line, start, x, piece, background))
    if line >= max_lines:
        line, pieces = max_lines, [piece for piece in pieces if piece[0] < max_lines]
        pieces.append((line, GAP, GAP, "… (cut here; all of it is in the JSON file)", None))
    canvas = Image.new("RGB", (width, GAP + (line + 1) * line_height), "white")
    draw = ImageDraw.Draw(canvas)
    for row, left, right, piece, background in pieces:
        top = GAP // 2 + row * line_height
        if background is not None:
            draw.rectangle([left, top, right, top + line_height - 2], fill=background)
        draw.text((left, top), piece, fill="black", font=font)
    return canvas


def stack(images: Sequence[Image.Image]) -> Image.Image:
    """Images below each other, on white."""
    canvas = Image.new("RGB", (max(image.width for image in images), sum(image.height for image in images)), "white")
    top = 0
    for image in images:
        canvas.paste(image, (0, top))
        top += image.height
    return canvas
