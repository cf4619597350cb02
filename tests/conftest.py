"""Fixtures that several test files share."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def start_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's untrained Qwen3-VL with processor and tokenizer, as a checkpoint directory."""
    from tools.make_demo import build_start_model

    path = tmp_path_factory.mktemp("start_model")
    build_start_model(path, seed=0)
    return path
