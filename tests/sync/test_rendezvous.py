"""SRV-3: NCCL's unique id travels as raw bytes. NCCL itself needs devices; the meeting does not."""

import ctypes
import pickle
import threading

import pytest

rendezvous = pytest.importorskip("utils.sync.rendezvous")

from vllm.distributed.device_communicators.pynccl_wrapper import ncclUniqueId  # noqa: E402
from vllm.distributed.utils import StatelessProcessGroup  # noqa: E402

from tests.e2e.processes import free_port  # noqa: E402


def test_the_unique_id_arrives_and_nothing_is_unpickled(monkeypatch):
    """SRV-3: also not what a stranger put into the store before rank 0 could."""
    monkeypatch.setattr(pickle, "loads", lambda *_: pytest.fail("unpickled"))
    port, size = free_port(), ctypes.sizeof(ncclUniqueId)
    sent = ncclUniqueId.from_buffer_copy(bytes(index % 251 for index in range(size)))
    received = []

    def worker() -> None:
        group = rendezvous.PlainGroup(1, 2, StatelessProcessGroup.create("127.0.0.1", port, 1, 2).store)
        received.append(group.broadcast_obj(ncclUniqueId(), 0))

    thread = threading.Thread(target=worker)
    thread.start()
    host = rendezvous.PlainGroup(0, 2, StatelessProcessGroup.create("127.0.0.1", port, 0, 2).store)
    assert host.broadcast_obj(sent, 0) is sent
    thread.join(30)
    assert bytes(received[0]) == bytes(sent) and isinstance(received[0], ncclUniqueId)
    assert isinstance(host, StatelessProcessGroup)  # what vLLM's communicator asks for
    host.store.set("unique_id/5", b"short")
    with pytest.raises(ValueError):
        host.broadcast_obj(ncclUniqueId(), 5)


def test_vllms_communicator_sends_nothing_else_through_the_group():
    """SRV-3: a release that sends more must be looked at."""
    import inspect

    from vllm.distributed.device_communicators import pynccl

    source = inspect.getsource(pynccl.PyNcclCommunicator)
    assert source.count("group.broadcast_obj(self.unique_id, src=0)") == source.count("_obj(") == 1
