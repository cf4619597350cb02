"""Packages that tests use and the environment does not hold, each set in a folder of its own."""

import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from tools.cached import alone

ROOT = Path(sys.prefix) / "opt"


@cache
def folder_with(*requirements: str, dependencies: bool = True) -> Path:
    """Install pinned requirements into a folder of their own, once; skip the test where they cannot be had.

    Append it to `sys.path` in another process, never put it in front: the environment's own packages come first.
    """
    folder = ROOT / "_".join(requirements).replace("==", "-")
    partial = folder.with_name(f"{folder.name}.partial")
    pip = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--upgrade"]
    pip += [] if dependencies else ["--no-deps"]
    with alone(folder.with_name(f"{folder.name}.lock")):  # two workers of pytest may want it at the same moment
        if not folder.exists():
            run = subprocess.run([*pip, "--target", partial, *requirements], capture_output=True, text=True)
            if run.returncode:
                pytest.skip(f"{' '.join(requirements)} cannot be installed: {run.stderr[-500:]}")
            partial.rename(folder)
    return folder
