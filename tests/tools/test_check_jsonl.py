"""The tool that counts and reports bad lines (DAT-3)."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from tests.data.test_samples import line, mixed, write
from tools.check_jsonl import check, main

NUM_LINES = 200_000


def test_dat_3_tool_counts_classes_and_names_first_lines(tmp_path):
    """DAT-3."""
    path = mixed(tmp_path)
    counts, text = check([str(path)], "x")
    assert text.splitlines() == [
        f"{path}: 4 good samples with 4 objects, 3 bad lines",
        f"{path}: json (not one JSON object in UTF-8): 1 line: 2",
        "    line 2: not valid JSON: Expecting property name enclosed in double quotes: line 1 column 2 (char 1)",
        f"{path}: image_missing (no such image file): 1 line: 7",
        f"    line 7: images[0]: {tmp_path}/no.png: no such image",
        f"{path}: outside (object outside its image): 2 lines: 5, 7",
        "    line 5: objects[0].bbox_2d: [0, 0, 500, 20] lies outside the image of 100 x 50",
    ]
    assert counts.num_bad == 3


def test_the_program_ends_with_1_on_mistakes_and_0_without(tmp_path, monkeypatch, capsys):
    def run_tool(*args: str | Path) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["check_jsonl", *map(str, args)])
        with pytest.raises(SystemExit) as ended:
            main()
        return ended.value.code, capsys.readouterr().out

    bad, good = mixed(tmp_path), write(tmp_path, line(), name="good.jsonl")
    next_command = f"write a config: python -m tools.init --data {good} --model DIR --gpus N\n"
    assert run_tool(good) == (0, f"{good}: 1 good samples with 1 objects, 0 bad lines\n{next_command}")
    code, text = run_tool(good, bad, tmp_path / "absent.jsonl", "--lines", "1")
    assert code == 1 and "2 lines: 5, ..." in text and "tools.init" not in text
    assert f"{tmp_path}/absent.jsonl: cannot be read: No such file or directory" in text
    (tmp_path / "empty.jsonl").touch()
    code, text = run_tool(tmp_path / "empty.jsonl")
    assert code == 1 and "0 good samples" in text and "empty.jsonl: the file is empty" in text
    code, text = run_tool(good, "--prompt", "")
    assert code == 1 and "no prompt" in text


PEAK = """
import re, sys
from tools.check_jsonl import check, main
def peak():  # of this program alone; getrusage's starts at that of the process that started it
    return int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1])
before = peak()
counts, text = check(sys.argv[1:], "x")
print(counts.num_bad, (peak() - before) / 1024)
"""


def peak_growth_mib(path: Path) -> tuple[int, float]:
    """Return the bad lines found, and how much the checker's peak memory grew over its imports."""
    done = subprocess.run([sys.executable, "-c", PEAK, str(path)], capture_output=True, text=True, check=True)
    num_bad, growth = done.stdout.split()
    return int(num_bad), float(growth)


def write_big(path: Path, num_lines: int) -> Path:
    """Write a line with 7 objects many times, every tenth time with an object outside its image."""
    Image.new("RGB", (64, 48)).save(path.parent / "a.png")
    objects = [{"desc": "traffic light", "bbox_2d": [1, 2, 30, 40.5]}] * 7
    good = json.dumps({"images": ["a.png"], "width": 64, "height": 48, "objects": objects}) + "\n"
    bad = good.replace("40.5", "99.5")
    with path.open("w") as file:
        for _ in range(num_lines // 10):
            file.write(good * 9 + bad)
    return path


def test_dat_3_memory_does_not_grow_with_the_file(tmp_path):
    """DAT-3: 20,000 lines, 8 MiB of text, of which nothing is kept."""
    num_bad, growth = peak_growth_mib(write_big(tmp_path / "big.jsonl", 20_000))
    assert num_bad == 2_000 and growth < 8, growth


@pytest.mark.slow
def test_dat_3_memory_of_a_large_file(tmp_path):
    """DAT-3: ten times as many lines take no more memory."""
    path = write_big(tmp_path / "big.jsonl", NUM_LINES)
    num_bad, growth = peak_growth_mib(path)
    assert num_bad == NUM_LINES // 10 and growth < 8, (growth, path.stat().st_size)
