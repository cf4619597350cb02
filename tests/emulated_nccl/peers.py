"""Other ends of emulated communicators, as processes of their own that start quickly: forked from a server process
that has imported torch and vLLM."""

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from tests.emulated_nccl.gate import FOLDER

_processes = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload(["tests.emulated_nccl.preloaded"])


class Peer:
    """Runs `target(connection, *args)` in a process, with this one's settings of the emulation; `ask` and `hear`
    exchange objects with it."""

    def __init__(self, target: Callable[..., None], *args: Any) -> None:
        settings = {name: value for name, value in os.environ.items() if name.startswith(FOLDER)}
        self.connection, theirs = _processes.Pipe()
        self.process = _processes.Process(target=_run, args=(target, theirs, settings, *args), daemon=True)
        self.process.start()
        theirs.close()

    def ask(self, *command: Any) -> None:
        self.connection.send(command)

    def hear(self, timeout_s: float = 60.0) -> Any:
        """Return what it says next. Raises TimeoutError; EOFError when it has ended."""
        if not self.connection.poll(timeout_s):
            raise TimeoutError(f"peer {self.process.pid} says nothing")
        return self.connection.recv()

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.process.pid, number)

    def end(self) -> int:
        """Kill it and return its exit status."""
        if self.process.is_alive():
            self.process.kill()
        self.process.join()
        return self.process.exitcode


def _run(target: Callable[..., None], connection: Connection, settings: dict[str, str], *args: Any) -> None:
    from tests.emulated_nccl import preloaded  # noqa: F401  (where the server process could not import it)

    os.environ |= settings
    sys.stdout = sys.stderr
    target(connection, *args)
