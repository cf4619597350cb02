"""How learner and engine workers meet over NCCL: vLLM's rendezvous without its pickles, used by both sides."""

from typing import Any

from vllm.distributed.utils import StatelessProcessGroup


class PlainGroup(StatelessProcessGroup):
    """vLLM's group for meeting; what its NCCL communicator sends through it, NCCL's unique id, travels as raw bytes.

    vLLM (0.32) pickles it, and whoever reaches the store would have the workers unpickle what he likes.
    """

    def broadcast_obj(self, obj: Any, src: int) -> Any:
        """`obj` of rank `src`, a ctypes structure; the other ranks pass an empty one of the same type.

        Raises:
            ValueError: fewer bytes than the structure has.
        """
        key = f"unique_id/{src}"
        if self.rank == src:
            self.store.set(key, bytes(obj))
            return obj
        return type(obj).from_buffer_copy(self.store.get(key))


def open_nccl(address: str, port: int, rank: int, world_size: int) -> Any:
    """A vLLM NCCL communicator on the current CUDA device; rank 0 hosts the store at `address:port`."""
    import torch
    from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
    from vllm.utils.nccl import unpinned_nccl_env

    met = StatelessProcessGroup.create(address, port, rank, world_size)
    with unpinned_nccl_env():
        group = PlainGroup(rank, world_size, met.store)
        return PyNcclCommunicator(group, device=torch.accelerator.current_device_index())
