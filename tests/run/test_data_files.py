"""Data files of a run: their digests, which are read again only after a change, indexes that rank 0 makes, and what is
checked before anything heavy starts."""

import json
import math
import os
import socket
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

import train_stage2
from tests.answers import make_table
from tests.config.test_load import edited
from tests.config.test_rlhf import grpo
from tests.data.test_images import shard
from tests.data.test_samples import line, png, write
from tests.e2e.processes import config_of
from tests.run.test_program import (  # noqa: F401
    NoLearner,
    folder,
    responses,
    server,
    start,
    write_config,
)
from utils.answer_format import FORMATS
from utils.config.load import Config, build_config, load_config
from utils.config.plan import make_plan
from utils.config.schema import RM
from utils.data import index as index_module
from utils.data.encoding import EncodedPrompt, load_processor
from utils.data.images import MAX_IMAGE_BYTES, as_sent
from utils.data.index import NO_LENGTH, Checks, Index, IndexedFile, scan, write_index
from utils.data.samples import LineReader, Sample
from utils.dist import Ranks
from utils.run import data_files, inputs, setup
from utils.run.data_files import check_ground_truth, check_images, check_lengths, load_data, open_data
from utils.run.inputs import KnownDigests, check_inputs
from utils.targets import TargetOptions, ground_truth_target

OLD = 3 * 10**9  # ns


def config(run: Path, *paths: Path, skips: bool = False):
    return build_config(
        {
            "global_max_length": 64,
            "model": {"path": str(run)},
            "data": {"on_bad_sample": "skip" if skips else "stop"},
            "custom": {
                "trainer_variant": "rollout_matching_sft",
                "train_jsonl": [str(path) for path in paths],
                "val_jsonl": [str(path) for path in paths],
                "extra": {"rollout_matching": {"teacher_forced_ratio": 1.0}},
            },
            "training": {"output_dir": str(run), "max_steps": 1, "eval_limit": 3},
        }
    )


@pytest.fixture
def read(monkeypatch) -> list[Path]:
    """Files whose content was digested."""
    found, describe = [], inputs._describe
    monkeypatch.setattr(inputs, "_describe", lambda path: found.append(path) or describe(path))
    return found


@pytest.fixture
def settled(monkeypatch) -> None:
    """Files were last changed long ago."""
    now = time.time_ns
    monkeypatch.setattr(inputs.time, "time_ns", lambda: now() + OLD)


def test_dat_6_a_digest_is_read_again_only_after_a_change(tmp_path, read, settled):
    """DAT-6: content, also of the same size with the times set back; a copy in the place of the file."""
    path = tmp_path / "d.jsonl"
    path.write_text("one")

    def describe() -> dict:
        known = KnownDigests(tmp_path)
        found = known.describe(str(path))
        known.write(known.states)
        return found

    first = describe()
    assert describe() == first and read == [path]
    times = os.stat(path)
    path.write_text("two")
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert describe()["blake2b"] != first["blake2b"] and len(read) == 2
    (tmp_path / "copy").write_text("one")
    os.utime(tmp_path / "copy", ns=(times.st_atime_ns, times.st_mtime_ns))
    (tmp_path / "copy").replace(path)
    assert describe() == first and len(read) == 3
    (tmp_path / "data_index" / "known.json").write_text("{")
    assert describe() == first and len(read) == 4


def test_dat_6_a_file_that_has_just_changed_is_not_trusted(tmp_path, read):
    """DAT-6: another change within the same tick of the clock would not show."""
    path = tmp_path / "d.jsonl"
    path.write_text("one")
    for _ in range(2):
        known = KnownDigests(tmp_path)
        known.describe(str(path))
        known.write(known.states)
    assert len(read) == 2 and known.states == {}


def test_dat_6_nodes_that_see_other_files_do_not_train(tmp_path, monkeypatch, capsys):
    """DAT-6: one rank of each node reads them."""
    path, ranks = write(tmp_path, line()), Ranks()
    cfg = config(tmp_path / "run", path)

    def gather(own):
        """What rank 0, whose file is another one, and this rank say."""
        return [[{str(path): {"bytes": 1, "blake2b": "0"}}, {}, []] if isinstance(own, tuple) else None, own]

    monkeypatch.setattr(ranks, "gather", gather)
    monkeypatch.setattr(ranks, "on_each", lambda work, where: work())
    with pytest.raises(SystemExit) as ended:
        check_inputs(cfg, None, (), ranks)
    assert ended.value.code == 2
    assert f"rank 1 on {socket.gethostname()} reads different files from rank 0; make all" in capsys.readouterr().err
    ranks.local_rank = 1
    monkeypatch.setattr(ranks, "gather_or_raise", lambda *_: pytest.skip("went on, as it should"))
    with pytest.raises(pytest.skip.Exception):
        check_inputs(cfg, None, (), ranks)


@pytest.fixture(scope="module")
def processor(start_model):
    return load_processor(start_model)


@pytest.fixture
def load(processor):
    """Training and validation files of a config."""

    def load(cfg, rewards=()):
        ranks = Ranks()
        Path(cfg.training.output_dir).mkdir(exist_ok=True)
        return load_data(cfg, ranks, check_inputs(cfg, None, (), ranks)["digests"], processor, rewards)

    return load


def test_dat_6_a_later_start_reads_no_line(tmp_path, monkeypatch, capsys, read, settled, load):
    """DAT-6, DAT-3: nor digests the file; it says again what it leaves out. The file is read again where it, the
    prompt, the tokenizer or the images' limits have changed."""
    path = write(tmp_path, line(), "{", *[line()] * 4)
    cfg, passes = config(tmp_path / "run", path, skips=True), []
    monkeypatch.setattr(index_module, "scan", lambda *args: passes.append(args) or scan(*args))
    train, val = load(cfg)
    said = capsys.readouterr().out
    assert said.startswith("1 bad sample(s) skipped") and len(passes) == 1  # training and validation are one file
    assert list(map(len, train)) == [5] and list(map(len, val)) == [3]
    assert list(train[0]) == list(load(cfg)[0][0]) and capsys.readouterr().out == said and len(passes) == 1
    assert read.count(path) == 1
    assert json.loads((tmp_path / "run" / "skipped.jsonl").read_text())["line"] == 2
    changed = cfg.model_copy(update={"data": cfg.data.model_copy(update={"prompt": "Other."})})
    assert load(changed)[0][0][0].messages[0]["content"] == "Other." and len(passes) == 2
    path.write_text(json.dumps(line()) + "\n")
    assert list(map(len, load(changed)[0])) == [1] and len(passes) == 3
    (tmp_path / "run" / "tokenizer.json").write_text("{}")  # the base checkpoint's
    load(changed)
    assert len(passes) == 4
    larger = changed.model_copy(update={"model": changed.model.model_copy(update={"image_max_pixels": 10**6})})
    load(larger)
    assert len(passes) == 5
    assert len([each for each in (tmp_path / "run" / "data_index").iterdir() if each.is_dir()]) == 1


def test_dat_6_lines_that_were_fine_are_checked_again_for_other_rewards_GRP_5(tmp_path, capsys, load):
    """DAT-6, GRP-5: a later start reads no line, but its rewards may need a key that no earlier one asked for."""
    cfg = config(tmp_path / "run", write(tmp_path, line()))
    load(cfg)
    with pytest.raises(SystemExit) as ended:
        load(cfg, ["summary_tversky"])
    assert ended.value.code == 2 and "d.jsonl:1: summary: must be an object" in capsys.readouterr().err


def test_dat_1_a_summary_alone_says_nothing_of_objects(tmp_path, capsys, load):
    """DAT-1: an answer that lists none would be the best."""
    cfg = config(tmp_path / "run", write(tmp_path, line(objects=..., summary={})))
    with pytest.raises(SystemExit):
        load(cfg)
    assert "d.jsonl:1: objects: missing; write [] for an image without objects" in capsys.readouterr().err
    rlhf = build_config(grpo(reward_funcs=["summary_format"])).rlhf
    custom = cfg.custom.model_copy(update={"trainer_variant": "grpo"})
    assert len(load(cfg.model_copy(update={"custom": custom, "rlhf": rlhf}))[0][0]) == 1
    with pytest.raises(SystemExit):  # the index of those samples is no index of this run's
        load(cfg)


def test_dat_6_lines_that_were_fine_are_checked_again_for_another_answer_format_DAT_3(tmp_path, capsys, load):
    """DAT-6, DAT-3: a label that holds a word of the other form cannot be written there."""
    cfg = config(tmp_path / "run", write(tmp_path, line(objects=[{"desc": "<ref> mark", "bbox_2d": [0, 0, 50, 25]}])))
    load(cfg)
    raw = cfg.model_dump(by_alias=True)
    raw["custom"]["extra"]["rollout_matching"]["answer_format"] = "internvl"
    with pytest.raises(SystemExit) as ended:
        load(build_config(raw))
    assert ended.value.code == 2 and "answer_format: internvl writes around labels" in capsys.readouterr().err


def test_dat_6_images_that_were_missing_are_looked_for_again(tmp_path, capsys, load):
    """DAT-6, DAT-3: after a stop, with the file as it was."""
    path = write(tmp_path, line(images=["later.png"]))
    cfg = config(tmp_path / "run", path)
    with pytest.raises(SystemExit) as ended:
        load(cfg)
    assert ended.value.code == 2 and "later.png: no such image" in capsys.readouterr().err
    (tmp_path / "a.png").rename(tmp_path / "later.png")
    assert list(map(len, load(cfg)[0])) == [1]


def test_dat_6_what_a_start_asks_for_counts_at_the_next_one_SRV_5_SRV_10(
    tmp_path, monkeypatch, capsys, settled, processor
):
    """DAT-6, SRV-5, SRV-10, CFG-15: images made smaller and moved, with the file as it was. Rank 0 forgets the index,
    once all have opened it; what they map stays."""
    monkeypatch.chdir(tmp_path)
    data = config_of(tmp_path, tmp_path / "run", "http://127.0.0.1:8000", 8001, {})
    data["custom"] |= {"train_jsonl": [{"path": str(linked(tmp_path))}], "val_jsonl": None}
    data["custom"]["extra"]["rollout_server"] |= {"max_image_pixels": 59_999}
    data["training"]["output_dir"] = str(tmp_path / "run")
    (tmp_path / "run").mkdir()
    ranks, opened = Ranks(), []
    monkeypatch.setattr(ranks, "fence", lambda: opened.append(kept()))

    def kept() -> set[str]:
        return {path.name for path in (tmp_path / "run" / "data_index").rglob("*.*")} - {"known.json"}

    def opened_with(**keys) -> list[IndexedFile]:
        cfg = build_config(data | keys)
        return open_data(cfg, ranks, check_inputs(cfg, None, (), Ranks())["digests"], processor, None, ())[0]

    with pytest.raises(SystemExit):
        opened_with()
    told = capsys.readouterr().err
    assert "make them smaller" in told and "an image in" in told
    whole = {"about.json", "lines.bin", "images.bin", "bad.jsonl", "unfit.txt"}
    assert opened == [whole] and kept() == whole - {"about.json"}
    png(tmp_path / "data" / "large.png", 150, 100)
    (tmp_path / "data" / "linked").unlink()
    (tmp_path / "photos").rename(tmp_path / "data" / "linked")
    assert opened_with()[0].num_pixels.tolist() == [5000, 5000, 15_000] and kept() == whole
    with pytest.raises(SystemExit):
        opened_with(global_max_length=66)
    assert "samples do not fit" in capsys.readouterr().err and kept() == whole - {"about.json"}
    opened_with()
    monkeypatch.setattr(ranks, "is_main", False)
    monkeypatch.setattr(ranks, "on_main", lambda work: None)
    monkeypatch.setattr("utils.config.load.SILENT_RANKS_WAIT_S", 0)
    with pytest.raises(SystemExit):
        opened_with(global_max_length=66)
    assert kept() == whole


def test_labels_that_no_object_has_are_named_DAT_5(tmp_path, caplog, monkeypatch, load):
    """DAT-5: a misspelt class would leave its false positives unpunished. Texts too varied to be classes are not."""
    objects = [{"desc": name, "bbox_2d": [10, 5, 100, 50]} for name in ("Fork Lift", "dog")]
    path = write(tmp_path, *[line(objects=[each]) for each in objects])
    raw = config(tmp_path / "run", path).model_dump(by_alias=True)
    raw["custom"]["train_jsonl"][0]["annotated"] = ["fork lift", "forklift"]
    raw["custom"]["val_jsonl"][0]["annotated"] = ["dog"]
    raw["custom"]["extra"]["rollout_matching"]["eval"]["new_labels"] = ["dog", "cat", "cow"]
    _, (val,) = load(build_config(raw))
    assert val[0].annotated == {"dog"}
    assert [record.message for record in caplog.records] == [
        f"annotated of {path}: no object there is called forklift; is it misspelt?",
        f"{RM}.eval.new_labels: no object there is called cat, cow; is it misspelt?",
    ]
    caplog.clear()
    monkeypatch.setattr(index_module, "MAX_LABELS", 1)
    raw["training"]["output_dir"] = str(tmp_path / "other")
    load(build_config(raw))
    assert not caplog.records


def test_an_evaluations_limit_counts_over_its_files_LRN_7(tmp_path, load):
    """LRN-7: the first three samples, of files of two and five."""
    files = [tmp_path / name for name in ("a.jsonl", "b.jsonl")]
    for file, number in zip(files, (2, 5), strict=True):
        write(tmp_path, *[line()] * number).rename(file)
    _, val = load(config(tmp_path / "run", *files))
    assert [len(own) for own in val] == [2, 1]


def test_dat_6_only_rank_0_reads(tmp_path, monkeypatch, load, processor):
    """DAT-6: the others wait for it, then use its index."""
    cfg = config(tmp_path / "run", write(tmp_path, line()))
    expected = list(load(cfg)[0][0])
    ranks = Ranks()
    ranks.is_main = False
    monkeypatch.setattr(data_files, "ensure_index", lambda *_: pytest.fail("read"))
    found = load_data(cfg, LikeOther(), check_inputs(cfg, None, (), Ranks())["digests"], processor)
    assert list(found[0][0]) == expected


class LikeOther(Ranks):
    """Rank 1; rank 0 has just done its work."""

    def __init__(self) -> None:
        super().__init__()
        self.rank, self.is_main, self.world_size = 1, False, 2

    def gather(self, own):
        return ["done", own] if own is None else [[None, None], own]


def test_dat_6_a_run_counts_prompts_once(folder, start_model, server, start, responses, monkeypatch):  # noqa: F811
    """DAT-6, CFG-15 at the call site: the second start of a run counts no prompt."""
    counted = []
    count = data_files.num_prompt_tokens

    def note(sample: Sample, processor) -> int:
        counted.append(sample.source)
        return count(sample, processor)

    monkeypatch.setattr(data_files, "num_prompt_tokens", note)
    path = write_config(folder, start_model, server, training={"output_dir": str(folder / "twice")})
    for expected in (4, 0):
        counted.clear()
        status, _, error = start(train_stage2, path, "--resume", "auto", sync=responses.sync)
        assert status == 0 and len(counted) == expected, error


def test_weights_of_files_count_in_the_number_of_steps_CFG_16_LRN_1(
    folder,  # noqa: F811
    start_model,
    server,  # noqa: F811
    start,  # noqa: F811
    responses,  # noqa: F811
):
    """CFG-16, LRN-1 at the call site: an epoch gives each of the four samples three times, as the plan says."""
    data = [{"path": str(folder / "data" / "train.jsonl"), "weight": 3.0}]
    training = {"output_dir": str(folder / "weighted"), "max_steps": None, "num_train_epochs": 1}
    path = write_config(folder, start_model, server, data=data, training=training)
    status, _, error = start(train_stage2, path, sync=responses.sync)
    assert status == 0, error
    steps = json.loads((folder / "weighted" / "finished.json").read_text())["steps"]
    assert steps == 3 == make_plan(load_config(path), 1).num_steps


def test_dat_6_the_probe_of_a_sync_sends_images_of_shards_as_bytes(tmp_path, monkeypatch):
    """DAT-6 at the call site."""
    path = shard(tmp_path / "000.tar", a=Image.new("RGB", (4, 4)))
    sample = Sample("s", [f"{path}/a.png"], [(4, 4)], 4, 4, [], [{"role": "user", "content": "x"}], "d.jsonl:1")
    monkeypatch.setattr(setup, "encode_prompt", lambda *_: EncodedPrompt([1, 2], {}))
    monkeypatch.setattr(setup, "make_prompts", lambda *_: [])
    monkeypatch.setattr(setup, "length_limit", lambda cfg: ("global_max_length", 10))
    processor = SimpleNamespace(tokenizer=SimpleNamespace(encode=lambda *_, **__: [3]))
    learner = SimpleNamespace(last_logprobs=lambda *_: None)
    probe = setup.make_probe(None, sample, processor, None, learner, lambda segments: segments)
    (sent,) = probe.infer_request["images"]
    assert sent == as_sent(sample.images[0]) and sent.startswith("data:")
    long = SimpleNamespace(tokenizer=SimpleNamespace(encode=lambda *_, **__: list(range(20))))
    probe = setup.make_probe(None, sample, long, None, learner, lambda segments: segments)
    assert probe.token_ids == list(range(7))  # 10, less the prompt's two and one that the engine makes
    monkeypatch.setattr(setup, "length_limit", lambda cfg: ("global_max_length", 2))
    assert setup.make_probe(None, sample, long, None, learner, lambda segments: segments).token_ids == [0]


@pytest.mark.parametrize(
    ("ratio", "own", "training", "named"),
    [
        (1, 0, {}, ["train.jsonl"]),
        (1, None, {}, []),
        (0, 1, {}, []),
        (0, None, {}, ["train.jsonl"]),
        (1, None, {"eval_steps": 1}, ["val.jsonl"]),
        (1, None, {"eval_at_start": True}, ["val.jsonl"]),
        (0.5, 0.9, {"eval_steps": 1}, ["train.jsonl", "val.jsonl"]),
    ],
)
def test_every_file_needs_room_for_what_is_generated_for_it_CFG_15_DAT_5(
    tmp_path, monkeypatch, capsys, ratio, own, training, named
):
    """CFG-15, DAT-5: a prompt of 900 tokens and a response of 256 in a row of 1024; validation is never forced."""
    data = config_of(tmp_path, tmp_path / "model", "http://127.0.0.1:8000", 8001, {})
    data["custom"] |= {"train_jsonl": [{"path": "train.jsonl"}], "val_jsonl": [{"path": "val.jsonl"}]}
    if own is not None:
        data["custom"]["train_jsonl"][0]["teacher_forced_ratio"] = own
    data["custom"]["extra"]["rollout_matching"] |= {"max_new_tokens": 256, "teacher_forced_ratio": ratio}
    data["custom"]["extra"].pop("rollout_server", None)
    data["training"] |= {"eval_steps": 0, "eval_at_start": False} | training

    class File(list):
        num_tokens = np.array([900])

    train, val = (File([SimpleNamespace(source=f"{name}.jsonl:1")]) for name in ("train", "val"))
    monkeypatch.setattr(data_files, "num_prompt_tokens", lambda sample, processor: 900)
    cfg = build_config(data)
    assert cfg.global_max_length == 1024
    if not named:
        return check_lengths(cfg, True, [train], None, [val])
    with pytest.raises(SystemExit) as end:
        check_lengths(cfg, True, [train], None, [val])
    told = capsys.readouterr().err
    assert end.value.code == 2 and f"{len(named)} of 2 samples do not fit" in told
    assert [line.split(":")[0].strip() for line in told.splitlines() if "make 1156 tokens" in line] == named


@pytest.mark.parametrize("kind", ["bbox_2d", "poly"])
@pytest.mark.parametrize("form", ["coord_tokens", "qwen3vl"])
def test_a_sample_whose_ground_truth_fits_no_row_is_named_at_start_CFG_15_PCK_3(
    tmp_path, monkeypatch, capsys, kind, form
):
    """CFG-15, PCK-3: it would stop the run when it is drawn, and the resumed run as well. To the token: the sequence is
    as long as the one that would be trained. GRPO trains none."""
    for name in ("WORLD_SIZE", "RANK"):
        monkeypatch.delenv(name, raising=False)
    table = make_table("native" if form == "qwen3vl" else "qwen", form)
    shape = [1, 1, 50, 25] if kind == "bbox_2d" else [1, 1, 50, 1, 50, 25]
    rows = [line(objects=[{"desc": "cat", kind: shape}] * number) for number in (1, 12, 11)]
    path, prompt = write(tmp_path, *rows), 100
    reader = LineReader("List.", form=FORMATS[form])
    write_index(tmp_path / "index", path, Checks(reader, lambda sample: prompt))
    file = IndexedFile(path, Index(tmp_path / "index"), reader)
    lengths = [prompt + len(ground_truth_target(sample.objects, table, TargetOptions()).answer_ids) for sample in file]
    assert all(file.max_answer_tokens + prompt + 1 >= lengths)

    def cfg_with(limit: int) -> Any:
        return build_config(edited(global_max_length=limit, RM__answer_format=form, RM__max_new_tokens=16))

    check_ground_truth(cfg_with(lengths[1]), Ranks(), [file], table)
    with monkeypatch.context() as later:  # a later start does not look again (DAT-6)
        later.setattr(IndexedFile, "__getitem__", lambda *_: pytest.fail("read again"))
        again = IndexedFile(path, Index(tmp_path / "index"), reader)
        for length in (lengths[1], lengths[1] + 1):
            check_ground_truth(cfg_with(length), Ranks(), [again], table)
    with pytest.raises(SystemExit) as end:
        check_ground_truth(too_short := cfg_with(lengths[1] - 1), Ranks(), [file], table)
    told = capsys.readouterr().err
    assert end.value.code == 2 and f"global_max_length={lengths[1] - 1}: 1 training samples do not fit" in told
    assert f"{path}:2: prompt and ground truth make {lengths[1]} tokens" in told and f"{path}:3" not in told
    monkeypatch.setattr(Config, "is_grpo", True)
    check_ground_truth(too_short, Ranks(), [file], table)


def linked(root: Path) -> Path:
    """A data file. Its second line shows an image behind a link to another folder, its third one a larger image."""
    (root / "data").mkdir()
    (root / "photos").mkdir()
    for path in ("data/a.png", "photos/b.png"):
        png(root / path)
    png(root / "data/large.png", 300, 200)
    (root / "data/linked").symlink_to(root / "photos")
    rows = [line(images=["a.png"]), line(images=["linked/b.png"]), line(images=["large.png"], width=300, height=200)]
    return write(root / "data", *rows)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({}, ["allowed_image_roots", ":2: an image in"]),
        ({"allowed_image_roots": ["."]}, []),
        ({"allowed_image_roots": ["."], "max_image_pixels": 59_999}, ["max_image_pixels=59999", "60000 at most", ":3"]),
        ({"max_image_pixels": 59_999}, ["max_image_pixels=59999", "allowed_image_roots"]),
        ({"servers": [{"allowed_image_roots": ["."]}, {}]}, ["allowed_image_roots", ":2: an image in"]),
        ({"allowed_image_roots": ["."], "servers": [{}, {"max_image_pixels": 59_999}]}, ["60000 at most", ":3"]),
        ("large files", ["at most 64 MiB; 1 samples have a larger one: save it smaller", ":3"]),
        ("remote", []),
        ("teacher-forced", []),
        ("no server section", []),
        ("hf", []),
    ],
)
def test_images_that_a_server_would_not_read_are_named_at_start_SRV_5_SRV_10(
    tmp_path, monkeypatch, capsys, changes, told
):
    """SRV-5, SRV-10: links are resolved, as the server does; only what a server on this machine is asked counts, each
    one with settings of its own."""
    monkeypatch.chdir(tmp_path)
    path = linked(tmp_path)
    url = "http://10.0.0.3:8000" if changes == "remote" else "http://127.0.0.1:8000"
    data = config_of(tmp_path, tmp_path / "model", url, 8001, {})
    data["custom"] |= {"train_jsonl": [{"path": str(path)}], "val_jsonl": None}
    matching = data["custom"]["extra"]["rollout_matching"]
    if changes == "teacher-forced":
        matching["teacher_forced_ratio"] = 1.0
    if changes == "no server section":
        data["custom"]["extra"].pop("rollout_server")
    if changes == "hf":
        matching["rollout_backend"] = "hf"
    if changes == "large files":
        changes = {"allowed_image_roots": ["."]}
        with (tmp_path / "data" / "large.png").open("ab") as file:
            file.truncate(MAX_IMAGE_BYTES + 1)  # PNG may have bytes behind its end
    if isinstance(changes, dict):
        data["custom"]["extra"]["rollout_server"] |= changes
        if "servers" in changes:
            matching["vllm"]["server"]["servers"].append({"base_url": "http://127.0.0.1:8010", "group_port": 8011})
    cfg, reader = build_config(data), LineReader("List.")
    write_index(tmp_path / "index", path, Checks(reader))
    file = IndexedFile(path, Index(tmp_path / "index"), reader)
    assert file.num_pixels.tolist() == [5000, 5000, 60_000]
    if not told:
        return check_images(cfg, True, [file])
    with pytest.raises(SystemExit) as end:
        check_images(cfg, True, [file])
    message = capsys.readouterr().err
    assert end.value.code == 2 and all(text in message for text in told)
    if changes == {}:
        assert message.count("an image in") == 1 and str(tmp_path / "photos") in message
        check_images(cfg, True, [IndexedFile(path, Index(tmp_path / "index"), reader, limit=1)])
    if changes == {"max_image_pixels": 59_999}:  # `eval_limit` may leave a file without samples
        data["custom"]["val_jsonl"], data["training"]["eval_at_start"] = [{"path": str(path)}], True
        cfg = build_config(data)
        with pytest.raises(SystemExit, match="2"):
            check_images(cfg, True, [file], [IndexedFile(path, Index(tmp_path / "index"), reader, limit=0)])


def test_a_prompt_that_cannot_be_encoded_is_named_where_no_length_is_set_CFG_15(tmp_path, monkeypatch, capsys):
    """CFG-15: GRPO without a server needs no length."""
    monkeypatch.setattr(data_files, "length_limit", lambda cfg: ("global_max_length", math.inf))

    def refuse(sample, processor):
        raise ValueError("spells a special token")

    monkeypatch.setattr(data_files, "num_prompt_tokens", refuse)
    data = config_of(tmp_path, tmp_path / "model", "http://127.0.0.1:8000", 8001, {})
    train = type("File", (list,), {"num_tokens": np.array([NO_LENGTH])})([SimpleNamespace(source="a.jsonl:1")])
    with pytest.raises(SystemExit) as end:
        check_lengths(build_config(data), True, [train], None)
    told = capsys.readouterr().err
    assert end.value.code == 2 and "1 samples cannot be encoded" in told and "a.jsonl:1: spells a special" in told
