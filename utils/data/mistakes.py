"""Mistakes in data files: their classes, how many lines have each, and the list of skipped lines a run leaves.

`utils.data.samples` finds them; this module keeps and reports them, in memory that does not grow with the file.
"""

import json
import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

# The classes of mistakes, in the order in which reports list them.
KINDS = {
    "file": "the file cannot be read or holds no sample",
    "json": "not one JSON object in UTF-8",
    "id": "id is not a string",
    "prompt": "prompt missing, given twice or not a string",
    "messages": "messages malformed, or markers that do not fit the images",
    "images": "list of images malformed",
    "image_missing": "no such image file",
    "image_unreadable": "image file cannot be read",
    "size": "width or height not a positive integer, or those of the image on its side",
    "objects": "list of objects malformed",
    "desc": "desc missing, empty, not a string, or spells a special token",
    "geometry": "not exactly one well-formed bbox_2d or poly",
    "outside": "object outside its image",
    "annotated": "annotated is not a list of labels",
}
SKIPPED_FILE = "skipped.jsonl"


@dataclass(frozen=True)
class BadLine:
    """A line that cannot be used, with all its mistakes as (class of `KINDS`, reason) pairs.

    `line` counts from 1; 0 stands for the file itself.
    """

    path: str
    line: int
    problems: list[tuple[str, str]]

    def messages(self) -> list[str]:
        """`file:line: reason` for each problem."""
        source = f"{self.path}:{self.line}" if self.line else self.path
        return [f"{source}: {reason}" for _, reason in self.problems]


class ProblemCounts:
    """Numbers of bad lines by (file, class), and the first few of each; a line with two classes counts in both."""

    def __init__(self, max_lines: int = 5) -> None:
        self.max_lines = max_lines
        self.num_bad = 0
        self.num_lines: Counter[tuple[str, str]] = Counter()
        self.first: defaultdict[tuple[str, str], list[tuple[int, str]]] = defaultdict(list)  # (line, reason)

    def add(self, bad: BadLine) -> None:
        self.num_bad += 1
        for kind, reason in dict(reversed(bad.problems)).items():  # the first reason of each class
            key = (bad.path, kind)
            self.num_lines[key] += 1
            if len(self.first[key]) < self.max_lines:
                self.first[key].append((bad.line, reason))

    def report(self) -> str:
        """One paragraph per file and class: its count, its first line numbers and the first reason in full."""
        paths, kinds = list(dict.fromkeys(path for path, _ in self.num_lines)), list(KINDS)
        keys = sorted(self.num_lines, key=lambda key: (paths.index(key[0]), kinds.index(key[1])))
        return "\n".join(self._paragraph(*key) for key in keys)

    def _paragraph(self, path: str, kind: str) -> str:
        count, first = self.num_lines[path, kind], self.first[path, kind]
        line, reason = first[0]
        if not line:
            return f"{path}: {reason}"
        lines = ", ".join(str(number) for number, _ in first) + (", ..." if count > len(first) else "")
        head = f"{path}: {kind} ({KINDS[kind]}): {count} line{'s' if count > 1 else ''}: {lines}"
        return f"{head}\n    line {line}: {reason}"


def report_skipped(skipped: Iterable[BadLine], run_dir: str | os.PathLike) -> str:
    """Write one row per bad line to `skipped.jsonl` in the run directory; the file is empty where there is none.

    Returns the text for the user, counts by class with the first lines, and a line break; "" if nothing was skipped.
    """
    target = Path(run_dir) / SKIPPED_FILE
    target.parent.mkdir(parents=True, exist_ok=True)
    counts = ProblemCounts()
    with target.open("w", encoding="utf-8") as out:
        for bad in skipped:
            counts.add(bad)
            write_bad_line(bad, out)
    if not counts.num_bad:
        return ""
    head = f"{counts.num_bad} bad sample(s) skipped (data.on_bad_sample: skip), all listed in {target}"
    return f"{head}\n{counts.report()}\n"


def write_bad_line(bad: BadLine, out: TextIO) -> None:
    """Write a row of JSON that `read_bad_lines` reads."""
    problems = [{"class": kind, "reason": reason} for kind, reason in bad.problems]
    out.write(json.dumps({"file": bad.path, "line": bad.line, "problems": problems}) + "\n")


def read_bad_lines(path: str | os.PathLike) -> Iterator[BadLine]:
    """The rows of a file of bad lines."""
    with open(path, encoding="utf-8") as file:
        for row in map(json.loads, file):
            yield BadLine(row["file"], row["line"], [(each["class"], each["reason"]) for each in row["problems"]])
