"""Rendezvous of learner and engine workers over NCCL, used by both sides: vLLM's own, without its pickles."""

from typing import Any

from vllm.distributed.utils import StatelessProcessGroup


class PlainGroup(StatelessProcessGroup):
    """vLLM's rendezvous group, through which NCCL's unique id travels as raw bytes.

    vLLM (0.32) pickles it: anyone who reaches the store could have the workers unpickle anything.
    """

    def broadcast_obj(self, obj: Any, src: int) -> Any:
        """Return `obj` of rank `src`, a ctypes structure; the other ranks pass an empty one of the same type.

        Raises:
            ValueError: fewer bytes than the structure has.
        """
        key = f"unique_id/{src}"
        if self.rank == src:
            self.store.set(key, bytes(obj))
            return obj
        return type(obj).from_buffer_copy(self.store.get(key))


def open_nccl(address: str, port: int, rank: int, world_size: int) -> Any:
    """Open a vLLM NCCL communicator on the current CUDA device; rank 0 hosts the store at `address:port`."""
    import torch
    from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
    from vllm.utils.nccl import unpinned_nccl_env

    met = StatelessProcessGroup.create(address, port, rank, world_size)
    with unpinned_nccl_env():
        group = PlainGroup(rank, world_size, met.store)
        return PyNcclCommunicator(group, device=torch.accelerator.current_device_index())
