"""One HTTP connection that another thread can cancel, against sockets that misbehave."""

import contextlib
import datetime
import ipaddress
import socket
import ssl
import threading
import time
from contextlib import contextmanager

import pytest
import requests
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from utils.rollout.link import CallFailed, CallTimeout, Link, RolloutError, is_loopback_url

REFUSED = b"HTTP/1.1 404 Not Found\r\nContent-Length: 3\r\n\r\nwho"
MOVED = b"HTTP/1.1 307 Moved\r\nLocation: /elsewhere/\r\nContent-Length: 0\r\n\r\n"


def take_slowly(connection, stop):
    """Takes 10 MB a second, and answers after 16 MB, which no buffer holds."""
    taken = 0
    while taken < 16_000_000 and (data := connection.recv(1 << 17)):
        taken += len(data)
        stop.wait(len(data) / 1e7)
    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")


@contextmanager
def listening(serve, context=None, buffer_bytes=None):
    """Yields the address of a socket whose connections go to `serve(connection, stop)`, each in its own thread."""
    stop = threading.Event()
    listener = socket.create_server(("127.0.0.1", 0))
    if buffer_bytes is not None:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)

    def handle(connection):
        try:
            with connection if context is None else context.wrap_socket(connection, server_side=True) as open_:
                serve(open_, stop)
        except OSError:
            pass  # the client went away

    def accept():
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=handle, args=(connection,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield f"127.0.0.1:{listener.getsockname()[1]}"
    finally:
        stop.set()
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()


def hang(connection, stop):
    connection.recv(65536)
    stop.wait(20.0)


def hang_halfway(connection, stop):
    connection.recv(65536)
    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nsome")
    stop.wait(20.0)


def drip(connection, stop):
    connection.recv(65536)
    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")
    while not stop.wait(0.05):
        connection.sendall(b" " * 10)


def answering(response, received):
    def serve(connection, stop):
        while data := connection.recv(65536):
            received.append(data.decode())
            connection.sendall(response)

    return serve


def assert_cancel_ends_the_call(link):
    """A call without limit ends with the reason given, soon, and so does any later one."""
    reason = RolloutError("cancelled by a test")
    timer = threading.Timer(0.4, link.cancel, (reason,))
    timer.start()
    start = time.monotonic()
    with pytest.raises(RolloutError) as error:
        link.request("GET", "/health/", None)
    timer.join()
    assert error.value is reason and 0.3 < time.monotonic() - start < 3.0
    link.cancel(RolloutError("the first reason counts"))
    with pytest.raises(RolloutError) as error:
        link.request("GET", "/health/", None)
    assert error.value is reason
    link.close()


@pytest.mark.parametrize("serve", [hang, hang_halfway, drip])
def test_con_5_a_call_is_cancelled_from_another_thread(serve):
    """CON-5: before the response, in the middle of it, and while it drips in."""
    with listening(serve) as address:
        assert_cancel_ends_the_call(Link(f"http://{address}", None))


@pytest.mark.parametrize("serve", [hang, hang_halfway])
def test_con_5_a_tls_call_is_cancelled_from_another_thread(serve, tmp_path):
    """CON-5: the same over TLS, whose socket must stay whole for the thread that reads it."""
    with listening(serve, server_context(tmp_path)) as address:
        link = Link(f"https://{address}", None)
        link._session.verify = str(tmp_path / "cert.pem")
        assert_cancel_ends_the_call(link)


def test_con_5_a_call_through_a_proxy_is_cancelled(monkeypatch):
    """CON-5, CON-2: a server elsewhere is reached through the environment's proxy."""
    with listening(hang) as address:
        monkeypatch.setenv("http_proxy", f"http://{address}")
        for name in ("no_proxy", "NO_PROXY"):
            monkeypatch.delenv(name, raising=False)
        assert_cancel_ends_the_call(Link("http://rollout.example.org", None))


def test_a_proxy_that_fails_is_named_with_the_way_past_it_CON_2(monkeypatch):
    """CON-2: its refusal looked like the server's. Loopback never goes through one."""
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", "http://me:secret@127.0.0.1:9")
    hint = r"ConnectionRefusedError: .* \(through the proxy 127.0.0.1:9 of the environment; set no_proxy=10.0.0.2 "
    with pytest.raises(CallFailed, match=hint):
        Link("http://10.0.0.2:8000", None).request("GET", "/health/", 5.0)
    with pytest.raises(CallFailed) as failed:
        Link("http://127.0.0.1:9", None).request("GET", "/health/", 5.0)
    assert "proxy" not in str(failed.value)


def test_a_link_cancelled_before_or_between_calls_sends_nothing():
    received = []
    with listening(answering(REFUSED, received)) as address:
        link, fresh = Link(f"http://{address}", None), Link(f"http://{address}", None)
        assert link.request("GET", "/a/", 5.0) == (f"http://{address}/a/", 404, "who")
        for each in (link, fresh):
            each.cancel(RolloutError("enough"))
            with pytest.raises(RolloutError, match="^enough$"):
                each.request("GET", "/b/", 5.0)
        assert len(received) == 1


def test_con_5_a_cancel_while_it_connects_is_not_lost(monkeypatch):
    """CON-5: there is no socket yet that could be shut."""
    with listening(hang) as address:
        link = Link(f"http://{address}", None)
        connect = socket.socket.connect

        def cancelling(self, *args):
            link.cancel(RolloutError("enough"))
            return connect(self, *args)

        monkeypatch.setattr(socket.socket, "connect", cancelling)
        start = time.monotonic()
        with pytest.raises(RolloutError, match="^enough$"):
            link.request("GET", "/health/", None)
        assert time.monotonic() - start < 3.0


@pytest.mark.parametrize("serve", [hang, hang_halfway, drip])
def test_the_time_limit_is_for_the_whole_call(serve):
    """A server that answers in drops is bounded, too: the limit is not for each piece of its answer."""
    with listening(serve) as address:
        start = time.monotonic()
        with pytest.raises(CallTimeout, match="/health/: no answer within 0.4 s"):
            Link(f"http://{address}", None).request("GET", "/health/", 0.4)
        assert time.monotonic() - start < 3.0


def test_a_broken_connection_is_named_by_its_innermost_cause():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    with pytest.raises(CallFailed, match=f"{url}/health/: ConnectionRefusedError: ") as error:
        Link(url, None).request("GET", "/health/", 1.0)
    assert not isinstance(error.value, CallTimeout) and error.value.status is None


def test_con_5_a_connection_that_a_firewall_dropped_is_noticed(monkeypatch):
    """CON-5: `/infer/` sends nothing for minutes; the system asks the other end meanwhile, also through a proxy."""
    for own in ("http://{}", "http://rollout.example.org"):
        with listening(answering(REFUSED, [])) as address:
            monkeypatch.setenv("http_proxy", f"http://{address}")
            link = Link(own.format(address), None)
            link.request("GET", "/health/", 5.0)
            assert link._connection.sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            assert link._connection.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 60


def test_redirects_are_not_followed_and_the_connection_is_kept():
    received, connections = [], []
    serve = answering(MOVED, received)
    with listening(lambda *args: (connections.append(args), serve(*args))) as address:
        link = Link(f"http://{address}", None)
        for _ in range(3):
            assert link.request("GET", "/a/", 5.0)[1:] == (307, "")
        assert len(received) == 3 and len(connections) == 1


def test_srv_3_the_token_is_not_replaced_by_netrc(monkeypatch, tmp_path):
    """SRV-3: an entry of ~/.netrc for the server's host would win over a mere header."""
    received = []
    (tmp_path / "netrc").write_text("machine rollout.example.org login me password mine\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with listening(answering(REFUSED, received)) as address:
        monkeypatch.setenv("http_proxy", f"http://{address}")  # so that a name is reached here
        Link("http://rollout.example.org", "secret").request("GET", "/health/", 5.0)
        Link("http://rollout.example.org", None).request("GET", "/health/", 5.0)
    assert "Authorization: Bearer secret" in received[0] and "Authorization: Basic" in received[1]


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://127.0.0.1:8000", True),
        ("http://127.9.9.9/pre", True),
        ("http://localhost:8000", True),
        ("http://[::1]:8000", True),
        ("http://10.0.0.1:8000", False),
        ("http://localhost.example.org", False),
        ("https://rollout.example.org", False),
    ],
)
def test_con_2_loopback(url, expected):
    """CON-2: loopback urls do not look at the environment."""
    assert is_loopback_url(url) is expected
    assert Link(url, None)._session.trust_env is not expected


def server_context(folder):
    """TLS for 127.0.0.1 with a certificate of its own, `cert.pem` in the folder."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "127.0.0.1")])
    now = datetime.datetime.now(datetime.UTC)
    address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
    cert = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([address]), critical=False)
        .sign(key, hashes.SHA256())
    )
    plain = serialization.NoEncryption()
    pem, pkcs8 = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    (folder / "cert.pem").write_bytes(cert.public_bytes(pem))
    (folder / "key.pem").write_bytes(key.private_bytes(pem, pkcs8, plain))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "cert.pem", folder / "key.pem")
    return context


def test_a_connection_that_does_not_come_up_is_told_with_its_own_limit(monkeypatch):
    """Not with the limit of the call, which others would raise in vain."""

    def refuse(*args, **options):
        raise requests.ConnectTimeout

    with contextlib.closing(Link("http://127.0.0.1:9", None)) as link:
        monkeypatch.setattr(link._session, "request", refuse)
        with pytest.raises(CallTimeout, match="no connection within 10 s"):
            link.request("GET", "/health/", 300.0)


@pytest.mark.parametrize("is_open", [False, True])
def test_a_large_body_may_take_longer_to_send_than_connecting_may_CON_5(monkeypatch, is_open):
    """CON-5: images that travel as bytes, over a slow network. The call's own limit holds."""
    monkeypatch.setattr("utils.rollout.link.CONNECT_TIMEOUT_S", 0.3)

    def serve(connection, stop):
        if is_open:
            connection.recv(65536)
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
        take_slowly(connection, stop)

    with listening(serve, buffer_bytes=1 << 16) as address:
        link, body = Link(f"http://{address}", None), {"x": "a" * 16_000_000}
        if is_open:
            link.request("GET", "/health/", 5.0)
        assert link.request("POST", "/infer/", None, json=body)[1:] == (200, "{}")
        link = Link(f"http://{address}", None)
        if is_open:
            link.request("GET", "/health/", 5.0)
        with pytest.raises(CallTimeout, match="no answer within 0.5 s"):
            link.request("POST", "/infer/", 0.5, json=body)
