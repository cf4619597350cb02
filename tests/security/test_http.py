"""SRV-10, SRV-11: what a connection may cost, and for whom a request is meant, over real sockets."""

import asyncio
import contextlib
import http.server
import socket
import threading
import time

import pytest
import uvicorn
from fastapi import Request
from fastapi.responses import JSONResponse, PlainTextResponse

from utils.run.setup import learner_host
from utils.server import front, images


async def echo(scope, receive, send):
    if scope["type"] == "http":
        while (await receive()).get("more_body"):
            pass
        await JSONResponse({"path": scope["path"]})(scope, receive, send)


@pytest.fixture
def port():
    with serving(echo) as port:
        yield port


@contextlib.contextmanager
def serving(app, send_buffer=None):
    config = front.front_config(front.require_host(app, front.own_hosts("127.0.0.1")))
    config.lifespan = "off"
    listener = socket.create_server(("127.0.0.1", 0))
    if send_buffer:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)  # its connections inherit it
    server = uvicorn.Server(config)
    server.capture_signals = contextlib.nullcontext
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        server.should_exit = True
        thread.join(10)


def ask(port: int, head: bytes) -> bytes:
    """Send a head and return what comes until the server closes, or for 5 s."""
    with socket.create_connection(("127.0.0.1", port), timeout=5) as client:
        with contextlib.suppress(OSError):  # it may hang up before the end
            client.sendall(head)
        with contextlib.suppress(OSError):
            return client.recv(65536)
    return b""


def test_an_endless_head_is_refused_SRV_10(port):
    lines = b"".join(b"X-%d: %s\r\n" % (i, b"a" * 1000) for i in range(2000))
    assert b" 200 " not in ask(port, b"GET / HTTP/1.1\r\nHost: localhost\r\n" + lines + b"\r\n")
    assert b" 200 " in ask(port, b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")


@pytest.mark.parametrize("start", [b"GET /a", b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\nGET /a"])
def test_a_head_that_does_not_end_is_cut_off_SRV_10(port, start, monkeypatch):
    """Also one that sends a byte now and then, and on a connection that had an answer already."""
    monkeypatch.setattr(front, "HEAD_S", 0.5)
    with socket.create_connection(("127.0.0.1", port), timeout=5) as client:
        client.sendall(start)
        deadline = time.monotonic() + 5
        with pytest.raises(OSError):
            while time.monotonic() < deadline:
                client.sendall(b"P")
                time.sleep(0.1)


ENDLESS = b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9999\r\n\r\n"


def test_a_body_that_does_not_end_is_cut_off_SRV_10(port, monkeypatch):
    monkeypatch.setattr(front, "BODY_S", 0.5)
    with socket.create_connection(("127.0.0.1", port), timeout=5) as client:
        client.sendall(ENDLESS)
        deadline = time.monotonic() + 5
        with pytest.raises(OSError):
            while time.monotonic() < deadline:
                client.sendall(b"x")
                time.sleep(0.1)


def test_a_body_that_does_not_end_behind_another_request_is_cut_off_SRV_10(monkeypatch):
    monkeypatch.setattr(front, "BODY_S", 0.5)

    async def slow(scope, receive, send):
        await asyncio.sleep(0.3)
        await echo(scope, receive, send)

    with serving(slow) as port, socket.create_connection(("127.0.0.1", port), timeout=5) as client:
        client.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" + ENDLESS)
        assert client.recv(1 << 16).startswith(b"HTTP/1.1 200")
        while client.recv(1 << 16):  # until the end
            pass


@pytest.mark.parametrize("num_bytes", [60_000, 1_000_000])
def test_an_answer_that_its_client_does_not_read_is_given_up_SRV_10(monkeypatch, num_bytes):
    """Whatever the server's socket cannot take; closing the idle connection alone would wait for the client."""
    monkeypatch.setattr(front, "ANSWER_S", 0.5)

    async def large(scope, receive, send):
        await PlainTextResponse("x" * num_bytes)(scope, receive, send)

    def first_bytes(client: socket.socket) -> None:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.settimeout(5)
        client.connect(("127.0.0.1", port))
        client.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert client.recv(1000).startswith(b"HTTP/1.1 200")

    with serving(large, send_buffer=4096) as port:
        with socket.socket() as unread:
            first_bytes(unread)
            time.sleep(1.5)
            read = 1000
            with contextlib.suppress(ConnectionResetError):
                while data := unread.recv(1 << 16):
                    read += len(data)
            assert read < num_bytes
        with socket.socket() as slow:  # one that reads in time gets all of it
            first_bytes(slow)
            time.sleep(0.2)
            read = 1000
            while read < num_bytes:
                read += len(slow.recv(1 << 16))
            time.sleep(0.7)
            slow.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
            while b"HTTP/1.1 200" not in (data := slow.recv(1 << 16)):
                assert data


def test_a_body_in_the_smallest_chunks_holds_nobody_up_SRV_10(port):
    """Other requests are answered between two reads."""
    worst, is_over = [0.0], threading.Event()

    def look() -> None:
        while not is_over.is_set():
            start = time.monotonic()
            assert b" 200 " in ask(port, b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            worst[0] = max(worst[0], time.monotonic() - start)

    looking = threading.Thread(target=look)
    looking.start()
    chunks = b"1\r\nx\r\n" * 350_000
    head = b"POST / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    with socket.create_connection(("127.0.0.1", port), timeout=60) as client:
        client.sendall(head + chunks + b"0\r\n\r\n")
        assert client.recv(1 << 16).startswith(b"HTTP/1.1 200")
    is_over.set()
    looking.join()
    assert worst[0] < 1.0


def test_what_comes_behind_a_request_is_bounded_SRV_10():
    """A client that sends on and on while its request is answered is cut off, one that waits is not."""

    async def slow(scope, receive, send):
        request = Request(scope, receive)
        await request.body()
        while not await request.is_disconnected():  # as the server's routes do; each look reads what has come
            await asyncio.sleep(0.01)

    with contextlib.ExitStack() as stack:
        port = stack.enter_context(serving(slow))
        client = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=5))
        client.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        num_sent, deadline = 0, time.monotonic() + 10
        with pytest.raises(OSError):
            while time.monotonic() < deadline and num_sent < 64 << 20:
                num_sent += client.send(b"x" * (1 << 20))


def test_connections_are_bounded_SRV_10(port, monkeypatch):
    monkeypatch.setattr(front, "MAX_CONNECTIONS", 3)
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=5)) for _ in range(4)]
        with contextlib.suppress(ConnectionResetError):
            assert clients[3].recv(1) == b""


@pytest.mark.parametrize(("host", "status"), [("localhost:1", 200), ("[::1]:8", 200), ("evil.example", 421), ("", 421)])
def test_the_host_header_must_be_the_servers_SRV_11(port, host, status):
    assert b" %d " % status in ask(port, b"GET / HTTP/1.1\r\nHost: %b\r\n\r\n" % host.encode())


def test_beyond_loopback_the_machines_own_names_are_the_servers_SRV_11(monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "GPU-box")
    own = {"gpu-box", "127.0.0.1"}  # a name and the address of an interface
    assert own <= front.own_hosts("0.0.0.0") and own.isdisjoint(front.own_hosts("localhost"))
    assert {"alias", "localhost"} <= front.own_hosts("Alias") and "evil.example" not in front.own_hosts("0.0.0.0")


def test_redirects_of_images_are_checked_SRV_11():
    class Redirect(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(302)
            self.send_header("Location", "ftp://127.0.0.1:9/a.png")
            self.end_headers()

        def log_message(self, *args):
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Redirect) as server:
        threading.Thread(target=server.handle_request, daemon=True).start()
        with pytest.raises(images.ImageRefused, match=r"redirects to .* only http"):
            images.ImageStore([], allow_urls=True).open_all([f"http://127.0.0.1:{server.server_port}/"])


@pytest.mark.parametrize(
    ("pause_s", "limits", "words"),
    [
        (0.05, {"URL_TOTAL_S": 0.3}, "not whole within 0.3 s"),
        (1.0, {"URL_TIMEOUT_S": 0.3}, "timed out"),
        (0.0, {"MAX_IMAGE_BYTES": 50}, "is larger than"),
    ],
)
def test_an_image_that_drips_stalls_or_is_large_ends_SRV_10(monkeypatch, pause_s, limits, words):
    """SRV-10: the time for the body, the time without a byte, the bytes."""
    for name, limit in limits.items():
        monkeypatch.setattr(images, name, limit)

    class Drip(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            with contextlib.suppress(OSError):
                for _ in range(100):
                    self.wfile.write(b"x")
                    time.sleep(pause_s)

        def log_message(self, *args):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Drip) as server:
        server.daemon_threads = True
        server.block_on_close = False
        threading.Thread(target=server.handle_request, daemon=True).start()
        with pytest.raises(ValueError, match=words):
            images.ImageStore([], allow_urls=True).open_all([f"http://127.0.0.1:{server.server_port}/"])


@pytest.mark.parametrize(
    "answer",
    [b"", b"nonsense\r\n\r\n", b"HTTP/1.1 200 OK\r\nA: " + b"x" * 70_000 + b"\r\n\r\n"]
    + [
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 302 F\r\nLocation: http://a b/\r\n\r\n",
    ],
)
def test_a_server_of_images_that_speaks_no_http_spoils_its_image_only_SRV_10(answer):
    """SRV-5, SRV-10: while the head is read, while the body is, and where a redirect leads nowhere."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            with listener.accept()[0] as client:
                client.recv(65536)
                client.sendall(answer)

        threading.Thread(target=serve, daemon=True).start()
        with pytest.raises(ValueError, match="cannot fetch image"):
            images.ImageStore([], allow_urls=True).open_all([f"http://127.0.0.1:{listener.getsockname()[1]}/"])


def test_a_learner_reaches_an_ipv6_server():
    assert learner_host("http://[::1]:8000") == "::1"


def test_an_upgrade_to_a_web_socket_is_an_ordinary_request_SRV_10(port):
    """SRV-10: it would leave the connection without its bounds."""
    head = b"GET /a HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    head += b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
    assert b" 200 " in ask(port, head)
