"""Resume with other data or another base checkpoint: refused by name, by both programs (security review, finding 7)."""

import itertools
import json
import re
import shutil
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

import train_grpo
import train_stage2
from tests.run.test_program import (  # noqa: F401
    NoLearner,
    folder,
    responses,
    server,
    start,
    write_config,
    write_grpo_config,
)
from utils.config.load import build_config
from utils.dist import Ranks
from utils.run import inputs, session
from utils.run.resume import RunLock, read_manifest
from utils.run.session import Session

SAVE = Session._save
STAGE_1 = {"matching": {"teacher_forced_ratio": 1.0}}
PROGRAMS = {
    "stage2": (train_stage2, write_config, {}),
    "grpo": (train_grpo, write_grpo_config, {}),
    "stage1": (train_stage2, write_config, STAGE_1),
}


@pytest.fixture
def model(start_model: Path, tmp_path: Path) -> Path:
    """A base checkpoint to spoil."""
    return shutil.copytree(start_model, tmp_path / "model")


@pytest.fixture
def launch(
    folder: Path,  # noqa: F811
    model: Path,
    server: Any,  # noqa: F811
    start: Callable[..., tuple[int, str, str]],  # noqa: F811
    responses: Any,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[..., tuple[int, str, str]]:
    """Run a program for so many steps on its own copy of the data, with real checkpoints of nothing."""
    monkeypatch.setattr(NoLearner, "save_state", lambda self, path: path.mkdir(parents=True), raising=False)
    monkeypatch.setattr(NoLearner, "load_state", lambda self, path: None, raising=False)
    monkeypatch.setattr(train_grpo, "policy_row", lambda weighted, row, collate: row)
    for name in ("save_merged", "save_adapter"):
        monkeypatch.setattr(session, name, lambda *_: None)
    lines = [json.loads(line) for line in (folder / "data" / "train.jsonl").read_text().splitlines()]
    data = folder / "data" / "own.jsonl"
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))

    turns: dict[str, Any] = defaultdict(itertools.count)

    def respond(body: dict[str, Any], respond: Callable[..., Any] = server.on_infer) -> tuple[int, Any]:
        status, found = respond(body)
        for request, response in zip(body["infer_requests"], found, strict=True):
            if next(turns[request["uuid"]]) % 2:  # or GRPO would not train on answers with equal rewards
                response["response_token_ids"] = [responses.ids[:5]]
        return status, found

    server.on_infer = respond

    def launch(name: str, steps: int, *arguments: str) -> tuple[int, str, str]:
        program, write, more = PROGRAMS[name]
        training = {"output_dir": str(tmp_path / "run"), "max_steps": steps, "save_steps": 1}
        path = write(folder, model, server, data=str(data), training=training, **more)
        path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text()) | {"data": {"on_bad_sample": "skip"}}))
        return start(program, path, *arguments, sync=responses.sync, save=SAVE)

    launch.data = data
    return launch


def reverse(data: Path) -> None:
    data.write_text("".join(line + "\n" for line in reversed(data.read_text().splitlines())))


def move_boxes(data: Path) -> None:
    data.write_text(data.read_text().replace("[0, 0, 40, 40]", "[0, 0, 41, 41]"))


def scale(model: Path) -> None:
    path = model / "model.safetensors"
    save_file({name: tensor * 1.05 for name, tensor in load_file(path).items()}, path, {"format": "pt"})


CHANGES = {
    "order": ("data", lambda launch, model: reverse(launch.data), "own.jsonl has other content"),
    "objects": ("data", lambda launch, model: move_boxes(launch.data), "own.jsonl has other content"),
    "weights": ("base_model", lambda launch, model: scale(model), "model.safetensors has other content"),
    "shard": (
        "base_model",
        lambda launch, model: (model / "more.safetensors").write_bytes(b"\2\0\0\0\0\0\0\0{}"),
        "new",
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_finding_7_resume_refuses_other_files_by_name_LRN_12(launch, model, tmp_path, change):
    """LRN-12: nothing is written then; the flag that the message names accepts them, on record from then on."""
    kind, spoil, message = CHANGES[change]
    assert launch("stage2", 1)[0] == 0
    spoil(launch, model)
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    for arguments in ((), ("--accept-changes", "data" if kind == "base_model" else "base_model")):
        status, _, error = launch("stage2", 2, "--resume", "auto", *arguments)
        assert (
            status == 2 and f"{tmp_path / 'run' / 'checkpoint-1'}: was trained with different files: {kind}: " in error
        )
        assert message in error and f"--accept-changes {kind}\n" in error and "Traceback" not in error, error
    after = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    assert after == before
    status, _, error = launch("stage2", 2, "--resume", "auto", "--accept-changes", kind)
    assert status == 0, error
    (line,) = json.loads((tmp_path / "run" / "run.json").read_text())["accepted_changes"]
    assert line.startswith(f"step 1: {kind}: ") and message in line
    status, _, error = launch("stage2", 3, "--resume", "auto")  # the new files are the run's own now
    assert status == 0, error
    assert json.loads((tmp_path / "run" / "run.json").read_text())["accepted_changes"] == [line]
    assert read_manifest(tmp_path / "run" / "checkpoint-3").inputs["accepted_changes"] == [line]


@pytest.mark.parametrize("name", ["grpo", "stage1"])
def test_finding_7_all_programs_refuse_LRN_12(launch, model, tmp_path, name):
    """LRN-12: GRPO and stage 1, data and base checkpoint in one message; unchanged files go on without a word."""
    status, _, error = launch(name, 1)
    kept = read_manifest(tmp_path / "run" / "checkpoint-1").config["deepspeed_file"]
    assert kept == json.loads((tmp_path / "run" / "run.json").read_text())["deepspeed_file"]
    assert kept["zero_optimization"]["stage"] == 2  # the file's content: its name alone would hide a change
    assert status == 0, error
    status, _, error = launch(name, 2, "--resume", "auto")
    assert status == 0, error
    reverse(launch.data)
    scale(model)
    status, _, error = launch(name, 3, "--resume", "auto")
    assert status == 2 and "data: " in error and "base_model: model.safetensors" in error, error
    assert "--accept-changes data base_model" in error
    status, _, error = launch(name, 3, "--resume", "auto", "--accept-changes", "data", "base_model")
    assert status == 0, error


def test_a_state_that_is_refused_ends_the_program_with_one_message_LRN_5(launch, monkeypatch):
    """LRN-5: status 2 and no traceback, as for other reasons why a run cannot resume."""

    def load_state(self: NoLearner, path: Path) -> None:
        raise ValueError(f"{path}/shard.pt: could execute something")

    assert launch("stage2", 2)[0] == 0
    monkeypatch.setattr(NoLearner, "load_state", load_state)
    status, _, error = launch("stage2", 3, "--resume", "auto")
    assert status == 2 and "Traceback" not in error
    assert re.search(r"^training.resume_from_checkpoint: \S+/state/shard.pt: could execute something$", error, re.M)


def test_finding_7_a_checkpoint_without_digests_resumes_with_one_warning_LRN_12(
    launch, model, tmp_path, monkeypatch, caplog
):
    """LRN-12: of an earlier version, whatever the files are now; the next checkpoint has them."""
    write = session.write_checkpoint
    monkeypatch.setattr(session, "write_checkpoint", lambda *args, **facts: write(*args, **(facts | {"inputs": None})))
    assert launch("stage2", 1)[0] == 0
    monkeypatch.setattr(session, "write_checkpoint", write)
    reverse(launch.data)
    caplog.clear()
    status, _, error = launch("stage2", 2, "--resume", "auto")
    assert status == 0, error
    assert len([record for record in caplog.records if "has no digests of data" in record.getMessage()]) == 1
    assert read_manifest(tmp_path / "run" / "checkpoint-2").inputs["digests"]["data"]


def test_finding_7_every_tensor_of_the_base_checkpoint_counts_LRN_12(tmp_path, model, monkeypatch):
    """LRN-12: any one tensor scaled, read as a whole or in parts; tensors swapped; another tokenizer."""
    monkeypatch.setattr(inputs, "_BLOCK", 64)
    data = tmp_path / "data.jsonl"
    data.write_text("{}\n")
    config = {
        "global_max_length": 64,
        "model": {"path": str(model)},
        "custom": {
            "trainer_variant": "rollout_matching_sft",
            "train_jsonl": str(data),
            "extra": {"rollout_matching": {"teacher_forced_ratio": 1.0}},
        },
        "training": {"output_dir": str(tmp_path / "run"), "max_steps": 1},
    }
    cfg = build_config(config)
    path, old = model / "model.safetensors", inputs._describe_model(cfg)
    tensors = load_file(path)
    nonzero = [name for name, tensor in tensors.items() if tensor.any()]
    assert len(nonzero) > 20 and max(tensors[name].nbytes for name in nonzero) > 100 * 3 * 64
    for name in nonzero:
        save_file(tensors | {name: tensors[name] * 1.05}, path, {"format": "pt"})
        new = inputs._describe_model(cfg)
        assert [file for file in old if old[file] != new[file]] == [path.name], name
    pairs = [(tensors[first], tensors[second], first, second) for first, second in itertools.combinations(nonzero, 2)]
    first, second = next(names for a, b, *names in pairs if a.shape == b.shape and not torch.equal(a, b))
    save_file(tensors | {first: tensors[second], second: tensors[first]}, path, {"format": "pt"})
    assert inputs._describe_model(cfg) != old
    save_file(tensors, path, {"format": "pt"})
    assert inputs._describe_model(cfg) == old
    (model / "tokenizer_config.json").write_text("{}")
    assert inputs._describe_model(cfg) != old


def test_finding_9_a_refused_second_start_writes_nothing_LRN_5(launch, tmp_path):
    """LRN-5: `skipped.jsonl` of the run that owns the directory stays as it is; an admitted start writes it anew."""
    whole = launch.data.read_text()
    launch.data.write_text(whole + "5\n")
    status, out, error = launch("stage2", 1)
    assert status == 0 and out.startswith("1 bad sample(s) skipped"), error
    lock, listed = RunLock(tmp_path / "run"), (tmp_path / "run" / "skipped.jsonl").read_text()
    assert json.loads(listed)["line"] == 5
    launch.data.write_text(whole)
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    status, out, error = launch("stage2", 2, "--resume", "auto")
    assert status == 2 and "in use by" in error and out == ""
    assert {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()} == before
    lock.close()
    status, _, error = launch("stage2", 2, "--resume", "auto", "--accept-changes", "data")
    assert status == 0 and (tmp_path / "run" / "skipped.jsonl").read_text() == "", error


def test_a_start_policy_or_an_adapter_elsewhere_must_stay_as_it_was_LRN_12(model, tmp_path):
    """LRN-12: by its path, which is a setting; another one, or a checkpoint of a version without it, is no change."""
    other, adapter = (shutil.copytree(model, tmp_path / name) for name in ("reference", "adapter"))

    def found(reference: str | None = None) -> inputs.Digests:
        own = SimpleNamespace(path=str(model), reference_path=reference)
        cfg = SimpleNamespace(model=own, tuner=SimpleNamespace(adapter_path=str(adapter)))
        return inputs._describe_model(cfg)

    without, old = found(), found(str(other))
    scale(other)
    scale(adapter)
    changed = inputs._changes(old, found(str(other)), "base_model")
    assert [line.split(" (")[0] for line in changed] == [
        f"{where}/model.safetensors has other content" for where in (adapter, other)
    ]
    assert inputs._changes({name: own for name, own in old.items() if "/" not in name}, without, "base_model") == []
    assert found(str(model)).keys() == without.keys()


def test_changed_code_of_rewards_is_named_and_the_run_goes_on_GRP_5_GRP_7(tmp_path, caplog):
    """GRP-5, GRP-7: a checkpoint of a version without their digests says nothing."""

    def resume(old: dict, new: str) -> list[str]:
        files = {"data": {}, "base_model": {}}
        digests = files | {"rewards": {"own.py": {"bytes": 9, "blake2b": new}}}
        checkpoint = SimpleNamespace(path="c", step=3, inputs={"digests": files | old, "accepted_changes": []})
        return inputs._accepted_changes(checkpoint, digests, (), Ranks())

    assert resume({"rewards": {"own.py": {"bytes": 9, "blake2b": "a"}}}, "a") == [] == resume({}, "a")
    assert not caplog.records
    assert resume({"rewards": {"own.py": {"bytes": 9, "blake2b": "a"}}}, "b") == []
    assert "since the checkpoint: own.py has other content" in caplog.text and "rewards before and after" in caplog.text
