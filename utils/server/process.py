"""The server's processes and its socket: how they begin, what they answer while the model loads, how they end.

Imports nothing heavy, because every process that vLLM spawns imports this module first.
"""

import contextlib
import ctypes
import logging
import os
import re
import resource
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).parents[2]
SHUTDOWN_S = 8.0  # until processes that have not ended are killed; generous for a loaded machine (SRV-7)
PARENT_PID = "ROLLOUT_SERVER_PARENT_PID"  # environment variable: the process that spawns children


# What could end a line, steer a terminal or turn the direction of writing.
CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")


class OneLineRecord(logging.LogRecord):
    """A log record whose message is one line, control characters escaped: it may repeat a request (SRV-11)."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.exc_info and self.exc_info[0] is not None:
            chunks = traceback.format_exception(*self.exc_info)  # lines of source code stay, messages become one line
            self.exc_text = "\n".join(c.rstrip("\n") if c.startswith('  File "') else escape(c) for c in chunks)

    def getMessage(self) -> str:
        return escape(super().getMessage())


def escape(text: str) -> str:
    """Return `text` without line breaks around it, and with control characters inside it as Python writes them."""
    return CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text.strip("\n"))


def escape_logs() -> None:
    """Have all loggers of this process, vLLM's and uvicorn's too, write `OneLineRecord`s."""
    logging.setLogRecordFactory(OneLineRecord)


def begin_as_child() -> None:
    """Set up a process that vLLM spawns (engine, worker, coordinator); it imports the main file first.

    The kernel kills it when its parent ends, however that happens (SRV-7).
    """
    escape_logs()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() != int(os.environ.get(PARENT_PID, os.getppid())):  # it ended before the line above
            os._exit(1)
    os.environ[PARENT_PID] = str(os.getpid())  # for this process's own children


def set_environment(device: str, cpu_kv_cache_gib: int, world_size: int) -> None:
    """Set the variables that vLLM reads at import and in its processes. It never contacts anything outside."""
    for name in ("VLLM_NO_USAGE_STATS", "VLLM_DO_NOT_TRACK", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        os.environ[name] = "1"
    # A request with top_p and without a seed would have the engine compile FlashInfer's sampler, by an nvcc that need
    # not be there. Ours have seeds, which that sampler does not know.
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"  # children begin with begin_as_child
    os.environ[PARENT_PID] = str(os.getpid())
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.getenv("PYTHONPATH")])])
    os.environ.pop("ROLLOUT_SERVER_TOKEN", None)  # the engines' processes need none
    if device == "cpu":
        # An engine of one device computes in its own process (`engine_args`). vLLM would give it a worker process here,
        # and both would spin for a second behind each message, which takes a core from whoever works.
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(cpu_kv_cache_gib)
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        # One kernel, some 100 KB, per layer shape and number of tokens: the default of 1024 grows for hours.
        os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "256")
        threads = max(1, len(os.sched_getaffinity(0)) // (2 * world_size))  # half the cores are the learner's
        os.environ.setdefault("OMP_NUM_THREADS", str(threads))


def allow_open_files() -> None:
    """Let this process and its children open as many files as the machine allows: most shells begin with 1024, which is
    fewer than the connections that a server takes."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def listen(host: str, port: int) -> socket.socket:
    """Return the server's listening socket: a busy port is found before anything is loaded.

    Raises:
        OSError: the port is taken (names the process, where that can be seen), the address is not this machine's, or
            the name has none, or one on loopback.
    """
    from utils.config.rollout import is_loopback

    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (socket.gaierror, UnicodeError) as error:  # UnicodeError: no name at all, such as a..b
        raise OSError(f"cannot listen on {host}:{port}: no address of that name; change base_url ({error})") from error
    if is_loopback(address[0]) and not is_loopback(host) and not host.endswith(".localhost"):
        rule = f"here that name leads to {address[0]}, where no other machine reaches it; put an address into base_url"
        raise OSError(f"cannot listen on {host}:{port}: {rule}")
    # asyncio sets TCP_NODELAY only where the protocol is named; else every answer waits 40 ms for an acknowledgement.
    server = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections of a former server may linger
    try:
        server.bind(address)
        server.listen(1024)
    except OSError as error:
        from utils.dist import port_holder

        server.close()
        raise OSError(f"cannot listen on {host}:{port}: {error.strerror}{port_holder(port)}") from error
    return server


LOADING = b'{"status": "loading", "detail": "the model is being loaded"}'
LOADING_ANSWER = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nConnection: close\r\n"
    b"Content-Length: %d\r\n\r\n%b" % (len(LOADING), LOADING)
)


@contextlib.contextmanager
def answer_loading(server: socket.socket) -> Iterator[None]:
    """Answer every request with 503 "loading" inside, so that clients can tell slow from absent."""
    stopped = threading.Event()

    def answer() -> None:
        while not stopped.is_set():
            with contextlib.suppress(OSError):  # accept timed out, or the client went away
                connection, _ = server.accept()
                with connection:
                    connection.settimeout(1.0)
                    connection.recv(65536)
                    connection.sendall(LOADING_ANSWER)

    server.settimeout(0.2)
    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        thread.join()
        server.settimeout(None)


def kill_later() -> None:
    """Kill the server after `SHUTDOWN_S`, as the last resort: when this process ends, the kernel ends its children."""

    def kill() -> None:
        print("rollout server: engines did not end in time and are killed", file=sys.stderr, flush=True)
        os._exit(0)

    timer = threading.Timer(SHUTDOWN_S, kill)
    timer.daemon = True
    timer.start()


def end_now() -> NoReturn:
    """End this process, whose engines have ended. Python's own teardown of torch and vLLM can take longer than all else
    on a busy machine, and `kill_later` no longer counts while it runs (SRV-7)."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
