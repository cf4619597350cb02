"""Start-up on data files of 1,000 to 1,000,000 lines: seconds, and memory per rank (section DAT).

Each figure comes from a process of its own: the seconds until the first sample is drawn, and the memory by which it has
grown then, imports left out. Ten boxes per line, images of two sizes, one prompt. Ours is a start on a file that an
earlier one has checked; the baseline reads and checks the whole file on every rank, as every start did before.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

from benchmarks.harness import Result, at_most, reported

NUM_LINES = (1_000, 100_000, 1_000_000)
START = """
import json, os, sys, time
from pathlib import Path
import psutil
from utils.data.index import Checks, IndexedFile, ensure_index
from utils.data.samples import LineReader, load_samples
from utils.data.stream import SampleStream
from utils.run.inputs import KnownDigests

way, path = sys.argv[1], Path(sys.argv[2])
memory = psutil.Process().memory_info
before, start = memory().rss, time.perf_counter()
if way == "loaded":
    file = load_samples([path], "List.")[0]
else:
    known = KnownDigests(path.parent)
    known.describe(str(path))
    checks = Checks(LineReader("List."))
    file = IndexedFile(path, ensure_index(path.with_suffix(".index"), path, checks), checks.reader)
SampleStream([file]).next(1)
print(json.dumps([time.perf_counter() - start, memory().rss - before]))
if way == "first":
    known.write(known.states)
"""


def run() -> list[Result]:
    results, found = [], {}
    with tempfile.TemporaryDirectory() as folder:
        for number in NUM_LINES:
            path = write_file(Path(folder), number)
            for way in ("first", "indexed", "loaded"):
                found[way, number] = start(way, path)
            path.unlink()
            lines = f"{number:,} lines"
            (first, _), (again, ours), (loaded, theirs) = (found[way, number] for way in ("first", "indexed", "loaded"))
            results += [
                reported(f"data: first start, {lines}, over loading all", "s", first, loaded),
                reported(f"data: later start, {lines}, over loading all", "s", again, loaded),
                reported(f"data: memory per rank, {lines}, over loading all", "MB", ours / 1e6, theirs / 1e6),
            ]
    most, fewest = found["indexed", NUM_LINES[-1]], found["indexed", NUM_LINES[0]]
    return [
        *results,
        at_most("data: later start, 1,000,000 lines, over two seconds", "s", most[0], 2.0, 1.0),
        at_most(
            "data: memory that 1,000,000 lines add to 1,000, over 100 MB", "MB", (most[1] - fewest[1]) / 1e6, 100, 1
        ),
    ]


def write_file(folder: Path, num_lines: int) -> Path:
    """Write a data file whose lines differ in id and place of the objects."""
    for name, size in (("a.jpg", (640, 480)), ("b.jpg", (480, 640))):
        Image.new("RGB", size).save(folder / name)
    path = folder / f"{num_lines}.jsonl"
    with path.open("w") as file:
        for i in range(num_lines):
            boxes = [[x := (i + 37 * k) % 300, x + k, x + 100, x + k + 80] for k in range(10)]
            objects = [{"desc": "red car", "bbox_2d": box} for box in boxes]
            image = {
                "id": str(i),
                "images": ["ab"[i % 2] + ".jpg"],
                "width": [640, 480][i % 2],
                "height": [480, 640][i % 2],
            }
            file.write(json.dumps(image | {"objects": objects}) + "\n")
    return path


def start(way: str, path: Path) -> tuple[float, float]:
    """Seconds and bytes of one start, in a new process; raise TimeoutExpired after two hours."""
    command = [sys.executable, "-c", START, way, str(path)]
    seconds, grown = json.loads(
        subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=os.environ, timeout=7200).stdout
    )
    return seconds, grown
