"""utils.run.policy: recovery from a lost server (CON-4), with a client and an engine that do what they are told."""

from types import SimpleNamespace

import pytest

from utils.dist import DistributedError, Ranks
from utils.rollout.link import RolloutError
from utils.rollout.round import ServerGone
from utils.run.policy import MAX_RECOVERIES, Policy
from utils.run.records import Timer


class Engine:
    """Notes what is done to it."""

    def __init__(self, happened: list[str]):
        self.happened = happened

    def open(self) -> None:
        self.happened.append("reopen")

    def sync(self, version: str) -> SimpleNamespace:
        self.happened.append(f"sync {version}")
        return SimpleNamespace(num_bytes=1, gb_per_s=1.0, seconds=1.0)


class Client:
    """Of servers that are gone for as many looks as `gone` says, and come back or not."""

    def __init__(self, gone: int = 0, comes_back: bool = True):
        self.gone, self.comes_back, self.waits = gone, comes_back, 0

    def lost(self) -> list[int]:
        self.gone -= 1
        return [0] if self.gone >= 0 else []

    def wait_ready(self) -> list[int]:
        self.waits += 1
        if not self.comes_back:
            raise RolloutError("http://there: no answer")
        return [0]


def run(errors: list, client: Client | None) -> tuple[str, list[str]]:
    """Work that brings one of `errors` each time, then succeeds; what it gave and what happened in order."""
    happened, errors = [], list(errors)

    def work() -> str:
        happened.append("work")
        if errors:
            raise errors.pop(0)
        return "rows"

    policy = Policy(Engine(happened), client, Ranks(), "run", 0, str, None, Timer())
    policy.drain = lambda: happened.append("drain")
    return policy.with_current_weights(3, work, "preparing"), happened


AGAIN = ["drain", "reopen", "sync run:3", "work"]


def test_con_4_work_is_done_again_after_the_communicators_were_opened_anew():
    """CON-4."""
    client = Client()
    assert run([ServerGone("gone"), ServerGone("gone")], client) == (
        "rows",
        ["sync run:3", "work", *AGAIN, *AGAIN],
    )
    assert client.waits == 2


def test_con_4_a_sync_that_broke_because_the_server_died_is_a_loss_too():
    """CON-4: what the transport says then is any error at all; that the server is gone is seen by looking."""
    assert run([RuntimeError("connection closed by peer")], Client(gone=1))[1] == ["sync run:3", "work", *AGAIN]


@pytest.mark.parametrize("client", [None, Client()])
def test_con_4_other_failures_end_the_run_at_once(client):
    """CON-4, SYN-3."""
    with pytest.raises(
        DistributedError,
        match="preparing with weights of step 3 failed on 1 of 1 ranks\nrank 0: ValueError: a bad tensor",
    ):
        run([ValueError("a bad tensor")], client)


def test_con_4_a_server_that_does_not_come_back_ends_the_run_with_its_url():
    """CON-4."""
    with pytest.raises(DistributedError, match="http://there"):
        run([ServerGone("gone")], Client(comes_back=False))


def test_con_4_a_server_that_dies_again_and_again_ends_the_run():
    """CON-4."""
    client = Client()
    with pytest.raises(DistributedError, match="gone"):
        run([ServerGone("gone")] * (MAX_RECOVERIES + 1), client)
    assert client.waits == MAX_RECOVERIES
