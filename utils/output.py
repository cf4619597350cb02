"""Standard output and error that outlive their reader.

Ctrl-C in `program 2>&1 | tee log` ends `tee`, too. A print would then raise BrokenPipeError in a step whose checkpoint
is wanted, or in the last words.
"""

import contextlib
import os
import sys
from collections.abc import Callable
from typing import Any, TextIO


class _Lasting:
    """A text stream that goes to nowhere once nobody reads it."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        return self._outlive(self._stream.write, text)

    def flush(self) -> None:
        self._outlive(self._stream.flush)

    def _outlive(self, call: Callable[..., Any], *args: Any) -> Any:
        try:
            return call(*args)
        except BrokenPipeError:
            with open(os.devnull, "wb") as nowhere:
                os.dup2(nowhere.fileno(), self._stream.fileno())
            return call(*args)


def outlive_readers() -> None:
    """Let this process print on when what reads its standard output or error is gone."""
    for name in ("stdout", "stderr"):
        setattr(sys, name, _Lasting(getattr(sys, name)))


def tell(text: str) -> None:
    """Write to standard error from a signal handler, which may have interrupted a print."""
    with contextlib.suppress(OSError):
        os.write(2, text.encode())
