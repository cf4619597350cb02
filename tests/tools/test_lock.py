"""Locks of a small package index on disk, with the pip of this environment."""

import sys
import zipfile
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest

from tools import lock as tool
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
        write_wheel(tmp_path, name, version, needs)
    return ["--no-index", "--find-links", str(tmp_path)]


@pytest.fixture
def lock_of(tmp_path, monkeypatch):
    """Run the program on a lock that pins `b`, where `a` and `B` are needed; give the lock afterwards."""
    asked = SimpleNamespace(locks=[], lock=written(tmp_path, "constraints-gpu.txt", "b==1.0\n"))

    def resolved(pip: list[str], requirements: Path, lock: Path | None, options: list[str]) -> dict[str, str]:
        asked.locks.append(lock)
        return {"B": "1.0", "a": "2.0+cpu"}

    monkeypatch.setattr(tool, "ROOT", tmp_path)
    monkeypatch.setattr(tool, "PLATFORM", (sys.platform, tool.platform.machine(), sys.version_info[:2]))
    monkeypatch.setattr(tool, "resolve", resolved)
    monkeypatch.setattr(tool.venv, "create", lambda *_, **__: None)
    monkeypatch.setattr(tool.subprocess, "run", lambda *_, **__: SimpleNamespace(returncode=0))

    def run(*options: str) -> SimpleNamespace:
        monkeypatch.setattr(sys, "argv", ["lock", "gpu", *options])
        tool.main()
        return asked

    run.asked = asked
    return run


def write_wheel(folder: Path, name: str, version: str, needs: str | None = None) -> None:
    info = f"{name}-{version}.dist-info"
    requires = f"Requires-Dist: {needs}\n" if needs else ""
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{requires}")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


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


def test_a_package_that_is_installed_already_is_in_the_lock(index, tmp_path):
    own = metadata.version("pip")
    write_wheel(tmp_path, "pip", own)
    assert resolve(PIP, written(tmp_path, "requirements-gpu.txt", "pip\n"), None, index) == {"pip": own}


def test_a_lock_is_written_afresh_or_with_the_versions_that_it_has(lock_of):
    asked = lock_of()
    assert asked.locks == [None] and asked.lock.read_text().splitlines()[1:] == ["a==2.0", "B==1.0"]
    assert lock_of("--keep").locks == [None, asked.lock]


def test_a_check_names_what_the_lock_lacks_and_writes_nothing(lock_of):
    with pytest.raises(SystemExit, match="constraints-gpu.txt does not pin a; make lock DEVICE=gpu ARGS=--keep"):
        lock_of("--check")
    asked = lock_of.asked
    assert asked.locks == [asked.lock] and asked.lock.read_text() == "b==1.0\n"


def test_a_lock_is_not_resolved_on_another_platform(lock_of, monkeypatch):
    monkeypatch.setattr(tool, "PLATFORM", ("linux", "aarch64", (3, 11)))
    with pytest.raises(SystemExit, match="the locks are for Linux on x86-64"):
        lock_of()
    assert not lock_of.asked.locks
