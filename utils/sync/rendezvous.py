"""Rendezvous of learner and engine workers, without vLLM's pickles, used by both sides."""

import threading
from datetime import timedelta
from typing import Any

import torch
from vllm.distributed.utils import StatelessProcessGroup

from utils.dist import capture_error, host_store
from utils.sync import nccl


class PlainGroup(StatelessProcessGroup):
    """vLLM's rendezvous group, through which NCCL's unique id travels as raw bytes.

    vLLM (0.32) pickles it: anyone who reaches the store could have the workers unpickle anything.
    """

    def broadcast_obj(self, obj: Any, src: int) -> Any:
        """Return `obj` of rank `src`, a ctypes structure; others pass an empty one. Bytes missing: ValueError."""
        key = f"unique_id/{src}"
        if self.rank == src:
            self.store.set(key, bytes(obj))
            return obj
        return type(obj).from_buffer_copy(self.store.get(key))


def open_nccl(host: str, port: int, rank: int, world_size: int, timeout_s: float) -> nccl.Channel:
    """Open an NCCL communicator on the current CUDA device; rank 0 hosts the store at `host:port`.

    In a thread of its own: `ncclCommInitRank` waits for its peers without a limit, and vLLM's communicator moves the
    thread that makes it onto another CUDA stream for good (vLLM 0.32). Raises TimeoutError: not all came in time.
    """
    from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
    from vllm.utils.nccl import unpinned_nccl_env

    device, meeting, outcome = nccl.current_device(), PlainGroup(rank, world_size, None), []

    def meet() -> None:
        if rank == 0:
            meeting.store = host_store(host, port, world_size, timeout_s)
        else:
            meeting.store = torch.distributed.TCPStore(host, port, world_size, False, timedelta(seconds=timeout_s))
        with unpinned_nccl_env():
            outcome.append(PyNcclCommunicator(meeting, device=device))
        if outcome[0].disabled:  # it would send nothing, without a word
            raise RuntimeError("vLLM found no NCCL library (VLLM_NCCL_SO_PATH)")

    thread = threading.Thread(target=lambda: outcome.append(capture_error(meet)), daemon=True)
    thread.start()
    thread.join(timeout_s + 1)  # the store counts in whole seconds, and its error says more
    who = "a worker" if rank == 0 else "the learner or another worker"
    late = TimeoutError(f"timed out: {who} did not finish joining at {host}:{port} in {timeout_s:g} s")
    if (error := late if thread.is_alive() else outcome[-1]) is not None:
        meeting.store = None  # frees the port, although NCCL may still wait
        raise error
    return nccl.Channel(outcome[0], meeting)
