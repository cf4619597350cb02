"""Pictures for people: where lines are drawn, and that no shape or text breaks them (LOG-4)."""

import numpy as np
import pytest
from PIL import Image

from utils.geometry import Object
from utils.run.draw import draw_objects, sheet, stack, text_panel

RED, BLUE = "#ff0000", "#0000ff"


def pixels_of(image: Image.Image, colour: tuple[int, int, int]) -> np.ndarray:
    """(x, y) of every pixel of exactly that colour, `[n, 2]`."""
    rows, cols = np.nonzero((np.asarray(image) == colour).all(axis=-1))
    return np.stack([cols, rows], axis=1)


def test_a_box_is_drawn_where_its_bins_say():
    """The outline of 250..750 of 999 on a canvas of 400 x 200 pixels; the image itself is unchanged."""
    image = Image.new("RGB", (200, 100))
    drawn = draw_objects(image, [Object("a", "bbox_2d", (250, 500, 750, 900))], RED, side=400, labels=[""])
    assert drawn.size == (400, 200) and not np.asarray(image).any()
    found = pixels_of(drawn, (255, 0, 0))
    assert found.min(axis=0).tolist() == [100, 100] and found.max(axis=0).tolist() == [300, 180]


def test_every_object_has_its_own_colour():
    objects = [Object("a", "bbox_2d", (0, 0, 300, 300)), Object("b", "poly", (500, 500, 900, 500, 700, 900))]
    drawn = draw_objects(Image.new("RGB", (99, 99)), objects, [RED, BLUE])
    assert len(pixels_of(drawn, (255, 0, 0))) > 100 and len(pixels_of(drawn, (0, 0, 255))) > 100
    assert pixels_of(drawn, (0, 0, 255))[:, 0].max() <= 256


@pytest.mark.parametrize("size", [(1000, 1), (1, 1000), (640, 360), (1, 1)])
def test_no_shape_and_no_desc_breaks_a_picture(size):
    """Extreme images; boxes without area, on the border; descs long, empty, or in other scripts."""
    objects = [
        Object("猫" * 40, "bbox_2d", (999, 999, 999, 999)),
        Object("", "bbox_2d", (0, 0, 999, 0)),
        Object("line\nbreak", "poly", (5, 5, 5, 5, 5, 5)),
    ]
    drawn = draw_objects(Image.new("L", size), objects, RED, side=64)
    assert max(drawn.size) == 64 and min(drawn.size) >= 1
    assert draw_objects(Image.new("RGB", size), [], RED).mode == "RGB"


def test_a_label_at_the_right_border_stays_inside():
    drawn = draw_objects(Image.new("RGB", (256, 256)), [Object("long label", "bbox_2d", (980, 500, 999, 600))], RED)
    assert pixels_of(drawn, (255, 255, 255))[:, 0].min() < 230


def test_sheet_and_stack_hold_all_their_images():
    wide, tall = Image.new("RGB", (50, 10), RED), Image.new("RGB", (10, 60), BLUE)
    board = sheet([[wide, tall], [wide, wide]], ("left", "right"))
    assert board.size == (8 + 2 * 58, 28 + 60 + 10 + 16)
    assert len(pixels_of(board, (255, 0, 0))) == 3 * 500 and len(pixels_of(board, (0, 0, 255))) == 600
    pile = stack([wide, tall])
    assert pile.size == (50, 70) and len(pixels_of(pile, (255, 0, 0))) == 500


def test_text_is_wrapped_marked_and_cut():
    """Wrapped text is higher, never wider; a background covers its own run only; too much text is cut."""
    short, long = (text_panel([("word " * n, None)], 200) for n in (2, 60))
    assert short.width == long.width == 200 and long.height > 4 * short.height
    marked = text_panel([("plain ", None), ("marked", "#00ff00"), (" plain", None)], 400)
    found = pixels_of(marked, (0, 255, 0))
    assert len(found) > 50 and found[:, 0].min() > 30 and found[:, 0].max() < 150
    assert (
        text_panel([("x" * 100_000, None)], 200, max_lines=5).height == text_panel([("x" * 9_000, None)], 200, 5).height
    )
    assert text_panel([], 100).height > 0
    assert text_panel([("\n\t\x00\ud800猫", None)], 5).width == 5
