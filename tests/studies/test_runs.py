"""What the studies share: a learner that is cut short, the file of records, and start models."""

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from studies import runs
from tools.cached import cached
from tools.warmup_sft import load_warmup_config


def test_a_run_that_is_cut_short_ends_its_learner(tmp_path):
    log = tmp_path / "log"

    def cut_short(*_):
        raise KeyboardInterrupt

    def send_signal():
        deadline = time.monotonic() + 60
        while not (log.exists() and log.read_text().endswith("\n")) and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.2)  # `Popen` has returned
        signal.pthread_kill(threading.main_thread().ident, signal.SIGALRM)

    previous = signal.signal(signal.SIGALRM, cut_short)
    sender = threading.Thread(target=send_signal)
    sender.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            runs.run_to_end([sys.executable, "-uc", "import os, time; print(os.getpid()); time.sleep(600)"], log)
    finally:
        signal.signal(signal.SIGALRM, signal.SIG_IGN)  # one that comes too late
        sender.join()
        signal.signal(signal.SIGALRM, previous)
    with pytest.raises(ProcessLookupError):
        os.kill(int(log.read_text()), 0)


def test_store_adds_a_record_or_replaces_that_of_the_same_run(tmp_path, monkeypatch):
    monkeypatch.setattr(runs, "RECORDS", tmp_path / "results.json")
    assert runs.load_records() == []
    for seed, f1 in ((1, 0.5), (2, 0.6), (1, 0.7)):
        runs.store({"task": "demo", "variant": "stage 2", "seed": seed, "f1": f1})
    assert [(r["seed"], r["f1"]) for r in runs.load_records()] == [(2, 0.6), (1, 0.7)]
    assert len(list(tmp_path.iterdir())) == 1


def test_an_interrupted_start_model_goes_on_behind_its_last_round(tmp_path, monkeypatch):
    """Each round starts from the one before; the best one stays; another setting begins anew."""
    f1, started_from = iter((0.5, None, 0.7, 0.6)), []

    def score(*_: object) -> dict[str, float]:
        if (value := next(f1)) is None:
            raise KeyboardInterrupt
        return {"f1": value}

    def save(parts: str, folder: Path) -> None:
        folder.mkdir(exist_ok=True)  # the round that was interrupted is there
        (folder / "weights").write_text(folder.name)

    monkeypatch.setattr(runs, "load_samples", lambda *_: ([], None))
    monkeypatch.setattr(runs, "load_parts", lambda cfg: started_from.append((cfg.model, cfg.seed)))
    monkeypatch.setattr(runs, "train", lambda *_: None)
    monkeypatch.setattr(runs, "save", save)
    monkeypatch.setattr(runs, "greedy_scores", score)
    cfg, folder = load_warmup_config(Path("studies/configs/crowd_warmup.yaml")), tmp_path / "model"

    def make(settings: list[int]) -> None:
        cached(folder, settings, "start model", lambda to: runs.warm_up(to, cfg, Path("unread")), can_resume=True)

    with pytest.raises(KeyboardInterrupt):
        make([1])
    assert started_from == [(cfg.model, 0), (str(folder / "round-0"), 1)]
    make([1])
    assert started_from[2:] == [(str(folder / "round-0"), 1), (str(folder / "round-1"), 2)]
    assert (folder / "weights").read_text() == "round-1"
    assert [point["f1"] for point in json.loads((folder / "curve.json").read_text())] == [0.5, 0.7, 0.6]
    make([1])  # kept
    assert len(started_from) == 4
    f1 = iter((0.4, 0.4))
    make([2])
    assert started_from[4:] == [(cfg.model, 0), (str(folder / "round-0"), 1)]
    assert (folder / "weights").read_text() == "round-0"
