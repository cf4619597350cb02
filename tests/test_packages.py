"""Optional packages of tests: two workers that want one at the same moment."""

import multiprocessing
import subprocess
import time
from pathlib import Path

from tests import packages


def ask(root: Path, start: multiprocessing.Barrier) -> None:
    def install(command: list[str], **_: object) -> subprocess.CompletedProcess:
        target = Path(command[command.index("--target") + 1])
        target.mkdir(parents=True, exist_ok=True)
        time.sleep(0.3)  # pip takes its time
        with (target / "installs").open("a") as file:
            file.write("one\n")
        return subprocess.CompletedProcess(command, 0)

    packages.ROOT, packages.subprocess.run = root, install
    start.wait(timeout=30)
    packages.folder_with("something==1.0")


def test_a_package_is_installed_once(tmp_path):
    """The second process waits for the first and takes what it has made."""
    context = multiprocessing.get_context("fork")
    start = context.Barrier(2)
    processes = [context.Process(target=ask, args=(tmp_path, start)) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=30)
    assert [process.exitcode for process in processes] == [0, 0]
    assert (tmp_path / "something-1.0" / "installs").read_text() == "one\n"
