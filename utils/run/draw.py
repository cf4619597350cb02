"""Objects drawn onto images, sheets of such images, coloured text. For people to look at; nothing is trained on it."""

import functools
from collections.abc import Sequence

from PIL import Image, ImageDraw, ImageFont

from utils.geometry import Object, bins_to_pixels

GROUND_TRUTH, PREDICTION = "#1a9850", "#d73027"
MAX_DESC = 28  # characters of a label that are drawn
FONTS = ("NotoSansCJK-Regular.ttc", "DejaVuSans.ttf")  # Pillow's own has little beyond ASCII


@functools.cache
def font_of(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    """The installed font that knows the most scripts, else Pillow's own, where what it lacks is an empty box."""
    for name in FONTS:
        try:
            return ImageFont.truetype(name, size)
        except OSError:
            continue
    return ImageFont.load_default(size=size)


def draw_objects(
    image: Image.Image,
    objects: Sequence[Object],
    colours: str | Sequence[str],
    side: int = 256,
    labels: Sequence[str] | None = None,
) -> Image.Image:
    """A copy of `image`, its longer side scaled to `side` pixels, with every object's outline and label.

    Args:
        colours: one for all objects, or one each.
        labels: one per object, by default its desc.
    """
    scale = side / max(image.size)
    size = (max(round(image.width * scale), 1), max(round(image.height * scale), 1))
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
    """The text on one line: whatever is not to be seen, line breaks too, is escaped."""
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def sheet(rows: Sequence[Sequence[Image.Image]], titles: Sequence[str], gap: int = 8) -> Image.Image:
    """Images in rows under column titles, on white."""
    width = max(image.width for row in rows for image in row)
    heights = [max(image.height for image in row) for row in rows]
    header = 28
    size = (gap + len(titles) * (width + gap), header + sum(heights) + gap * len(rows))
    canvas = Image.new("RGB", size, "white")
    draw = ImageDraw.Draw(canvas)
    font = font_of(16)
    for column, title in enumerate(titles):
        draw.text((gap + column * (width + gap), 5), title, fill="black", font=font)
    top = header
    for row, height in zip(rows, heights, strict=True):
        for column, image in enumerate(row):
            canvas.paste(image, (gap + column * (width + gap), top))
        top += height + gap
    return canvas


def text_panel(
    runs: Sequence[tuple[str, str | None]], width: int, max_lines: int = 40, size: int = 14, gap: int = 8
) -> Image.Image:
    """Text wrapped to `width` pixels, on white; the last line says so where more than `max_lines` would be needed.

    Args:
        runs: `(text, background)` in reading order, background None for plain; control characters are shown escaped.
    """
    font = font_of(size)
    advance: dict[str, float] = {}
    pieces: list[tuple[int, float, float, str, str | None]] = []  # line, left, right, text, background
    line, x = 0, float(gap)
    for text, background in runs:
        start, piece = x, ""
        for char in printable(text):
            if char not in advance:
                advance[char] = font.getlength(char)
            if x + advance[char] > width - gap and x > gap:
                pieces.append((line, start, x, piece, background))
                line, x, start, piece = line + 1, float(gap), float(gap), ""
                if line == max_lines:
                    break
            piece, x = piece + char, x + advance[char]
        if line == max_lines:
            pieces.append((line, gap, gap, "… (cut here; all of it is in the JSON file)", None))
            break
        pieces.append((line, start, x, piece, background))
    height = size + 5
    canvas = Image.new("RGB", (width, gap + (line + 1) * height), "white")
    draw = ImageDraw.Draw(canvas)
    for row, left, right, piece, background in pieces:
        top = gap // 2 + row * height
        if background is not None:
            draw.rectangle([left, top, right, top + height - 2], fill=background)
        draw.text((left, top), piece, fill="black", font=font)
    return canvas


def stack(images: Sequence[Image.Image]) -> Image.Image:
    """Images below each other, on white."""
    canvas = Image.new("RGB", (max(i.width for i in images), sum(i.height for i in images)), "white")
    top = 0
    for image in images:
        canvas.paste(image, (0, top))
        top += image.height
    return canvas
