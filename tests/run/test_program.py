"""Both training programs from `main()` to their end in this process: what stops them before training, and what a run
asks for and records. The server is a stand-in that speaks real HTTP; learner and weight sync do nothing."""

import argparse
import gc
import itertools
import json
import re
import shutil
import signal
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import train_grpo
import train_stage2
from tests.config.test_checkpoint_files import POINTER
from tests.rollout.test_client import FaultyServer
from tests.sync.test_adapter_sync import tuned
from tools.make_demo import make_dataset
from utils.capacity import request_seed
from utils.config.load import build_config, load_config
from utils.config.plan import step_remarks
from utils.config.schema import Data
from utils.data.encoding import encode_prompt, load_processor, num_prompt_tokens
from utils.data.index import Checks, Index, IndexedFile, write_index
from utils.data.samples import DataError, LineReader, load_samples
from utils.data.stream import SampleStream
from utils.dist import DistributedError, Ranks
from utils.geometry import Object
from utils.learner.learner import NotFinite, StepResult
from utils.learner.model import load_model
from utils.parsing import TokenTable
from utils.run import data_files, session, setup
from utils.run.monitor import Monitor
from utils.run.program import again_command
from utils.run.rollout_log import read_rollout_log
from utils.run.session import Session
from utils.run.shutdown import STOPPED_STATUS, StopRequest
from utils.sync.adapter_sync import AdapterSync, FallbackSync
from utils.sync.weight_sync import SyncResult, WeightSync
from utils.targets import format_objects

NUM_STEPS, SAMPLES_PER_STEP = 2, 4
SEEN = Object("red circle", "bbox_2d", (0, 0, 312, 312))  # of a ground truth of two objects
MISSED = {"desc": "blue square", "bbox_2d": [64, 64, 108, 108]}  # pixels of an image of 128 x 128
NEAR_MISSED = Object("blue square", "bbox_2d", (650, 650, 999, 999))
LORA = {"type": "lora", "rank": 2}


class LikeRanks(Ranks):
    """One of `world_size` learners that all do the same; it does rank 0's work, whatever its own number is."""

    world, place = 1, 0

    def __init__(self, timeout_s: float) -> None:
        super().__init__(timeout_s)
        self.world_size, self.rank = self.world, self.place

    def check_port(self) -> None:
        pass

    open = close = check_port

    def gather(self, value: Any) -> list[Any]:
        return [value] * self.world_size


class NoLearner:
    model = start_head = None

    def __init__(self, cfg: Any, ranks: Any, num_steps: int) -> None:
        pass

    def step(self, rows: list[Any], objective: Any, step: int) -> StepResult:
        losses = dict.fromkeys(("total", "text", "coord", "w1", "gate", "policy"), 1.0)
        return StepResult(losses, grad_norm=0.5, learning_rates={"llm": 1e-3}, num_tokens=75, room=100)


class NoSync:
    """`fallbacks`: why an adapter sync is not in force, at the start and after each sync (the last one stays)."""

    def __init__(self, *fallbacks: str | None) -> None:
        self.fallbacks, self.ledger, self.version = list(fallbacks) or [None], {}, None
        self.is_adapter = bool(fallbacks)

    @property
    def fallback(self) -> str | None:
        return self.fallbacks[0]

    @property
    def mode(self) -> str:
        return "adapter" if self.is_adapter and self.fallback is None else "full"

    def open(self) -> None:
        pass

    close = open

    def sync(self, version: str) -> SyncResult:
        self.version = version
        self.fallbacks = self.fallbacks[1:] or self.fallbacks
        return SyncResult(version, num_tensors=1, num_bytes=2_000_000_000, seconds=0.5, verified=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four samples of the same two objects."""
    folder = tmp_path_factory.mktemp("program")
    train, _, _ = make_dataset(folder / "data", num_train=SAMPLES_PER_STEP, num_val=1)
    lines = [json.loads(line) for line in train.read_text().splitlines()]
    objects = [{"desc": "red circle", "bbox_2d": [0, 0, 40, 40]}, MISSED]
    train.write_text("".join(json.dumps(row | {"objects": objects}) + "\n" for row in lines))
    return folder


@pytest.fixture
def server():
    server = FaultyServer(world_size=1)
    yield server
    server.close()


def write_config(folder: Path, model: Path, server: FaultyServer, **changes: Any) -> Path:
    """A stage-2 config of that server; `matching`, `training` and `vllm` extend sections, the rest replaces keys."""
    connection = {"base_url": server.url, "group_port": 51216, "timeout_s": 5.0}
    vllm = {"mode": "server", "server": connection} | changes.pop("vllm", {})
    matching = {"max_new_tokens": 200, "decode_batch_size": 8, "vllm": vllm} | changes.pop("matching", {})
    enable_lora = {"vllm_enable_lora": True} if vllm.get("enable_lora") else {}
    data = str(folder / "data" / "train.jsonl")
    config = {
        "global_max_length": 1024,
        "model": {"path": str(model), "dtype": changes.pop("dtype", "float32")},
        "custom": {
            "trainer_variant": "rollout_matching_sft",
            "train_jsonl": changes.pop("data", data),
            "val_jsonl": data,
            "extra": {
                "rollout_matching": matching,
                "rollout_server": {"device": "cpu", "vllm_max_model_len": 512, **enable_lora},
            },
        },
        "training": {
            "output_dir": str(folder / "run"),
            "max_steps": NUM_STEPS,
            "per_device_train_batch_size": 2,
            "gradient_accumulation_steps": 2,
        }
        | changes.pop("training", {}),
    }
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config | changes))
    return path


def write_grpo_config(folder: Path, model: Path, server: FaultyServer, **changes: Any) -> Path:
    """The same run as GRPO."""
    config = yaml.safe_load(write_config(folder, model, server, **changes).read_text())
    config["custom"]["trainer_variant"] = "grpo"
    del config["custom"]["extra"]["rollout_matching"]
    port = int(server.url.rpartition(":")[2])
    rlhf = {"reward_funcs": ["detection_f1"], "vllm_server_port": [port], "max_new_tokens": 200, "num_generations": 2}
    config["rlhf"] = rlhf
    config["custom"]["extra"]["rollout_server"]["vllm_max_model_len"] = 1024
    (folder / "grpo.yaml").write_text(yaml.safe_dump(config))
    return folder / "grpo.yaml"


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Run a program's `main()` with these arguments; returns exit status, stdout and stderr."""

    def start(
        program: Any,
        config: Path,
        *arguments: str,
        sync: NoSync | None = None,
        world_size: int = 1,
        rank: int = 0,
        layout: Any = None,
        save: Callable[..., None] = lambda *_: None,
        check_model: Callable[..., None] = lambda *_: None,
        probe: Callable[..., None] = lambda *_: None,
    ) -> tuple[int, str, str]:
        gc.collect()  # the lock of a start that was refused before this one
        monkeypatch.setattr("sys.argv", [f"{program.__name__}.py", "--config", str(config), *arguments])
        monkeypatch.setattr(LikeRanks, "world", world_size)
        monkeypatch.setattr(LikeRanks, "place", rank)
        monkeypatch.setattr(setup, "Ranks", LikeRanks)
        monkeypatch.setattr(setup, "Learner", NoLearner)
        monkeypatch.setattr(setup, "make_weight_sync", lambda *_: sync or NoSync())
        monkeypatch.setattr(setup, "make_layout", layout or (lambda *_: (lambda segment: segment, lambda row: row)))
        monkeypatch.setattr(setup, "check_model", check_model)
        monkeypatch.setattr(setup, "make_probe", probe)
        monkeypatch.setattr(Session, "_save", save)
        monkeypatch.setattr(StopRequest, "install", lambda self: requests.append(self))
        with pytest.raises(SystemExit) as ended:
            program.main()
        return ended.value.code, *capsys.readouterr()

    return start


# Evaluation in slices


def test_an_evaluation_holds_some_samples_at_a_time_LRN_7(folder, start_model, server, start, responses, monkeypatch):
    """LRN-7: images of a rank's whole share would not fit into memory; its last slice may be smaller, or empty."""
    monkeypatch.setattr(session, "EVAL_SAMPLES", 3)
    sizes, encode = [], session.Data.encode

    def sized(self: session.Data, own: Any, keeps_pixels: bool = True) -> Any:
        sizes.append(len(own))
        return encode(self, own, keeps_pixels)

    monkeypatch.setattr(session.Data, "encode", sized)
    training = {"output_dir": str(folder / "sliced"), "eval_at_start": True}
    path = write_config(folder, start_model, server, training=training)
    status, _, error = start(train_stage2, path, sync=responses.sync)
    assert status == 0, error
    assert sizes[:2] == [3, 1]
    lines = (folder / "sliced" / "eval" / "step_000000.jsonl").read_text().splitlines()
    assert len({json.loads(line)["id"] for line in lines}) == len(lines) == 4


# ---------------------------------------------------------------------------------------------------------------------
# What stops a program before training


def test_DAT_2_an_image_that_a_resumed_run_no_longer_finds_is_told_with_its_line(folder, start_model, server, start):
    """DAT-2: its index, made at the first start, is trusted; the first sample's image is read before the first step."""

    def gone(*_: Any) -> None:
        raise FileNotFoundError("images/2.png: no such image")

    path = write_config(folder, start_model, server, training={"output_dir": str(folder / "gone")})
    status, _, error = start(train_stage2, path, probe=gone)
    assert status == 2 and ".jsonl:1: images/2.png: no such image; put back what the run began with" in error, error

    message = "train.jsonl:1: images[0]: a.png has changed since it was checked; remove data_index"

    def changed(*_: Any) -> None:
        raise DataError([message])

    status, _, error = start(train_stage2, path, probe=changed)
    assert status == 2 and error.startswith(f"{message}\nafter fixing this, start again with")


@pytest.mark.parametrize(
    ("program", "other", "write"),
    [(train_stage2, "train_grpo.py", write_grpo_config), (train_grpo, "train_stage2.py", write_config)],
)
def test_CFG_4_a_program_refuses_the_other_variant(folder, start_model, server, start, program, other, write):
    """CFG-4: and names the script that takes the file, whatever else was asked for."""
    config = write(folder, start_model, server)
    for arguments in ((), ("--dry-run",)):
        status, out, error = start(program, config, *arguments)
        assert status == 2 and out == ""
        assert "custom.trainer_variant=" in error and f"start this file with {other}" in error


@pytest.mark.parametrize("tuner", [LORA, LORA | {"use_dora": True}])
@pytest.mark.parametrize("fallback_to_full", [True, False])
@pytest.mark.parametrize("mode", ["adapter", "auto"])
def test_CFG_10_several_learners_cannot_sync_adapters(
    folder, start_model, server, start, monkeypatch, tuner, fallback_to_full, mode
):
    """CFG-10: whatever the fallback and whatever the tuner; in a dry run and at the start, before data is read."""
    vllm = {"enable_lora": True, "sync": {"mode": mode, "fallback_to_full": fallback_to_full}}
    config = write_config(folder, start_model, server, vllm=vllm, tuner=tuner)
    monkeypatch.setattr(setup, "open_data", lambda *_: pytest.fail("went on"))
    for arguments, world_size in ((("--dry-run", "--world-size", "2"), 1), ((), 2)):
        status, _, error = start(train_stage2, config, *arguments, world_size=world_size)
        assert status == 2
        command = rf"train_stage2\.py --config {re.escape(str(config))}"
        again = rf"after fixing this, start again with: .*{command}\n\Z"  # any launcher
        if fallback_to_full or "use_dora" not in tuner:
            assert bool(re.search(again, error)) == (not arguments)
            assert "vllm.sync.mode" in error and "2 learners in server mode need full" in error
        else:
            assert "no LoRA slots for DoRA" in error


def test_FAM_3_a_model_that_fails_its_checks_stops_both_programs(
    folder, start_model, server, start, monkeypatch, tmp_path
):
    """FAM-3: before the engine is opened; the check is told whether rows are packed."""
    asked = []

    def check(learner: Any, processor: Any, is_packed: bool) -> None:
        asked.append((type(learner).__name__, type(processor).__name__, is_packed))
        raise ValueError("packing changes the model's output")

    monkeypatch.setattr(setup, "open_engine", lambda *_: pytest.fail("went on"))
    for program, write in ((train_stage2, write_config), (train_grpo, write_grpo_config)):
        config = write(folder, start_model, server, training={"output_dir": str(tmp_path / program.__name__)})
        status, _, error = start(program, config, check_model=check)
        assert status == 2 and f"model.path={start_model}: packing changes the model's output" in error
    assert asked == [("NoLearner", "Qwen3VLProcessor", True)] * 2


@pytest.mark.parametrize("key", ["path", "reference_path"])
def test_CFG_16_a_checkpoint_that_is_not_whole_stops_before_servers_are_waited_for(
    folder, start_model, server, start, monkeypatch, tmp_path, key
):
    """CFG-16: one message, in a dry run too, whose plan needs neither weights nor folder. No network is asked."""
    monkeypatch.setattr(setup, "check_ranks", lambda *_: pytest.fail("went on"))
    model = shutil.copytree(start_model, tmp_path / "model")
    (model / "model.safetensors").write_bytes(POINTER)

    def refused(path: Path | str, *arguments: str) -> tuple[int, str, str]:
        matching = {"losses": {"reference_kl": 1.0}} if key == "reference_path" else {}
        config = write_config(folder, start_model, server, matching=matching)
        written = yaml.safe_load(config.read_text())
        written["model"][key] = str(path)
        config.write_text(yaml.safe_dump(written))
        return start(train_stage2, config, *arguments)

    told = f'{folder}/config.yaml: model.{key}="{model}": model.safetensors is a Git LFS pointer'
    status, out, error = refused(model, "--dry-run")
    assert status == 0 and "# plan" in out and error.startswith(f"would not start: {told}"), error
    status, _, error = refused(model)
    assert status == 2 and error.startswith(told) and "after fixing this, start again with:" in error, error
    told = f'model.{key}="models/mine": no such folder (looked in {Path.cwd()}/models/mine;'
    status, out, error = refused("models/mine", "--dry-run")
    assert status == 0 and "# plan" in out and error.startswith("would not start: ") and told in error, error
    status, _, error = refused("models/mine")
    assert status == 2 and told in error


def test_SYN_7_the_probe_of_a_sync_is_a_sample_that_is_generated_for(folder, start_model, server, start, monkeypatch):
    """SYN-7, SRV-5: of a file that is only trained on, nobody knows whether the server may read its images."""
    probed, (train, other) = [], (folder / "data" / name for name in ("train.jsonl", "forced.jsonl"))
    other.write_text("".join(json.dumps(json.loads(line) | {"id": "forced"}) + "\n" for line in train.open()))

    def probe(cfg: Any, sample: Any, *_: Any) -> None:
        probed.append(sample.id)
        raise KeyboardInterrupt

    data = [{"path": str(other), "teacher_forced_ratio": 1.0}, str(train)]
    config = write_config(folder, start_model, server, data=data, training={"output_dir": str(folder / "probed")})
    with pytest.raises(KeyboardInterrupt):
        start(train_stage2, config, probe=probe)
    assert len(probed) == 1 and probed[0] != "forced"


def test_CFG_3_an_adapter_that_is_not_there_stops_before_servers_are_waited_for(
    folder, start_model, server, start, monkeypatch
):
    """CFG-3: PEFT would look for it on the Hub, after the model has been loaded."""
    monkeypatch.setattr(setup, "check_ranks", lambda *_: pytest.fail("went on"))
    config = write_config(folder, start_model, server)
    written = yaml.safe_load(config.read_text())
    config.write_text(yaml.safe_dump(written | {"tuner": {"type": "lora", "adapter_path": "me/adapter"}}))
    status, _, error = start(train_stage2, config)
    assert status == 2 and 'tuner.adapter_path="me/adapter": no such folder (looked in' in error, error
    status, _, error = start(train_stage2, config, "--dry-run")
    assert status == 0 and error.startswith("would not start: ") and 'tuner.adapter_path="me/adapter": no such' in error


def test_FAM_2_a_form_that_the_model_does_not_write_is_told_by_a_dry_run(folder, start_model, server, start):
    """FAM-2: config.json tells the family."""
    config = write_config(folder, start_model, server)
    written = yaml.safe_load(config.read_text())
    written["custom"]["extra"]["rollout_matching"]["answer_format"] = "internvl"
    config.write_text(yaml.safe_dump(written))
    for arguments, expected in ((["--dry-run"], 0), ([], 2)):
        status, _, error = start(train_stage2, config, *arguments)
        assert status == expected and "Qwen3-VL was not trained to write this form; use qwen3vl, or" in error, error


def test_ROL_7_rows_longer_than_the_colocated_engine_can_hold_are_told_before_anything_starts(
    folder, start_model, server, start, monkeypatch
):
    """ROL-7: vLLM would refuse the length, but only after the model has been loaded."""
    monkeypatch.setattr(setup, "check_ranks", lambda *_: pytest.fail("went on"))
    longest = json.loads((start_model / "config.json").read_text())["text_config"]["max_position_embeddings"]
    config = write_config(folder, start_model, server)
    written = yaml.safe_load(config.read_text())
    matching = written["custom"]["extra"]["rollout_matching"]
    matching["vllm"] = {"mode": "colocate", "tensor_parallel_size": 1}
    for length, is_told in ((longest, False), (longest + 1, True)):
        config.write_text(yaml.safe_dump(written | {"global_max_length": length}))
        status, _, error = start(train_stage2, config, "--dry-run")
        assert status == 0 and (f"global_max_length={length}: is the colocated" in error) is is_told, error
    status, _, error = start(train_stage2, config)
    assert status == 2 and f"ends at {longest} positions; lower it" in error, error


def test_ROL_7_heads_that_the_colocated_engine_cannot_divide_are_told_before_anything_starts(
    folder, start_model, server, start, monkeypatch
):
    """ROL-7: vLLM would refuse the size, but only after the model has been loaded."""
    monkeypatch.setattr(setup, "check_ranks", lambda *_: pytest.fail("went on"))
    heads = json.loads((start_model / "config.json").read_text())["text_config"]["num_attention_heads"]
    config = write_config(folder, start_model, server)
    written = yaml.safe_load(config.read_text())
    matching = written["custom"]["extra"]["rollout_matching"]
    matching["vllm"] = {"mode": "colocate", "tensor_parallel_size": heads + 1}
    config.write_text(yaml.safe_dump(written))
    status, _, error = start(train_stage2, config)
    assert status == 2 and f"vllm.tensor_parallel_size={heads + 1}: cannot divide" in error, error


@pytest.mark.parametrize("launched", [None, "make train GPUS=3 CONFIG=c.yaml RESUME=auto"])
def test_LRN_5_the_way_to_start_again_names_the_checkpoint_once(monkeypatch, launched):
    """LRN-5: what `tools.launch` has on record has `--resume` already."""
    arguments = argparse.Namespace(config="c.yaml", resume="my runs/a/checkpoint-4", accept_changes=["data"])
    monkeypatch.delenv("LEARNER_COMMAND", raising=False)
    if launched:
        monkeypatch.setenv("LEARNER_COMMAND", launched)
        assert again_command(arguments) == launched
    else:
        assert again_command(arguments).endswith("c.yaml --resume 'my runs/a/checkpoint-4' --accept-changes data")
        arguments.resume, arguments.accept_changes = None, []
        assert again_command(arguments).endswith("c.yaml")


def test_CFG_16_a_directory_that_holds_another_run_is_told_by_a_dry_run(folder, start_model, server, start, tmp_path):
    """CFG-16: unless that run is to be resumed."""
    config = write_config(folder, start_model, server, training={"output_dir": str(tmp_path)})
    assert start(train_stage2, config, "--dry-run")[::2] == (0, "")
    (tmp_path / "run.json").touch()
    status, out, error = start(train_stage2, config, "--dry-run")
    told = f'would not start: {config}: training.output_dir="{tmp_path}": holds an earlier run; resume it'
    assert status == 0 and "# plan" in out and error.startswith(told), error
    assert start(train_stage2, config, "--dry-run", "--resume")[::2] == (0, "")


@pytest.mark.parametrize(("program", "write"), [(train_stage2, write_config), (train_grpo, write_grpo_config)])
def test_CFG_16_data_files_that_are_not_there_are_told_by_a_dry_run(
    folder, start_model, server, start, monkeypatch, tmp_path, program, write
):
    """CFG-16: each by its key, in the words of the start that they would stop; the plan needs none of them."""
    config = write(folder, start_model, server, training={"output_dir": str(tmp_path / "run")})
    assert start(program, config, "--dry-run")[::2] == (0, "")
    written = yaml.safe_load(config.read_text())
    here = written["custom"]["train_jsonl"]
    written["custom"] |= {"train_jsonl": [here, "data/nothere.jsonl"], "val_jsonl": str(tmp_path)}
    config.write_text(yaml.safe_dump(written))
    gone = "custom.train_jsonl[1]=data/nothere.jsonl: cannot be read: No such file or directory; paths are relative to"
    told = [f"{gone} the working directory, {Path.cwd()}", f"custom.val_jsonl[0]={tmp_path}: cannot be read: Is a dir"]
    status, out, error = start(program, config, "--dry-run")
    assert status == 0 and "# plan" in out and error.count("would not start: ") == 2, error
    assert all(f"would not start: {line}" in error for line in told), error
    with monkeypatch.context() as other_rank:
        other_rank.setenv("RANK", "1")
        assert start(program, config, "--dry-run") == (0, "", ""), "one rank tells it"
    status, _, error = start(program, config)
    assert status == 2 and all(line in error for line in told), error


def test_CFG_16_a_start_remarks_on_steps_that_it_never_comes_to(
    folder, start_model, server, start, responses, monkeypatch, tmp_path, caplog
):
    """CFG-16: as the plan does."""
    training = {"output_dir": str(tmp_path / "run"), "warmup_steps": 5, "save_steps": 9}
    config = write_config(folder, start_model, server, training=training)
    status, _, error = start(train_stage2, config, sync=responses.sync)
    assert status == 0, error
    warned = [own.getMessage() for own in caplog.records if own.name == "utils.run.setup"]
    assert warned == step_remarks(load_config(config), NUM_STEPS) and len(warned) == 3


def test_CFG_3_a_tuner_that_does_not_fit_the_model_is_told_in_one_message(
    folder, start_model, server, start, monkeypatch
):
    """CFG-3: names that only the loaded model knows to be wrong."""

    def refuse(*_: Any) -> None:
        raise ValueError("tuner.target_modules: no linear layer has a name that ends in ['q_prj']")

    monkeypatch.setattr(NoLearner, "__init__", refuse)
    status, _, error = start(train_stage2, write_config(folder, start_model, server))
    assert status == 2 and error.count("ends in ['q_prj']\n") == 1 and "Traceback" not in error, error


def test_CON_4_a_server_of_another_model_stops_before_the_model_is_loaded(
    folder, start_model, server, start, monkeypatch
):
    """CON-4: at the call site."""
    monkeypatch.setattr(NoLearner, "__init__", lambda *_: pytest.fail("went on"))
    server.on_health = lambda: (200, server.health(model="/other", model_digest="other"))
    status, _, error = start(train_stage2, write_config(folder, start_model, server))
    assert status == 1 and f"serves another model than this run trains: /other, model.path={start_model}" in error


def test_DIS_2_more_learners_than_the_servers_have_room_for(folder, start_model, server, start, monkeypatch):
    """DIS-2: at the start, as in a dry run; the model is never loaded."""
    config = write_config(folder, start_model, server, matching={"decode_batch_size": 2})
    monkeypatch.setattr(NoLearner, "__init__", lambda *_: pytest.fail("went on"))
    for arguments, world_size, expected in ((("--dry-run", "--world-size", "3"), 1, 2), ((), 3, 1)):
        status, _, error = start(train_stage2, config, *arguments, world_size=world_size)
        assert status == expected
        assert re.search(r"decode_batch_size=2.* 1 rollout device.*3 learners", error), error


def with_line(folder: Path, number: int, **changes: Any) -> str:
    """The training file with line `number` changed."""
    lines = (folder / "data" / "train.jsonl").read_text().splitlines()
    lines[number - 1] = json.dumps(json.loads(lines[number - 1]) | changes)
    path = folder / "data" / "changed.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return str(path)


LENGTHS = [
    # 81 tokens of a demo prompt and 200 of a response
    (
        {"prompt": "word " * 500},
        {},
        r"vllm_max_model_len=512: 1 of 8 .*\n\S+changed.jsonl:3: prompt .*=200 make \d+ tokens",
    ),
    ({"prompt": "word " * 500}, {"global_max_length": 400}, r"global_max_length=400: 1 of 8 samples do not fit"),
    (
        {},
        {"global_max_length": 250, "training": {"eval_steps": 1}},
        r"global_max_length=250: 8 of 8 .*(\n\S+(changed|train).jsonl:\d: .* make 281 tokens){8}",
    ),
    (
        {"objects": [{"desc": "car", "bbox_2d": [1, 1, 9, 9]}] * 100},
        {},
        r"global_max_length=\d+: 1 training samples do not fit; raise .*\n\S+changed.jsonl:3: prompt and ground truth",
    ),
    ({"prompt": "an <|image_pad|>"}, {}, r"1 of 8 .*\n\S+changed.jsonl:3: the prompt has 2 image placeholders for 1"),
]


@pytest.mark.parametrize(("line", "changes", "message"), LENGTHS)
def test_CFG_15_prompts_that_do_not_fit_are_named_before_training(
    folder, start_model, server, start, monkeypatch, line, changes, message
):
    """CFG-15: status 2, before servers are asked, with file and line, training and validation data alike."""
    config = write_config(folder, start_model, server, data=with_line(folder, 3, **line), **changes)
    monkeypatch.setattr(setup, "reach_servers", lambda *_: pytest.fail("went on"))
    status, _, error = start(train_stage2, config)
    assert status == 2 and re.search(message, error), error
    ways_out = "raise it, " + ("or remove" if "ground truth" in error else "lower custom.extra.rollout_matching.max_n")
    assert "Traceback" not in error and ways_out in error


def test_DAT_3_labels_that_spell_a_special_token_are_named_before_training(
    folder, start_model, server, start, monkeypatch
):
    """DAT-3: where the answer format writes labels as they are."""
    row = {"objects": [{"desc": "an <img> tag", "bbox_2d": [1, 1, 9, 9]}]}
    config = write_config(folder, start_model, server, data=with_line(folder, 3, **row))
    monkeypatch.setattr(data_files, "special_words", lambda *_: ("<img>",))
    status, _, error = start(train_stage2, config)
    assert status == 2 and "changed.jsonl:3: objects[0].desc: 'an <img> tag' spells a special token" in error, error


def test_CFG_15_grpo_checks_its_prompts_too(folder, start_model, server, start, monkeypatch):
    """CFG-15."""
    config = write_grpo_config(folder, start_model, server, data=with_line(folder, 2, prompt="word " * 900))
    monkeypatch.setattr(setup, "reach_servers", lambda *_: pytest.fail("went on"))
    status, _, error = start(train_grpo, config)
    assert status == 2, error
    assert re.search(r"changed.jsonl:2: prompt \+ rlhf.max_new_tokens=200 make \d{4} tokens", error), error


def test_SRV_5_SRV_10_images_that_a_server_would_not_read_are_named_before_training(
    folder, start_model, server, start, monkeypatch
):
    """SRV-5, SRV-10: status 2, before servers are asked; training and validation data alike."""
    lines = (folder / "data" / "train.jsonl").read_text().splitlines()
    image = folder / "data" / json.loads(lines[2])["images"][0]
    (folder / "elsewhere").mkdir()
    (folder / "elsewhere" / image.name).write_bytes(image.read_bytes())
    (folder / "data" / "linked").symlink_to(folder / "elsewhere")
    data = with_line(folder, 3, images=[f"linked/{image.name}"])
    monkeypatch.setattr(setup, "reach_servers", lambda *_: pytest.fail("went on"))
    told = rf"allowed_image_roots=null: .*\n\S+changed.jsonl:3: an image in {folder}/elsewhere\n"
    for key in ("train_jsonl", "val_jsonl"):
        config = write_config(folder, start_model, server, training={"eval_steps": 1})
        written = yaml.safe_load(config.read_text())
        written["custom"][key] = data
        config.write_text(yaml.safe_dump(written))
        status, _, error = start(train_stage2, config)
        assert status == 2 and "Traceback" not in error and re.search(told, error), error


def test_CFG_15_the_smallest_server_counts_and_supervised_runs_need_no_room_for_responses(
    start_model, server, folder, tmp_path
):
    """CFG-15, LRN-10."""
    config = yaml.safe_load(write_config(folder, start_model, server).read_text())
    extra = config["custom"]["extra"]
    data, processor = folder / "data" / "train.jsonl", load_processor(start_model)
    checks = Checks(LineReader(Data().prompt), partial(num_prompt_tokens, processor=processor))
    write_index(tmp_path / "index", data, checks)
    files = [IndexedFile(data, Index(tmp_path / "index"), checks.reader)]
    data_files.check_lengths(build_config(config), True, files, processor)
    extra["rollout_server"]["servers"] = [{"vllm_max_model_len": 280}]
    with pytest.raises(SystemExit, match="2"):
        data_files.check_lengths(build_config(config), True, files, processor)
    extra["rollout_matching"]["teacher_forced_ratio"] = 1.0
    data_files.check_lengths(build_config(config), True, files, processor)


# A whole run


@pytest.fixture
def responses(folder, start_model, server) -> SimpleNamespace:
    """Let the server respond to each sample with one object of two, twice, one that overlaps the other a little, and a
    malformed one, cut at the limit. `prompt_of` and `sync` may be changed."""
    processor = load_processor(start_model)
    table = TokenTable.from_tokenizer(processor.tokenizer)
    samples = load_samples([folder / "data" / "train.jsonl"], prompt=Data().prompt)[0]
    prompts = {sample.id: encode_prompt(sample, processor).prompt_token_ids for sample in samples}
    text = format_objects([SEEN, SEEN, NEAR_MISSED])[:-2] + ', {"desc": "", "bbox_2d": []}'
    found = SimpleNamespace(sync=NoSync(), prompt_of=prompts.get, ids=table.encode(text))

    def answer(body: dict[str, Any]) -> tuple[int, Any]:
        choice = {"message": {"content": text}, "finish_reason": "length"}
        return 200, [
            {
                "response": {"choices": [choice], "prompt_token_ids": found.prompt_of(request["uuid"])},
                "response_token_ids": [found.ids],
                "rollout_infos": {"weight_version": found.sync.version},
            }
            for request in body["infer_requests"]
        ]

    server.on_infer = answer
    return found


def curves(run_dir: Path) -> dict[str, dict[int, float]]:
    """Value by step of every curve."""
    events = EventAccumulator(str(run_dir)).Reload()
    tags = events.Tags()["scalars"]
    return {tag: {event.step: event.value for event in events.Scalars(tag)} for tag in tags}


def test_SRV_3_no_record_and_no_output_of_a_run_has_a_secret(
    folder, start_model, server, start, responses, tmp_path, monkeypatch, caplog
):
    """SRV-3, LRN-11: neither the server's token nor the ranks' secret, at the lowest level of all loggers."""
    monkeypatch.setenv("ROLLOUT_SERVER_TOKEN", "access-s3cret")
    monkeypatch.setenv("LEARNER_SECRET", "ranks-s3cret")
    training = {"output_dir": str(tmp_path), "eval_steps": NUM_STEPS}
    config = write_config(folder, start_model, server, training=training, matching={"max_new_tokens": 200})
    with caplog.at_level(0):
        status, out, error = start(train_stage2, config, sync=responses.sync)
    assert status == 0, error
    records = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {"run.json", "rollouts.jsonl"} <= {path.name for path in records} and "/infer/" in caplog.text
    assert not [path for path in records if b"s3cret" in path.read_bytes()]
    assert "s3cret" not in out + error + caplog.text


def test_LOG_3_every_curve_of_a_step_and_a_greedy_evaluation(folder, start_model, server, start, responses, tmp_path):
    """LOG-3, LRN-7, LOG-1: a run with sampled rollouts, by hand: per response 3 valid objects, 1 matched, 1 repeated,
    1 gated, 1 malformed, 1 missed and appended. Its evaluations are greedy."""
    training = {"output_dir": str(tmp_path), "eval_steps": NUM_STEPS, "eval_at_start": True}
    config = write_config(folder, start_model, server, training=training, matching={"max_new_tokens": 200})
    sampled = yaml.safe_load(config.read_text())
    sampled["custom"]["extra"]["rollout_matching"]["decoding"] = {"temperature": 0.7, "top_p": 0.9}
    config.write_text(yaml.safe_dump(sampled))
    status, _, error = start(train_stage2, config, sync=responses.sync)
    assert status == 0, error
    found = curves(tmp_path)
    steps = set(range(1, NUM_STEPS + 1))
    length, n = len(responses.ids), SAMPLES_PER_STEP
    expected = {
        "rollout/num_pred": 3 * n,
        "rollout/num_gt": 2 * n,
        "rollout/matched": n,
        "rollout/duplicates": n,
        "rollout/gated": n,
        "rollout/dropped/empty_desc": n,
        "rollout/appended": n,
        "rollout/truncated": n,
        "rollout/failed": 0,
        "rollout/precision": 1 / 3,
        "rollout/recall": 1 / 2,
        "rollout/f1": 0.4,
        "rollout/parse_rate": 0,
        "rollout/new_tokens_mean": length,
        "rollout/new_tokens_p90": length,
        "rollout/new_tokens_p99": length,
        "rollout/remade": 0,
        "train/policy_lag": 0,
        "train/policy_lag_max": 0,
        "train/grad_norm": 0.5,
        "train/fill_ratio": 0.75,
        "learning_rate/llm": 1e-3,
        "sync/bytes": 2e9,
        "sync/gb_per_s": 4,
        "sync/seconds": 0.5,
        "sync/adapter": 0,
        "sync/fallback": 0,
        **dict.fromkeys(("loss/total", "loss/text", "loss/coord", "loss/w1", "loss/gate"), 1),
    }
    for tag, value in expected.items():
        seen = {step: at for step, at in found.pop(tag).items() if step in steps}
        if tag.startswith("sync/") and tag not in ("sync/adapter", "sync/fallback"):
            seen.setdefault(1, value)  # the first sync was the evaluation's, at step 0
        assert seen == pytest.approx(dict.fromkeys(steps, value)), tag
    measured = {f"seconds/{part}" for part in ("rollout", "sync", "prepare", "train", "step")}
    measured |= {"train/tokens_per_s", "train/buffer_length"}
    assert all(steps <= found[tag].keys() for tag in measured)
    assert all(found[tag][step] > 0 for tag in ("train/tokens_per_s", "seconds/rollout") for step in steps)
    for tag in ("eval/f1", "eval/precision", "eval/recall", "eval/mean_iou", "eval/parse_rate", "eval/f1_no_label"):
        assert found[tag].keys() == {0, NUM_STEPS}

    lines = read_rollout_log(tmp_path / "rollouts.jsonl")
    asked = {(line["phase"], line["decoding"]["temperature"], line["decoding"]["top_p"]) for line in lines}
    assert asked == {("eval", 0.0, 1.0), ("train", 0.7, 0.9)}
    sent = [(call["request_config"]["temperature"], len(call["infer_requests"])) for call in server.calls]
    assert sum(number for temperature, number in sent if temperature == 0) == 2 * n  # two evaluations of the same file
    assert sum(number for temperature, number in sent if temperature == 0.7) == NUM_STEPS * n


@pytest.mark.parametrize(("program", "logprobs"), [(train_stage2, False), (train_grpo, True)])
def test_CFG_12_DIS_6_requests_are_sampled_as_the_config_says(
    folder, start_model, server, start, responses, tmp_path, monkeypatch, program, logprobs
):
    """CFG-12, DIS-6, TGT-14: decoding, length and seed of the config. GRPO asks for log-probabilities, which correct
    its ratios; evaluation of stage 2 for confidences."""
    monkeypatch.setattr(train_grpo, "policy_row", lambda weighted, row, collate: row)
    training = {"output_dir": str(tmp_path), "seed": 3, "max_steps": 1, "eval_steps": 1}
    write = write_grpo_config if program is train_grpo else write_config
    config = write(folder, start_model, server, training=training)
    written, decoding = yaml.safe_load(config.read_text()), {"temperature": 0.7, "top_p": 0.9, "top_k": 5}
    section = written["rlhf"] if program is train_grpo else written["custom"]["extra"]["rollout_matching"]
    section |= {"decoding": decoding} | ({"importance_correction_cap": None} if program is train_grpo else {})
    config.write_text(yaml.safe_dump(written))
    status, _, error = start(program, config, sync=responses.sync)
    assert status == 0, error
    asked = {bool(call["request_config"]["temperature"]): call["request_config"] for call in server.calls}
    assert asked[True].items() >= (decoding | {"max_tokens": 200, "logprobs": logprobs}).items()
    assert asked[False].items() >= {"max_tokens": 200, "logprobs": True}.items()
    calls = [call for call in server.calls if call["request_config"]["temperature"]]
    seeds = {
        call["request_config"]["seed"] + index: request["uuid"]
        for call in calls
        for index, request in enumerate(call["infer_requests"])
    }
    ids = [sample.id for sample in load_samples([folder / "data" / "train.jsonl"], prompt=Data().prompt)[0]]
    order, size = SampleStream([ids], seed=3).next(SAMPLES_PER_STEP), 2 if program is train_grpo else 1
    assert seeds == {
        request_seed(3, 0, micro, 0) + index: order[2 * micro + index // size]
        for micro in range(2)
        for index in range(2 * size)
    }


def test_LRN_1_each_rank_trains_on_its_own_samples(folder, start_model, server, start, responses, tmp_path):
    """LRN-1 at the call site: the second of two ranks draws every second sample, from the second one on."""
    training = {"output_dir": str(tmp_path), "seed": 3, "max_steps": 2}
    training |= {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 1}
    config = write_config(folder, start_model, server, training=training)
    status, _, error = start(train_stage2, config, sync=responses.sync, world_size=2, rank=1)
    assert status == 0, error
    ids = [sample.id for sample in load_samples([folder / "data" / "train.jsonl"], prompt=Data().prompt)[0]]
    asked = [request["uuid"] for call in server.calls for request in call["infer_requests"]]
    assert asked == SampleStream([ids], seed=3, rank=1, world_size=2).next(2)


def test_CFG_17_the_learner_knows_how_many_steps_come(folder, start_model, server, start, monkeypatch, tmp_path):
    """CFG-17 at the call site: the learning rate falls over all of them."""
    told: list[int] = []

    def learner(self: NoLearner, cfg: Any, ranks: Any, num_steps: int) -> None:
        told.append(num_steps)
        raise ValueError("seen")

    monkeypatch.setattr(NoLearner, "__init__", learner)
    config = write_config(folder, start_model, server, training={"output_dir": str(tmp_path), "max_steps": 7})
    status, _, error = start(train_stage2, config)
    assert status == 2 and error.startswith("seen\n") and told == [7]


def test_SYN_10_a_fallback_is_on_record_everywhere(folder, start_model, server, start, responses, tmp_path):
    """SYN-10, LOG-1, LOG-2: known at the start it is in run.json from the start; at run time, from then on."""
    why = "vLLM has no slots for DoRA"
    for name, fallbacks, modes in (
        ("known", [why], ["full", "full"]),
        ("at_run_time", [None, None, why], ["adapter", "full"]),
    ):
        responses.sync = NoSync(*fallbacks)
        config = write_config(folder, start_model, server, training={"output_dir": str(tmp_path / name)})
        status, _, error = start(train_stage2, config, sync=responses.sync)
        assert status == 0, error
        record = json.loads((tmp_path / name / "run.json").read_text())
        assert record["sync"] == {"mode": "full", "fallback": why} and record["world_size"] == 1
        lines = read_rollout_log(tmp_path / name / "rollouts.jsonl")
        assert [line["sync"]["mode"] for line in lines] == modes and lines[-1]["sync"]["fallback"] == why
        found = curves(tmp_path / name)
        is_full = [float(mode == "full") for mode in modes]
        assert list(found["sync/fallback"].values()) == is_full
        assert list(found["sync/adapter"].values()) == [1 - value for value in is_full]


def test_ROL_3_a_prompt_that_the_engine_saw_otherwise_ends_the_run(
    folder, start_model, server, start, responses, tmp_path
):
    """ROL-3: before anything is trained on it."""
    right = responses.prompt_of
    responses.prompt_of = lambda uuid: [*right(uuid)[:-1], 0]
    config = write_config(folder, start_model, server, training={"output_dir": str(tmp_path)})
    status, _, error = start(train_stage2, config, sync=responses.sync)
    assert status == 1 and "PromptMismatch" in error, error
    assert (
        "the engine's prompt differs from the learner's at token" in error
        and "it ended after optimizer step 0" in error
    )


@pytest.mark.parametrize(("program", "write"), [(train_stage2, write_config), (train_grpo, write_grpo_config)])
def test_LRN_8_the_main_thread_computes_no_positions_and_casts_no_pixels(
    folder, start_model, server, start, responses, tmp_path, monkeypatch, program, write
):
    """LRN-8: both programs leave that to the threads that encode and judge, and the row is what it is without them."""
    model, make_layout, laid_out = load_model(start_model), setup.make_layout, []
    calls: set[tuple[str, str]] = set()  # function, thread

    def watch(owner: Any, name: str) -> None:
        function = getattr(owner, name)

        def watched(*args: Any, **named: Any) -> Any:
            calls.add((name, threading.current_thread().name))
            return function(*args, **named)

        monkeypatch.setattr(owner, name, watched)

    def layout(*parts: Any) -> tuple[Any, Any]:
        place, collate = make_layout(*parts)
        watch(model.model, "get_rope_index")
        return place, lambda row: laid_out.append((collate, row, collate(row))) or laid_out[-1][-1]

    turns: dict[str, Any] = defaultdict(itertools.count)

    def respond(body: dict[str, Any], respond: Callable[..., Any] = server.on_infer) -> tuple[int, Any]:
        status, found = respond(body)
        for request, response in zip(body["infer_requests"], found, strict=True):
            if next(turns[request["uuid"]]) % 2:  # or GRPO would not train on answers with equal rewards
                response["response_token_ids"] = [responses.ids[:5]]
        return status, found

    server.on_infer = respond
    watch(session, "encode_prompt")
    monkeypatch.setattr(NoLearner, "model", model)
    config = write(folder, start_model, server, training={"output_dir": str(tmp_path)}, dtype="bfloat16")
    status, _, error = start(program, config, sync=responses.sync, layout=layout)
    assert status == 0 and len(laid_out) >= NUM_STEPS and all(row for _, row, _ in laid_out), error
    laid_out[0][0]([])  # the dummy has its positions, too
    assert {name for name, _ in calls} == {"get_rope_index", "encode_prompt"}
    assert "MainThread" not in {thread for _, thread in calls}, calls

    samples = load_samples([folder / "data" / "train.jsonl"], prompt=Data().prompt)[0]
    vision = {sample.id: encode_prompt(sample, load_processor(start_model)).vision for sample in samples}
    rounded = {own: image | {"pixel_values": image["pixel_values"].bfloat16()} for own, image in vision.items()}
    for collate, row, batch in laid_out:
        assert batch.vision["pixel_values"].dtype == torch.bfloat16
        row = [replace(part, position_ids=None, vision=rounded[part.sample_id]) for part in row]
        expected, own = (vars(made) | made.vision | vars(made.teacher) for made in (collate(row), batch))
        for name in expected.keys() - {"vision", "teacher"}:
            value, made = expected[name], own[name]
            assert torch.equal(value, made) if isinstance(value, torch.Tensor) else value == made, name


# A run that ends early

requests: list[StopRequest] = []  # of the programs that ran


class Saves:
    """Stands for `Session._save`: notes the step, how many requests the server had got by then, and the state."""

    def __init__(self, server: FaultyServer) -> None:
        self.server, self.seen, self.states = server, [], []

    def __get__(self, session: Session, kind: type) -> Callable[..., None]:
        return partial(self, session)

    def __call__(self, session: Session, program: Any) -> None:
        assert program.session is session
        self.seen.append((session.steps_done, sum(len(call["infer_requests"]) for call in self.server.calls)))
        self.states.append(program.state_dict())
        session.steps_saved = session.steps_done


def lose_after(server: FaultyServer, num_requests: int, then: Callable[[], None] = lambda: None) -> None:
    """Have the server answer so many requests, then nothing any more."""
    answer = server.on_infer

    def on_infer(body: dict[str, Any]) -> tuple[int, Any]:
        if sum(len(call["infer_requests"]) for call in server.calls) <= num_requests:
            return answer(body)
        server.on_health = lambda: (503, {"status": "dead"})
        then()
        return 500, "dead"

    server.on_infer = on_infer


@pytest.mark.parametrize("is_stopped", [False, True])
def test_LRN_12_a_lost_server_costs_no_finished_step(
    folder, start_model, server, start, responses, tmp_path, is_stopped
):
    """LRN-12: lost for good after the first step, with a checkpoint due at the last one only; the run fails. A stop
    request ends the wait for it, and the run with a status of its own."""
    vllm = {"server": {"base_url": server.url, "group_port": 51216, "timeout_s": 60.0 if is_stopped else 2.0}}
    config = write_config(folder, start_model, server, training={"output_dir": str(tmp_path)}, vllm=vllm)
    stop = partial(StopRequest._on_signal, number=signal.SIGTERM, frame=None)
    lose_after(server, SAMPLES_PER_STEP, lambda: stop(requests[-1]) if is_stopped else None)
    saves, begun = Saves(server), time.monotonic()
    status, _, error = start(train_stage2, config, sync=responses.sync, save=saves)
    assert [step for step, _ in saves.seen] == [1], error
    last = error[error.rindex(f"run {tmp_path}: ") :]
    if is_stopped:
        assert status == STOPPED_STATUS and "stopped by SIGTERM after step 1 of 2, saved; interrupted: " in last
        assert "preparing step 1" in last and time.monotonic() - begun < 50
    else:
        assert status == 1 and "not every rollout server could be reached within 2 s" in last
        assert "change group_port in custom.extra.rollout_matching.vllm.server" in last


def test_LRN_12_a_checkpoint_comes_before_the_evaluation_of_its_step(
    folder, start_model, server, start, responses, tmp_path
):
    """LRN-12: a server lost in the evaluation costs nothing; where only the evaluation is due, it saves the step."""
    n = SAMPLES_PER_STEP
    for name, save_steps, lost_after in (("saved", 1, 10 * n), ("due", 1, n), ("not_due", 0, n)):
        training = {"output_dir": str(tmp_path / name), "eval_steps": 1, "save_steps": save_steps}
        vllm = {"server": {"base_url": server.url, "group_port": 51216, "timeout_s": 2.0}}
        config = write_config(folder, start_model, server, training=training, vllm=vllm)
        answer = server.on_infer
        server.calls.clear()
        lose_after(server, lost_after)
        saves = Saves(server)
        status, _, error = start(train_stage2, config, sync=responses.sync, save=saves)
        if name == "saved":  # per step: its samples, then as many to evaluate
            assert status == 0 and saves.seen == [(1, n), (2, 3 * n)], error
        else:
            assert status == 1 and [step for step, _ in saves.seen] == [1], error
        if name == "due":
            assert saves.seen == [(1, n)]
        server.on_infer, server.on_health = answer, lambda: (200, server.health())


def test_LRN_12_weights_that_are_not_whole_are_not_saved(
    folder, start_model, server, start, responses, tmp_path, monkeypatch
):
    """LRN-12: the second step fails while it trains, for another reason than a loss that is not finite."""
    monkeypatch.setattr(NoLearner, "step", failing(NoLearner.step, 2, DistributedError("rank 1 is gone")))
    config, saves = write_config(folder, start_model, server, training={"output_dir": str(tmp_path)}), Saves(server)
    status, _, error = start(train_stage2, config, sync=responses.sync, save=saves)
    assert status == 1 and saves.seen == [] and "failed: DistributedError: rank 1 is gone" in error


def failing(function: Callable[..., Any], number: int, error: Exception) -> Callable[..., Any]:
    """`function`, whose call with this number (from 1) fails."""
    calls = itertools.count(1)

    def called(*args: Any, **named: Any) -> Any:
        if next(calls) == number:
            raise error
        return function(*args, **named)

    return called


FULL = OSError(28, "No space left on device")


@pytest.mark.parametrize(
    ("owner", "name", "error", "words"),
    [
        (None, "", None, "packing the rows of optimizer step 2 .*: 3 segments wait .* ways out: "),
        (None, "collate", ValueError("no digit"), "packing the rows of optimizer step 2 .*: no digit"),
        (NoLearner, "step", NotFinite("the loss is nan"), "NotFinite: the loss is nan"),
        (train_stage2, "log_step", FULL, "recording optimizer step 2 .* No space left"),
        (session, "write_evaluation", FULL, "writing the evaluation at step 2 .* No space left"),
    ],
)
def test_LRN_12_what_fails_beside_the_weights_costs_no_finished_step_PCK_3(
    folder, start_model, server, start, responses, tmp_path, monkeypatch, owner, name, error, words
):
    """LRN-12, PCK-3: a row that cannot be made, a loss that is not finite, a record that cannot be written. What is
    saved knows nothing of the samples of a step that was not finished: a resumed run draws them again."""
    collate = lambda row: sizes.append(len(row)) or row  # noqa: E731
    sizes: list[int] = []  # of the rows
    if name == "collate":
        collate = failing(collate, 3, error)
    elif owner is not None:
        monkeypatch.setattr(owner, name, failing(getattr(owner, name), 2, error))
    training = {"output_dir": str(tmp_path), "max_steps": 3, "packing_buffer": 64 if name else 2}
    training["eval_steps"] = int(name == "write_evaluation")
    config = write_config(folder, start_model, server, training=training, global_max_length=320)
    layout, saves = lambda *_: (lambda segment: segment, collate), Saves(server)  # noqa: E731
    status, _, told = start(train_stage2, config, sync=responses.sync, save=saves, layout=layout)
    assert status == 1 and re.search(f"failed: .*{words}", told, re.S), told
    finished, (state,) = 2 if error is FULL else 1, saves.states
    assert [step for step, _ in saves.seen] == [finished]
    num_waiting = len(state["buffer"]["segments"])
    assert num_waiting and sum(sizes[: 2 * finished]) + num_waiting == SAMPLES_PER_STEP * finished
    assert state["stream"]["position"] == SAMPLES_PER_STEP * finished


def test_LRN_12_the_first_error_is_the_one_that_is_shown(
    folder, start_model, server, start, responses, tmp_path, monkeypatch
):
    """LRN-12: where saving fails, too, and closing the curves; what is open is closed all the same."""

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    closed: list[str] = []
    for kind in (Monitor, NoSync):
        monkeypatch.setattr(kind, "close", lambda self: (closed.append(type(self).__name__), full()))
    monkeypatch.setattr(LikeRanks, "close", lambda self: closed.append("Ranks"))
    vllm = {"server": {"base_url": server.url, "group_port": 51216, "timeout_s": 2.0}}
    answer = server.on_infer
    for name, save in (("lost", full), ("whole", lambda *_: None)):
        config = write_config(folder, start_model, server, training={"output_dir": str(tmp_path / name)}, vllm=vllm)
        if name == "lost":
            lose_after(server, SAMPLES_PER_STEP)
        closed.clear()
        status, _, error = start(train_stage2, config, sync=responses.sync, save=save)
        assert status == 1 and closed == ["Monitor", "NoSync", "Ranks"]
        last = error[error.rindex(f"run {tmp_path / name}: failed: ") :]
        what = "DistributedError: preparing step 1" if name == "lost" else "OSError: [Errno 28]"
        assert last.startswith(f"run {tmp_path / name}: failed: {what}"), last
        assert ("and at its end: OSError: [Errno 28] No space left on device" in last) == (name == "lost")
        server.on_infer, server.on_health = answer, lambda: (200, server.health())


# The sync that the programs open


@pytest.mark.parametrize(
    ("mode", "tuner", "expected"),
    [
        ("full", LORA, WeightSync),
        ("adapter", LORA, FallbackSync),
        ("auto", LORA, FallbackSync),
        ("adapter", LORA | {"use_dora": True}, WeightSync),
    ],
)
def test_SYN_10_CFG_8_the_sync_of_a_config(folder, start_model, server, caplog, mode, tuner, expected):
    """SYN-10: the mode of the file is what is opened; DoRA falls back with one warning. CFG-8: `server.timeout_s`
    bounds the opening, `sync.timeout_s` a sync."""
    vllm = {"enable_lora": True, "sync": {"mode": mode, "timeout_s": 7.0}}
    cfg = load_config(write_config(folder, start_model, server, vllm=vllm, tuner=tuner))
    learner = SimpleNamespace(model=tuned(use_dora=tuner.get("use_dora", False)))
    with caplog.at_level("WARNING"):
        sync = setup.make_weight_sync(cfg, Ranks(), "run", SimpleNamespace(), learner, None)
    assert type(sync) is expected
    current = sync.current if expected is FallbackSync else sync
    assert isinstance(current, AdapterSync) == (sync.mode == "adapter") == (expected is FallbackSync)
    assert (current.open_timeout_s, current.timeout_s) == (5.0, 7.0)
    warnings = [record.getMessage() for record in caplog.records]
    if tuner.get("use_dora"):
        assert len(warnings) == 1 and "full sync instead" in warnings[0] and "DoRA" in sync.fallback
    else:
        assert warnings == [] and sync.fallback is None


def test_SYN_6_SYN_7_the_sync_gets_its_settings(folder, start_model, server):
    """SYN-6, SYN-7, SYN-10: bucket, proofs and probe; without fallback a failing adapter sync ends the run."""
    settings = {"mode": "adapter", "bucket_mib": 3, "verify": "always", "fallback_to_full": False}
    vllm, probe = {"enable_lora": True, "sync": settings}, object()
    cfg = load_config(write_config(folder, start_model, server, vllm=vllm, tuner=LORA))
    sync = setup.make_weight_sync(cfg, Ranks(), "run", SimpleNamespace(), SimpleNamespace(model=tuned()), probe)
    assert type(sync) is AdapterSync and sync.run_id == "run"
    assert (sync.bucket_bytes, sync.verify, sync.probe) == (3 << 20, "always", probe)


@pytest.mark.parametrize(("is_ahead", "expected"), [(True, "keep"), (False, "wait")])
def test_SYN_9_what_runs_during_a_sync_is_treated_as_the_config_says(folder, start_model, server, is_ahead, expected):
    """SYN-9: without rollouts ahead of training nothing runs then."""
    ahead = {"enabled": is_ahead, "version_window": int(is_ahead), "on_sync": "keep"}
    cfg = load_config(write_config(folder, start_model, server, tuner=LORA, matching={"async": ahead}))
    sync = setup.make_weight_sync(cfg, Ranks(), "run", SimpleNamespace(), SimpleNamespace(model=tuned()), None)
    assert sync.on_running == expected


def test_SYN_10_without_fallback_dora_stops_before_anything_is_loaded(folder, start_model, server, start):
    """SYN-10: with the way out; `--dry-run` of the same file with fallback says what will happen, and why."""
    sync = {"mode": "adapter", "fallback_to_full": False}
    tuner = LORA | {"use_dora": True}
    config = write_config(folder, start_model, server, vllm={"enable_lora": True, "sync": sync}, tuner=tuner)
    status, _, error = start(train_stage2, config)
    assert status == 2 and "no LoRA slots for DoRA (tuner.use_dora); set it to true, or" in error, error
    sync["fallback_to_full"] = True
    config = write_config(folder, start_model, server, vllm={"enable_lora": True, "sync": sync}, tuner=tuner)
    status, out, _ = start(train_stage2, config, "--dry-run")
    assert status == 0
    assert re.search(r"^# sync mode: +full, as adapter sync fails: .* DoRA \(tuner.use_dora\)$", out, re.MULTILINE)
