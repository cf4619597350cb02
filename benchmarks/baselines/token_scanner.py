"""A straightforward way from a generated answer to a training batch: loops over tokens, characters and pairs.

A trainer that nobody tuned for long answers looks like this, with the same library for overlaps (shapely), the same
solver (scipy) and the tokenizer's own encode. `tuned` adds two cheap improvements: token texts from a list made once
instead of decoding each token, and shapes built once per object instead of once per pair. The format is that of
`utils.targets.format_objects`. On well-formed answers the results equal those of `utils.parsing`, which handles
malformed ones better.
"""

import json
import math
from functools import cache
from typing import Any

import shapely
import torch
from scipy.optimize import linear_sum_assignment

from utils.answer_format import COORD_TOKENS
from utils.geometry import Object, regression_targets
from utils.parsing import TokenTable


class Scanner:
    """Parse, match and build targets with one tokenizer of transformers."""

    def __init__(self, tokenizer: Any, table: TokenTable, tuned: bool) -> None:
        self.table, self.tuned = table, tuned
        text_of = [text.decode(errors="replace") for text in table.bytes_of]
        self.text_of = text_of.__getitem__ if tuned else lambda token: tokenizer.decode([token])
        self.bin_of = {token: value for value, token in enumerate(table.coord_ids.tolist())}

    def parse(self, token_ids: list[int]) -> tuple[list[tuple[Object, list[int], int]], tuple[int, int]]:
        """Return all objects as `(object, token index of each coordinate, index of its first token)`, and where the
        last one ends: the token, and how many of its characters belong to the object."""
        found, depth, in_string, escaped, last = [], 0, False, False, (0, 0)
        text, coords, first = [], [], 0
        for index, token in enumerate(token_ids):
            if token in self.bin_of:
                text.append(str(self.bin_of[token]))
                coords.append(index)
                continue
            for position, char in enumerate(self.text_of(token)):
                if in_string:
                    in_string, escaped = char != '"' or escaped, char == "\\" and not escaped
                elif char == '"':
                    in_string = True
                elif char in "{[":
                    depth += 1
                    if depth == 3:
                        text, coords, first = [], [], index
                elif char in "}]":
                    depth -= 1
                    if depth == 2 and char == "}":
                        last = (index, position + 1)
                        fields = json.loads("".join(text) + "}")
                        kind = "poly" if "poly" in fields else "bbox_2d"
                        found.append((Object(fields["desc"], kind, tuple(fields[kind])), coords, first))
                text.append(char)
        return found, last

    def match(self, pred: list[Object], gt: list[Object], threshold: float) -> list[tuple[int, int]]:
        """Match one to one, with the largest sum of IoU among pairs of at least `threshold`."""
        shape_of = cache(_shape) if self.tuned else _shape
        gain = [[0.0] * len(gt) for _ in pred]
        for i, a in enumerate(pred):
            for j, b in enumerate(gt):
                overlap = _iou(shape_of(a), shape_of(b))
                gain[i][j] = overlap if overlap >= threshold else 0.0
        rows, cols = linear_sum_assignment(gain, maximize=True)
        return [(i, j) for i, j in zip(rows.tolist(), cols.tolist(), strict=True) if gain[i][j] > 0]

    def target(
        self, token_ids: list[int], parsed: tuple, gt: list[Object], pairs: list[tuple[int, int]]
    ) -> tuple[list[int], dict[int, float], dict[int, int]]:
        """Return `(ids, coordinate target by index, text label by index)`."""
        found, (last, num_kept) = parsed
        taken = {j for _, j in pairs}
        missed = "".join(", " + COORD_TOKENS.write_object(obj) for j, obj in enumerate(gt) if j not in taken)
        cut = self.text_of(token_ids[last])
        if num_kept == len(cut):
            last += 1
            ids = token_ids[:last] + self.table.encode(missed + "]}") + [self.table.eos_id]
        else:  # tokenized together with what follows, as utils.targets does
            ids = token_ids[:last] + self.table.encode(cut[:num_kept] + missed + "]}") + [self.table.eos_id]
        coords, labels = {}, {}
        for index in range(last, len(ids)):
            if ids[index] in self.bin_of:
                coords[index] = float(self.bin_of[ids[index]])
            else:
                labels[index] = ids[index]
        for i, j in pairs:
            obj, own, first = found[i]
            for index, value in zip(own, regression_targets(obj, gt[j]), strict=True):
                coords[index] = float(value)
            lead = self.text_of(ids[first]).partition("{")[0] + '{"desc": '
            quote = self.table.encode(lead + json.dumps(gt[j].desc, ensure_ascii=False) + ",")
            before = len(self.table.encode(lead + '"')) - 1
            for offset, token in enumerate(quote):
                if offset > before or token != ids[first + offset]:
                    labels[first + offset] = token
                if token != ids[first + offset] or '"' in self.text_of(token) and offset > before:
                    break
        return ids, coords, labels


def _shape(obj: Object) -> shapely.Geometry:
    if obj.kind == "bbox_2d":
        return shapely.box(*obj.coords)
    shape = shapely.Polygon(list(zip(obj.coords[0::2], obj.coords[1::2], strict=True)))
    return shape if shape.is_valid else shapely.make_valid(shape, method="structure", keep_collapsed=False)


def _iou(a: shapely.Geometry, b: shapely.Geometry) -> float:
    overlap = a.intersection(b).area
    union = a.area + b.area - overlap
    return overlap / union if union else 0.0


def pack(
    made: list[tuple[list[int], dict[int, float], dict[int, int]]], prompt: list[int], cap: int
) -> dict[str, torch.Tensor]:
    """Pack in order until the row is full: ids, positions and labels (-100 or NaN: none) as tensors."""
    ids, positions, labels, coords = [], [], [], []
    for answer, coord_of, label_of in made:
        length = len(prompt) + len(answer)
        if len(ids) + length > cap:
            break
        ids += prompt + answer
        positions += range(length)
        labels += [-100] * len(prompt) + [label_of.get(index, -100) for index in range(len(answer))]
        coords += [math.nan] * len(prompt) + [coord_of.get(index, math.nan) for index in range(len(answer))]
    columns = {"input_ids": ids, "position_ids": positions, "labels": labels, "coord_target": coords}
    return {name: torch.tensor(values) for name, values in columns.items()}
