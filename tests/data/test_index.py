"""`utils.data.index`: files are checked once, in parts, and read when a sample is drawn (DAT-6)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from tests.data.test_images import shard
from tests.data.test_samples import BAD_LINES, line, mixed, png, write
from utils.answer_format import QWEN3VL
from utils.data import images as images_module
from utils.data import index as index_module
from utils.data.encoding import encode_prompt, load_processor
from utils.data.images import EXIF_ORIENTATION, as_sent, image_size, open_image
from utils.data.index import (
    IMAGE,
    LINE,
    NO_LENGTH,
    Checks,
    Index,
    IndexedFile,
    check_indexes,
    ensure_index,
    index_path,
    parts,
    scan,
    write_index,
)
from utils.data.mistakes import BadLine
from utils.data.samples import DataError, LineReader, Sample, load_samples, read_samples
from utils.data.stream import SampleStream
from utils.rollout.backend import RolloutRequest, infer_request

CHECKS = Checks(LineReader("List."))


def indexed(path: Path, checks: Checks = CHECKS, **options) -> IndexedFile:
    write_index(path.with_name("index"), path, checks)
    return IndexedFile(path, Index(path.with_name("index")), checks.reader, **options)


def many(folder: Path, num: int = 300) -> Path:
    """Lines of many forms, some bad, some blank, with text of several bytes per character and both line ends."""
    png(folder / "b.png", 30, 20)
    rows = []
    for i in range(num):
        if i % 7 == 3:
            rows.append(list(BAD_LINES.values())[i % len(BAD_LINES)][0])
        elif i % 11 == 5:
            rows.append("  ")
        else:
            images = [["a.png"], ["b.png", "a.png"], []][i % 3]
            objects = [{"desc": "naïve 猫" * (i % 5 + 1), "bbox_2d": [0, 0, i % 20, 19]}] * (i % 4)
            rows.append(line(id=str(i), images=images, objects=objects, note={"i": i}))
    path = write(folder, *rows)
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes().replace(b"  \n", b"  \r\n").rstrip(b"\n"))
    return path


def test_dat_6_an_indexed_file_holds_what_loading_it_holds(tmp_path, monkeypatch):
    """DAT-6, DAT-3: the same samples and mistakes, however the file falls into parts."""
    path, skipped = many(tmp_path), []
    (loaded,) = load_samples([path], "List.", skipped=skipped)
    assert len(loaded) > 200 and len(skipped) > 30
    for num_bytes in (1, 1000, 1 << 20):
        monkeypatch.setattr(index_module, "CHUNK_BYTES", num_bytes)
        file = indexed(path)
        assert list(file) == loaded and list(Index(tmp_path / "index").bad_lines()) == skipped
        assert len(file) == len(loaded) and file[-1] == loaded[-1] and file[5:9] == loaded[5:9]
        assert file[np.int64(7)] == loaded[7]
    with pytest.raises(IndexError):
        file[len(file)]


@settings(deadline=None, max_examples=100)
@given(st.binary(max_size=300), st.integers(1, 50))
def test_dat_6_parts_are_whole_lines_and_make_up_the_file(tmp_path_factory, content, num_bytes):
    """DAT-6: whatever the bytes; each part knows the number of its first line."""
    path = tmp_path_factory.getbasetemp() / "bytes"
    path.write_bytes(content)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(index_module, "CHUNK_BYTES", num_bytes)
        found = list(parts(path))
    lines = content.split(b"\n")
    assert b"".join(content[at : at + size] for at, size, _ in found) == content
    for at, size, number in found:
        assert size and (content[:at].endswith(b"\n") or at == 0)
        assert len(b"\n".join(lines[: number - 1])) + (number > 1) == at


def test_dat_6_worker_processes_find_what_one_process_finds(tmp_path, monkeypatch):
    """DAT-6: in the same order, with every check."""
    monkeypatch.setattr(index_module, "CHUNK_BYTES", 2000)
    path = many(tmp_path)
    checks = Checks(LineReader("List.", "sorted", QWEN3VL), Sample.__sizeof__, ["summary_tversky"])
    one, two = list(scan(path, checks, 1)), list(scan(path, checks, 2))
    assert len(one) > 5
    for a, b in zip(one, two, strict=True):
        assert a.lines.tolist() == b.lines.tolist() and a.images.tolist() == b.images.tolist()
        assert replace(a, lines=None, images=None) == replace(b, lines=None, images=None)


def test_dat_6_large_files_are_read_by_workers(tmp_path, monkeypatch):
    """DAT-6: one per core this process may use."""
    asked = []
    monkeypatch.setattr(
        index_module, "map_in_processes", lambda work, items, num: asked.append(num) or map(work, items)
    )
    path = write(tmp_path, line())
    indexed(path)
    assert asked == []
    monkeypatch.setattr(index_module, "SMALL_BYTES", 10)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1, 2})
    assert len(indexed(path)) == 1 and asked == [3]
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(224)))  # of the node, whatever the container has
    list(scan(path, CHECKS))
    assert asked == [3, 16]


def test_dat_6_a_worker_that_dies_ends_the_pass(tmp_path, monkeypatch):
    """DAT-6: with an error, not with a shorter file; and no process stays."""
    path = write(tmp_path, *[line()] * 3)
    with pytest.raises(RuntimeError, match="a worker process ended, status 3"):
        list(scan(path, Checks(LineReader("List."), die), 2))


def die(sample: Sample) -> int:
    os._exit(3)


def test_dat_6_workers_end_with_the_learner(tmp_path):
    """DAT-6: also with one that is killed: they read its pipe."""
    code = "import os; from utils.data.workers import map_in_processes; made = map_in_processes(str, iter(int, 1), 2)"
    code += "; next(made); os._exit(1)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=100)  # ends once stderr is closed
    assert found.returncode == 1


def test_dat_6_an_index_is_made_once(tmp_path, monkeypatch):
    """DAT-6, DAT-3: later starts read neither lines nor images; a broken or unfinished index is made anew."""
    path, target = mixed(tmp_path), tmp_path / "indexes" / "index"
    write_index(target, path, CHECKS)
    samples = [list(IndexedFile(path, Index(target), CHECKS.reader))]
    passes = []
    monkeypatch.setattr(index_module, "scan", lambda *args: passes.append(args) or scan(*args))
    monkeypatch.setattr("utils.data.samples.image_size", lambda _: pytest.fail("opened an image"))
    assert list(IndexedFile(path, ensure_index(target, path, CHECKS), CHECKS.reader)) == samples[0] and not passes
    monkeypatch.undo()
    monkeypatch.setattr(index_module, "scan", lambda *args: passes.append(args) or scan(*args))
    for spoil in (
        lambda: (target / "about.json").unlink(),
        lambda: (target / "about.json").write_text('{"lines": 6}'),
        lambda: (target / "about.json").write_text("{"),
        lambda: os.truncate(target / "lines.bin", LINE.itemsize),
        lambda: os.truncate(target / "images.bin", IMAGE.itemsize),
        lambda: (target / "lines.bin").unlink(),
    ):
        passes.clear()
        spoil()
        assert list(IndexedFile(path, ensure_index(target, path, CHECKS), CHECKS.reader)) == samples[0] and passes
        assert [file.name for file in target.parent.iterdir()] == ["index"]


def test_dat_6_a_pass_that_fails_leaves_no_index(tmp_path, monkeypatch):
    """DAT-6: and the next one is not disturbed by its remains."""
    path = write(tmp_path, *[line()] * 4)
    monkeypatch.setattr(index_module, "CHUNK_BYTES", 10)
    calls = iter([lambda: None, lambda: 1 / 0])
    with pytest.raises(ZeroDivisionError):
        write_index(tmp_path / "index", path, CHECKS, lambda: next(calls)())
    assert not (tmp_path / "index").exists() and (tmp_path / "index.unfinished").exists()
    assert len(ensure_index(tmp_path / "index", path, CHECKS).lines) == 4


def test_dat_6_all_that_decides_about_an_index_is_in_its_name(tmp_path, monkeypatch):
    """DAT-6: content, name and place of the file, settings, code and libraries."""
    paths = [index_path(tmp_path, *args) for args in (("d/a.jsonl", "1", ["x"]),) * 2]
    assert paths[0] == paths[1] and paths[0].parent == tmp_path and paths[0].name.startswith("a-")
    others = [
        ("d/a.jsonl", "2", ["x"]),
        ("e/a.jsonl", "1", ["x"]),
        ("d/b.jsonl", "1", ["x"]),
        ("d/a.jsonl", "1", ["y"]),
    ]
    assert len({paths[0], *(index_path(tmp_path, *args) for args in others)}) == 5
    monkeypatch.chdir(tmp_path)
    assert index_path(tmp_path, "d/a.jsonl", "1", ["x"]) != paths[0]
    monkeypatch.undo()
    for name in ("pillow", "transformers"):
        monkeypatch.setattr(index_module, "version", lambda package, name=name: f"{package == name}")
        assert index_path(tmp_path, "d/a.jsonl", "1", ["x"]) != paths[0]
    monkeypatch.undo()
    read = Path.read_bytes
    for name in ("geometry.py", "samples.py", "index.py"):
        monkeypatch.setattr(Path, "read_bytes", lambda path, name=name: read(path) + b"#" * (path.name == name))
        assert index_path(tmp_path, "d/a.jsonl", "1", ["x"]) != paths[0]


def test_dat_6_a_file_that_changes_under_a_run_is_told(tmp_path):
    """DAT-6: at the line, instead of training on something else; a file put in its place changes nothing."""
    path = write(tmp_path, *[line(id=f"{i}") for i in range(4)])
    file = indexed(path)
    before = list(file)
    content = path.read_text()
    path.rename(tmp_path / "old")
    path.write_text("")
    assert list(file) == before
    path = tmp_path / "old"
    path.write_text(content.replace('"1"', '"9"'))
    assert file[0] == before[0]
    with pytest.raises(DataError, match="d.jsonl:2: the file has changed since it was checked"):
        file[1]


def test_dat_6_many_threads_read_one_file(tmp_path):
    """DAT-6, LRN-8."""
    file = indexed(write(tmp_path, *[line(id=f"{i}") for i in range(200)]))
    wrong = []

    def read(turn: int) -> None:
        for i in np.random.default_rng(turn).permutation(200):
            if file[i].id != str(i):
                wrong.append(i)

    threads = [threading.Thread(target=read, args=(turn,)) for turn in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_dat_6_draws_do_not_depend_on_the_index(tmp_path):
    """DAT-6, LRN-1: order, seeds and the state of a resumed run."""
    path = many(tmp_path)
    (loaded,), file = load_samples([path], "List.", skipped=[]), indexed(path)
    streams = [SampleStream([data], [0.7], seed=3, rank=1, world_size=2) for data in (loaded, file)]
    assert streams[0].next(200) == streams[1].next(200)
    assert streams[0].state_dict() == streams[1].state_dict()


def test_dat_5_a_file_says_what_holds_for_its_lines(tmp_path):
    """DAT-5, TGT-12: of a line that says itself for which labels it is complete, those in both."""
    path = write(tmp_path, line(), line(annotated=["dog", "CAT"]), line(annotated=["dog"]))
    file = indexed(path, annotated=[" Cat"], teacher_forced_ratio=0.5)
    assert [sample.annotated for sample in file] == [{"cat"}, {"cat"}, set()]
    assert [sample.annotated for sample in indexed(path)] == [None, {"cat", "dog"}, {"dog"}]
    assert {sample.teacher_forced_ratio for sample in file} == {0.5}
    assert len(indexed(path, limit=1)) == 1 and indexed(path, limit=1)[:] == indexed(path)[:1]


def test_dat_2_a_format_without_polygons(tmp_path):
    """DAT-2: as when a file is loaded; the index counts them."""
    poly = {"desc": "dog", "poly": [10, 5, 100, 5, 50, 50]}
    path, checks = write(tmp_path, line(objects=[poly] * 2), line()), Checks(LineReader("List.", form=QWEN3VL))
    assert list(indexed(path, checks)) == load_samples([path], reader=LineReader("List.", form=QWEN3VL))[0]
    found = Index(tmp_path / "index")
    assert (found.num_polygons, found.num_objects) == (2, 3)


def test_cfg_15_lengths_are_found_in_the_same_pass(tmp_path):
    """CFG-15: of every good line; a prompt that cannot be encoded is longer than any limit."""

    def count(sample: Sample) -> int:
        if sample.id == "1":
            raise ValueError("no")
        return 10 + int(sample.id)

    path = write(tmp_path, line(id="0"), "{", line(id="1"), line(id="2"))
    assert indexed(path, Checks(CHECKS.reader, count)).num_tokens.tolist() == [10, NO_LENGTH, 12]


MISTAKES = {
    "none": ([line()], [], False, []),
    "bad": ([line(), "{"], [], False, ["d.jsonl:2: not valid JSON"]),
    "skipped": ([line(), "{"], [], True, []),
    "all bad": (["{", "["], [], True, ["d.jsonl: no line of it can be used", "d.jsonl:1: ", "d.jsonl:2: "]),
    "blank": (["", " "], [], True, ["d.jsonl: the file is empty"]),
    "a reward's key": ([line(summary={}), line()], ["summary_tversky"], True, ["d.jsonl:2: summary: "]),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_dat_3_what_stops_a_run(tmp_path, name):
    """DAT-3, GRP-5: as before there were indexes; the index is gone then, since images may come without a new file."""
    rows, rewards, skips_bad, expected = MISTAKES[name]
    folder = tmp_path / "indexes"
    index = ensure_index(folder / "d", write(tmp_path, *rows), replace(CHECKS, rewards=rewards))
    (folder / "stale").mkdir()
    if not expected:
        check_indexes([index], folder, skips_bad)
        assert [path.name for path in folder.iterdir()] == ["d"]
        return
    with pytest.raises(DataError) as caught:
        check_indexes([index], folder, skips_bad)
    assert len(caught.value.problems) == len(expected)
    for problem, start in zip(caught.value.problems, expected, strict=True):
        assert problem.startswith(f"{tmp_path}/{start}")
    assert not (folder / "d").exists()


@pytest.mark.parametrize("name", ["cut.jpg", "cut.bmp"])
def test_dat_3_an_image_that_is_cut_off_is_found_in_the_pass(tmp_path, name):
    """DAT-3, CON-3: with file and line, or left out with `on_bad_sample: skip`; its header alone is sound."""
    Image.effect_noise((100, 50), 90).convert("RGB").save(tmp_path / name)
    whole = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(whole[: len(whole) // 2])
    assert image_size(tmp_path / name) == (50, 100)
    path = write(tmp_path, line(), line(images=[name]))
    assert len(indexed(path)) == 1
    [problem] = Index(tmp_path / "index").problems(skips_bad=False)
    assert problem.startswith(f"{path}:2: images[0]: {tmp_path / name}: image file is truncated")
    assert not list(Index(tmp_path / "index").problems(skips_bad=True))


def test_dat_3_all_missing_files_are_listed(tmp_path):
    """DAT-3: 50 in the message, all in a file that it names."""
    path = write(tmp_path, line(), *[line(images=[f"{i}.png"]) for i in range(60)])
    index = ensure_index(tmp_path / "indexes" / "d", path, CHECKS)
    with pytest.raises(DataError) as caught:
        check_indexes([index], tmp_path / "indexes", skips_bad=False)
    listed = tmp_path / "indexes" / "mistakes.txt"
    assert len(caught.value.problems) == 50 and str(caught.value).endswith(f"... and 10 more, all in {listed}")
    found = listed.read_text().splitlines()
    assert [text.split("images[0]: ")[1] for text in found] == [f"{tmp_path}/{i}.png: no such image" for i in range(60)]
    expected = [text for item in read_samples(path, "x") if isinstance(item, BadLine) for text in item.messages()]
    assert found == expected


def test_dat_6_drawn_images_of_a_shard_know_their_place(tmp_path, monkeypatch):
    """DAT-6: the shard's headers are read by the pass alone; what is sent, and what is said of the sample, is right."""
    images = {name: Image.new("RGB", (100, 50), name) for name in ("red", "blue")}
    shard(tmp_path / "000.tar", **images)
    rows = [line(images=[f"000.tar/{name}.png"]) for name in images] + [line(images=["000.tar/red.png", "a.png"])]
    file = indexed(write(tmp_path, *rows))
    monkeypatch.setattr("tarfile.open", lambda *_: pytest.fail("read the headers of a shard"))
    images_module._members.cache_clear()
    drawn = list(file)
    assert [sample.images for sample in drawn][2] == [f"{tmp_path}/000.tar/red.png", f"{tmp_path}/a.png"]
    assert open_image(drawn[1].images[0]).tobytes() == images["blue"].tobytes()
    sent = infer_request(RolloutRequest("", [], drawn[2].images, []))["images"]
    assert sent[0].startswith("data:image;base64,") and sent[1] == f"{tmp_path}/a.png"
    json.dumps([sample.images for sample in drawn])
    with pytest.raises(DataError, match="000.tar/green.png: no such image"):
        monkeypatch.undo()
        load_samples([write(tmp_path, line(images=["000.tar/green.png"]))], "x")


def test_dat_6_an_image_that_changes_under_a_run_is_told(tmp_path, start_model):
    """DAT-6: one that was resized, before its objects are trained on; one that EXIF turns has not changed."""
    turned = Image.Exif()
    turned[EXIF_ORIENTATION] = 6
    Image.new("RGB", (40, 20)).save(tmp_path / "t.jpg", exif=turned)
    processor = load_processor(start_model)
    path = write(tmp_path, line(images=["t.jpg", "a.png"], width=100, height=50, objects=[]), line())
    write_index(tmp_path / "index", path, CHECKS)
    for _ in range(2):  # starts
        file = IndexedFile(path, ensure_index(tmp_path / "index", path, CHECKS), CHECKS.reader)
        before = [len(encode_prompt(sample, processor).prompt_token_ids) for sample in file]
    png(tmp_path / "a.png", 50, 30)
    told = r"changed since it was checked: 100 x 50 then, 50 x 30 now; remove data_index in the run directory and start"
    for index, name in ((0, r"d.jsonl:1: images\[1\]: .*/a.png has "), (1, r"d.jsonl:2: images\[0\]: .*/a.png has ")):
        with pytest.raises(DataError, match=name + told):
            encode_prompt(file[index], processor)
    png(tmp_path / "a.png")
    assert [len(encode_prompt(sample, processor).prompt_token_ids) for sample in file] == before


@pytest.mark.parametrize("change", ["order", "times", "name", "content", "appended", "cut", "gone"])
def test_dat_6_a_shard_that_is_rebuilt_under_a_run_is_told(tmp_path, change):
    """DAT-6: where other bytes lie at an image's place, instead of training on another image. A copy with other times,
    as another node may have, is the same."""
    images = {name: Image.new("RGB", (100, 50), name) for name in ("red", "tan")}
    path = shard(tmp_path / "000.tar", **images)
    file = indexed(write(tmp_path, *[line(images=[f"000.tar/{name}.png"]) for name in images]))
    os.utime(path, ns=(1, 1))
    assert [open_image(sample.images[0]).getpixel((0, 0)) for sample in file] == [(255, 0, 0), (210, 180, 140)]
    if change == "order":
        shard(path, **dict(reversed(images.items())))
    elif change == "name":
        shard(path, red=images["red"], sky=images["tan"])
    elif change == "content":
        shard(path, red=images["red"], tan=Image.new("RGB", (100, 50), (210, 180, 141)))
    elif change == "appended":
        shard(path, **images, blue=Image.new("RGB", (100, 50), "blue"))
    elif change == "cut":
        os.truncate(path, 1000)
    elif change == "gone":
        path.unlink()
    drawn = file[1].images[0]
    if change in ("times", "appended"):
        assert open_image(drawn).getpixel((0, 0)) == (210, 180, 140) and as_sent(drawn).startswith("data:")
        return
    told = "changed since it was checked; remove data_index in the run directory and start again"
    for read in (open_image, as_sent):
        with pytest.raises(OSError, match="No such file|no such image" if change == "gone" else f"000.tar: has {told}"):
            read(drawn)


MEMORY = """
import re, sys
from pathlib import Path
from utils.data.index import Checks, IndexedFile, ensure_index
from utils.data.samples import LineReader
from utils.data.stream import SampleStream
path, checks = Path(sys.argv[1]), Checks(LineReader("List."))
file = IndexedFile(path, ensure_index(path.with_suffix(".index"), path, checks), checks.reader)
SampleStream([file]).next(500)
# of this program alone; getrusage's starts at that of the process that started it
print(len(file), re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
"""


def test_dat_6_memory_is_flat(tmp_path):
    """DAT-6: the peak of a process that makes an index and draws by it, at 1,000 and 20,000 lines; as objects, each
    such line takes over 4 kB (docs/performance.md)."""
    peaks = []
    for num in (1000, 20_000):
        row = json.dumps(line(images=[], objects=[{"desc": "cat", "bbox_2d": [1, 2, 30, 40]}] * 10)) + "\n"
        path = tmp_path / f"{num}.jsonl"
        path.write_text(row * num)
        found = subprocess.run([sys.executable, "-c", MEMORY, str(path)], capture_output=True, text=True, check=True)
        lines, peak = map(int, found.stdout.split())
        assert lines == num
        peaks.append(peak)
    assert peaks[1] - peaks[0] < 20_000, peaks  # KiB
