"""Fixtures shared by several test files."""

import gc
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("DS_ACCELERATOR", "cpu")
if os.environ["DS_ACCELERATOR"] == "cpu":  # `DS_ACCELERATOR=cuda python -m pytest -m gpu` sees the GPUs
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("no deadline", deadline=None)  # tests may share two cores with real servers and learners
settings.load_profile("no deadline")


@pytest.fixture(scope="session")
def start_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's untrained Qwen3-VL with processor and tokenizer, as a checkpoint directory."""
    from tools.make_demo import build_start_model

    path = tmp_path_factory.mktemp("start_model")
    build_start_model(path, seed=0)
    return path


@pytest.fixture(scope="session")
def warm_model(start_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The start model after a short supervised warm-up with the users' program, so that answers begin to parse."""
    from tools.cached import cached

    own = tmp_path_factory.getbasetemp()
    folder = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "warm_model"
    cached(folder, [], "a warmed-up model", lambda to: make_warm_model(start_model, to))
    return folder / "model"


def make_warm_model(start_model: Path, folder: Path) -> None:
    import subprocess
    import sys

    import yaml

    from tools.make_demo import make_dataset

    make_dataset(folder / "data", num_train=600, num_val=1, seed=7)
    config = {
        "extends": str(Path("configs/demo/warmup.yaml").resolve()),
        "model": str(start_model),
        "train_jsonl": str(folder / "data" / "train.jsonl"),
        "output_dir": str(folder / "model"),
        "steps": 120,
    }
    (folder / "warmup.yaml").write_text(yaml.safe_dump(config))
    command = [sys.executable, "-m", "tools.warmup_sft", "--config", str(folder / "warmup.yaml")]
    subprocess.run(command, check=True, timeout=600)


@pytest.fixture(scope="session")
def ranks():
    """Process groups of a single learner rank, this process, for tests that train in it.

    Opened only once: after a `close`, DeepSpeed 0.19 cannot open others.
    """
    from utils.dist import Ranks

    ranks = Ranks()
    ranks.open()
    yield ranks
    ranks.close()


def pytest_collection_finish() -> None:
    """Spare each later collection of garbage a walk through all modules, which takes it half a second."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    """Let what was frozen go, or libraries report it as leaked when the process ends."""
    gc.unfreeze()
