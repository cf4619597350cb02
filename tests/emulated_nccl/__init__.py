"""NCCL for tests without GPUs: `emulated` for this process, `environment` for the programs that a test starts."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.emulated_nccl.gate import FOLDER

if TYPE_CHECKING:
    import pytest

ROOT = Path(__file__).parents[2]


def environment(folder: Path, **more: str) -> dict[str, str]:
    """Environment of a program whose processes use the emulated NCCL and leave their marks in `folder`."""
    path = f"{Path(__file__).parent / 'site'}{os.pathsep}{ROOT}"
    return (
        os.environ | {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "PYTHONPATH": path, FOLDER: str(folder)} | more
    )


def emulated(patch: pytest.MonkeyPatch, folder: Path) -> None:
    """Use the emulated NCCL in this process, as long as `patch` lasts."""
    from tests.emulated_nccl.patches import PATCHES

    patch.setenv(FOLDER, str(folder))
    for name in ("torch", "vllm.distributed.device_communicators.pynccl", "utils.sync.nccl"):
        PATCHES[name](importlib.import_module(name), patch.setattr)


def marks(folder: Path, kind: str) -> dict[str, Any]:
    """Marks that processes left, by file name."""
    return {path.name: path.read_text() for path in folder.glob(f"{kind}-*")}
