"""Waiting as C code waits, and loud ends for calls that real NCCL would answer with a crash."""

import ctypes
import os
import sys
import threading
import traceback
from pathlib import Path

_libc = ctypes.CDLL(None)  # calls release the interpreter lock
FOLDER = "EMULATED_NCCL"  # environment variable: where processes leave marks; set, it switches the emulation on


class Gate:
    """Closed until `open`. A thread that waits sits in C: no Python signal handler runs, no exception gets in, no time
    limit ends it. `pthread_mutex_lock` never returns for a signal, unlike most calls of libc."""

    def __init__(self) -> None:
        self._mutex = ctypes.create_string_buffer(64)  # zeros are PTHREAD_MUTEX_INITIALIZER on Linux
        self._lock = threading.Lock()
        self.is_open = False
        _libc.pthread_mutex_lock(self._mutex)

    def open(self) -> None:
        with self._lock:
            if not self.is_open:
                self.is_open = True
                _libc.pthread_mutex_unlock(self._mutex)

    def wait(self) -> None:
        if not self.is_open:
            _libc.pthread_mutex_lock(self._mutex)
            _libc.pthread_mutex_unlock(self._mutex)


def violation(what: str) -> None:
    """End the process as a crash inside NCCL would, and leave a mark that no recovery of the program hides."""
    text = f"emulated NCCL: {what}\n{''.join(traceback.format_stack())}"
    print(text, file=sys.stderr, flush=True)
    mark("violation", text)
    os.abort()


def mark(kind: str, text: str = "") -> None:
    """Leave the file KIND-PID for the test."""
    if folder := os.environ.get(FOLDER):
        with Path(folder, f"{kind}-{os.getpid()}").open("a") as file:
            file.write(text + "\n")
