"""`tools.plan`: seconds worked out by hand, and the message when nothing was measured (CFG-16)."""

import itertools
import json
import re
import shutil
import subprocess
import sys
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.config.test_load import edited
from tests.config.test_plan import checkpoint, settings
from tools import plan
from tools.plan import (
    Constants,
    Split,
    StepTime,
    StepWork,
    calibrate,
    load_constants,
    measure,
    planned_work,
    predict,
    recomputed,
    splits,
    work_of_step,
    write_constants,
)
from utils.config.load import build_config, load_config
from utils.config.memory import GIB, ModelSize, model_size
from utils.config.plan import max_tokens_per_step
from utils.config.schema import RM, RS, Config
from utils.run.monitor import write_run_json

ROOT = Path(__file__).parents[2]
CONSTANTS = Constants(
    train_flops_per_s=1e6, rollout_flops_per_s=2e5, prepare_s=0.1, sync_fixed_s=0.5, sync_bytes_per_s=1e3
)
WORK = StepWork(num_answers=10, new_tokens=50, num_tokens=1000, parameters=1000, trainable=500, sync_bytes=2000)


def test_a_step_by_hand():
    """Train: 1000 tokens x 2 x (2 x 1000 + 500) = 5e6 FLOPs on 2 learners of 1e6/s: 2.5 s. Rollout: 10 x 50 x 2000 =
    1e6 on 4 devices of 2e5/s: 1.25 s. Prepare: 5 each x 0.1 s. Sync: 0.5 + 2 s."""
    time = predict(WORK, CONSTANTS, learners=2, rollout_devices=4, prefetch=False)
    assert (time.rollout, time.train, time.prepare, time.sync) == (1.25, 2.5, 0.5, 2.5)
    assert time.step == 6.75
    assert predict(WORK, CONSTANTS, 2, 4, prefetch=True).step == 5.5  # the learner's part is the larger
    assert replace(WORK, recompute=True).train_flops == 7e6
    assert replace(WORK, num_updates=2, num_other_passes=2).train_flops == 14e6


def test_constants_of_a_measured_step_predict_that_step_again(tmp_path):
    measured = StepTime(rollout=3.0, train=2.0, prepare=1.0, sync=0.25, prefetch=False)
    path = tmp_path / "constants.json"
    write_constants("cuda", {"train_flops_per_s": 1.0}, path)
    write_constants("cpu", {"sync_bytes_per_s": 1e12}, path)
    write_constants("cpu", calibrate(WORK, measured), path)
    again = predict(WORK, load_constants("cpu", path), 1, 1, prefetch=False)
    assert again.step == pytest.approx(measured.step, rel=1e-3)
    assert load_constants("cuda", path) == Constants(train_flops_per_s=1.0)


def test_what_was_not_measured_is_named(tmp_path):
    assert load_constants("cuda", tmp_path / "none.json") == Constants()
    with pytest.raises(ValueError, match="not measured: rollout_flops_per_s, sync_fixed_s"):
        predict(WORK, replace(CONSTANTS, rollout_flops_per_s=None, sync_fixed_s=None), 1, 1, prefetch=False)


def test_the_best_split_balances_learner_and_rollouts():
    """The 8B preset on 16 GPUs: every split uses at most 16 devices, best first; memory is that of --dry-run."""
    cfg = load_config(ROOT / "configs/stage2/qwen3vl_8b_3v1.yaml")
    constants = replace(CONSTANTS, train_flops_per_s=3e14, rollout_flops_per_s=3e13, sync_bytes_per_s=1e10)
    args = Namespace(new_tokens=None, segment_tokens=None, device_gib=80.0)
    found = splits(cfg, constants, 16, args)
    assert found and all(split.learners + split.rollout_devices <= 16 for split in found)
    fitting = [split.samples_per_s for split in found if split.fits]
    assert fitting == sorted(fitting, reverse=True)
    assert all(split.learner_bytes > 16e9 for split in found)  # the weights alone
    slower = splits(cfg, replace(constants, rollout_flops_per_s=3e11), 16, args)
    assert slower[0].rollout_devices >= found[0].rollout_devices


def test_without_constants_the_tool_says_how_to_measure_them():
    command = [sys.executable, "-m", "tools.plan", "--config", "configs/stage2/qwen3vl_8b_3v1.yaml", "--nodes", "2"]
    if load_constants("cuda").missing:
        result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert result.returncode == 2 and "--run RUN_DIR" in result.stderr and "Traceback" not in result.stderr


def finished_run(folder: Path, **changes) -> Path:
    """Write what a run of two learners and a server of two devices leaves: 7 steps, four of them slow."""
    from torch.utils.tensorboard import SummaryWriter

    checkpoint(folder / "model")
    cfg = build_config(edited(model__path=str(folder / "model"), **changes))
    facts = {"world_size": 2, "server_world_sizes": [2]}
    write_run_json(folder / "run", cfg.model_dump(mode="json", by_alias=True), **facts)
    values = {"seconds/rollout": 4.0, "seconds/train": 2.0, "seconds/sync": 0.5, "seconds/prepare": 1.0}
    values |= {"seconds/step": 8.0, "rollout/new_tokens_mean": 30.0, "train/tokens_per_s": 100.0}
    values |= {"rollout/num_images": 16.0, "sync/bytes": 5e6}
    with SummaryWriter(folder / "run") as writer:
        for step in range(1, 8):
            for tag, value in values.items():
                writer.add_scalar(tag, value * (10 if step <= 3 or step == 6 else 1), step)
    return folder / "run"


@pytest.mark.parametrize(("checkpointing", "passes"), [(True, 3), (False, 2), ("auto", 2)])
def test_constants_of_a_finished_run_by_hand(tmp_path, checkpointing, passes):
    """90 parameters, full fine-tuning of what is not frozen (52: language and embeddings); 800 tokens, 16 answers. A
    GPU has room for all activations of such a model."""
    constants = measure(finished_run(tmp_path, training__gradient_checkpointing=checkpointing))
    assert constants.train_flops_per_s == pytest.approx(800 * 2 * (passes * 90 + 52) / (2 * 2.0))
    assert constants.rollout_flops_per_s == pytest.approx(16 * 30 * 2 * 90 / (2 * 4.0))
    assert constants.prepare_s == pytest.approx(1.0 * 2 / 16)
    assert (constants.sync_fixed_s, constants.sync_bytes_per_s) == (0.0, 1e7)


def test_a_start_policy_and_further_updates_cost_their_passes(tmp_path):
    """Stage 2 with a KL to its start, measured and planned; GRPO with three updates on the same answers and a KL."""
    kl = {"custom__extra__rollout_matching__losses": {"reference_kl": 1.0}, "model__reference_path": "start"}
    held = finished_run(tmp_path, **kl)
    flops = 800 * 2 * ((2 + 1) * 90 + 52)
    assert measure(held).train_flops_per_s == pytest.approx(flops / (2 * 2.0))
    cfg = build_config(edited(**kl))
    plain, size = build_config(edited()), model_size(tmp_path / "model", cfg.tuner)
    assert planned(cfg, size) - planned(plain, size) == 2 * 90 * max_tokens_per_step(cfg, 1)
    grpo = load_config(ROOT / "configs/grpo/detection.yaml")
    more = grpo.model_copy(update={"rlhf": grpo.rlhf.model_copy(update={"num_iterations": 3, "beta": 0.1})})
    work = planned_work(grpo, size, learners=1, new_tokens=None, segment_tokens=None)
    assert work.num_other_passes == grpo.has_reference
    added = 2 * 90 * work.num_tokens * 2  # the old policy's pass and the start policy's
    assert planned(more, size) == pytest.approx(3 * replace(work, num_other_passes=0).train_flops + added)


def planned(cfg: Config, size: ModelSize) -> float:
    return planned_work(cfg, size, learners=1, new_tokens=None, segment_tokens=None).train_flops


def test_a_run_that_cannot_tell_says_why(tmp_path):
    with pytest.raises(ValueError, match="no finished run there"):
        measure(tmp_path)
    with pytest.raises(ValueError, match="with prefetch a step's seconds are not its own"):
        measure(finished_run(tmp_path, RM__async={"enabled": True}))
    (tmp_path / "alone").mkdir()
    alone = finished_run(tmp_path / "alone")
    record = json.loads((alone / "run.json").read_text())
    (alone / "run.json").write_text(json.dumps(record | {"server_world_sizes": []}))
    with pytest.raises(ValueError, match="no longer exists, or it had no servers"):
        measure(alone)


def plan_with(monkeypatch, *arguments: str) -> None:
    """Run the program on a preset."""
    config = str(ROOT / "configs/stage2/qwen3vl_8b_3v1.yaml")
    monkeypatch.setattr("sys.argv", ["plan", "--config", config, *arguments])
    plan.main()


def no_curves(run: Path) -> None:
    """As with `report_to: [wandb]`."""
    next(run.glob("events*")).unlink()


def few_steps(run: Path) -> None:
    from torch.utils.tensorboard import SummaryWriter

    events = EventAccumulator(str(run)).Reload()
    tags = events.Tags()["scalars"]
    no_curves(run)
    with SummaryWriter(run) as writer:
        for tag, step in itertools.product(tags, (1, 2, 3)):
            writer.add_scalar(tag, 1.0, step)


def other_curves(run: Path) -> None:
    """As of a GRPO run."""
    from torch.utils.tensorboard import SummaryWriter

    no_curves(run)
    with SummaryWriter(run) as writer:
        writer.add_scalar("seconds/step", 8.0, 1)


def newer_key(run: Path) -> None:
    text = (run / "run.json").read_text()
    (run / "run.json").write_text(text.replace('"model": {', '"mode": 1, "model": {', 1))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (no_curves, "run: holds no TensorBoard curves; name a run with tensorboard in training.report_to"),
        (other_curves, "run: its curves lack rollout/new_tokens_mean, rollout/num_images, seconds/prepare, "),
        (lambda run: (run / "run.json").write_text("{}"), "run/run.json: is not that of a run; name the training.outp"),
        (lambda run: (run / "run.json").write_text('{"config": {"mo'), "run/run.json: is no whole JSON (Unterminated "),
        (few_steps, "run: needs more than 3 steps"),
        (newer_key, "run/run.json: mode=1: unknown key"),
    ],
)
def test_a_run_that_cannot_be_read_ends_with_2_and_its_reason_CFG_16(tmp_path, monkeypatch, capsys, spoil, message):
    """CFG-16."""
    spoil(finished_run(tmp_path))
    with pytest.raises(SystemExit) as caught:
        plan_with(monkeypatch, "--run", str(tmp_path / "run"))
    assert caught.value.code == 2 and f"no prediction for cuda devices: {tmp_path}/{message}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "value", "least"),
    [
        ("--new-tokens", "-5", "a number above 0"),
        ("--segment-tokens", "-100", "a number above 0"),
        ("--segment-tokens", "nan", "a number above 0"),
        ("--device-gib", "0", "a number above 0"),
        ("--device-gib", "inf", "a number above 0"),
        ("--nodes", "0", "a whole number of at least 1"),
        ("--devices-per-node", "-8", "a whole number of at least 1"),
    ],
)
def test_measures_that_cannot_be_name_their_rule_CFG_16(monkeypatch, capsys, option, value, least):
    """CFG-16."""
    monkeypatch.setattr("sys.argv", ["plan", "--config", "x.yaml", f"{option}={value}"])
    with pytest.raises(SystemExit) as caught:
        plan.main()
    assert caught.value.code == 2 and f"argument {option}: {value}; give {least}\n" in capsys.readouterr().err


def test_a_token_costs_what_it_uses_FAM_2():
    """FAM-2: of 128 experts of three matrices of 768 x 2048 in each of 48 layers, a token goes to 8. With constants and
    devices equal, this 30B generates and trains faster than the 8B; a run is measured by the same numbers."""
    constants = Constants(1e14, 1e13, 1e-3, 0.1, 1e10)
    args = Namespace(device_gib=80, new_tokens=500, segment_tokens=1000)
    times = {}
    for name in ("qwen3vl_30b_a3b_native_4v4", "qwen3vl_8b_full_4v4"):
        data = load_config(ROOT / f"configs/stage2/{name}.yaml").model_dump()
        data["tuner"] = {"type": "full", "freeze_vit": False, "freeze_aligner": False}
        cfg = build_config(data)
        (own,) = [
            split for split in splits(cfg, constants, 8, args) if (split.learners, split.rollout_devices) == (4, 4)
        ]
        times[name[:11]] = own.time.rollout, own.time.train
        if "a3b" in name:
            size = model_size(Path(cfg.model.path), cfg.tuner)
    assert all(of_30b < of_8b for of_30b, of_8b in zip(*times.values(), strict=True))
    assert size.total - size.active[0] == size.trainable - size.active[1] == 48 * 120 * 3 * 768 * 2048
    step = {"answers": 1.0, "new_tokens": 1.0, "tokens": 1.0}
    assert work_of_step(step, size).rollout_flops == 2 * size.active[0]
    assert work_of_step(step, size).train_flops == 2 * (2 * size.active[0] + size.active[1])


def test_supervised_training_has_nothing_to_split_LRN_10():
    """LRN-10."""
    cfg = load_config(ROOT / "configs/stage1/qwen3vl_8b_4gpu.yaml")
    with pytest.raises(ValueError, match="every device is a learner"):
        splits(cfg, CONSTANTS, 8, Namespace(new_tokens=None, segment_tokens=None, device_gib=80.0))


def test_grpo_has_its_server_beside_the_learners_GRP_2():
    """GRP-2: what more machines would do there, no config can say."""
    cfg = load_config("configs/grpo/summary_1024.yaml")
    with pytest.raises(ValueError, match="the learners' own machine .*; plan for --nodes 1"):
        splits(cfg, CONSTANTS, 16, Namespace(nodes=2, device_gib=80, new_tokens=None, segment_tokens=None))


def test_engines_need_room_and_devices_of_their_own_CFG_16():
    """CFG-16: a 32B does not fit the share of one device, and with colocated engines there is nothing to split."""
    data = load_config("configs/stage2/qwen3vl_8b_3v1.yaml").model_dump()
    args = Namespace(device_gib=80, new_tokens=None, segment_tokens=None)
    constants = Constants(1e14, 1e13, 1e-3, 0.1, 1e10)
    assert any(split.fits for split in splits(build_config(data), constants, 4, args))
    data["model"]["path"] = "Qwen/Qwen3-VL-32B-Instruct"
    data["custom"]["extra"]["rollout_server"]["vllm_gpu_memory_utilization"] = 0.7
    data["deepspeed"] = "zero3"
    assert not any(split.fits for split in splits(build_config(data), constants, 8, args))
    data["custom"]["extra"]["rollout_matching"]["vllm"] = {"mode": "colocate", "tensor_parallel_size": 1}
    with pytest.raises(ValueError, match="the learners' own devices generate"):
        splits(build_config(data), constants, 4, args)
    del data["custom"]["extra"]["rollout_matching"]["vllm"]
    data["custom"]["extra"]["rollout_matching"]["rollout_backend"] = "hf"
    with pytest.raises(ValueError, match="the learners' own devices generate"):
        splits(build_config(data), constants, 4, args)


def splits_of(
    num_devices: int, config: str = "stage2/qwen3vl_8b_3v1", device_gib: float = 80, **changes
) -> list[Split]:
    """Splits of a preset with changes at dotted paths (`__` for the dot)."""
    data = load_config(ROOT / f"configs/{config}.yaml").model_dump()
    for path, value in changes.items():
        *parents, last = path.replace("RM", RM).replace("RS", RS).replace("__", ".").split(".")
        section = data
        for key in parents:
            section = section[key]
        section[last] = value
    args = Namespace(device_gib=device_gib, new_tokens=None, segment_tokens=None, nodes=1)
    return splits(build_config(data), Constants(1e14, 1e13, 1e-3, 0.1, 1e10), num_devices, args)


def test_splits_are_those_that_the_config_can_start_CFG_16(tmp_path):
    """CFG-16: whole engines, an answer at once for each learner (DIS-2), and no DeepSpeed JSON that contradicts."""
    assert {split.rollout_devices % 2 for split in splits_of(8, RS__vllm_tensor_parallel_size=2)} == {0}
    assert {split.learners for split in splits_of(8, RM__decode_batch_size=1)} == {1, 2, 3, 4}
    training = load_config(ROOT / "configs/stage2/qwen3vl_8b_3v1.yaml").training
    own = {"gradient_accumulation_steps": training.gradient_accumulation_steps, "zero_optimization": {"stage": 2}}
    own["train_batch_size"] = 3 * training.per_device_train_batch_size * training.gradient_accumulation_steps
    (tmp_path / "ds.json").write_text(json.dumps(own))
    assert [split.learners for split in splits_of(8, deepspeed=str(tmp_path / "ds.json"))] == [3]


def test_a_split_fits_by_the_memory_of_the_devices_at_hand_CFG_16():
    """CFG-16: of learners and of engines; what does not fit comes last, however fast it would be."""
    for device_gib in (80, 50):
        found = splits_of(8, "stage2/qwen3vl_8b_full_4v4", device_gib)
        fits = [split.learner_bytes <= device_gib * GIB for split in found]
        assert [split.fits for split in found] == fits == sorted(fits, reverse=True) and len(set(fits)) == 2
    rates = [split.samples_per_s for split in found]
    assert rates != sorted(rates, reverse=True)
    small = {"RS__vllm_gpu_memory_utilization": 0.4}
    assert any(split.fits for split in splits_of(8, **small))
    assert not any(split.fits for split in splits_of(8, device_gib=40, **small))


def test_samples_are_counted_not_answers_GRP_1():
    """GRP-1: several answers of one sample are one sample."""
    for split in splits_of(4, "grpo/detection"):
        cfg = load_config(ROOT / "configs/grpo/detection.yaml")
        own = cfg.training.per_device_train_batch_size * cfg.training.gradient_accumulation_steps
        assert split.samples_per_s == pytest.approx(split.learners * own / split.time.step)


def test_the_work_of_a_step_follows_the_config_unless_means_are_given(tmp_path):
    """Two learners, each with two times three samples in float32; of the 90 parameters 52 can change."""
    batches = {"training__per_device_train_batch_size": 2, "training__gradient_accumulation_steps": 3}
    changes = batches | {"model__dtype": "float32", "RM__max_new_tokens": 40}
    cfg = build_config(edited(model__path=str(checkpoint(tmp_path / "model")), **changes))
    size = model_size(tmp_path / "model", cfg.tuner)
    work = planned_work(cfg, size, 2, new_tokens=None, segment_tokens=None)
    assert (work.num_answers, work.new_tokens, work.sync_bytes) == (12, 40, 52 * 4)
    assert work.num_tokens == max_tokens_per_step(cfg, 2)
    given = planned_work(cfg, size, 2, new_tokens=30.5, segment_tokens=100.0)
    assert (given.new_tokens, given.num_tokens) == (30.5, 1200)
    half = build_config(edited(model__path=str(tmp_path / "model"), model__dtype="bfloat16"))
    assert planned_work(half, size, 2, None, None).sync_bytes == 52 * 2


@pytest.mark.parametrize(("device", "recompute"), [("cuda", 0.0), ("cpu", 1.0)])
def test_without_a_gpu_all_layers_are_recomputed_LRN_3(tmp_path, device, recompute):
    """LRN-3: `auto` goes by a GPU's memory; the program has none to go by there."""
    server = settings(device=device)
    cfg = build_config(edited(model__path=str(checkpoint(tmp_path / "model")), RS=server))
    assert recomputed(cfg, model_size(tmp_path / "model", cfg.tuner), 1, 80 * GIB)[1] == recompute


def test_devices_that_no_split_can_use_end_with_2_CFG_16(monkeypatch, capsys):
    """CFG-16."""
    monkeypatch.setattr(plan, "load_constants", lambda kind: CONSTANTS)
    with pytest.raises(SystemExit) as caught:
        plan_with(monkeypatch, "--devices-per-node", "1")
    assert caught.value.code == 2 and "no split of these devices works; use more devices" in capsys.readouterr().err


def test_a_run_is_measured_and_splits_shown_with_the_memory_given_CFG_16(monkeypatch, capsys):
    """CFG-16: the table says which splits have too little memory."""
    asked = []
    monkeypatch.setattr(plan, "measure", lambda *given: asked.append(given) or CONSTANTS)
    plan_with(monkeypatch, "--run", "some", "--device-gib", "1", "--devices-per-node", "2")
    assert asked == [(Path("some"), GIB)]
    shown = capsys.readouterr().out
    assert shown.count("(too much)") == 1
    plan_with(monkeypatch, "--run", "some", "--devices-per-node", "2")
    assert "(too much)" not in capsys.readouterr().out


def test_headers_get_the_plans_memory_CFG_16(tmp_path, monkeypatch):
    """CFG-16: only that line changes; where nothing generates it has no rollout device."""
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    spoilt = [tmp_path / f"configs/{name}.yaml" for name in ("stage2/qwen3vl_8b_6v2", "stage1/qwen3vl_8b_8gpu")]
    shipped = [path.read_text() for path in spoilt]
    for path, text in zip(spoilt, shipped, strict=True):
        path.write_text(re.sub("# Memory: .*", "# Memory:   9.9 GiB", text))
    monkeypatch.setattr(plan, "PRESETS", spoilt)
    monkeypatch.setattr("sys.argv", ["plan", "--update-headers"])
    plan.main()
    assert [path.read_text() for path in spoilt] == shipped


def test_a_run_that_seldom_generates_tells_no_constants(tmp_path):
    from torch.utils.tensorboard import SummaryWriter

    run = finished_run(tmp_path)
    no_curves(run)
    with SummaryWriter(run) as writer:
        for tag in ("seconds/train", "seconds/prepare", "seconds/step", "train/tokens_per_s"):
            for step in range(1, 6):
                writer.add_scalar(tag, 1.0, step)
        for tag in ("seconds/rollout", "seconds/sync", "rollout/new_tokens_mean", "rollout/num_images", "sync/bytes"):
            writer.add_scalar(tag, 1.0, 5)
    with pytest.raises(ValueError, match="most of its steps do not generate, train or sync; measure a run whose"):
        measure(run)


@pytest.mark.parametrize("part", ["rollout/num_images", "seconds/rollout", "seconds/train", "seconds/sync"])
def test_a_run_whose_steps_lack_a_part_tells_no_constants(tmp_path, part):
    from torch.utils.tensorboard import SummaryWriter

    run = finished_run(tmp_path)
    tags = EventAccumulator(str(run)).Reload().Tags()["scalars"]
    no_curves(run)
    with SummaryWriter(run) as writer:
        for tag, step in itertools.product(tags, range(1, 6)):
            writer.add_scalar(tag, float(tag != part), step)
    with pytest.raises(ValueError, match="most of its steps do not generate, train or sync"):
        measure(run)
