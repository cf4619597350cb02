"""Training in models' own answer formats: a model that memorised a few scenes, the hf backend, two real steps."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.e2e.processes import ROOT, run_learner, write_yaml
from tests.families import build_family
from tools.make_demo import make_dataset
from utils.answer_format import FORMATS, INTERNVL, AnswerFormat

pytestmark = pytest.mark.e2e
NUM_STEPS = 2
OF_FAMILY = {"qwen2_5vl": "qwen2_5_vl", "internvl": "internvl"}  # format -> family of the tiny model, else the demo's


@pytest.fixture(scope="module", params=["qwen3vl", *(pytest.param(name, marks=pytest.mark.slow) for name in OF_FAMILY)])
def form(request) -> AnswerFormat:
    return FORMATS[request.param]


@pytest.fixture(scope="module")
def folder(tmp_path_factory, form) -> Path:
    """Scenes of 128 px, one of which has polygons as objects; Qwen2.5-VL's processor makes 64 px of them."""
    folder = tmp_path_factory.mktemp(form.name)
    train, _, _ = make_dataset(folder / "data", num_train=6, num_val=1)
    rows = [json.loads(line) for line in train.read_text().splitlines()]
    for obj in rows[0]["objects"]:
        x1, y1, x2, y2 = obj.pop("bbox_2d")
        obj["poly"] = [x1, y1, x2, y1, x2, y2]
    train.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture(scope="module")
def native_model(folder, start_model, form) -> Path:
    """The untrained model after a warm-up in its native format: it answers the training scenes."""
    family = OF_FAMILY.get(form.name)
    config = {
        "extends": str(ROOT / "configs" / "demo" / "warmup.yaml"),
        "model": str(build_family(family, folder / "start") if family else start_model),
        "train_jsonl": str(folder / "data" / "train.jsonl"),
        "output_dir": str(folder / "model"),
        "answer_format": form.name,
        "steps": 60,
        "samples_per_step": 6,
        "losses": {"text": 1.0, "desc": 1.0, "w1": 1.0},
    }
    (folder / "warmup.yaml").write_text(yaml.safe_dump(config))
    command = [sys.executable, "-m", "tools.warmup_sft", "--config", str(folder / "warmup.yaml")]
    subprocess.run(command, check=True, timeout=300, cwd=ROOT)
    return folder / "model"


@pytest.fixture(scope="module")
def run(folder, native_model, form) -> Path:
    config = {
        "global_max_length": 2048,
        "model": {"path": str(native_model), "dtype": "float32"},
        "custom": {
            "trainer_variant": "rollout_matching_sft",
            "train_jsonl": str(folder / "data" / "train.jsonl"),
            "val_jsonl": str(folder / "data" / "train.jsonl"),
            "extra": {
                "rollout_matching": {
                    "rollout_backend": "hf",
                    "answer_format": form.name,
                    "decode_batch_size": 6,
                    "max_new_tokens": 220,
                    "monitor_dump": {"every_steps": 1, "num_samples": 2},
                }
            },
        },
        "training": {
            "output_dir": str(folder / "run"),
            "max_steps": NUM_STEPS,
            "per_device_train_batch_size": 6,
            "learning_rate": 1e-4,
            "eval_at_start": True,
            "eval_steps": NUM_STEPS,
        },
        "deepspeed": "zero2",
    }
    result = run_learner("train_stage2.py", write_yaml(folder / "run.yaml", config), 1)
    assert result.returncode == 0, result.stdout[-6000:]
    (folder / "run" / "output.txt").write_text(result.stdout)
    return folder / "run"


def test_a_run_trains_on_numbers_TGT_7(run):
    """TGT-7, LRN-7: answers parse and match, text tokens are trained, and there is no coordinate loss."""
    events = EventAccumulator(str(run)).Reload()
    losses = {part: [event.value for event in events.Scalars(f"loss/{part}")] for part in ("total", "text", "coord")}
    assert len(losses["total"]) == NUM_STEPS and all(value > 0 and math.isfinite(value) for value in losses["total"])
    assert losses["text"] == pytest.approx(losses["total"]) and losses["coord"] == [0.0] * NUM_STEPS
    assert events.Scalars("rollout/parse_rate")[0].value > 0.5
    assert events.Scalars("rollout/matched")[0].value > 0
    assert (run / f"checkpoint-{NUM_STEPS}" / "merged" / "config.json").exists()


def test_grpo_rewards_answers_in_this_form_GRP_5_GRP_8_FAM_4(folder, native_model, form):
    """GRP-5, GRP-8, FAM-4: objects are read from numbers in text, and each has its own credit: the last one of each
    scene is not in the annotation, so even answers that are all alike teach something."""
    rows = [json.loads(line) for line in (folder / "data" / "train.jsonl").open()]
    shorter = [row | {"objects": row["objects"][:-1]} for row in rows if len(row["objects"]) > 1]
    (folder / "data" / "grpo.jsonl").write_text("".join(json.dumps(row) + "\n" for row in shorter))
    config = {
        "global_max_length": 2048,
        "model": {"path": str(native_model), "dtype": "float32"},
        "custom": {
            "trainer_variant": "grpo",
            "train_jsonl": str(folder / "data" / "grpo.jsonl"),
            "extra": {"rollout_matching": {"answer_format": form.name}},
        },
        "rlhf": {
            "use_vllm": False,
            "reward_funcs": ["detection_f1", "detection_parse"],
            "advantage": "object",
            "decoding": {"temperature": 0.3},  # so little trained, it breaks its syntax at 1
            "num_generations": 4,
            "decode_batch_size": 24,
            "max_new_tokens": 220,
        },
        "training": {"output_dir": str(folder / "grpo"), "max_steps": 1, "per_device_train_batch_size": 6},
        "deepspeed": "zero2",
    }
    result = run_learner("train_grpo.py", write_yaml(folder / "grpo.yaml", config), 1)
    assert result.returncode == 0, result.stdout[-6000:]
    events = EventAccumulator(str(folder / "grpo")).Reload()
    rewards = {name: events.Scalars(f"reward/{name}")[0].value for name in ("detection_f1", "detection_parse")}
    assert all(0 < reward <= 1 for reward in rewards.values()), rewards
    assert events.Scalars("train/grad_norm")[0].value > 0


def test_records_are_norm1000_and_polygons_boxes_DAT_2_FAM_4(run, folder, form):
    """DAT-2, LOG-4: records are in bins 0..999; one warning mentions the polygons."""
    assert f"polygons, which answer_format: {form.name} cannot express" in (run / "output.txt").read_text()
    lines = [json.loads(line) for line in (run / "eval" / "step_000000.jsonl").open()]
    rows = {row["id"]: row for row in map(json.loads, (folder / "data" / "train.jsonl").open())}
    assert len(lines) == len(rows) == 6
    half_a_step = 0.501 * 999 / (64 if form.in_pixels else 1000)
    for line in lines:
        for found, given in zip(line["gt"], rows[line["id"]]["objects"], strict=True):
            x1, y1, *_, x2, y2 = given.get("poly") or given["bbox_2d"]
            expected = [value / 128 * 999 for value in (x1, y1, x2, y2)]
            assert found["bbox_2d"] == pytest.approx(expected, abs=half_a_step)
    assert any(line["pred"] for line in lines)


def test_sample_sheets_show_what_is_learnt_LOG_4(run, form):
    """LOG-4: digits are marked as trained text, in the answer format itself."""
    dumps = sorted((run / "dumps" / "step_000001").glob("*.json"))
    assert len(dumps) == 2 and all(path.with_suffix(".png").exists() for path in dumps)
    for record in map(json.loads, map(Path.read_text, dumps)):
        opens = "</ref><box>[[" if form is INTERNVL else '"label": "'
        assert opens in record["target"]["text"] and "<|coord_" not in record["target"]["text"]
        assert {token["kind"] for token in record["target"]["tokens"]} <= {"none", "text"}
