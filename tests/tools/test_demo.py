"""The demo's report, from run directories as the learner leaves them."""

import json
import socket
import sys
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest
from PIL import Image

from tools import demo, demo_grpo
from utils.config.load import load_config
from utils.run.monitor import write_run_json
from utils.run.resume import RunLock


def test_the_summary_has_start_model_and_both_arms(tmp_path, monkeypatch, capsys):
    Image.new("RGB", (64, 64)).save(tmp_path / "a.png")
    found = [{"desc": "red ring", "bbox_2d": [1, 1, 20, 20]}]
    for arm, steps in (("sft", (100,)), ("after", (0, 100))):
        run = tmp_path / arm
        (run / "eval").mkdir(parents=True)
        config = load_config(demo.CONFIGS[arm]).model_dump(mode="json", by_alias=True)
        write_run_json(run, config, run_id="a", world_size=2, server_world_sizes=[1])
        finished = {"steps": 100, "world_size": 2, "seconds": dict.fromkeys((*demo.PARTS, "step"), 9.0)}
        (run / "finished.json").write_text(json.dumps(finished))
        for step in steps:
            scores = dict.fromkeys(demo.METRICS, 0.25 if arm == "sft" else step / 200)
            scores |= {"num_images": 1.0, "step": step}
            (run / f"eval/step_{step:06d}.json").write_text(json.dumps(scores))
            line = {"id": "a", "images": [str(tmp_path / "a.png")], "gt": found, "pred": found[: step // 100]}
            (run / f"eval/step_{step:06d}.jsonl").write_text(json.dumps(line) + "\n")
    monkeypatch.setattr(demo, "run_dir_of", lambda config: tmp_path / Path(config).stem.replace("stage2", "after"))
    demo.report(tmp_path, {"total": 30.0})
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert [summary[name]["f1"] for name in ("before", "sft", "after")] == [0.0, 0.25, 0.5]
    assert {"f1", "f1_old", "f1_new", "duplicates"} <= summary["sft"].keys()
    assert summary["seconds"]["sft_step"] == summary["seconds"]["after_step"] == 9.0 and summary["steps"] == 100
    width = Image.open(tmp_path / "comparison.png").width
    assert width > 4 * 64, "ground truth, start model, and both arms"
    shown = capsys.readouterr().out
    assert "stage 2" in shown and f"{tmp_path / 'after' / 'report.html'}, to open" in " ".join(shown.split())
    assert "red ring" in (tmp_path / "after" / "report.html").read_text()


def test_the_grpo_demos_data_are_made_anew_for_other_numbers(tmp_path, monkeypatch):
    made = []
    monkeypatch.setattr(demo_grpo, "cached", lambda folder, settings, *_: made.append(settings))
    for num_train in (10, 20):
        monkeypatch.setattr(demo_grpo, "NUM_TRAIN", num_train)
        demo_grpo.make(tmp_path)
    assert all(before != after for before, after in zip(made[:3], made[3:], strict=True))


def test_both_arms_differ_in_their_targets_only():
    """Otherwise the table compares something else."""
    sft, stage2 = (load_config(config).model_dump() for config in demo.CONFIGS.values())

    def differing(one, other, path=""):
        if not isinstance(one, dict):
            return [path] if one != other else []
        return [found for key in one for found in differing(one[key], other[key], f"{path}.{key}".lstrip("."))]

    rm = "custom.extra.rollout_matching."
    assert sorted(differing(sft, stage2)) == [
        rm + "losses.reference_kl",
        rm + "teacher_forced_ratio",
        "training.eval_at_start",
        "training.output_dir",
    ]


@pytest.mark.parametrize("program", [demo, demo_grpo])
def test_sigterm_ends_what_a_demo_started(program, monkeypatch):
    """It is handled before anything is started."""
    calls: list[str] = []
    monkeypatch.setattr(sys, "argv", ["demo"])
    monkeypatch.setattr(program, "exit_on_sigterm", lambda: calls.append("handled"))
    monkeypatch.setattr(program, "run", lambda *args: sys.exit(str(calls)))
    with pytest.raises(SystemExit, match="handled"):
        program.main()


def test_a_server_that_is_not_the_demos_own_ends_it(monkeypatch):
    """`/health/` would answer, while the demo's own server fails for want of the port."""
    monkeypatch.setattr(demo, "start_server", lambda *_: pytest.fail("started"))
    with socket.create_server(("127.0.0.1", 0)) as foreign:
        server = SimpleNamespace(base_url=f"http://127.0.0.1:{foreign.getsockname()[1]}/")
        monkeypatch.setattr(demo, "load_config_or_exit", lambda _: SimpleNamespace(servers=lambda: [server]))
        with pytest.raises(SystemExit, match="another server listens there"), demo.serving("c", Path("runs/x"), {}):
            pass


def test_a_run_that_goes_on_is_not_deleted(tmp_path, monkeypatch):
    (tmp_path / "run/checkpoint-50").mkdir(parents=True)
    monkeypatch.setattr(demo, "run_dir_of", lambda _: tmp_path / "run")
    monkeypatch.setattr(demo, "run", lambda *_: None)
    with closing(RunLock(tmp_path / "run")), pytest.raises(SystemExit, match="in use by process"):
        demo.train("s", "c", {})
    assert (tmp_path / "run/checkpoint-50").exists()
    demo.train("s", "c", {})
    assert not (tmp_path / "run").exists()
