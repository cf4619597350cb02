"""Locks of a small package index on disk, with the pip of this environment."""

import sys
import zipfile
from pathlib import Path

import pytest

from tools.lock import lock_text, resolve, unpinned

PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]


@pytest.fixture
def index(tmp_path, monkeypatch) -> list[str]:
    """Options for a folder of wheels and nothing else: `trainer` needs `engine_core`, which has two versions."""
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    for name, version, needs in (
        ("trainer", "1.0", "engine-core<3"),
        ("engine_core", "1.0", None),
        ("engine_core", "2.0+cpu", None),
    ):
        info = f"{name}-{version}.dist-info"
        requires = f"Requires-Dist: {needs}\n" if needs else ""
        with zipfile.ZipFile(tmp_path / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{requires}")
            wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            wheel.writestr(f"{info}/RECORD", "")
    return ["--no-index", "--find-links", str(tmp_path)]


def written(folder: Path, name: str, text: str) -> Path:
    (folder / name).write_text(text)
    return folder / name


def test_a_lock_holds_what_the_requirements_pull_in(index, tmp_path):
    resolved = resolve(PIP, written(tmp_path, "requirements-gpu.txt", "trainer==1.0\n"), None, index)
    assert lock_text("gpu", resolved).splitlines()[1:] == ["engine_core==2.0", "trainer==1.0"]
    lock = written(tmp_path, "constraints-gpu.txt", "engine-core==1.0\n")
    held = resolve(PIP, tmp_path / "requirements-gpu.txt", lock, index)
    assert held == {"trainer": "1.0", "engine_core": "1.0"}
    assert unpinned(held, lock.read_text()) == ["trainer"]
    assert unpinned(held, lock_text("gpu", held)) == []


def test_a_version_without_its_build_is_not_taken_for_another_one(index, tmp_path):
    """Three signs keep a CUDA requirement from a `+cpu` build that lies nearer."""
    assert resolve(PIP, written(tmp_path, "a.txt", "engine-core==2.0\n"), None, index) == {"engine_core": "2.0+cpu"}
    with pytest.raises(SystemExit, match="a package is not to be had"):
        resolve(PIP, written(tmp_path, "a.txt", "engine-core===2.0\n"), None, index)


def test_a_lock_that_contradicts_the_requirements_is_an_error_that_shows_both(index, tmp_path, capfd):
    lock = written(tmp_path, "constraints-gpu.txt", "engine-core==3.0\n")
    with pytest.raises(SystemExit, match="requirements-gpu.txt with constraints-gpu.txt contradicts itself"):
        resolve(PIP, written(tmp_path, "requirements-gpu.txt", "trainer==1.0\n"), lock, index)
    assert "engine-core<3" in capfd.readouterr().err


def test_an_index_that_does_not_answer_is_said_to(tmp_path, index):
    options = ["--index-url", "http://127.0.0.1:9/simple", "--retries", "0", "--timeout", "1"]
    with pytest.raises(SystemExit, match="the index does not answer"):
        resolve(PIP, written(tmp_path, "requirements-gpu.txt", "trainer==1.0\n"), None, options)
