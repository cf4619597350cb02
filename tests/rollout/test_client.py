"""The HTTP client against a small server in this process that can misbehave on command."""

import gc
import json
import os
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from unittest.mock import MagicMock

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from utils.capacity import capacity_slots, chunk_size, requests_per_server
from utils.config.rollout import Server, ServerSettings
from utils.rollout import link as rollout_link
from utils.rollout.client import RolloutClient
from utils.rollout.link import CallFailed, CallTimeout, RolloutError
from utils.rollout.round import InferJob, Round, ServerBatch, ServerGone, SlotGate

METRICS = b"""# HELP rollout_running by replica
rollout_running{replica="0"} 3.0
rollout_running{replica="1"} 4.0
rollout_waiting 2.0
"""
TOO_LONG_S = 20.0  # a hang, in the measure of these tests


@dataclass
class Address:
    base_url: str
    group_port: int = 51216


class FaultyServer:
    """A rollout server without an engine: answers by `on_infer` and `on_health`, which tests replace."""

    def __init__(self, world_size=1, boot_id="boot", prefix=""):
        self.world_size, self.boot_id, self.prefix = world_size, boot_id, prefix
        self.calls, self.paths, self.connections, self.headers = [], [], set(), []
        self.on_infer = self.answer
        self.on_health = lambda: (200, self.health())
        self.release = threading.Event()  # ends hanging handlers
        self.running = self.most_running = 0
        self.lock = threading.Lock()
        self.http = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.http.server_port}{prefix}"
        threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def health(self, **changes):
        return {"status": "ok", "boot_id": self.boot_id, "weight_version": "v", "model": "/m", **changes}

    def answer(self, body):
        seed = body["request_config"]["seed"]
        return 200, [self.output(request, seed + i) for i, request in enumerate(body["infer_requests"])]

    def output(self, request, seed, **infos):
        response = {"choices": [{"message": {"content": request["uuid"]}}], "prompt_token_ids": [1]}
        return {"response": response, "response_token_ids": [[seed]], "rollout_infos": {"weight_version": "v", **infos}}

    def hang(self, body=None):
        self.release.wait(TOO_LONG_S)
        return 500, "released"

    def sizes(self):
        return [len(call["infer_requests"]) for call in self.calls]

    def close(self):
        self.release.set()
        self.http.shutdown()
        self.http.server_close()

    def _infer(self, body):
        with self.lock:
            self.calls.append(body)
            self.running += len(body["infer_requests"])
            self.most_running = max(self.most_running, self.running)
        try:
            return self.on_infer(body)
        finally:
            with self.lock:
                self.running -= len(body["infer_requests"])

    def _handler(server):  # noqa: N805
        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def do_GET(self):
                path = self._path()
                if path == "/get_world_size/":
                    self._send(200, {"world_size": server.world_size})
                elif path == "/metrics/":
                    self._send(200, METRICS)
                elif path == "/health/":
                    self._send(*server.on_health())
                else:
                    self._send(404, {"detail": "Not Found"})

            def do_POST(self):
                path = self._path()
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                self._send(*(server._infer(body) if path == "/infer/" else (200, {"path": path, "body": body})))

            def _path(self):
                server.connections.add(self.client_address)
                server.headers.append(dict(self.headers))
                server.paths.append(self.path)
                return self.path.removeprefix(server.prefix)

            def _send(self, status, answer):
                data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
                try:
                    self.send_response(abs(status))
                    self.send_header("Content-Length", str(len(data)))
                    self.end_headers()
                    self.wfile.write(data[: len(data) // 2] if status < 0 else data)  # negative: cut in the middle
                except OSError:
                    pass
                self.close_connection = self.close_connection or status < 0

            def log_message(self, *args):
                pass

        return Handler


@contextmanager
def setting(*worlds, prefix="", ready=True, **options):
    """(client, servers): one server per world size, each another process."""
    servers = [FaultyServer(size, f"boot{i}", prefix) for i, size in enumerate(worlds)]
    options = {"rank": 0, "world_size": 1, "decode_batch_size": 4, "timeout_s": 2.0, "backoff_s": 0.01, **options}
    client = RolloutClient([Address(server.url, 51216 + i) for i, server in enumerate(servers)], **options)
    try:
        if ready:
            client.wait_ready()
        yield client, servers
    finally:
        client.close()
        for server in servers:
            server.close()


def bodies(num):
    return [{"messages": [{"role": "user", "content": "x"}], "images": [], "uuid": f"r{i}"} for i in range(num)]


def infer(client, num, seed=100):
    return client.infer(bodies(num), {"max_tokens": 4}, seed)


def tokens(outputs):
    return [output["response_token_ids"] for output in outputs]


def free_url():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{listener.getsockname()[1]}"


# Sharing


def test_dis_4_shares_rounds_order_and_seeds():
    """DIS-3, DIS-4, DIS-5, DIS-6: 2 + 4 slots; 13 requests go in rounds of 6, 6 and 1, one call per server each."""
    with setting(1, 2, decode_batch_size=2) as (client, (one, two)):
        outputs = infer(client, 13)
        assert [o["response"]["choices"][0]["message"]["content"] for o in outputs] == [f"r{i}" for i in range(13)]
        assert tokens(outputs) == [[[100 + i]] for i in range(13)]
        assert one.sizes() == [2, 2, 1] and two.sizes() == [4, 4]
        assert one.most_running <= 2 and two.most_running <= 4
        assert [call["request_config"]["seed"] for call in one.calls] == [100, 106, 112]


def test_dis_5_no_request_no_call():
    """DIS-5: nothing is sent for an empty list, and a server without share gets no call."""
    with setting(1, 1) as (client, (one, two)):
        assert infer(client, 0) == []
        infer(client, 1)
        assert one.sizes() == [1] and two.sizes() == []


def test_dis_3_one_round_of_a_rank_at_a_time():
    """DIS-3: training and evaluation threads of one rank never overload a device together."""
    with setting(1, decode_batch_size=2) as (client, (server,)):

        def slow(body):
            time.sleep(0.02)
            return server.answer(body)

        server.on_infer = slow
        threads = [threading.Thread(target=infer, args=(client, 4)) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert server.sizes() == [2] * 6 and server.most_running == 2


def test_dis_4_two_rounds_that_do_not_fit_one_server_wait_DIS_3():
    """DIS-3, DIS-4: 5 + 5 + 6 slots, two rounds of 3 + 3 + 2: together 6 on server 0, so the second waits."""
    with setting(5, 5, 6, decode_batch_size=1, timeout_s=30.0) as (client, servers):
        for server in servers:
            server.on_infer = lambda body, server=server: (time.sleep(0.1), server.answer(body))[1]
        threads = [threading.Thread(target=infer, args=(client, 8)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [server.most_running for server in servers] == [3, 3, 2]
        assert [server.sizes() for server in servers] == [[3] * 4, [3] * 4, [2] * 4]


def test_dis_3_rounds_that_fit_run_side_by_side_and_in_order():
    """DIS-3: three of 2 fit in 6 slots, the fourth follows when the first one ends; nobody overtakes."""
    with setting(1, decode_batch_size=6, timeout_s=30.0) as (client, (server,)):
        going, order = {seed: threading.Event() for seed in (100, 200, 300, 400, 500)}, []

        def wait(body):
            seed = body["request_config"]["seed"]
            order.append(seed)
            assert going[seed].wait(10)
            return server.answer(body)

        server.on_infer = wait
        threads = []
        for seed, num in ((100, 2), (200, 2), (300, 2), (400, 4), (500, 1)):
            threads.append(threading.Thread(target=infer, args=(client, num, seed)))
            threads[-1].start()
            time.sleep(0.1)
        assert order == [100, 200, 300]
        going[100].set()
        time.sleep(0.2)
        assert order == [100, 200, 300]  # 4 do not fit in the 2 slots, and 500 is behind them
        for event in going.values():
            event.set()
        for thread in threads:
            thread.join()
        assert sorted(order[3:]) == [400, 500] and server.most_running <= 6


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 5), st.lists(st.integers(1, 3), min_size=1, max_size=4), st.integers(1, 4), st.randoms())
def test_dis_3_4_no_rank_and_no_server_is_ever_above_its_capacity(decode_batch_size, sizes, num_learners, random):
    """DIS-3, DIS-4: all ranks at once, rounds of random sizes; some round always runs."""
    assume(decode_batch_size * sum(sizes) >= num_learners)
    chunk = chunk_size(decode_batch_size, sum(sizes), num_learners)
    lock, running, faults = threading.Lock(), [[0] * len(sizes) for _ in range(num_learners)], []

    def send(rank, gate, num):
        ours = rank, num_learners, decode_batch_size, sizes
        counts, slots = requests_per_server(num, *ours), capacity_slots(*ours)
        with gate.let_in(counts):
            with lock:
                running[rank] = [a + b for a, b in zip(running[rank], counts, strict=True)]
                totals = [sum(own) for own in zip(*running, strict=True)]
                is_over = sum(running[rank]) > chunk or any(a > b for a, b in zip(running[rank], slots, strict=True))
                if is_over or any(a > decode_batch_size * size for a, size in zip(totals, sizes, strict=True)):
                    faults.append((rank, running, totals))
            time.sleep(0.001)
            with lock:
                running[rank] = [a - b for a, b in zip(running[rank], counts, strict=True)]

    threads = []
    for rank in range(num_learners):
        gate = SlotGate(chunk, capacity_slots(rank, num_learners, decode_batch_size, sizes))
        threads += [threading.Thread(target=send, args=(rank, gate, random.randint(1, chunk))) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert not faults and not any(thread.is_alive() for thread in threads)


def test_con_4_after_a_loss_no_waiting_round_begins_until_all_servers_are_ready():
    """CON-4, DIS-3: a server that came back has no weights yet."""
    with setting(1, decode_batch_size=2, timeout_s=30.0) as (client, (server,)):
        server.on_infer, errors = (lambda body: server.hang()), []

        def send():
            try:
                infer(client, 2)
            except ServerGone as error:
                errors.append(error)

        threads = [threading.Thread(target=send) for _ in range(3)]
        for thread in threads:
            thread.start()
        while not server.calls:
            time.sleep(0.01)
        server.boot_id = "again"
        server.release.set()
        for thread in threads:
            thread.join()
        assert len(errors) == 3 and len(server.calls) == 1
        server.on_infer = server.answer
        with pytest.raises(ServerGone):
            infer(client, 1)
        client.wait_ready()
        assert tokens(infer(client, 1)) == [[[100]]]


def test_dis_3_an_evaluation_fills_slots_as_they_free_up_with_the_same_seeds_LRN_7():
    """DIS-3, DIS-6, LRN-7: 3 x 4 slots; of 48 requests one per round of 3 is slow: the others do not wait for it."""
    with setting(1, 1, 1, decode_batch_size=4, timeout_s=30.0) as (client, servers):
        ended = []

        def answer(server, body):
            seed = body["request_config"]["seed"]
            time.sleep(0.6 if seed == 100 else 0.02)
            ended.append(seed)
            return server.answer(body)

        for server in servers:
            server.on_infer = partial(answer, server)
        outputs = client.infer(bodies(48), {"max_tokens": 4}, 100, in_small_rounds=True)
        assert tokens(outputs) == [[[100 + i]] for i in range(48)] and ended[-1] == 100
        assert all(server.most_running <= 4 for server in servers) and len(ended) == 48
        calls = client.pop_calls()
        assert sorted((call["seed"], call["first_request"]) for call in calls) == [(100 + i, i) for i in range(48)]
        assert tokens(client.infer(bodies(12), {}, 7, in_small_rounds=True)) == [[[7 + i]] for i in range(12)]
        assert [server.sizes()[-1] for server in servers] == [4, 4, 4]  # all fit: one call per server


def test_dis_3_an_evaluation_ends_with_the_first_failure():
    """CON-3, DIS-3: no further round begins."""
    with setting(1, decode_batch_size=2) as (client, (server,)):
        server.on_infer = lambda body: (401, {"detail": "no"})
        with pytest.raises(CallFailed, match="HTTP 401"):
            client.infer(bodies(60), {}, 0, in_small_rounds=True)
        assert len(server.calls) < 60


def test_dis_1_world_sizes_are_asked_once():
    """DIS-1."""
    with setting(1, 3) as (client, (one, two)):
        infer(client, 5)
        assert client.world_sizes == [1, 3] and client.chunk == 16
        assert one.paths.count("/get_world_size/") == two.paths.count("/get_world_size/") == 1


def test_dis_2_too_small_servers_stop_before_any_rollout():
    """DIS-2."""
    with setting(1, ready=False, decode_batch_size=1, world_size=2) as (client, _):
        with pytest.raises(RolloutError, match="decode_batch_size=1 on 1 rollout device.* 2 learners"):
            client.wait_ready()


# Reaching the servers


def test_con_1_waits_for_a_slow_starter():
    """CON-1: not ready twice, then healthy."""
    with setting(1, ready=False) as (client, (server,)):
        states = [(503, {"status": "loading"})] * 2
        server.on_health = lambda: states.pop() if states else (200, server.health())
        client.wait_ready()
        assert not states and client.boot_ids == [server.health()["boot_id"]]


def test_con_1_error_lists_every_server_and_the_ways_out():
    """CON-1: url, group port, answer."""
    with setting(1, 1, ready=False, timeout_s=2) as (client, (one, two)):
        one.on_health = lambda: (503, {"status": "engine is dead"})
        client.servers.append(Address(free_url(), 60000))
        client.ways_out = "  wake it"
        start = time.monotonic()
        with pytest.raises(RolloutError) as error:
            client.wait_ready()
        assert time.monotonic() - start < 6
    message = str(error.value)
    assert f"{one.url} (group port 51216): HTTP 503" in message and "engine is dead" in message
    assert f"{two.url} (group port 51217): ready" in message
    assert "(group port 60000): ConnectionRefusedError" in message
    assert message.endswith("Ways out:\n  wake it")


def test_con_1_a_hanging_server_does_not_hold_the_start_up():
    """CON-1: a server that takes connections and says nothing counts as not reachable."""
    with setting(1, ready=False, timeout_s=0.5) as (client, (server,)):
        server.on_health = server.hang
        start = time.monotonic()
        with pytest.raises(RolloutError, match="no answer within"):
            client.wait_ready()
        assert time.monotonic() - start < 2.0


def test_con_1_something_else_on_the_port():
    """CON-1: a 200 of another program is not a rollout server."""
    with setting(1, ready=False, timeout_s=0.3) as (client, (server,)):
        server.on_health = lambda: (200, b"<html>hello</html>")
        with pytest.raises(RolloutError, match="not JSON: <html>"):
            client.wait_ready()
        server.on_health = lambda: (200, {"status": "ok"})
        with pytest.raises(RolloutError, match="something other than a rollout server"):
            client.wait_ready()


def test_srv_3_a_wrong_token_fails_at_once():
    """SRV-3: waiting does not help against 401."""
    with setting(1, ready=False, timeout_s=30.0) as (client, (server,)):
        server.on_health = lambda: (401, {"detail": "token"})
        start = time.monotonic()
        with pytest.raises(RolloutError, match="HTTP 401"):
            client.wait_ready()
        assert time.monotonic() - start < 2.0


def test_con_1_one_server_under_two_names():
    """CON-1: CFG-7: two urls of one process would hold twice what it can."""
    with setting(1, 1, ready=False) as (client, (one, two)):
        two.boot_id = one.boot_id
        with pytest.raises(RolloutError, match="are the same rollout server"):
            client.wait_ready()


def test_con_4_a_restarted_server_is_told_apart():
    """CON-4: another boot id is a server without weights; another size or model stops the run."""
    with setting(1, 2) as (client, (_, two)):
        two.boot_id = "again"
        client.wait_ready()
        assert client.boot_ids == ["boot0", "again"]
        two.world_size = 1
        with pytest.raises(RolloutError, match="world size 1 instead of 2; restart the run"):
            client.wait_ready()
        two.world_size = 2
        two.on_health = lambda: (200, two.health(model="/other"))
        with pytest.raises(RolloutError, match="model /other instead of /m; restart the run"):
            client.wait_ready()
        for key in ("model_digest", "tokenizer_digest"):  # other files at the same path
            two.on_health = lambda key=key: (200, two.health(**{key: "b"}))
            with pytest.raises(RolloutError, match=f"{key.replace('_', ' ')} b instead of None; restart the run"):
                client.wait_ready()


def test_con_4_a_server_with_another_model_is_refused_by_name():
    """CON-4: also where it has always been the same server; one that does not say what it serves is let pass."""
    with setting(1, 1, ready=False) as (client, (one, two)):
        two.on_health = lambda: (200, two.health(model="/other", model_digest="b"))
        client.wait_ready()
        client.check_model("/mine", "b")
        client.check_model("/mine", None)
        with pytest.raises(RolloutError, match=f"{two.url} serves another model .*: /other, model.path=/mine"):
            client.check_model("/mine", "a")


def test_con_4_another_owner_stops_the_run():
    """CON-4: at recovery and while calls run; before our communicator is open a former run's name does not matter."""
    with setting(1) as (client, (server,)):
        server.on_health = lambda: (200, server.health(owner="old"))
        client.wait_ready()
        client.owner = "mine"
        with pytest.raises(RolloutError, match="taken over by run old"):
            client.wait_ready()
        server.on_infer = lambda body: (500, "weights of another run")
        with pytest.raises(RolloutError, match="taken over by run old"):
            infer(client, 1)
        server.on_health, server.on_infer = (lambda: (200, server.health(owner="mine"))), server.answer
        client.wait_ready()
        assert tokens(infer(client, 1)) == [[[100]]]


def test_con_4_a_dirty_server_is_reachable():
    """CON-4: after a failed weight update only the next full one mends the server, so waiting would be in vain."""
    with setting(1, ready=False) as (client, (server,)):
        server.on_health = lambda: (503, server.health(status="dirty: weight update failed"))
        client.wait_ready()
        assert client.boot_ids == ["boot0"]


def test_con_2_environment_proxies_do_not_apply(monkeypatch):
    """CON-2: with a dead proxy in the environment everything still works."""
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, free_url())
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with setting(1) as (client, _):
        assert tokens(infer(client, 1)) == [[[100]]]


def test_srv_3_the_token_goes_with_every_request(monkeypatch):
    """SRV-3: from the environment, or as given; a path prefix of the base url stays (SRV-1)."""
    monkeypatch.setenv("ROLLOUT_SERVER_TOKEN", "secret")
    with setting(1, prefix="/box7") as (client, (server,)):
        infer(client, 2)
        assert client.post(0, "/update/", {"a": 1}, 5.0) == {"path": "/update/", "body": {"a": 1}}
        assert all(headers["Authorization"] == "Bearer secret" for headers in server.headers)
        assert all(path.startswith("/box7/") and path.endswith("/") for path in server.paths)


@pytest.mark.parametrize("token", ["hunter2\r", "hunter2 ", "s3cr\xe9t hunter2", "hunter2€"])
def test_srv_3_a_token_that_no_header_carries_is_told_and_not_shown(monkeypatch, capsys, token):
    """SRV-3: before a library quotes the header in an error."""
    monkeypatch.setenv("ROLLOUT_SERVER_TOKEN", token)
    with pytest.raises(SystemExit) as end:
        RolloutClient([], 0, 1, 1)
    told = capsys.readouterr().err
    assert end.value.code == 2 and told.startswith("ROLLOUT_SERVER_TOKEN: must be printable ASCII")
    assert "hunter2" not in told and "s3cr" not in told


def test_srv_3_the_run_token_goes_with_posts_to_its_server_and_no_token_is_ever_logged(monkeypatch, caplog):
    """SRV-3: not even at level DEBUG or by a call that fails."""
    monkeypatch.setenv("ROLLOUT_SERVER_TOKEN", "access-secret")
    with caplog.at_level(0), setting(1, 1) as (client, servers):
        client.run_tokens[1] = "run-secret"
        infer(client, 4)
        for index in (0, 1):
            client.post(index, "/start_weight_update/", {}, 5.0)
        heads = [[h.get("Run-Token") for h in server.headers] for server in servers]
        assert set(heads[0]) == {None} and heads[1][-1] == "run-secret" and set(heads[1][:-1]) == {None}
        servers[1].close()
        client.close()  # its kept connections
        with pytest.raises(CallFailed) as raised:
            client.post(1, "/finish_weight_update/", {}, 1.0)
        seen = caplog.text + str(raised.value) + repr(raised.value.__cause__) + str(client.pop_calls())
        assert "start_weight_update" in caplog.text and "secret" not in seen


def test_connections_are_kept_alive():
    """One connection serves many calls, and an idle one is not trusted for ever."""
    with setting(1) as (client, (server,)):
        server.connections.clear()
        for _ in range(5):
            infer(client, 2)
            client.get(0, "/health/")
        assert len(server.connections) <= 2  # the first may be wait_ready's


def test_idle_connections_are_dropped(monkeypatch):
    """A server closes idle connections; a POST that is sent once must not meet one at that moment."""
    monkeypatch.setattr(rollout_link, "KEEP_ALIVE_S", 0.0)
    with setting(1) as (client, (server,)):
        server.connections.clear()
        for _ in range(3):
            client.post(0, "/x/", {}, 5.0)
        assert len(server.connections) == 3


# Single posts


def test_post_errors_carry_url_and_answer():
    """Weight sync relies on it: one try, the url, the server's words."""
    with setting(1) as (client, (server,)):
        with pytest.raises(CallFailed, match=rf"{server.url}/nothing/: HTTP 404: .*Not Found") as error:
            client.get(0, "/nothing/")
        assert error.value.status == 404 and "Not Found" in error.value.detail
        server.on_infer = server.hang
        with pytest.raises(CallTimeout, match="no answer within 0.2 s"):
            client.post(0, "/infer/", {"infer_requests": []}, 0.2)


# Faults of /infer/


def failing(server, faults):
    """`faults` first, one per call, then good answers."""

    def on_infer(body):
        fault = faults.pop(0) if faults else None
        return server.answer(body) if fault is None else fault

    server.on_infer = on_infer


@pytest.mark.parametrize(
    "fault",
    [
        (500, "boom"),
        (503, {"detail": "busy"}),
        (-200, [{"rollout_infos": {}}] * 3),  # cut in the middle of the body
        (200, b'[{"rollout_infos":'),
        (200, []),
        (200, {"detail": "?"}),
        (200, [{"rollout_infos": {}}] * 3),
        (200, [None] * 3),
    ],
)
def test_con_3_a_fault_is_retried(fault):
    """CON-3: 500s, cut bodies, broken JSON, wrong counts, answers without tokens."""
    with setting(1) as (client, (server,)):
        failing(server, [fault])
        assert tokens(infer(client, 3)) == [[[100]], [[101]], [[102]]]
        assert server.sizes() == [3, 3]
        assert [call["attempt"] for call in client.calls] == [1, 2]
        assert not any(call["timed_out"] for call in client.calls)


def test_con_3_one_bad_sample_never_loses_the_others():
    """CON-3, DIS-6: halves down to the one that fails; every call has the seed of its own first request."""
    with setting(1, decode_batch_size=8) as (client, (server,)):

        def on_infer(body):
            is_bad = any(request["uuid"] == "r5" for request in body["infer_requests"])
            return (500, "boom") if is_bad else server.answer(body)

        server.on_infer = on_infer
        outputs = infer(client, 7, seed=2**31 - 3)
        expected = [[[(2**31 - 3 + i)]] for i in range(3)] + [[[i - 3]] for i in range(3, 7)]
        expected[5] = []
        assert [[[t % 2**31 for t in turn] for turn in o] for o in tokens(outputs)] == expected
        assert "HTTP 500" in outputs[5]["rollout_infos"]["error"]
        for call in server.calls:
            first = int(call["infer_requests"][0]["uuid"][1:])
            assert call["request_config"]["seed"] == (2**31 - 3 + first) % 2**31
        assert sorted(set(server.sizes())) == [1, 2, 3, 4, 7]
        assert sum(call["splits"] for call in client.calls) == 3  # 7 -> 4 + 3; 3 -> 2 + 1; 2 -> 1 + 1


def test_con_3_a_rejected_body_is_split_without_retries():
    """CON-3: a 422 says the same each time."""
    with setting(1) as (client, (server,)):

        def on_infer(body):
            is_bad = any(request["uuid"] == "r1" for request in body["infer_requests"])
            return (422, {"detail": "images[0]"}) if is_bad else server.answer(body)

        server.on_infer = on_infer
        outputs = infer(client, 2)
        assert tokens(outputs) == [[[100]], []] and "images[0]" in outputs[1]["rollout_infos"]["error"]
        assert server.sizes() == [2, 1, 1]


def test_con_3_timeouts_are_retried_and_counted():
    """CFG-8, CON-3: `infer_timeout_s` bounds the call."""
    with setting(1, infer_timeout_s=0.3) as (client, (server,)):
        hung = []

        def on_infer(body):
            return server.answer(body) if hung else (hung.append(1), server.hang())[1]

        server.on_infer = on_infer
        start = time.monotonic()
        assert tokens(infer(client, 1)) == [[[100]]]
        assert time.monotonic() - start < 3.0
        assert [(call["timed_out"], call["attempt"]) for call in client.calls] == [(True, 1), (False, 2)]


@pytest.mark.parametrize(("given", "used"), [(None, None), (0, None), (-1.0, None), (2.5, 2.5)])
def test_cfg_8_infer_timeout(given, used):
    """CFG-8: null, zero or negative means no HTTP timeout."""
    assert Server(base_url="http://127.0.0.1:1", group_port=2, infer_timeout_s=given).infer_timeout_s == used


def test_con_3_an_unreadable_image_becomes_an_empty_rollout():
    """CON-3: what the server reports for one request is no fault of the call."""
    with setting(1) as (client, (server,)):

        def on_infer(body):
            outputs = server.answer(body)[1]
            outputs[1] = {"response": None, "response_token_ids": [], "rollout_infos": {"error": "unreadable image"}}
            return 200, outputs

        server.on_infer = on_infer
        assert tokens(infer(client, 3)) == [[[100]], [], [[102]]]
        assert server.sizes() == [3]


def test_con_3_what_is_too_large_beside_others_is_asked_again_without_them_SRV_10(caplog):
    """CON-3: a call's images have a limit together, two here; one request is too large by itself."""
    with setting(1) as (client, (server,)):

        def on_infer(body):
            outputs, taken = server.answer(body)[1], 0
            for number, request in enumerate(body["infer_requests"]):
                taken += request["uuid"] != "r3"
                if request["uuid"] == "r3" or taken > 2:
                    infos = {"error": f"{request['uuid']}: at most 2", "too_large": True}
                    outputs[number] = {"response": None, "response_token_ids": [], "rollout_infos": infos}
            if all("too_large" in output["rollout_infos"] for output in outputs):
                return 400, {"detail": "at most 2"}
            return 200, outputs

        server.on_infer = on_infer
        assert tokens(infer(client, 7)) == [[[100 + n]] if n != 3 else [] for n in range(7)]
        assert server.sizes() == [4, 2, 1, 3, 1]
        assert [call["splits"] for call in client.pop_calls()] == [0, 1, 1, 0, 1]
        assert "2 of 4 requests go again in further calls" in caplog.text and "others: r2: at most 2" in caplog.text


def test_con_3_a_refused_path_stops_the_run():
    """CON-3, SRV-5: the message names the sample and the way out."""
    with setting(1) as (client, (server,)):
        server.on_infer = lambda body: (
            200,
            [server.output(r, 0, error="outside the roots", refused=True) for r in body["infer_requests"]],
        )
        with pytest.raises(RolloutError, match="request r0: refused: outside the roots.*allowed_image_roots"):
            infer(client, 2)


@pytest.mark.parametrize(("fraction", "good"), [(0.05, 10), (0.0, 0), (0.01, 2)])
def test_con_3_too_many_failures_stop_the_run(fraction, good):
    """CON-3: of the last 200 requests the fraction may fail, not one more."""
    with setting(1, max_failed_fraction=fraction) as (client, (server,)):
        server.on_infer = lambda body: (200, [server.output(r, 0, error="bad") for r in body["infer_requests"]])
        for _ in range(good):
            infer(client, 1)
        with pytest.raises(RolloutError, match=f"{good + 1} of the last 200 requests failed.*max_failed_fraction"):
            infer(client, 1)


def test_con_3_an_unreadable_sample_counts_once_however_many_answers_it_has():
    """CON-3: as in GRPO: of the last 200 samples 0.01 may fail, here two with 16 answers each."""
    with setting(1, max_failed_fraction=0.01, answers_per_sample=16) as (client, _):
        for _ in range(2 * 16):
            client.count_request("bad")
        with pytest.raises(RolloutError, match="33 of the last 3200 requests failed"):
            client.count_request("bad")
        for _ in range(198 * 16 - 1):
            client.count_request(None)
        with pytest.raises(RolloutError, match="33 of the last 3200"):
            client.count_request("bad")  # all but the first are still among the last


def test_con_3_old_failures_are_forgotten():
    """CON-3: the window is 200 requests long."""
    with setting(1, decode_batch_size=200, max_failed_fraction=0.005) as (client, (server,)):
        server.on_infer = lambda body: (200, [server.output(r, 0, error="bad") for r in body["infer_requests"]])
        infer(client, 1)
        server.on_infer = server.answer
        infer(client, 200)
        server.on_infer = lambda body: (200, [server.output(r, 0, error="bad") for r in body["infer_requests"]])
        infer(client, 1)
        with pytest.raises(RolloutError, match="2 of the last 200"):
            infer(client, 1)


@pytest.mark.parametrize("status", [401, 404])
def test_srv_3_not_let_in_stops_at_once(status):
    """SRV-3: A wrong token or path is no matter of samples: no retry, no split."""
    with setting(1) as (client, (server,)):
        server.on_infer = lambda body: (status, {"detail": "no"})
        with pytest.raises(CallFailed, match=f"{server.url}/infer/: HTTP {status}"):
            infer(client, 4)
        assert server.sizes() == [4]


# A lost server


def test_con_5_a_frozen_server_is_noticed_without_http_timeout():
    """CON-5: /infer/ hangs, /health/ hangs, no infer_timeout_s: the watch ends the call."""
    with setting(1, timeout_s=0.6) as (client, (server,)):
        server.on_infer = server.on_health = server.hang
        start = time.monotonic()
        with pytest.raises(ServerGone, match=f"rollout server 0 at {server.url} is gone: no good answer for 0.6 s"):
            infer(client, 2)
        assert 0.5 < time.monotonic() - start < 3.0
        (call,) = client.calls
        assert (
            "no answer within" in call["outcome"] and not call["timed_out"]
        )  # its server did not answer, not the call


def test_con_5_a_slow_call_of_a_healthy_server_is_waited_for():
    """CON-5: generating for three times `timeout_s` is no reason to give up."""
    with setting(1, timeout_s=1.5) as (client, (server,)):

        def slow(body):
            time.sleep(4.5)
            return server.answer(body)

        server.on_infer = slow
        assert tokens(infer(client, 1)) == [[[100]]]
        assert server.paths.count("/health/") > 3 and server.sizes() == [1]


def test_con_5_slow_health_answers_are_good_answers():
    """CON-5: a loaded server may take its time within `timeout_s`.

    The limit is generous, so that a machine that stands still for a second is no failure.
    """
    with setting(1, timeout_s=3.0) as (client, (server,)):

        def slow_health():
            time.sleep(1.2)
            return 200, server.health()

        def slow(body):
            time.sleep(4.0)
            return server.answer(body)

        server.on_health, server.on_infer = slow_health, slow
        assert tokens(infer(client, 1)) == [[[100]]]


# A stop request


def stop_after(client, seconds):
    client.end_waits_at(stop := threading.Event())
    threading.Timer(seconds, stop.set).start()


def test_LRN_12_a_stop_ends_the_wait_for_a_server_that_is_not_there():
    """LRN-12: in a recovery."""
    with setting(1, timeout_s=60.0, ready=False) as (client, (server,)):
        server.on_health = lambda: (503, {"status": "starting"})
        stop_after(client, 0.3)
        start = time.monotonic()
        with pytest.raises(RolloutError, match="could be reached before the stop request:\n.*503"):
            client.wait_ready()
        assert time.monotonic() - start < 10


@pytest.mark.parametrize("hangs", [True, False])
def test_LRN_12_after_a_stop_a_server_that_is_lost_while_it_generates_is_gone_at_once(monkeypatch, hangs):
    """LRN-12: frozen, or dead; `timeout_s` is a minute."""
    monkeypatch.setattr("utils.rollout.round.CONNECT_TIMEOUT_S", 1.0)
    with setting(1, timeout_s=60.0) as (client, (server,)):
        client.poll_s = 0.1
        server.on_infer = server.hang if hangs else lambda body: (500, "no")
        server.on_health = server.hang if hangs else lambda: (500, "no")
        stop_after(client, 0.3)
        start = time.monotonic()
        with pytest.raises(ServerGone, match="not waited for, since a stop was requested; last: .*/health/"):
            infer(client, 2)
        assert time.monotonic() - start < 10


def test_LRN_12_after_a_stop_a_healthy_server_may_finish():
    """LRN-12, LRN-5: the step in which the signal came is finished."""
    with setting(1) as (client, (server,)):
        server.on_infer = lambda body: (time.sleep(1.5), server.answer(body))[1]
        stop_after(client, 0.3)
        assert tokens(infer(client, 1)) == [[[100]]]


def test_LRN_12_a_stop_ends_calls_of_a_sync_that_hang(monkeypatch):
    """LRN-12: under way, with a little time to finish, and later ones; a connection that was not cut is used again."""
    monkeypatch.setattr("utils.rollout.client.STOP_S", 0.5)
    with setting(1) as (client, (server,)):
        client.post(0, "/good/", {})
        server.on_infer = server.hang
        for how, words in (("under way", "no answer within 0.5 s after the stop request"), ("later", "within 0.5 s")):
            if how == "under way":
                stop_after(client, 0.3)
            start = time.monotonic()
            with pytest.raises(CallFailed, match=words):
                client.post(0, "/infer/", {"infer_requests": []}, 60.0)
            assert time.monotonic() - start < 10
        assert client.post(0, "/good/", {})["path"] == "/good/"


def test_con_4_a_dead_server_is_waited_for_then_gone():
    """CON-4: connection refused for `timeout_s`."""
    with setting(1, timeout_s=0.5) as (client, (server,)):
        server.http.shutdown()
        server.http.server_close()
        client.close()
        start = time.monotonic()
        with pytest.raises(ServerGone, match="ConnectionRefusedError"):
            infer(client, 1)
        assert 0.4 < time.monotonic() - start < 2.0


def test_con_4_a_short_outage_is_survived():
    """CON-4: the same process answers again within `timeout_s`."""
    with setting(1, timeout_s=3.0) as (client, (server,)):
        until = time.monotonic() + 0.6
        server.on_infer = lambda body: server.answer(body) if time.monotonic() > until else (-200, {})
        server.on_health = lambda: (200, server.health()) if time.monotonic() > until else (503, {"status": "busy"})
        assert tokens(infer(client, 2)) == [[[100]], [[101]]] and set(server.sizes()) == {2}


def test_con_4_another_process_is_not_accepted():
    """CON-4: a restart within the wait is a loss: that process has no weights yet."""
    with setting(1) as (client, (server,)):
        server.boot_id = "again"
        server.on_infer = lambda body: (500, "no weights")
        with pytest.raises(ServerGone, match="restarted: boot id again, was boot0"):
            infer(client, 1)


def test_con_4_a_dirty_server_is_lost_at_once():
    """CON-4: 503 `dirty` ends only with a full update, so nobody waits `timeout_s` for it."""
    with setting(1, timeout_s=30.0) as (client, (server,)):
        server.on_infer = lambda body: (503, {"detail": "dirty"})
        server.on_health = lambda: (503, server.health(status="dirty"))
        start = time.monotonic()
        with pytest.raises(ServerGone, match="needs full weights"):
            infer(client, 4)
        assert time.monotonic() - start < 2.0 and server.sizes() == [4]


def test_con_4_a_dirty_server_that_was_not_restarted_is_not_lost():
    """CON-4: a failed update is no loss of the server, which would be waited for and sent the same again."""
    with setting(1) as (client, (server,)):
        server.on_health = lambda: (503, server.health(status="dirty"))
        assert client.lost() == []


def test_con_3_tries_are_further_and_further_apart_and_halves_begin_anew():
    """CON-3: 1.5 s and 3 s, then the halves' first calls after 1.5 s."""
    waits = []
    batch = ServerBatch(MagicMock(backoff_s=1.5), MagicMock(), MagicMock(), 0, range(4))
    batch.round.cancelled.wait = waits.append
    failed = [batch._after_failure(CallFailed("url", "no", 500), range(4), i, MagicMock()) for i in range(3)]
    assert waits == [1.5, 3.0, 1.5]
    assert failed == [[(range(4), 1)], [(range(4), 2)], [(range(2, 4), 0), (range(2), 0)]]


def test_con_5_the_loss_of_one_server_ends_the_calls_to_the_others():
    """CON-5: nobody waits for a long call whose round is lost already."""
    with setting(1, 1, timeout_s=30.0) as (client, (one, two)):
        one.on_infer = one.hang
        two.on_infer = lambda body: (503, {"detail": "dirty"})
        two.on_health = lambda: (503, two.health(status="dirty"))
        start = time.monotonic()
        with pytest.raises(ServerGone, match="rollout server 1"):
            infer(client, 8)
        assert time.monotonic() - start < 3.0


def test_no_thread_outlives_a_round():
    """Watches and workers end with their round, lost rounds included."""
    names = ("health-", "infer-")
    before = set(threading.enumerate())
    with setting(1, timeout_s=0.5) as (client, (server,)):
        seen = set()
        server.on_infer = lambda body: (seen.update(t.name for t in threading.enumerate()), server.answer(body))[1]
        infer(client, 4)
        assert all(any(thread.startswith(name) for thread in seen) for name in names)  # else nothing is tested below
        server.on_infer = server.on_health = server.hang
        with pytest.raises(ServerGone):
            infer(client, 4)
        deadline = time.monotonic() + 3.0
        while time.monotonic() < deadline:
            left = [t for t in set(threading.enumerate()) - before if any(name in t.name for name in names)]
            if not left:
                break
            time.sleep(0.02)
        assert left == []


def num_sockets():
    """Of this process."""
    links = (Path(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd"))
    return sum(os.readlink(link).startswith("socket:") for link in links if link.is_symlink())


def test_no_connection_outlives_its_use():
    """Those of watches and of cancelled calls; a run of many steps would end for want of file descriptors."""

    def make_calls():
        infer(client, 1)
        with suppress(RolloutError), client.link(0) as link:
            link.request("GET", "/health/", 5.0)
            link.cancel(RolloutError("not wanted"))

    with setting(1) as (client, (server,)):
        server.on_infer = lambda body: (time.sleep(0.4), server.answer(body))[1]  # a watch polls every 0.25 s
        make_calls()
        gc.disable()  # it would close some, late
        try:
            deadline, before = time.monotonic() + 5.0, num_sockets()
            for _ in range(4):
                make_calls()
            while num_sockets() > before and time.monotonic() < deadline:
                time.sleep(0.02)
            assert num_sockets() <= before
        finally:
            gc.enable()


@pytest.fixture
def interrupt():
    """Function that sends Ctrl-C to the main thread, once `when()` holds. Tests side by side would ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield interrupt_main
    signal.signal(signal.SIGINT, before)


def interrupt_main(after_s, when=lambda: True):
    def send():
        time.sleep(after_s)
        while not when():
            time.sleep(0.02)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    threading.Thread(target=send, daemon=True).start()


def test_ctrl_c_ends_all_calls_of_a_round(interrupt):
    """CON-5: no thread is left, and nobody waits for servers that generate for minutes."""
    with setting(1, 1, timeout_s=30.0) as (client, servers):
        for server in servers:
            server.on_infer = server.hang
        interrupt(0.2, lambda: all(server.calls for server in servers))
        start = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            infer(client, 8)
        assert time.monotonic() - start < 3.0
        assert not [thread for thread in threading.enumerate() if thread.name.startswith("infer-")]
        assert [call["outcome"] for call in client.pop_calls()] == ["KeyboardInterrupt"] * 2
        for server in servers:
            server.on_infer = server.answer
        assert tokens(infer(client, 2)) == [[[100]], [[101]]]


def test_ctrl_c_ends_the_wait_for_servers(interrupt):
    with setting(1, ready=False, timeout_s=30.0) as (client, (server,)):
        server.on_health = lambda: (503, {"status": "loading"})
        interrupt(0.2, lambda: server.paths)
        start = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            client.wait_ready()
        assert time.monotonic() - start < 3.0


def test_a_lost_round_does_not_spoil_the_next():
    """CON-4: after recovery the same client goes on."""
    with setting(1, timeout_s=0.5) as (client, (server,)):
        healthy = server.on_health
        server.on_infer = server.on_health = server.hang
        with pytest.raises(ServerGone):
            infer(client, 1)
        server.on_infer, server.on_health = server.answer, healthy
        client.wait_ready()
        assert tokens(infer(client, 3)) == [[[100]], [[101]], [[102]]]


def test_con_5_what_ends_a_call_too_late_does_not_end_the_next_one():
    """CON-5: connections are lent again; a round that has ended and a stop after a post let go of theirs."""
    with setting(1) as (client, (server,)):
        job = InferJob(bodies(2), {}, 100, {}, [None] * 2)
        ended = Round(client, job, range(2))
        ended.run()
        with client.link(0) as lent:
            ended.cancel(RolloutError("too late"))
            assert lent.error is None
        assert client.post(0, "/infer/", {"infer_requests": bodies(1), "request_config": {"seed": 1}})
        with client.link(0) as lent:
            client.cut_posts("too late")
            assert lent.error is None


# Records


def test_log_1_every_call_is_recorded():
    """LOG-1: server, port, seed and the caller's note, failures and halves included; handed out once."""
    with setting(1) as (client, (server,)):
        failing(server, [(500, "boom")])
        client.infer(bodies(2), {}, 7, {"global_step": 3})
        calls = client.pop_calls()
        assert [(call["seed"], call["num_requests"], call["global_step"]) for call in calls] == [(7, 2, 3)] * 2
        assert "HTTP 500" in calls[0]["outcome"] and calls[1]["outcome"] == "ok"
        assert calls[1]["url"] == server.url and calls[1]["group_port"] == 51216 and calls[1]["seconds"] > 0
        assert client.pop_calls() == []


def test_log_6_health_has_its_latency():
    """LOG-6."""
    with setting(1) as (client, _):
        health = client.health(0)
        assert health["boot_id"] == "boot0" and health["latency_s"] > 0
        by_replica = {'rollout_running{replica="0"}': 3.0, 'rollout_running{replica="1"}': 4.0}
        assert client.metrics(0) == {"rollout_running": 7.0, "rollout_waiting": 2.0} | by_replica


def test_con_4_a_server_that_was_started_with_another_config_is_refused_by_name():
    """CON-4: with less room answers would be cut, with other log-probabilities wrongly weighted. More room is fine."""
    with setting(1, 1, ready=False) as (client, (one, two)):
        two.on_health = lambda: (200, two.health(max_model_len=1024, logprobs_mode="raw_logprobs"))
        client.wait_ready()
        own = ServerSettings(vllm_max_model_len=1024)
        client.check_settings([own, own])
        client.check_settings([own, own.model_copy(update={"vllm_max_model_len": 512})])
        longer = own.model_copy(update={"vllm_max_model_len": 2048})
        with pytest.raises(RolloutError, match=f"{two.url} was started with vllm_max_model_len 1024, .* has 2048"):
            client.check_settings([longer, longer])
        processed = own.model_copy(update={"vllm_engine_kwargs": {"logprobs_mode": "processed_logprobs"}})
        with pytest.raises(RolloutError, match="logprobs_mode raw_logprobs, .* has processed_logprobs"):
            client.check_settings([processed, processed])
        two.on_health = lambda: (200, two.health(max_model_len=512, logprobs_mode="raw_logprobs"))
        with pytest.raises(RolloutError, match="max model len 512 instead of 1024; restart the run"):
            client.wait_ready()


def test_con_1_a_url_that_the_server_does_not_know_itself_by_is_not_waited_for():
    """CON-1: its Host header is refused every time."""
    with setting(1, timeout_s=30.0, ready=False) as (client, (server,)):
        server.on_health = lambda: (421, {"detail": "the Host header is no address of this server"})
        start = time.monotonic()
        with pytest.raises(RolloutError, match="no address of this server"):
            client.wait_ready()
        assert time.monotonic() - start < 5.0


def test_con_1_posts_in_flight_can_be_cut():
    """CON-1: as when another server refused."""
    with setting(1) as (client, (server,)), ThreadPoolExecutor(1) as pool:
        server.on_infer = server.hang
        post = pool.submit(client.post, 0, "/infer/", {"infer_requests": [], "request_config": {}}, 20.0)
        while not server.paths.count("/infer/"):
            time.sleep(0.01)
        start = time.monotonic()
        client.cut_posts("given up")
        with pytest.raises(CallFailed, match="given up"):
            post.result()
        assert time.monotonic() - start < 3.0
