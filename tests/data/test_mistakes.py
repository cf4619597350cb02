"""`utils.data.mistakes`: counting bad lines, and the list of skipped ones (DAT-3)."""

import json

from tests.data.test_samples import line, mixed, write
from utils.data.mistakes import BadLine, ProblemCounts, report_skipped
from utils.data.samples import load_samples


def test_counts_keep_few_lines_and_the_first_reason_of_each_class():
    counts = ProblemCounts(max_lines=2)
    for number in range(1, 1001):
        counts.add(BadLine("a.jsonl", number, [("desc", f"first {number}"), ("desc", "second"), ("id", "x")]))
    key = ("a.jsonl", "desc")
    assert (counts.num_lines[key], counts.first[key]) == (1000, [(1, "first 1"), (2, "first 2")])
    assert counts.num_bad == 1000 and len(counts.num_lines) == 2


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


def test_nothing_skipped_leaves_an_empty_list_and_no_words(tmp_path):
    (tmp_path / "skipped.jsonl").write_text("of an earlier start\n")
    assert report_skipped([], tmp_path) == "" and (tmp_path / "skipped.jsonl").read_text() == ""
