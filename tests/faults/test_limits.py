"""The limits that docs/faults.md gives for single calls, at the places that set them."""

from collections import deque
from types import SimpleNamespace

import pytest
import requests

from tests.rollout.test_client import setting
from tests.sync.test_sync_order import StandIn, sync_with, weights  # noqa: F401
from utils.rollout.client import RolloutClient
from utils.rollout.link import CallFailed, Link
from utils.rollout.round import NUM_RETRIES, ServerBatch
from utils.run.server_watch import server_scalars
from utils.run.session import Session
from utils.run.shutdown import StopRequest
from utils.sync.weight_sync import WeightSync


@pytest.mark.parametrize(("given", "connecting"), [(None, 10.0), (240.0, 10.0), (3.0, 3.0)])
def test_connecting_takes_10_s_or_the_calls_own_limit(monkeypatch, given, connecting):
    seen = []

    def request(*args, timeout, **_):
        seen.append(timeout)
        raise requests.ConnectionError

    link = Link("http://127.0.0.1:9", None)
    monkeypatch.setattr(link._session, "request", request)
    with pytest.raises(RuntimeError):
        link.request("GET", "/health/", given)
    assert seen == [(connecting, given)]


def test_health_and_world_size_have_10_s_or_what_is_left_and_the_curves_less_CON_1_LOG_6(monkeypatch):
    """CON-1, LOG-6: of each call to a server."""
    with setting(1) as (client, (server,)):
        seen, request = [], Link.request

        def spy(link, method, path, timeout_s, **options):
            seen.append((path, timeout_s))
            return request(link, method, path, timeout_s, **options)

        monkeypatch.setattr(Link, "request", spy)
        client.health(0)
        client.get(0, "/get_world_size/")
        server_scalars(client)
        assert seen == [("/health/", 10.0), ("/get_world_size/", 10.0), ("/health/", 2.0), ("/metrics/", 10.0)]
        seen.clear()
        client.timeout_s = 4.0
        client.wait_ready()
        assert [path for path, _ in seen] == ["/health/", "/get_world_size/"] and all(s <= 4.0 for _, s in seen)


@pytest.mark.parametrize(("timeout_s", "join_s"), [(2.0, 1.0), (9.0, 7.0), (10_000.0, 600.0)])
def test_a_rendezvous_ends_2_s_before_its_call_CFG_8(weights, timeout_s, join_s):  # noqa: F811
    """CFG-8: or at half of it, and after 600 s, which is what a server allows."""
    address = [("127.0.0.1", 1)]
    ranks = SimpleNamespace(device=SimpleNamespace(type="cpu"))
    options = {"run_id": "a", "bucket_bytes": 1, "timeout_s": 300.0, "open_timeout_s": timeout_s}
    assert WeightSync(weights, ranks, None, address, **options).transport.open_timeout_s == join_s


def test_calls_of_a_sync_share_its_limit_and_those_that_end_it_10_s_SYN_3(weights, monkeypatch):  # noqa: F811
    """SYN-3: `sync.timeout_s` is 5 here."""
    server, limits = StandIn(weights, fail_at="/finish_weight_update/"), {}
    post = server.post
    monkeypatch.setattr(server, "post", lambda i, path, body, s: (limits.update({path: s}), post(i, path, body, s))[1])
    sync = sync_with(server)
    with pytest.raises(RuntimeError):
        sync.sync("run:0")
    sync.close()
    assert limits.pop("/abort_weight_update/") == limits.pop("/close_communicator/") == 10.0
    assert list(limits) == ["/start_weight_update/", "/update_weights/", "/finish_weight_update/"]
    assert all(4.5 < limit <= 5 for limit in limits.values())


def test_an_infer_call_is_tried_three_times_1_5_and_3_s_apart_CON_3():
    """CON-3: then each half begins anew."""
    client = RolloutClient([], 0, 1, 1, token="t")
    pauses, wait = [], SimpleNamespace(wait=lambda s: pauses.append(s))
    a_round = SimpleNamespace(raise_if_cancelled=lambda: None, cancelled=wait)
    batch = ServerBatch(client, a_round, None, 0, range(4))
    failure, watch = CallFailed("url", "broken", 500), SimpleNamespace(wait_good=lambda since: None)
    tries, pending = [], deque([(range(4), 0)])
    while len(tries) <= NUM_RETRIES:
        tries.append(pending.pop())
        pending += batch._after_failure(failure, *tries[-1], watch)
    assert tries == [(range(4), attempt) for attempt in range(3)]
    assert pauses[:2] == [1.5, 3.0] and list(pending) == [(range(2, 4), 0), (range(2), 0)]


def test_requests_in_flight_are_waited_for_10_s_at_the_end_LRN_8():
    """LRN-8: then all else is closed."""
    waits, closed = [], []
    ends = {
        name: SimpleNamespace(close=lambda name=name: closed.append(name)) for name in ("ranks", "monitor", "watch")
    }
    policy = SimpleNamespace(engine=SimpleNamespace(close=lambda: closed.append("engine")))
    prefetcher = SimpleNamespace(close=lambda timeout_s: waits.append(timeout_s))
    Session.close(SimpleNamespace(lock=None, stop=StopRequest(), policy=policy, prefetcher=prefetcher, **ends))
    assert waits == [10.0] and set(closed) == {"ranks", "monitor", "watch", "engine"}
