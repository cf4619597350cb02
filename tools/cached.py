"""What is made once and kept: folders, each made by one process while others that want it wait."""

import fcntl
import hashlib
import json
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def cached(folder: Path, settings: list[Any], what: str, make: Callable[[Path], Any], can_resume: bool = False) -> None:
    """Call `make(folder)` unless the folder was completed with the same settings; its stamp is written last.

    The folder is empty, but for what an interrupted call with the same settings left there if `make` can resume. Of
    several processes that want it one makes it, the others wait.
    """
    stamp, begun = folder / "made_with.sha256", folder / "begun_with.sha256"
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()
    with alone(folder.with_name(f"{folder.name}.lock")):
        if stamp.exists() and stamp.read_text() == digest:
            print(f"{folder}: {what}: kept", flush=True)
            return
        print(f"{folder}: {what} ...", flush=True)
        started = time.monotonic()
        if not (can_resume and begun.exists() and begun.read_text() == digest):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            begun.write_text(digest)
        make(folder)
        stamp.write_text(digest)
        print(f"{folder}: made in {time.monotonic() - started:.0f} s", flush=True)


@contextmanager
def alone(path: Path, wait: bool = True) -> Iterator[bool]:
    """Hold a lock that ends with this process at the latest; without `wait` yield False where another one holds it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as held:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
        else:
            yield True
