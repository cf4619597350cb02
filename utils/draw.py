"""Objects drawn onto images, and sheets of such images. For people to look at; nothing is trained on it."""

from collections.abc import Sequence

from PIL import Image, ImageDraw, ImageFont

from utils.geometry import Object

GROUND_TRUTH, PREDICTION = "#1a9850", "#d73027"


def draw_objects(image: Image.Image, objects: Sequence[Object], colour: str, side: int = 256) -> Image.Image:
    """A copy of `image`, its longer side scaled to `side` pixels, with every object's outline and desc."""
    scale = side / max(image.size)
    canvas = image.convert("RGB").resize((round(image.width * scale), round(image.height * scale)))
    draw = ImageDraw.Draw(canvas)
    font = ImageFont.load_default(size=max(10, side // 20))
    for object_ in objects:
        points = [
            (x / 999 * canvas.width, y / 999 * canvas.height)
            for x, y in zip(object_.coords[0::2], object_.coords[1::2], strict=True)
        ]
        if object_.kind == "bbox_2d":
            draw.rectangle([points[0], points[1]], outline=colour, width=2)
        else:
            draw.polygon(points, outline=colour, width=2)
        left = min(x for x, _ in points)
        top = max(min(y for _, y in points) - side // 16, 0)
        box = draw.textbbox((left, top), object_.desc, font=font)
        draw.rectangle(box, fill="white")
        draw.text((left, top), object_.desc, fill=colour, font=font)
    return canvas


def sheet(rows: Sequence[Sequence[Image.Image]], titles: Sequence[str], gap: int = 8) -> Image.Image:
    """Images in rows under column titles, on white."""
    width = max(image.width for row in rows for image in row)
    heights = [max(image.height for image in row) for row in rows]
    header = 28
    size = (gap + len(titles) * (width + gap), header + sum(heights) + gap * len(rows))
    canvas = Image.new("RGB", size, "white")
    draw = ImageDraw.Draw(canvas)
    font = ImageFont.load_default(size=16)
    for column, title in enumerate(titles):
        draw.text((gap + column * (width + gap), 5), title, fill="black", font=font)
    top = header
    for row, height in zip(rows, heights, strict=True):
        for column, image in enumerate(row):
            canvas.paste(image, (gap + column * (width + gap), top))
        top += height + gap
    return canvas
