"""Lines of data files that cannot be used: what is wrong with them, counted by class, and the list a run leaves behind.

Finding mistakes is `data`'s work; this module only keeps and reports them, in memory that does not grow with the file.
"""

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

# The classes of mistakes, in the order in which reports list them.
KINDS = {
    "file": "the file cannot be read or holds no sample",
    "json": "not one JSON object in UTF-8",
    "id": "id is no string",
    "prompt": "prompt missing, given twice or no string",
    "messages": "messages malformed, or markers that do not fit the images",
    "images": "list of images malformed",
    "image_missing": "no such image file",
    "image_unreadable": "image file cannot be read",
    "size": "width or height no positive integer",
    "objects": "list of objects malformed",
    "desc": "desc empty, no string, or spells a special token",
    "geometry": "not exactly one well-formed bbox_2d or poly",
    "outside": "object outside its image",
}
SKIPPED_FILE = "skipped.jsonl"


@dataclass(frozen=True)
class BadLine:
    """One line that cannot be used, with everything that is wrong with it as (class of `KINDS`, reason) pairs.

    `line` counts from 1; 0 stands for the file itself.
    """

    path: str
    line: int
    problems: list[tuple[str, str]]

    def messages(self) -> list[str]:
        """`file:line: reason` for each problem."""
        source = f"{self.path}:{self.line}" if self.line else self.path
        return [f"{source}: {reason}" for _, reason in self.problems]


@dataclass
class _Seen:
    """How many lines of one file have a mistake of one class, the first of them, and the first one's reason."""

    count: int
    lines: list[int]
    reason: str


@dataclass
class ProblemCounts:
    """Counts of bad lines by file and class; a line with two classes of mistakes counts once in each."""

    max_lines: int = 5
    num_bad: int = 0
    seen: dict[tuple[str, str], _Seen] = field(default_factory=dict)

    def add(self, bad: BadLine) -> None:
        self.num_bad += 1
        for kind, reason in reversed(dict(reversed(bad.problems)).items()):  # the first reason of each class
            seen = self.seen.setdefault((bad.path, kind), _Seen(0, [], reason))
            seen.count += 1
            if len(seen.lines) < self.max_lines:
                seen.lines.append(bad.line)

    def report(self) -> str:
        """One paragraph per file and class: its count, its first line numbers and the first reason in full."""
        order = {kind: i for i, kind in enumerate(KINDS)}
        paths = list(dict.fromkeys(path for path, _ in self.seen))
        entries = sorted(self.seen.items(), key=lambda item: (paths.index(item[0][0]), order[item[0][1]]))
        return "\n".join(_paragraph(path, kind, seen) for (path, kind), seen in entries)


def _paragraph(path: str, kind: str, seen: _Seen) -> str:
    if seen.lines == [0]:
        return f"{path}: {seen.reason}"
    lines = ", ".join(map(str, seen.lines)) + (", ..." if seen.count > len(seen.lines) else "")
    plural = "s" if seen.count > 1 else ""
    return (
        f"{path}: {kind} ({KINDS[kind]}): {seen.count} line{plural}: {lines}\n    line {seen.lines[0]}: {seen.reason}"
    )


def report_skipped(skipped: Iterable[BadLine], run_dir: str | os.PathLike) -> str:
    """Write `skipped.jsonl` into the run directory, one bad line each, empty where there is none.

    Returns:
        What to tell the user, ending in a line break: counts by class with the first line numbers; empty where
        nothing was skipped.
    """
    target = Path(run_dir) / SKIPPED_FILE
    target.parent.mkdir(parents=True, exist_ok=True)
    counts = ProblemCounts()
    with target.open("w", encoding="utf-8") as out:
        for bad in skipped:
            counts.add(bad)
            problems = [{"class": kind, "reason": reason} for kind, reason in bad.problems]
            row = {"file": bad.path, "line": bad.line, "problems": problems}
            out.write(json.dumps(row) + "\n")
    if not counts.num_bad:
        return ""
    head = f"{counts.num_bad} bad sample(s) skipped (data.on_bad_sample: skip), all listed in {target}"
    return f"{head}\n{counts.report()}\n"
