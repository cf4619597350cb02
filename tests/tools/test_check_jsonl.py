"""Counting bad lines, the tool that reports them, and training's own skipping of them (DAT-3)."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from tests.data.test_samples import BAD_LINES, line, write
from tools.check_jsonl import check, main
from utils.data.bad_lines import KINDS, BadLine, ProblemCounts, report_skipped
from utils.data.samples import DataError, Sample, check_same_samples, fingerprint, load_samples, map_ahead, read_samples

NUM_LINES = 200_000


def mixed(folder: Path) -> Path:
    """Write nine lines: 2, 5 and 7 are bad, 7 in two classes, and one is blank."""
    far = {"desc": "cat", "bbox_2d": [0, 0, 500, 20]}
    rows = [line(), "{", line(), "", line(objects=[far]), line(), line(images=["no.png"], objects=[far, far]), line()]
    return write(folder, *rows)


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


@pytest.mark.parametrize("name", BAD_LINES)
def test_dat_3_every_mistake_has_a_class_and_training_finds_the_same(tmp_path, name):
    """DAT-3: what the tool counts is what `load_samples` refuses, message for message."""
    path = write(tmp_path, line(), BAD_LINES[name][0])
    bad = [item for item in read_samples(path, "x") if isinstance(item, BadLine)]
    assert len(bad) == 1 and {kind for kind, _ in bad[0].problems} <= set(KINDS)
    with pytest.raises(DataError) as caught:
        load_samples([path], "x")
    assert caught.value.problems == bad[0].messages()


def test_dat_3_classes_tell_missing_from_broken_images(tmp_path):
    """DAT-3."""
    (tmp_path / "broken.png").write_bytes(b"not a picture")
    rows = [line(images=["none.png"]), line(images=["broken.png"]), line(width=0), line(objects=[{"desc": " "}])]
    items = list(read_samples(write(tmp_path, *rows), "x"))
    assert [item.problems[0][0] for item in items] == ["image_missing", "image_unreadable", "size", "desc"]


def test_the_program_ends_with_1_on_mistakes_and_0_without(tmp_path, monkeypatch, capsys):
    def run_tool(*args: str | Path) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["check_jsonl", *map(str, args)])
        with pytest.raises(SystemExit) as ended:
            main()
        return ended.value.code, capsys.readouterr().out

    bad, good = mixed(tmp_path), write(tmp_path, line(), name="good.jsonl")
    assert run_tool(good) == (0, f"{good}: 1 good samples with 1 objects, 0 bad lines\n")
    code, text = run_tool(good, bad, tmp_path / "absent.jsonl", "--lines", "1")
    assert code == 1 and "2 lines: 5, ..." in text
    assert f"{tmp_path}/absent.jsonl: cannot be read: No such file or directory" in text
    code, text = run_tool(good, "--prompt", "")
    assert code == 1 and "no prompt" in text


def test_counts_keep_few_lines_and_the_first_reason_of_each_class():
    counts = ProblemCounts(max_lines=2)
    for number in range(1, 1001):
        counts.add(BadLine("a.jsonl", number, [("desc", f"first {number}"), ("desc", "second"), ("id", "x")]))
    seen = counts.seen["a.jsonl", "desc"]
    assert (seen.count, seen.lines, seen.reason) == (1000, [1, 2], "first 1")
    assert counts.num_bad == 1000 and len(counts.seen) == 2


def test_dat_3_skipping_keeps_the_good_samples_and_lists_the_others(tmp_path):
    """DAT-3: `data.on_bad_sample: skip`."""
    path, good = mixed(tmp_path), write(tmp_path, line(), name="good.jsonl")
    skipped: list[BadLine] = []
    datasets = load_samples([path, good], "x", skipped=skipped)
    assert [[sample.source.rpartition(":")[2] for sample in part] for part in datasets] == [["1", "3", "6", "8"], ["1"]]
    text = report_skipped(skipped, tmp_path / "run")
    assert "3 bad sample(s) skipped" in text and f"{path}: outside (object outside its image): 2 lines: 5, 7" in text
    rows = [json.loads(row) for row in (tmp_path / "run" / "skipped.jsonl").open()]
    assert [(row["file"], row["line"]) for row in rows] == [(str(path), 2), (str(path), 5), (str(path), 7)]
    assert [problem["class"] for problem in rows[2]["problems"]] == ["image_missing", "outside", "outside"]


def test_dat_3_skipping_needs_something_left(tmp_path):
    """DAT-3: a file of bad lines only, an empty file and an absent one stop the run even if bad samples are skipped."""
    all_bad, empty = write(tmp_path, "{", "[1]", name="bad.jsonl"), write(tmp_path, name="empty.jsonl")
    for path, words in [(all_bad, "bad.jsonl:2"), (empty, "empty"), (tmp_path / "absent.jsonl", "cannot be read")]:
        with pytest.raises(DataError, match=words):
            load_samples([write(tmp_path, line()), path], "x", skipped=[])


def test_nothing_skipped_leaves_an_empty_list_and_no_words(tmp_path):
    (tmp_path / "skipped.jsonl").write_text("of an earlier start\n")
    assert report_skipped([], tmp_path) == "" and (tmp_path / "skipped.jsonl").read_text() == ""


def test_ranks_that_skipped_different_lines_do_not_train(tmp_path):
    datasets = load_samples([mixed(tmp_path)], "x", skipped=[])
    same, other = fingerprint(datasets), fingerprint([datasets[0][1:]])
    check_same_samples([same, same])
    with pytest.raises(DataError, match=r"ranks \[1\] can use other samples than rank 0"):
        check_same_samples([same, other])


def test_map_ahead_is_ordered_and_takes_no_more_than_it_may():
    taken: list[int] = []
    mapped = map_ahead(lambda x: x * x, (taken.append(i) or i for i in range(100)), num_threads=4, max_ahead=10)
    assert next(mapped) == 0 and len(taken) == 10
    assert list(mapped) == [i * i for i in range(1, 100)]


def test_only_the_lines_asked_for_are_read(tmp_path):
    items = list(read_samples(mixed(tmp_path), "x", only={1, 5}))
    assert isinstance(items[0], Sample) and items[1].line == 5 and len(items) == 2
    assert list(read_samples(mixed(tmp_path), "x", only=set())) == []


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
