"""A client that means ill, beside a run on this machine; `make soak` starts it.

    python -m studies.hostile_client --url http://127.0.0.1:8911 --rendezvous-port 29500 --group-port 8921 \\
        --seconds 60 --counts hostile.json

Sends a fixed mix in seeded order at a bounded rate, one request at a time and at most 8 connections left half open, to
loopback only: what the server must refuse, hang-ups, and garbage to the ports where the learner's ranks and the workers
meet. A second thread asks for `/health/` twice a second. Ends after `--seconds` or SIGTERM and writes to `--counts` how
each kind was answered and how long `/health/` took. `judge` says which rules these figures break.
"""

import argparse
import contextlib
import json
import random
import signal
import socket
import statistics
import struct
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import requests

from utils.config.rollout import is_loopback

RATE = 3.0  # requests per second
MAX_HELD = 8  # connections left half open
ANSWER_S = 20.0  # the soak kills this client 30 s after its SIGTERM
SILENT_S = 2.0  # a port that is no HTTP server's may say nothing
HANG_UP_S = 0.3
HEALTH_INTERVAL_S = 0.5
HEALTH_P99_S = 1.0  # the longest wait is reported only: on shared cores it is the scheduler's
RESET = struct.pack("ii", 1, 0)  # SO_LINGER: close with a RST
HELLO = {"messages": [{"role": "user", "content": "hello"}]}
OWNED = ("close_communicator", "start_weight_update", "update_weights", "finish_weight_update", "abort_weight_update")
OWNED += ("reset_prefix_cache",)


def head(method: str, path: str, **headers: str | int) -> bytes:
    fields = {"Host": "127.0.0.1", "Content-Type": "application/json"} | {
        name.replace("_", "-"): value for name, value in headers.items()
    }
    lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in fields.items())]
    return "\r\n".join(lines).encode() + b"\r\n\r\n"


def post(path: str, body: bytes, **headers: str | int) -> bytes:
    return head("POST", path, Content_Length=len(body), **headers) + body


def infer(*asked: Any, **more: Any) -> bytes:
    """`/infer/` with these requests; `json` writes NaN and lone surrogates, too."""
    return post("/infer/", json.dumps({"infer_requests": asked, **more}).encode())


def owned(draw: random.Random, **headers: str) -> bytes:
    """A call that only the run that owns the server may make."""
    body = {"run_id": "stranger", "version": "stranger:1", "names": ["w"], "dtype_names": ["float32"], "shapes": [[1]]}
    return post(f"/{draw.choice(OWNED)}/", json.dumps(body).encode(), **headers)


def take_over() -> bytes:
    """`/init_communicator/` of another run, at an address where nobody listens."""
    call = {"run_id": "stranger", "master_address": "127.0.0.1", "master_port": 9, "world_size": 2}
    call |= {"bucket_bytes": 1, "timeout_s": 600.0, "open_timeout_s": 600.0}
    return post("/init_communicator/", json.dumps(call).encode())


@dataclass(frozen=True)
class Attack:
    """What to send, and which answers keep the server's promises: a status, `closed`, `refused` or `silent`.

    `then`: read the answer, leave the connection open and half said, or hang up with a reset.
    """

    data: Callable[[random.Random], bytes]
    answers: frozenset[str]
    then: Literal["read", "hold", "reset"] = "read"
    port: Literal["server", "rendezvous", "group"] = "server"
    share: int = 2  # cards of the deck


def attack(data: Callable[[random.Random], bytes], *answers: str, **more: Any) -> Attack:
    return Attack(data, frozenset(answers), **more)


def garbage(draw: random.Random) -> bytes:
    return draw.randbytes(draw.randrange(1, 4096))


NOT_HTTP = ("closed", "refused", "silent")
ATTACKS = {
    "foreign Host": attack(lambda _: head("GET", "/health/", Host="evil.example"), "421"),
    "garbage": attack(lambda draw: b"\xff" + garbage(draw) + b"\r\n\r\n", "400", "closed"),
    "endless head": attack(lambda _: b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * 200_000, "400", "closed"),
    "half a head": attack(lambda _: b"GET /health/ HTTP/1.1\r\nHo", "held", then="hold"),
    "slow body": attack(lambda _: head("POST", "/infer/", Content_Length=1000) + b"{", "held", then="hold"),
    "half a body": attack(lambda _: infer(HELLO)[:-9], "reset", then="reset"),
    "1 TiB declared": attack(lambda _: head("POST", "/infer/", Content_Length=2**40), "413"),
    "unknown path": attack(lambda _: head("GET", "/../etc/passwd"), "404"),
    "wrong method": attack(lambda _: head("GET", "/infer/"), "405"),
    "no JSON": attack(lambda draw: post("/infer/", garbage(draw)), "422"),
    "deep JSON": attack(lambda _: post("/infer/", b'{"infer_requests": ' + b"[" * 100_000), "422"),
    "not a number": attack(lambda _: infer(HELLO, request_config={"temperature": float("nan")}), "422"),
    "lone surrogate": attack(lambda _: infer({"messages": [{"role": "user", "content": "\ud800"}]}), "422"),
    "unknown fields": attack(lambda _: infer(HELLO | {f"x{i}": 0 for i in range(10_000)}), "422"),
    "numbers as requests": attack(lambda _: infer(*[3] * 10_000), "422"),
    "a million values": attack(
        lambda _: post("/infer/", b'{"infer_requests": [' + b"3," * 1_000_000 + b"3]}"), "413", share=1
    ),
    "endless text": attack(lambda _: infer({"messages": [{"role": "user", "content": "a b c, " * 9000}]}), "422"),
    "stop strings": attack(lambda _: infer(HELLO, request_config={"stop": ["x"] * 1000}), "422"),
    "foreign file": attack(lambda _: infer(HELLO | {"images": ["/etc/passwd"]}), "200", "422"),
    "no Run-Token": attack(owned, "403", share=4),
    "unknown Run-Token": attack(lambda draw: owned(draw, Run_Token=draw.randbytes(16).hex()), "403", share=4),
    "wrong access token": attack(lambda draw: owned(draw, Authorization="Bearer wrong"), "401", "403"),
    "a stranger's communicator": attack(lambda _: take_over(), "409", share=4),
    "hang-up": attack(lambda _: infer(HELLO, request_config={"max_tokens": 64}), "reset", then="reset", share=1),
    "garbage to the rendezvous": attack(garbage, *NOT_HTTP, port="rendezvous", share=1),
    "garbage to the group port": attack(garbage, *NOT_HTTP, port="group", share=1),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", required=True, help="of the rollout server, on loopback")
    parser.add_argument("--rendezvous-port", type=int, required=True, help="where the learner's ranks meet")
    parser.add_argument("--group-port", type=int, required=True, help="where learner and engine workers meet")
    parser.add_argument("--seconds", type=float, required=True, help="it ends by itself after these")
    parser.add_argument("--counts", type=Path, required=True, help="JSON to write")
    parser.add_argument("--rate", type=float, default=RATE, help="requests per second")
    args = parser.parse_args()
    server = urlsplit(args.url)
    if not (server.port and server.hostname and is_loopback(server.hostname)):
        parser.error(f"--url {args.url}: must be a loopback address with a port, such as http://127.0.0.1:8911")
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    ports = {"server": server.port, "rendezvous": args.rendezvous_port, "group": args.group_port}
    figures = run(server.hostname, ports, args.seconds, args.rate, stop)
    args.counts.write_text(json.dumps(figures, indent=2) + "\n")


def run(host: str, ports: Mapping[str, int], seconds: float, rate: float, stop: threading.Event) -> dict[str, Any]:
    """Deal the whole mix again and again, shuffled; return `{"seconds", "answers": {kind: {answer: count}},
    "health"}`."""
    draw, answers, deck = random.Random(0), defaultdict(Counter), []
    began = due = time.monotonic()
    with Health(f"http://{host}:{ports['server']}") as health, contextlib.ExitStack() as stack:
        held: deque[socket.socket] = deque()
        stack.callback(lambda: [client.close() for client in held])
        while not stop.wait(max(0.0, due - time.monotonic())) and time.monotonic() < began + seconds:
            due = max(due, time.monotonic()) + 1 / rate  # a slow answer is not made up for
            if not deck:
                deck = [kind for kind, attack in ATTACKS.items() for _ in range(attack.share)]
                draw.shuffle(deck)
            kind = deck.pop()
            answers[kind][send(ATTACKS[kind], host, ports[ATTACKS[kind].port], draw, held)] += 1
            while len(held) > MAX_HELD:
                held.popleft().close()
    return {"seconds": time.monotonic() - began, "answers": answers, "health": health.figures()}


def send(attack: Attack, host: str, port: int, draw: random.Random, held: deque[socket.socket]) -> str:
    """Make one attack; return how it ended. `held` takes a connection that stays open."""
    limit = ANSWER_S if attack.port == "server" else SILENT_S
    try:
        client = socket.create_connection((host, port), timeout=limit)
    except OSError:
        return "refused"
    with contextlib.suppress(OSError):  # the server may hang up before the end
        client.sendall(attack.data(draw))
    if attack.then == "hold":
        held.append(client)
        return "held"
    with client:
        if attack.then == "reset":
            time.sleep(HANG_UP_S)
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            return "reset"
        return read_status(client)


def read_status(client: socket.socket) -> str:
    """Return the HTTP status, `closed` if there is none, `silent` if nothing came in time."""
    try:
        answer = client.recv(65536)
    except TimeoutError:
        return "silent"
    except OSError:
        return "closed"
    if not answer.startswith(b"HTTP/1.1 "):
        return "not HTTP" if answer else "closed"
    return answer.split()[1].decode()


class Health:
    """Asks for `/health/` from entry to exit, in a thread."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.seconds: list[float] = []
        self.statuses: Counter[str] = Counter()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._ask)

    def __enter__(self) -> "Health":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _ask(self) -> None:
        with requests.Session() as session:
            session.trust_env = False
            while not self._over.wait(HEALTH_INTERVAL_S):
                began = time.monotonic()
                try:
                    status = str(session.get(f"{self.url}/health/", timeout=ANSWER_S).status_code)
                except requests.RequestException as error:
                    status = type(error).__name__
                self.seconds.append(time.monotonic() - began)
                self.statuses[status] += 1

    def figures(self) -> dict[str, Any]:
        """Statuses, and `p50`, `p99` and `max` of the waits in seconds if there are at least two."""
        waits: dict[str, float] = {}
        if len(self.seconds) > 1:
            cuts = statistics.quantiles(self.seconds, n=100, method="inclusive")
            waits = {"p50": cuts[49], "p99": cuts[98], "max": max(self.seconds)}
        return {"statuses": self.statuses, **waits}


def judge(figures: Mapping[str, Any]) -> list[str]:
    """Return a message for each rule that the figures of `run` break."""
    problems = []
    for kind, attack in ATTACKS.items():
        answers = figures["answers"].get(kind, {})
        wrong = {answer: count for answer, count in answers.items() if answer not in attack.answers}
        if wrong:
            problems.append(f"hostile client: {kind}: answered {wrong}, expected {sorted(attack.answers)}")
        if not answers:
            problems.append(f"hostile client: {kind}: never tried")
    health = figures["health"]
    if set(health["statuses"]) != {"200"}:
        problems.append(f"hostile client: /health/ answered {dict(health['statuses'])}, expected 200")
    if health.get("p99", 0.0) > HEALTH_P99_S:
        problems.append(f"hostile client: /health/ took {health['p99']:.3g} s (p99), more than {HEALTH_P99_S:g} s")
    return problems


if __name__ == "__main__":
    main()
