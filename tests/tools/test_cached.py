"""Folders that are made once and kept."""

import multiprocessing
import time
from pathlib import Path

import pytest

from tools.cached import cached


def make(folder: Path) -> None:
    time.sleep(0.3)
    with (folder / "made").open("a") as file:
        file.write("once\n")


def test_of_two_processes_one_makes_the_folder_and_the_other_waits(tmp_path):
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=cached, args=(tmp_path / "it", [1], "it", make)) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=30)
    assert [process.exitcode for process in processes] == [0, 0]
    assert (tmp_path / "it" / "made").read_text() == "once\n"


@pytest.mark.parametrize("can_resume", [False, True])
def test_a_folder_is_made_anew_for_other_settings_and_after_an_interruption(tmp_path, can_resume):
    found: list[list[str]] = []

    def interrupted(folder: Path) -> None:
        found.append(sorted(path.name for path in folder.glob("half*")))
        (folder / f"half {len(found)}").touch()
        if len(found) == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cached(tmp_path / "it", [1], "it", interrupted, can_resume)
    for settings in ([1], [1], [2]):
        cached(tmp_path / "it", settings, "it", interrupted, can_resume)
    assert found == [[], ["half 1"] if can_resume else [], []]
