"""A proxy between a learner and its rollout server that corrupts responses on command and records requests."""

import json
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

Fault = Callable[[bytes], bytes | None]  # from the server's response to the learner's; None: reset the connection


def not_json(answer: bytes) -> bytes:
    return b"<html><body>504 from a box in between</body></html>"


def half_of_it(answer: bytes) -> bytes:
    """Return well-formed HTTP with half a JSON document."""
    return answer[: len(answer) // 2]


def one_output_less(answer: bytes) -> bytes:
    return json.dumps(json.loads(answer)[:-1]).encode()


def another_prompt(answer: bytes) -> bytes:
    return _changed(answer, lambda output: output["response"]["prompt_token_ids"].__setitem__(0, 7))


def another_version(answer: bytes) -> bytes:
    return _changed(answer, lambda output: output["rollout_infos"].update(weight_version="somebody:3"))


def cut(answer: bytes) -> None:
    """Reset the connection in the middle of the response."""
    return None


def _changed(answer: bytes, change: Callable[[dict[str, Any]], None]) -> bytes:
    """Return the response with its first output changed."""
    outputs = json.loads(answer)
    change(outputs[0])
    return json.dumps(outputs).encode()


class Proxy:
    """Forwards everything unchanged except `/infer/` responses: each gets the next of `faults` (None: no fault).

    Attributes:
        on_request: called with the path before a request is forwarded.
        seen: paths of all requests so far.
    """

    def __init__(self, url: str) -> None:
        self.target = urlsplit(url)
        self.faults: deque[Fault | None] = deque()
        self.on_request: Callable[[str], None] = lambda path: None
        self.seen: list[str] = []
        self._lock = threading.Lock()
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), _handler_of(self))
        self._http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._http.server_port}"
        threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()

    def next_fault(self) -> Fault | None:
        with self._lock:
            return self.faults.popleft() if self.faults else None


def _handler_of(proxy: Proxy) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def do_GET(self) -> None:
            self._pass_on(None)

        def do_POST(self) -> None:
            self._pass_on(self.rfile.read(int(self.headers["Content-Length"])))

        def _pass_on(self, body: bytes | None) -> None:
            proxy.seen.append(self.path)
            proxy.on_request(self.path)
            headers = {k: v for k, v in self.headers.items() if k in ("Content-Type", "Run-Token", "Authorization")}
            connection = HTTPConnection(proxy.target.hostname, proxy.target.port)
            try:
                connection.request(self.command, self.path, body, headers)
                answer = connection.getresponse()
                status, data = answer.status, answer.read()
            except OSError:  # the server is gone, so end this connection too
                return self._reset()
            finally:
                connection.close()
            fault = proxy.next_fault() if self.path == "/infer/" and status == 200 else None
            spoilt = data if fault is None else fault(data)
            try:
                self.send_response(status)
                self.send_header("Content-Length", str(len(data if spoilt is None else spoilt)))
                self.send_header("Content-Type", "application/json")
                self.end_headers()
                self.wfile.write(data[: len(data) // 2] if spoilt is None else spoilt)
            except OSError:  # the learner hung up
                self.close_connection = True
            if spoilt is None:
                self._reset()

        def _reset(self) -> None:
            self.close_connection = True
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

        def log_message(self, *args: Any) -> None:
            pass

    return Handler
