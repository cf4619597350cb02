"""The benchmarks' arithmetic and results file, and that each baseline does the same work as ours: otherwise a ratio
would mean nothing."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from benchmarks import (
    bench_cpu_work,
    bench_data,
    bench_learner,
    bench_overlap,
    bench_sync,
    gpu_learner,
    grpo_peer,
    overlap_learner,
)
from benchmarks.__main__ import RESULTS
from benchmarks.baselines.token_scanner import Scanner
from benchmarks.harness import Result, at_least, at_most, cpu, reported, take_turns, write_results
from tools.demo_grpo import CONFIG as GRPO_CONFIG
from tools.make_demo import build_tokenizer
from tools.plan import calibrate, time_of_step, work_of_step
from utils.config.load import load_config
from utils.config.memory import ModelSize, parameter_shapes
from utils.geometry import iou_matrix
from utils.losses import PARTS
from utils.matching import match
from utils.packing import collate_packed, collate_padded
from utils.parsing import TokenTable, parse_answer
from utils.targets import TargetOptions, build_target


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer()


@pytest.fixture(scope="module")
def table(tokenizer) -> TokenTable:
    return TokenTable.from_tokenizer(tokenizer)


def test_ratios_point_the_way_their_bars_do():
    assert at_least("a", "s", ours=0.5, baseline=2.0, times=3) == Result("a", "s", 0.5, 2.0, 4.0, ">= 3", True)
    assert at_least("a", "s", ours=1.0, baseline=2.0, times=3).holds is False
    assert at_most("a", "s", ours=1.1, baseline=1.0, times=1.15).holds is True
    assert at_most("a", "s", ours=1.2, baseline=1.0, times=1.15) == Result("a", "s", 1.2, 1.0, 1.2, "<= 1.15", False)
    assert reported("a", "s", ours=1.0, baseline=2.0) == Result("a", "s", 1.0, 2.0, 0.5, None, None)


def test_functions_take_turns_and_the_median_counts():
    values = {"a": iter([99.0, 1.0, 50.0, 2.0]), "b": iter([99.0, 7.0, 8.0, 9.0])}
    order = []

    def function(name: str):
        return lambda: (order.append(name), next(values[name]))[1]

    assert take_turns({name: function(name) for name in values}, rounds=3) == {"a": 2.0, "b": 8.0}
    assert order == ["a", "b"] * 4
    assert cpu(lambda: sum(range(100_000)))() > 0


def test_results_of_a_kind_are_replaced_and_all_others_kept(tmp_path):
    """Also those whose line no longer exists."""
    path = tmp_path / "results.json"
    names = ("data: old", "sync: gone", "sync: again")
    write_results(path, [at_most(name, "s", 1.0, 2.0, 1.0) for name in names])
    write_results(path, [at_most("sync: again", "s", 3.0, 2.0, 1.0), reported("plan: new", "MiB", 1.23456789, 2.0)])
    entries = json.loads(path.read_text())
    assert [entry["name"] for entry in entries] == ["data: old", "sync: again", "plan: new"]
    assert entries[1]["ours"] == 3.0 and entries[1]["holds"] is False
    assert entries[2] == {
        "name": "plan: new", "unit": "MiB", "ours": 1.235, "baseline": 2.0, "ratio": 0.6173, "bar": None, "holds": None,
    }  # fmt: skip


@pytest.mark.skipif(not RESULTS.exists(), reason="make bench has not been run in this checkout")
def test_the_committed_results_have_the_promised_form():
    entries = json.loads(RESULTS.read_text())
    assert entries and len({entry["name"] for entry in entries}) == len(entries)
    for entry in entries:
        assert list(entry) == ["name", "unit", "ours", "baseline", "ratio", "bar", "holds"]
        assert all(entry[key] > 0 and math.isfinite(entry[key]) for key in ("ours", "baseline", "ratio"))
        assert (entry["bar"] is None) == (entry["holds"] is None)
        assert entry["holds"] is not False, f"{entry['name']}: docs/performance.md says that all bars hold"


@pytest.mark.parametrize("tuned", [False, True])
@pytest.mark.parametrize("kind", ["bbox_2d", "poly"])
def test_the_token_scanner_makes_the_same_targets(tokenizer, table, kind, tuned):
    """TGT-2, TGT-4 to TGT-6: objects, token indices of coordinates, pairs, sequence and every label are equal."""
    scanner = Scanner(tokenizer, table, tuned)
    for seed in range(3):
        ids, gt = bench_cpu_work.make_answer(table, 30, kind, seed)
        ours, theirs = parse_answer(ids, table), scanner.parse(ids)
        assert [obj for obj, *_ in theirs[0]] == ours.pred_objects
        assert [coords for _, coords, _ in theirs[0]] == [pred.coord_index for pred in ours.objects]
        pairs = match(iou_matrix(ours.pred_objects, gt), bench_cpu_work.THRESHOLD)
        assert scanner.match(ours.pred_objects, gt, bench_cpu_work.THRESHOLD) == pairs and len(pairs) > 10
        target = build_target(ours, gt, pairs, table, TargetOptions())
        answer, coord_of, label_of = scanner.target(ids, theirs, gt, pairs)
        assert target.answer_ids.tolist() == answer
        assert target.coord_index.tolist() == sorted(coord_of)
        assert np.allclose(target.coord_target, [coord_of[index] for index in sorted(coord_of)])
        assert dict(zip(target.text_index.tolist(), target.text_label.tolist(), strict=True)) == label_of


def test_both_pipelines_train_the_same_tokens(tokenizer, table):
    answers = [bench_cpu_work.make_answer(table, 20, "bbox_2d", seed) for seed in range(3)]
    batch = bench_cpu_work.ours(answers, table)
    row = bench_cpu_work.straightforward(answers, Scanner(tokenizer, table, tuned=True))
    assert batch.input_ids[0].tolist() == row["input_ids"].tolist()
    assert batch.position_ids[0, 0].tolist() == row["position_ids"].tolist()
    assert (batch.text_pos + 1).tolist() == (row["labels"] != -100).nonzero()[:, 0].tolist()
    assert (batch.coord_pos + 1).tolist() == (~row["coord_target"].isnan()).nonzero()[:, 0].tolist()


def test_the_padded_full_logits_loss_is_ours_gradients_included(table):
    """LRN-4, PCK-6: the same sums and the same gradient of the head."""
    segments = [bench_learner.long_segment(length, table, seed) for seed, length in enumerate((90, 200))]
    layout = {"position_ids_fn": bench_cpu_work.text_positions, "coord_ids": table.coord_ids, "dummy": segments[0]}
    packed, padded = collate_packed(segments, **layout), collate_padded(segments, **layout)
    torch.manual_seed(0)
    head = torch.nn.Linear(bench_learner.HIDDEN_SIZE, len(table.bytes_of), bias=False)
    gradients = []
    sums = []
    for batch, sums_of in ((packed, bench_learner.packed_sums), (padded, bench_learner.padded_sums)):
        head.weight.grad = None
        sums.append(sums_of(batch, head))
        bench_learner.backward(batch, sums[-1])
        gradients.append(head.weight.grad)
    for part in PARTS:
        torch.testing.assert_close(sums[0][part], sums[1][part], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("way", ["first", "loaded"])
def test_a_start_on_a_data_file_is_measured_DAT_6(tmp_path, way):
    seconds, grown = bench_data.start(way, bench_data.write_file(tmp_path, 20))
    assert 0 < seconds < 60 and grown >= 0


def test_padded_batches_are_full_and_of_like_length(table):
    """The padded side of the GPU benchmark may use as many tokens as a packed row."""
    segments = [bench_learner.long_segment(length, table, 0) for length in (90, 20, 80, 30, 20, 70, 25)]
    batches = gpu_learner.padded_batches(segments, cap=3 * max(map(len, segments)))
    assert sorted(len(own) for batch in batches for own in batch) == sorted(map(len, segments))
    assert all(len(batch) * max(map(len, batch)) <= 3 * max(map(len, segments)) for batch in batches)
    assert [max(map(len, batch)) for batch in batches] == sorted(max(map(len, batch)) for batch in batches)
    for batch, longer in zip(batches, batches[1:], strict=False):
        assert (len(batch) + 1) * min(map(len, longer)) > 3 * max(map(len, segments))


def test_answer_lengths_are_as_described():
    lengths = bench_learner.answer_lengths(4000)
    assert 560 < np.mean(lengths) < 620 and max(lengths) == 4000 and np.median(lengths) < 500


def test_the_rows_of_the_throughput_benchmark_are_full_but_for_a_few_tokens(table):
    segments = [bench_learner.long_segment(80, table, seed) for seed in range(24)]
    rows = bench_learner.carried_rows(segments, cap=1024)
    assert len(rows) > 3 and all(sum(map(len, row)) > 0.8 * 1024 for row in rows)
    assert all(sum(map(len, bench_learner.filled_up(row, 1024))) == 1024 for row in rows)


def test_memory_is_measured_at_its_peak_backward_included():
    x = torch.ones(1 << 20, requires_grad=True)  # 4 MiB, from before

    def work() -> None:
        (x * 2).exp().sum().backward()  # two results and their gradients, of which three are alive at once at most

    assert 8 << 20 <= bench_learner.peak_bytes(work) <= 16 << 20


def test_the_synced_model_is_of_smollm2s_size():
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(LlamaConfig(**bench_sync.SMOLLM2_135M))
    assert sum(parameter.numel() for parameter in model.parameters()) == 134_515_008


def test_trl_gets_the_settings_of_the_demo(tmp_path, start_model):
    """GRP-6: the same model, data, rewards, number of answers and adapters; two ranks of eight prompts are sixteen."""
    path = tmp_path / "grpo.yaml"
    path.write_text(json.dumps({"extends": str(Path(GRPO_CONFIG).resolve()), "model": {"path": str(start_model)}}))
    cfg = load_config(path)
    job = grpo_peer.trl_job(cfg, steps=5, seed=1)
    assert job["prompts_per_step"] == 2 * cfg.training.per_device_train_batch_size
    for name in ("num_generations", "max_new_tokens", "reward_funcs", "reward_weights", "loss_type"):
        assert job[name] == getattr(cfg.rlhf, name)
    assert job["temperature"] == cfg.rlhf.decoding.temperature
    assert all("language_model" in name for name in job["target_modules"]) == cfg.tuner.freeze_vit
    assert len(job["reward_funcs"]) == len(job["reward_weights"])


def test_the_peers_table_is_of_steps_after_the_warm_up(tmp_path, monkeypatch):
    """The first three steps of a run do not count; runs are pooled; rewards are of the first and last third."""
    monkeypatch.setattr(grpo_peer, "FOLDER", tmp_path)

    def run(second: float) -> list[grpo_peer.Step]:
        times = [0.0, 50.0, 100.0] + [100 + second * number for number in (1, 2, 3)]
        return [{"time": time, "reward": 0.1 * number, "new_tokens": 8.0} for number, time in enumerate(times)]

    assert grpo_peer.step_seconds(run(2.0)) == [2.0, 2.0, 2.0]
    grpo_peer.report({"ours": [run(2.0), run(2.0)], "TRL": [run(5.0), run(7.0)]}, 6)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["times_faster"] == 3.0 and summary["rounds"] == 2
    assert [summary["ours"][key] for key in ("reward_first", "reward_last")] == pytest.approx([0.05, 0.45])


def test_prefetch_is_measured_by_turns_and_steps_at_a_border_do_not_count():
    """LRN-8: rollouts take 2 s, the learner 1.5 s; ahead steps 2.2 s: 1.1 of the larger, 0.63 of the sum."""
    steps = []
    for step in range(overlap_learner.NUM_STEPS):
        border, ahead = not overlap_learner.counts(step), overlap_learner.is_ahead(step)
        seconds = {"rollout": 2.0, "train": 1.0, "sync": 0.3, "prepare": 0.2, "step": 2.2 if ahead else 3.5}
        steps.append({part: 99.0 for part in seconds} if border else seconds)
    whole, parts, balance = bench_overlap.compared(steps)
    assert whole.holds and math.isclose(whole.ratio, 1.1) and math.isclose(parts.ratio, 2.2 / 3.5)
    assert math.isclose(balance.ratio, 2.0 / 1.5)


def test_the_prediction_of_a_step_that_costs_in_proportion_is_exact():
    size = ModelSize(total=1000, trainable=100)
    step = {"rollout": 2.0, "train": 4.0, "prepare": 1.0, "sync": 0.5, "step": 7.5}
    whole = step | {"answers": 8.0, "new_tokens": 10.0, "tokens": 400.0}
    half = {"rollout": 1.0, "train": 2.0, "prepare": 0.5, "sync": 0.5, "answers": 4.0, "new_tokens": 10.0}
    constants = calibrate(work_of_step(whole, size), time_of_step(whole))
    result = bench_overlap.prediction(half | {"tokens": 200.0}, size, constants)
    assert math.isclose(result.ours, 4.0) and math.isclose(result.ratio, 1.0) and result.bar is None


def test_the_gpu_benchmark_runs_small_on_cpu_and_says_what_it_cannot_know(tmp_path, monkeypatch):
    """LRN-4, PCK-4: every figure of benchmarks/gpu_learner.py, on a toy."""
    out = tmp_path / "results.json"
    monkeypatch.setattr("sys.argv", ["gpu_learner", "--small", "--out", str(out)])
    gpu_learner.main()
    results = json.loads(out.read_text())
    if results["device"] == "cpu":
        unknown = {name for name, value in results.items() if value is None}
        assert unknown == {name for name in results if "utilisation" in name or "peak memory" in name}
    measured = [value for value in results.values() if isinstance(value, float)]
    assert len(measured) >= 9 and all(value > 0 for value in measured)


def test_the_model_of_the_gpu_benchmark_has_about_2b_parameters():
    shapes = parameter_shapes(gpu_learner.LARGE.config)
    assert 2.0e9 < sum(math.prod(shape) for shape in shapes.values()) < 2.3e9


@pytest.mark.skipif(torch.cuda.is_available(), reason="would run")
def test_the_gpu_benchmark_asks_for_the_small_size_on_cpu(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["gpu_learner"])
    with pytest.raises(SystemExit):
        gpu_learner.main()
    assert "--small" in capsys.readouterr().err
