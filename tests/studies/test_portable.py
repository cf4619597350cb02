"""Start models that are the same on all processors: the one way of computing, and that a study takes it."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from studies import new_class_data, partial_data, portable, results, runs
from studies.partial import SHARES
from studies.runs import RunFailed

# Stands for an older processor. Where ATen's kernels are chosen by `ONE_WAY`, that wins.
OLD = {"MKL_ENABLE_INSTRUCTIONS": "SSE4_2", "ONEDNN_MAX_CPU_ISA": "SSE41", "ATEN_CPU_CAPABILITY": "default"}
STEPS_OF_TRAINING = """
import contextlib, hashlib, sys, torch
from torch import nn
from studies.portable import one_way
with one_way() if sys.argv[1] == "portable" else contextlib.nullcontext():
    torch.manual_seed(0)
    x = torch.randn(8, 3, 2, 16, 16)
    patches = nn.Conv3d(3, 64, (2, 8, 8), (2, 8, 8))
    layer = nn.TransformerEncoderLayer(64, 4, 192, 0.0, batch_first=True)
    matrices = [p for p in layer.parameters() if p.ndim == 2]
    others = [*patches.parameters(), *(p for p in layer.parameters() if p.ndim != 2)]
    optimizers = torch.optim.Muon(matrices, lr=0.01), torch.optim.AdamW(others)
    for _ in range(3):
        layer(patches(x).flatten(2).mT).log_softmax(-1).exp().square().sum().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
print(hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in (*matrices, *others))).hexdigest())
"""


def weights_after_training(way: str, environment: dict[str, str]) -> str:
    command = [sys.executable, "-c", STEPS_OF_TRAINING, way]
    env = os.environ | environment | (portable.ONE_WAY if way == "portable" else {})
    return subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout


def test_one_way_gives_the_same_weights_where_instructions_differ():
    assert weights_after_training("as usual", {}) != weights_after_training("as usual", OLD)
    assert weights_after_training("portable", {}) == weights_after_training("portable", OLD)


def test_functions_that_the_processor_chooses_are_replaced():
    """Muon's matrix products are of float32, and AdamW's square roots are not MKL's."""
    values = torch.tensor([0.0, 0.25, 2.0, 3.0, 1e-30])
    with portable.one_way():
        assert torch.ones(2).bfloat16().dtype == torch.float32
        assert not torch.backends.mkldnn.enabled
        roots = values.sqrt()
    assert torch.equal(roots, 1 / (1 / values.double().sqrt().float()))
    assert torch.ones(2).bfloat16().dtype == torch.bfloat16
    assert torch.backends.mkldnn.enabled


def test_only_a_portable_study_is_prepared_in_a_process_of_the_one_way(tmp_path, monkeypatch):
    called, started = [], []
    study = replace(SHARES[0], root=tmp_path / "study", prepare=lambda: called.append(True))
    monkeypatch.setattr(portable, "run_to_end", lambda *given: started.append(given))
    portable.prepare(study)
    assert called == [True] and not started
    portable.prepare(replace(study, is_portable=True))
    assert len(called) == 1
    [(command, log, environment)] = started
    assert command[1:] == ["-m", "studies.portable", study.name] and environment == portable.ONE_WAY
    assert log.parent.is_dir()


def test_a_failed_preparation_shows_the_end_of_its_log(tmp_path, monkeypatch):
    def fail(_: list[str], log: Path, __: dict[str, str]) -> int:
        log.write_text("no space left")
        return 1

    monkeypatch.setattr(portable, "run_to_end", fail)
    with pytest.raises(RunFailed, match="no space left"):
        portable.prepare(replace(SHARES[0], root=tmp_path, is_portable=True))


def test_a_process_gets_the_environment_it_is_started_with(tmp_path):
    code = "import os; print(os.environ['MKL_CBWR'], 'PATH' in os.environ)"
    assert runs.run_to_end([sys.executable, "-c", code], tmp_path / "log", portable.ONE_WAY) == 0
    assert (tmp_path / "log").read_text() == "COMPATIBLE True\n"


def test_the_program_prepares_the_study_in_the_one_way(monkeypatch):
    seen = []
    study = replace(SHARES[0], is_portable=True, prepare=lambda: seen.append(torch.backends.mkldnn.enabled))
    monkeypatch.setattr(results, "STUDIES", {"some": study})
    monkeypatch.setattr(sys, "argv", ["portable", "some"])
    portable.main()
    assert seen == [False]


def test_runs_and_further_scores_prepare_by_way_of_the_portable_process(tmp_path, monkeypatch):
    """What `studies.results` starts from is made by `portable.prepare`, whatever it is for."""

    class Prepared(Exception):
        pass

    def prepare(_: object) -> None:
        raise Prepared

    monkeypatch.setattr(portable, "prepare", prepare)
    monkeypatch.setattr(runs, "ROOT", tmp_path)  # of claims
    monkeypatch.setattr(runs, "RECORDS", tmp_path / "results.json")  # none: every run is missing
    study = replace(SHARES[0], is_portable=True)
    for make in (results.run_all, results.score_kept):
        with pytest.raises(Prepared):
            make([study])


@pytest.mark.parametrize(("root", "autocast"), [(partial_data.ROOT, "bfloat16"), (partial_data.PORTABLE_ROOT, "off")])
def test_a_portable_start_model_is_trained_in_float32(root, autocast, monkeypatch):
    made = {}
    monkeypatch.setattr(partial_data, "cached", lambda *_: None)
    monkeypatch.setattr(new_class_data, "cached", lambda folder, settings, what, make: made.update({what: make}))
    monkeypatch.setattr(new_class_data, "warm_up", lambda cfg: made.update(cfg=cfg))
    made_with = partial_data.prepare_start(root)
    made["start model"](root)
    assert made["cfg"].autocast == autocast == made_with[1]["autocast"]
    assert made["cfg"].output_dir == str(root / "model")
