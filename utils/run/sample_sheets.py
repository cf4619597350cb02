"""Sheets of a few samples of a step: image, ground truth, prediction, matches and the target's supervision (LOG-4)."""

import functools
import hashlib
import json
import logging
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from utils.data.images import open_image
from utils.data.samples import Sample
from utils.geometry import Grid, Object, iou_matrix, to_norm1000
from utils.parsing import ParsedAnswer, TokenTable
from utils.rollout.backend import RolloutResult
from utils.run.draw import draw_objects, sheet, stack, text_panel
from utils.run.monitor import Monitor
from utils.scores import object_record
from utils.targets import Target

logger = logging.getLogger(__name__)

UNMATCHED = "#d73027"
PAIR_COLOURS = ("#1f78b4", "#33a02c", "#6a3d9a", "#b15928", "#008b8b", "#c51b7d", "#4d4d4d", "#7a7a00")
MARKS = {"text": "#c7e9c0", "changed": "#fdd49e", "coord": "#c6dbef"}  # backgrounds of supervised tokens
CUT_OFF = "#dddddd"  # background of the response after the usable prefix
SIDE = 448  # pixels of the longer side of a drawn image
_SHORT = 200  # characters of an image's path or data URI


@dataclass(frozen=True)
class Example:
    """One sample of a step with its response and target; `pairs` are matched (prediction, ground truth) indices."""

    sample: Sample
    answer: RolloutResult
    parsed: ParsedAnswer
    pairs: Sequence[tuple[int, int]]
    target: Target


@dataclass
class SampleDump:
    """A PNG sheet and a JSON file per dumped sample, `dumps/step_000040/<sample id>.{png,json}`."""

    run_dir: Path
    table: TokenTable  # of the tokenizer that writes the answers
    every_steps: int  # optimizer steps between dumps, 0 for none
    num_samples: int  # per dump; becomes 0 where none will be written
    enabled: bool  # True on rank 0

    def __post_init__(self) -> None:
        self.num_samples = self.num_samples if self.enabled and self.every_steps else 0
        self._has_warned = False

    def write(self, step: int, examples: Sequence[Example], monitor: Monitor) -> None:
        """Dump the first examples if a dump is due at `step`; a failure is logged (once per run), never raised."""
        if not self.num_samples or step % self.every_steps:
            return
        folder = self.run_dir / "dumps" / f"step_{step:06d}"
        names: Counter[str] = Counter()
        rows = []
        for index, example in enumerate(examples[: self.num_samples]):
            try:
                name = safe_name(example.sample.id)
                names[name] += 1
                name += f"-{names[name]}" if names[name] > 1 else ""
                record, picture = example_record(example, self.table), example_sheet(example, self.table)
                folder.mkdir(parents=True, exist_ok=True)
                picture.save(folder / f"{name}.png")
                text = json.dumps({"step": step, **record}, indent=1, ensure_ascii=False) + "\n"
                (folder / f"{name}.json").write_text(text, encoding="utf-8")
                monitor.image(step, f"dump/{index}", np.asarray(picture))
                rows.append([example.sample.id, record["rollout"]["text"], record["target"]["marked"]])
            except Exception as error:  # noqa: BLE001  (a picture must not end a run, whatever is wrong with it)
                if not self._has_warned:
                    message = "sample %s could not be dumped to %s: %s: %s (logged once per run)"
                    logger.warning(message, example.sample.id, folder, type(error).__name__, error)
                self._has_warned = True
        if rows:
            monitor.table(step, "dump/answers", ["sample", "answer", "target"], rows)


def safe_name(sample_id: str) -> str:
    """A file name for a sample id: the id itself if that is safe, else its safe part and a digest of the whole id."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "_", sample_id).strip("._-")[:80]
    digest = hashlib.sha256(sample_id.encode(errors="surrogatepass")).hexdigest()[:8]
    return name if name and name == sample_id else f"{name}-{digest}".lstrip("-")


def example_record(example: Example, table: TokenTable) -> dict[str, Any]:
    """Everything about one sample as plain JSON values.

    Coordinates are norm1000 (0..999), except inside texts and the targets of tokens. Indices count within their list.
    """
    sample, answer, parsed, target = example.sample, example.answer, example.parsed, example.target
    iou = iou_matrix(parsed.pred_objects, sample.objects)
    return {
        "id": sample.id,
        "source": sample.source,
        "images": [image if len(image) <= _SHORT else image[:_SHORT] + "..." for image in sample.images],
        "width": sample.width,
        "height": sample.height,
        "messages": sample.messages,
        "gt": [object_record(obj, sample.grid) for obj in sample.objects],
        "pred": [object_record(obj, sample.grid) for obj in parsed.pred_objects],
        "pairs": [{"pred": p, "gt": g, "iou": float(iou[p, g])} for p, g in example.pairs],
        "unmatched_pred": sorted(set(range(len(parsed.pred_objects))) - {p for p, _ in example.pairs}),
        "unmatched_gt": sorted(set(range(len(sample.objects))) - {g for _, g in example.pairs}),
        "rollout": {
            "text": _text(answer.response_token_ids, table),
            "token_ids": list(map(int, answer.response_token_ids)),
            "num_prefix_tokens": parsed.num_exact,
            "finish_reason": answer.finish_reason,
            "weight_version": answer.weight_version,
            "error": answer.error,
            "closed": parsed.closed,
            "dropped": parsed.dropped,
        },
        "target": {
            "text": _text(target.answer_ids.tolist(), table),
            "marked": marked_text(target, table),
            "num_prefix_tokens": target.num_prefix,
            "num_matched": target.num_matched,
            "num_appended": target.num_appended,
            "num_trimmed": target.num_trimmed,
            "respelled": target.respelled,
            "tokens": token_records(target, table),
        },
    }


def token_records(target: Target, table: TokenTable) -> list[dict[str, Any]]:
    """Per answer token: `id`, `token` (its text, bytes that are no whole character as `\\xc3`) and `kind`.

    `kind` is `none`; `text`, with the token to learn as `target_id` and `target`; or `coord`, with the bin to learn as
    `target`, fractional for polygons. Supervised tokens have a `weight` within their kind.
    """
    text_of = functools.partial(_text, table=table, errors="backslashreplace")
    records = [{"id": token, "token": text_of([token]), "kind": "none"} for token in target.answer_ids.tolist()]
    for index, label, weight in zip(target.text_index, target.text_label, target.text_weight, strict=True):
        learnt = {"target_id": int(label), "target": text_of([label]), "weight": float(weight)}
        records[index] |= {"kind": "text", **learnt}
    for index, value in zip(target.coord_index, target.coord_target, strict=True):
        records[index] |= {"kind": "coord", "target": float(value), "weight": 1.0}
    return records


def marked_text(target: Target, table: TokenTable) -> str:
    """The target with its supervision: `«learnt»`, `«written->to learn»`, `<120->118.5>`; context: `<120>`."""
    return "".join(text if kind in ("none", "coord") else f"«{text}»" for text, kind in _runs(target, table))


def _runs(target: Target, table: TokenTable) -> list[tuple[str, str]]:
    """(text, kind) of adjacent tokens of one kind: `none`, `text`, `changed` (learns another token) or `coord`."""
    runs: list[tuple[bytes, str]] = []
    for record in token_records(target, table):
        kind, text = record["kind"], _shown(record["id"], table)
        if kind == "coord":
            text = text[:-1] + f"->{round(record['target'], 1):g}>".encode()
        elif kind == "text" and record["target_id"] != record["id"]:
            kind, text = "changed", text + f"->{record['target']}".encode()
        if runs and runs[-1][1] == kind and kind in ("none", "text"):
            runs[-1] = (runs[-1][0] + text, kind)  # joined as bytes: a character may be spelled by several tokens
        else:
            runs.append((text, kind))
    return [(text.decode(errors="replace"), kind) for text, kind in runs]


def example_sheet(example: Example, table: TokenTable) -> Image.Image:
    """Ground truth beside prediction, both in the first image; the rollout; the target with supervised tokens marked.

    The objects of a pair share a colour and a number; unmatched ones are red, with an x.
    """
    sample, answer, parsed, target = example.sample, example.answer, example.parsed, example.target
    gt_labels = {g: number for number, (_, g) in enumerate(example.pairs, start=1)}
    pred_labels = {p: number for number, (p, _) in enumerate(example.pairs, start=1)}
    sides = [(sample.objects, gt_labels), (parsed.pred_objects, pred_labels)]
    first, *others = [_open_or_blank(source) for source in sample.images or [""]]
    rows = [[_draw_side(first, objects, numbers, sample.grid) for objects, numbers in sides]]
    rows += [[draw_objects(image, [], UNMATCHED, SIDE)] * 2 for image in others]
    pictures = sheet(rows, (f"ground truth ({len(sample.objects)})", f"prediction ({len(parsed.pred_objects)})"))
    shown, end = [_shown(token, table) for token in answer.response_token_ids], parsed.num_exact
    prefix, rest = (b"".join(part).decode(errors="replace") for part in (shown[:end], shown[end:]))
    facts = (
        f"{sample.id}   weights {answer.weight_version}   {len(example.pairs)} matched, {target.num_appended} appended"
        f", dropped {parsed.dropped or 0}, {answer.error or answer.finish_reason}"
    )
    legend = [("learnt", MARKS["text"]), (" ", None), ("written->to learn", MARKS["changed"])]
    legend += [(" ", None), ("<coordinate->to learn>", MARKS["coord"])]
    texts = (
        [("ROLLOUT   ", None), ("after the usable prefix", CUT_OFF)],
        [(prefix, None), (rest, CUT_OFF)],
        [("TARGET   ", None), *legend],
        [(text, MARKS.get(kind)) for text, kind in _runs(target, table)],
    )
    width = max(pictures.width, 2 * SIDE)
    return stack([text_panel([(facts, None)], width), pictures, *(text_panel(text, width) for text in texts)])


def _draw_side(image: Image.Image, objects: Sequence[Object], numbers: Mapping[int, int], grid: Grid) -> Image.Image:
    """The image with its objects; `numbers` maps the index of each matched one to its pair's number."""
    found = [numbers.get(index) for index in range(len(objects))]
    colours = [PAIR_COLOURS[(n - 1) % len(PAIR_COLOURS)] if n else UNMATCHED for n in found]
    labels = [f"{n or 'x'} {obj.desc}" for n, obj in zip(found, objects, strict=True)]
    return draw_objects(image, [to_norm1000(obj, grid) for obj in objects], colours, SIDE, labels)


def _open_or_blank(source: str) -> Image.Image:
    """The image, or a grey one that says why it is missing: the texts are useful without it."""
    try:
        return open_image(source)
    except (OSError, ValueError) as error:
        reason = str(error) if source else "no image"
    blank = Image.new("RGB", (SIDE, SIDE), "#eeeeee")
    blank.paste(text_panel([(reason[:_SHORT], None)], SIDE), (0, 0))
    return blank


def _text(token_ids: Sequence[int], table: TokenTable, errors: str = "replace") -> str:
    """The text of token ids, special tokens included; ids unknown to the tokenizer are skipped."""
    known = (table.bytes_of[token] for token in token_ids if 0 <= token < len(table.bytes_of))
    return b"".join(known).decode(errors=errors)


def _shown(token: int, table: TokenTable) -> bytes:
    """A token as pictures and marked text show it: a coordinate is `<120>` for short."""
    if not 0 <= token < len(table.bytes_of):
        return b""
    return table.bytes_of[token] if table.coord_bin[token] < 0 else b"<%d>" % table.coord_bin[token]
