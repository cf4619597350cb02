"""A function applied in several processes, each of which is a fresh interpreter.

Not `multiprocessing`: a fork would hold the learner's ports and GPU open, a spawn would import its main program, with
torch and DeepSpeed, in every process, and both can outlive a learner that is killed. These end with their stdin.
"""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from queue import SimpleQueue
from subprocess import PIPE, Popen
from typing import TypeVar

from utils.data.samples import map_ahead

Item, Result = TypeVar("Item"), TypeVar("Result")


def map_in_processes(function: Callable[[Item], Result], items: Iterable[Item], num_processes: int) -> Iterator[Result]:
    """`map` in order, with few items and results in memory. Function, items and results must be picklable.

    Raises:
        RuntimeError: a process ended; its own error stands on stderr.
    """
    root = str(Path(__file__).parents[2])
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    one_thread = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "utils.data.workers"]
    idle: SimpleQueue[Popen[bytes]] = SimpleQueue()
    with ExitStack() as stack:
        for _ in range(num_processes):
            process = Popen(command, stdin=PIPE, stdout=PIPE, env=os.environ | one_thread | {"PYTHONPATH": path})
            stack.enter_context(process)
            stack.callback(process.kill)  # before the wait above
            _send(process.stdin, function)
            idle.put(process)

        def call(item: Item) -> Result:
            process = idle.get()
            try:
                _send(process.stdin, item)
                return pickle.load(process.stdout)  # noqa: S301  (from our own child, over our own pipe)
            except (EOFError, OSError):
                raise RuntimeError(f"a worker process ended, status {process.wait()}") from None
            finally:
                idle.put(process)

        yield from map_ahead(call, items, num_processes, max_ahead=4 * num_processes)


def _send(pipe, value: object) -> None:
    pickle.dump(value, pipe)
    pipe.flush()


def _serve() -> None:
    """Receive a function, then its items, until the parent closes the pipe or ends."""
    items, results = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print is no result
    function = pickle.load(items)  # noqa: S301  (from our own parent, over its own pipe)
    while True:
        try:
            item = pickle.load(items)  # noqa: S301
        except EOFError:
            return
        _send(results, function(item))


if __name__ == "__main__":
    _serve()
