"""The learner with the backends that need no server: two DeepSpeed ranks, real vLLM, three optimizer steps each."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.e2e.processes import run_learner, write_yaml
from tools.make_demo import make_dataset
from utils.data.encoding import load_processor

pytestmark = pytest.mark.e2e
NUM_STEPS = 3
DORA = {"type": "lora", "use_dora": True, "rank": 4, "alpha": 8, "modules_to_save": ["embed_tokens"]}
COLOCATE = {"rollout_backend": "vllm"}  # vllm.mode: colocate is the default
RUNS = {
    "hf_zero0": ("zero0", {"rollout_backend": "hf"}),
    "hf_zero2": ("zero2", {"rollout_backend": "hf"}),
    "hf_zero3": ("zero3", {"rollout_backend": "hf", "losses": {"reference_kl": 1.0}}),
    "colocate_tp1": ("zero2", COLOCATE | {"vllm": {"tensor_parallel_size": 1, "sync": {"bucket_mib": 1}}}),
    "colocate_tp2": ("zero3", COLOCATE | {"vllm": {"tensor_parallel_size": 2, "sync": {"verify": "always"}}}),
}
SLOW = {"hf_zero0", "hf_zero2", "colocate_tp1"}  # what the others show, once more


def marked(name: str) -> Any:
    return pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else [])


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Five validation samples: one rank has three, in calls of two and one; the other rank has two, in one call."""
    folder = tmp_path_factory.mktemp("backends")
    make_dataset(folder / "data", num_train=24, num_val=5)
    sharded = {"stage": 3, "stage3_param_persistence_threshold": 0}  # otherwise small models are never sharded
    (folder / "zero3.json").write_text(json.dumps({"zero_optimization": sharded}))
    return folder


def config_of(folder: Path, model: Path, name: str, matching: dict, deepspeed: str, **changes) -> Path:
    matching = {"decode_batch_size": 2, "max_new_tokens": 64} | matching
    config = {
        "global_max_length": 1024,
        "model": {"path": str(model), "dtype": "float32", "image_max_pixels": 1 << 16},  # of smaller images
        "tuner": DORA,
        "custom": {
            "trainer_variant": "rollout_matching_sft",
            "train_jsonl": str(folder / "data" / "train.jsonl"),
            "val_jsonl": str(folder / "data" / "val.jsonl"),
            "extra": {"rollout_matching": matching},
        },
        "training": {
            "output_dir": str(folder / name),
            "max_steps": NUM_STEPS,
            "per_device_train_batch_size": 2,
            "learning_rate": 5e-3,
            "eval_at_start": True,
        },
        "deepspeed": str(folder / "zero3.json") if deepspeed == "zero3" else deepspeed,
    }
    return write_yaml(folder / f"{name}.yaml", config | changes)


@pytest.fixture(scope="module")
def run_of(folder, warm_model):
    """Return a function `name -> run directory`; each run happens only once."""
    done: dict[str, Path] = {}

    def run(name: str) -> Path:
        if name not in done:
            deepspeed, matching = RUNS[name]
            result = run_learner("train_stage2.py", config_of(folder, warm_model, name, matching, deepspeed), 2)
            assert result.returncode == 0, result.stdout[-6000:]
            done[name] = folder / name
        return done[name]

    return run


@pytest.mark.parametrize("name", [marked(name) for name in RUNS])
def test_a_run_trains_and_leaves_its_records_CFG_5_ROL_4_ROL_6_ROL_7_LRN_6(run_of, name):
    """CFG-5, ROL-4, ROL-6, ROL-7; LRN-6: the merged model resizes images as the run did."""
    folder = run_of(name)
    assert json.loads((folder / "finished.json").read_text())["steps"] == NUM_STEPS
    events = EventAccumulator(str(folder)).Reload()
    losses = [event.value for event in events.Scalars("loss/total")]
    assert len(losses) == NUM_STEPS and all(map(math.isfinite, losses))
    assert all(event.value > 0 for event in events.Scalars("rollout/new_tokens_mean"))
    merged = folder / f"checkpoint-{NUM_STEPS}" / "merged"
    assert (merged / "config.json").exists() and load_processor(merged).image_processor.size["longest_edge"] == 1 << 16


@pytest.mark.parametrize("name", [marked(name) for name in RUNS if name != "hf_zero3"])
def test_all_backends_give_the_same_greedy_answers_ROL_1(run_of, name):
    """ROL-1: five validation samples before training, and the loss of the first step on four samples. Sometimes the
    last bit of a float decides between two neighbouring coordinates, hence the tolerance of two bins."""
    expected, got = run_of("hf_zero3"), run_of(name)
    for ours, theirs in zip(start_answers(got), start_answers(expected), strict=True):
        assert [o["desc"] for o in ours["pred"]] == [o["desc"] for o in theirs["pred"]]
        for one, other in zip(ours["pred"], theirs["pred"], strict=True):
            assert one["bbox_2d"] == pytest.approx(other["bbox_2d"], abs=2)
    first = [EventAccumulator(str(run)).Reload().Scalars("loss/total")[0].value for run in (expected, got)]
    assert first[1] == pytest.approx(first[0], rel=1e-2)


def test_the_divergence_from_the_start_begins_at_zero_TGT_16_LOG_3(run_of):
    """TGT-16, LOG-3: two ranks under ZeRO-3 with DoRA and a trained head, on answers with and without such tokens."""
    curves = EventAccumulator(str(run_of("hf_zero3"))).Reload()
    first, *later = [event.value for event in curves.Scalars("loss/reference_kl")]
    assert first == pytest.approx(0, abs=1e-6) and len(later) == NUM_STEPS - 1 and min(later) > 1e-6
    assert "loss/reference_kl" not in EventAccumulator(str(run_of("colocate_tp2"))).Reload().Tags()["scalars"]


def start_answers(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "eval" / "step_000000.jsonl").open()]


def test_an_engine_that_does_not_divide_the_learners_stops_before_training_ROL_5_CFG_6(folder, warm_model):
    """ROL-5, CFG-6: the default size is 4."""
    result = run_learner("train_stage2.py", config_of(folder, warm_model, "odd", COLOCATE, "zero2"), 2)
    assert result.returncode != 0 and "Traceback (most recent call last)" not in result.stdout.split("[launch")[0]
    assert "rollout_matching.vllm.tensor_parallel_size=4: must divide the 2 learner(s)" in result.stdout
    assert "set it to 1" in result.stdout and "rollout_backend: hf" in result.stdout
    assert not (folder / "odd").exists()
