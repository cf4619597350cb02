"""The hostile client of `make soak`: what it sends, how much of it, what it counts as broken (SRV-10, SRV-11), and that
the soak starts and ends it. Its counterpart is a small HTTP server; once it is the rollout server's own front."""

import contextlib
import http.server
import json
import random
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
import requests

from studies import hostile_client, soak
from studies.hostile_client import ATTACKS, judge
from tests.e2e.processes import free_port

ROOT = Path(__file__).parents[2]
GOOD = {
    "answers": {kind: {min(attack.answers): 3} for kind, attack in ATTACKS.items()},
    "health": {"statuses": {"200": 100}, "p50": 0.01, "p99": 0.99, "max": 9.0},
}


class Answers(http.server.BaseHTTPRequestHandler):
    """200 to everything."""

    protocol_version = "HTTP/1.1"

    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_POST = do_GET

    def log_message(self, *args):
        pass


@pytest.fixture
def counterpart():
    """A server that answers 200 to everything, and the sockets that it has accepted."""
    accepted = []

    class Server(http.server.ThreadingHTTPServer):
        daemon_threads = True

        def get_request(self):
            client, address = super().get_request()
            accepted.append(client)
            return client, address

        def handle_error(self, *args):
            pass

    with Server(("127.0.0.1", 0), Answers) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        yield server.server_port, accepted
        server.shutdown()


def test_promises_kept_are_no_problem():
    """The longest wait for /health/ is not judged."""
    assert judge(GOOD) == []


@pytest.mark.parametrize(
    ("answers", "health", "words"),
    [
        ({"a stranger's communicator": {"409": 5, "200": 1}}, {}, "a stranger's communicator: answered {'200': 1}"),
        ({"unknown Run-Token": {"200": 1}}, {}, "unknown Run-Token: answered"),
        ({"deep JSON": {"422": 7, "500": 1}}, {}, "deep JSON: answered {'500': 1}"),
        ({"endless head": {"silent": 1}}, {}, "endless head: answered"),
        ({"no JSON": {}}, {}, "no JSON: never tried"),
        ({}, {"statuses": {"200": 9, "503": 1}}, "/health/ answered {'200': 9, '503': 1}"),
        ({}, {"statuses": {}}, "/health/ answered {}"),
        ({}, {"p99": 1.01}, "/health/ took 1.01 s (p99)"),
    ],
)
def test_broken_promises_are_named_SRV_10(answers, health, words):
    (problem,) = judge({"answers": GOOD["answers"] | answers, "health": GOOD["health"] | health})
    assert words in problem


def test_no_answer_in_order_is_a_fault_or_changes_weights_SRV_10():
    weights = {*hostile_client.OWNED, "init_communicator"}
    seen = set()
    for attack in ATTACKS.values():
        words = attack.data(random.Random(0)).split(b"\r\n")[0].split()
        path = words[1].strip(b"/").decode() if len(words) == 3 else ""
        assert not any(answer.startswith("5") for answer in attack.answers)
        if path in weights:
            seen.add(path)
            assert attack.answers <= {"401", "403", "409"}
    assert "init_communicator" in seen and len(seen) > 1


class After(threading.Event):
    """Ends the client after so many turns."""

    def __init__(self, turns: int) -> None:
        super().__init__()
        self.left = turns

    def wait(self, timeout=None):
        time.sleep(0.005)
        self.left -= 1
        return self.left < 0


DECK = sum(attack.share for attack in ATTACKS.values())


def test_the_mix_is_whole_and_always_the_same(monkeypatch, counterpart):
    sent = []
    monkeypatch.setattr(hostile_client, "send", lambda attack, *_: sent.append(attack) or "x")
    for _ in range(2):
        ports = {"server": counterpart[0], "rendezvous": 1, "group": 1}
        hostile_client.run("127.0.0.1", ports, 60.0, 1e6, After(2 * DECK))
    first, second, again, _ = (sent[at : at + DECK] for at in range(0, 4 * DECK, DECK))
    assert {kind: first.count(attack) for kind, attack in ATTACKS.items()} == {k: a.share for k, a in ATTACKS.items()}
    assert first == again and first != second


def test_rate_and_open_connections_are_bounded(monkeypatch, counterpart):
    port, accepted = counterpart
    half_open = {kind: attack for kind, attack in ATTACKS.items() if attack.then == "hold"}
    monkeypatch.setattr(hostile_client, "ATTACKS", half_open)
    monkeypatch.setattr(hostile_client, "HEALTH_INTERVAL_S", 60)
    seen = []

    def wait(seconds):
        time.sleep(seconds)
        seen.append(sum(1 for one in psutil.Process().net_connections("tcp") if one.raddr and one.raddr.port == port))

    stop = threading.Event()
    monkeypatch.setattr(stop, "wait", wait)
    figures = hostile_client.run("127.0.0.1", {"server": port}, 1.0, 20.0, stop)
    number = sum(sum(answers.values()) for answers in figures["answers"].values())
    deadline = time.monotonic() + 5
    while len(accepted) < number and time.monotonic() < deadline:  # the server may be behind
        time.sleep(0.01)
    assert 3 <= number <= 21 and number == len(accepted)  # fewer than 20 on a busy machine
    assert max(seen) == min(number, hostile_client.MAX_HELD)


def test_faults_of_the_server_are_counted_SRV_10(counterpart):
    """One that takes every call: the mix notices, through real sockets, and so does the clock of /health/."""
    ports = {"server": counterpart[0], "rendezvous": counterpart[0], "group": free_port()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hostile_client, "HANG_UP_S", 0.0)
        patch.setattr(hostile_client, "SILENT_S", 0.1)
        patch.setattr(hostile_client, "ANSWER_S", 1.0)
        patch.setattr(hostile_client, "HEALTH_INTERVAL_S", 0.02)
        figures = hostile_client.run("127.0.0.1", ports, 15.0, 1000.0, After(DECK))
    assert figures["answers"]["garbage to the group port"] == {"refused": 1}
    assert figures["health"]["statuses"].keys() == {"200"} and figures["health"]["max"] < 15
    problems = "\n".join(judge(figures))
    assert "never tried" not in problems
    for kind in ("unknown Run-Token", "a stranger's communicator", "deep JSON", "foreign Host"):
        assert f"{kind}: answered {{'200':" in problems


def test_the_servers_own_front_keeps_its_promises_SRV_10(start_model, monkeypatch):
    """Real application and tokenizer, owned by a run, with an engine that answers at once."""
    pytest.importorskip("vllm")
    monkeypatch.setattr(hostile_client, "HEALTH_INTERVAL_S", 0.02)
    port = free_port()
    command = [sys.executable, "-m", "tests.security.bounded_server", str(port), str(start_model)]
    server = subprocess.Popen(command, cwd=ROOT)
    try:
        url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + 120
        while time.monotonic() < deadline and server.poll() is None:
            with contextlib.suppress(requests.ConnectionError):
                if requests.get(url + "/health/", timeout=5).ok:
                    break
            time.sleep(0.2)
        body = {"run_id": "owner", "master_address": "127.0.0.1", "master_port": 9, "world_size": 3}
        body |= {"bucket_bytes": 1, "timeout_s": 60.0, "open_timeout_s": 5.0}
        assert requests.post(url + "/init_communicator/", json=body, timeout=30).ok
        ports = {"server": port, "rendezvous": free_port(), "group": free_port()}
        figures = hostile_client.run("127.0.0.1", ports, 60.0, 1000.0, After(DECK))
        assert requests.get(url + "/health/", timeout=30).json()["owner"] == "owner"
    finally:
        server.kill()
        server.wait()
    # This front checks no Host, and has two engines, so that the stranger's world is refused before its owner is asked.
    assert figures["answers"].pop("foreign Host").keys() == {"200"}
    assert figures["answers"].pop("a stranger's communicator").keys() == {"422"}
    problems = [problem for problem in judge(figures) if "never tried" not in problem and "(p99)" not in problem]
    assert problems == [] and len(figures["answers"]) == len(ATTACKS) - 2


@pytest.mark.parametrize(
    "url", ["http://192.0.2.1:80", "http://example.com:80", "http://127.0.0.1", "http://0.0.0.0:1"]
)
def test_only_loopback_is_attacked(url, monkeypatch, capsys):
    monkeypatch.setattr(hostile_client, "run", lambda *_: pytest.fail("it ran"))
    flags = ["--rendezvous-port", "1", "--group-port", "1", "--seconds", "1", "--counts", "x.json"]
    monkeypatch.setattr(sys, "argv", ["hostile_client", "--url", url, *flags])
    with pytest.raises(SystemExit) as ended:
        hostile_client.main()
    assert ended.value.code == 2 and "must be a loopback address" in capsys.readouterr().err


# ---- beside the soak ------------------------------------------------------------------------------------------------


def flags_of(port: int) -> list[str]:
    return ["--url", f"http://127.0.0.1:{port}", "--rendezvous-port", str(port), "--group-port", str(port)]


def clients() -> list[psutil.Process]:
    """Hostile clients that this process started; earlier tests may have left it other children."""
    running = [child for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE]
    return [child for child in running if "studies.hostile_client" in child.cmdline()]


def test_it_runs_while_the_learner_does_and_is_ended(tmp_path, monkeypatch, counterpart):
    """From the first step to the learner's SIGTERM; then its figures are there, and no process is left."""
    (tmp_path / "learner.log").write_text("step 1/9")
    learner = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    monkeypatch.setattr(soak, "STOPPED_STATUS", -15)
    monkeypatch.setattr(soak, "SAMPLE_S", 0.2)
    beside = []

    def sample(*_):
        beside.append(len(clients()))
        return {}

    monkeypatch.setattr(soak, "sample", sample)
    soak.watch(learner, 0, tmp_path, 10.0, flags_of(counterpart[0]))  # time for it to start
    assert set(beside[1:]) == {1} and clients() == []
    figures, problems = soak.read_hostile(tmp_path)
    assert sum(map(len, figures["answers"].values())) and any("/health/" not in problem for problem in problems)


@pytest.mark.parametrize("flags", [None, ["--url", "http://192.0.2.1:1"]])
def test_without_it_nothing_runs_and_without_its_counts_the_soak_fails(tmp_path, flags):
    with soak.hostile_client(tmp_path, flags, 1.0):
        assert bool(clients()) == bool(flags)
    assert clients() == []
    assert "ended without its counts" in soak.read_hostile(tmp_path)[1][0]


def test_it_is_ended_when_the_soak_fails(tmp_path, counterpart):
    with pytest.raises(SystemExit), soak.hostile_client(tmp_path, flags_of(counterpart[0]), 60.0):
        assert clients()
        sys.exit("the learner ended too early")
    assert clients() == []


def test_it_ends_by_itself(tmp_path, counterpart):
    """A soak that is killed leaves no hostile client behind for long."""
    command = [sys.executable, "-m", "studies.hostile_client", *flags_of(counterpart[0]), "--seconds", "0.5"]
    subprocess.run([*command, "--counts", str(tmp_path / "x.json")], cwd=ROOT, timeout=60, check=True)
    assert json.loads((tmp_path / "x.json").read_text())["seconds"] >= 0.5


@pytest.mark.parametrize("with_hostile", [True, False])
def test_the_soak_judges_it_SRV_10(tmp_path, monkeypatch, with_hostile):
    """Its problems and figures reach soak.json and the exit status; it gets the ports of this very run."""
    config = tmp_path / "soak.yaml"
    ports = {"base_url": "http://127.0.0.1:81", "group_port": 82}
    config.write_text(json.dumps({"custom": {"extra": {"rollout_matching": {"vllm": {"server": ports}}}}}))
    given, started = [], []

    def watch(learner, server_pid, folder, seconds, flags):
        given.append(flags)
        figures = {"answers": {}, "health": {"statuses": {"200": 1}}}
        (tmp_path / "hostile.json").write_text(json.dumps(figures))
        return []

    class Events:
        def __init__(self, *_, **__):
            self.Reload = lambda: self
            self.Scalars = lambda _: []

    for name, fake in {"prepare": lambda _: config, "resume_once": lambda *_: [], "EventAccumulator": Events}.items():
        monkeypatch.setattr(soak, name, fake)
    monkeypatch.setattr(soak, "start_learner", lambda config, log, port: started.append(port))
    monkeypatch.setattr(soak, "find_growth", lambda *_: ({}, []))
    monkeypatch.setattr(soak, "watch", watch)
    monkeypatch.setattr(soak.shutil, "rmtree", lambda *_, **__: None)
    for name in ("start_server", "wait_healthy", "stop"):
        monkeypatch.setattr(soak.demo, name, lambda *_: type("Server", (), {"pid": 1}))
    monkeypatch.setattr(soak.demo, "exit_on_sigterm", lambda: None)
    monkeypatch.setattr(sys, "argv", ["soak", "--folder", str(tmp_path)] + ["--no-hostile"] * (not with_hostile))
    with pytest.raises(SystemExit) as ended:
        soak.main()
    written = json.loads((tmp_path / "soak.json").read_text())
    assert ended.value.code == int(with_hostile) and bool(written["problems"]) == with_hostile
    assert ("health" in written["hostile"]) == with_hostile
    flags = ["--url", "http://127.0.0.1:81", "--rendezvous-port", str(started[0]), "--group-port", "82"]
    assert given == [flags if with_hostile else None]


def test_a_hang_up_is_a_reset(monkeypatch):
    monkeypatch.setattr(hostile_client, "HANG_UP_S", 0.0)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        hang_up = ATTACKS["hang-up"]
        assert hostile_client.send(hang_up, *listener.getsockname(), random.Random(0), None) == "reset"
        with listener.accept()[0] as client, pytest.raises(ConnectionResetError):
            while client.recv(65536):
                pass
