"""One HTTP connection to one server whose call in flight any thread can cut."""

import ipaddress
import json
import socket
import threading
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import requests
from requests.adapters import HTTPAdapter
from urllib3.connectionpool import HTTPConnectionPool, HTTPSConnectionPool
from urllib3.exceptions import HTTPError

CONNECT_TIMEOUT_S = 10.0


TEXT_LIMIT = 300  # characters of a server's answer that messages repeat


class RolloutError(RuntimeError):
    """The rollout phase cannot go on."""


class CallFailed(RolloutError):
    """One HTTP call failed.

    `kind`: `connection`, `timeout`, `status` (then `status` is the number, `body` the text) or `answer` (unreadable or
    of another form).
    """

    def __init__(self, url: str, kind: str, detail: str, status: int | None = None, body: str = "") -> None:
        super().__init__(f"{url}: {detail}")
        self.url, self.kind, self.detail, self.status, self.body = url, kind, detail, status, body


class Link:
    """One keep-alive HTTP connection to one server for one thread at a time, which any other thread can cut.

    `requests` cannot end a call from outside, and a call without timeout on a dead server never ends by itself (CON-5);
    so the sockets are remembered and shut down.
    """

    def __init__(self, base_url: str, token: str | None) -> None:
        self.base_url = base_url
        self.error: BaseException | None = None
        self.last_used = time.monotonic()
        self._sockets = _Sockets()
        self._session = requests.Session()
        self._session.trust_env = not is_loopback(base_url)  # CON-2
        if token:
            # As `auth`, not as a header, which an entry in ~/.netrc would replace.
            self._session.auth = _bearer(token)
        for scheme in ("http://", "https://"):
            self._session.mount(scheme, _CuttableAdapter(self._sockets))

    def cut(self, error: BaseException) -> None:
        """End the call in flight and refuse any later one with `error`."""
        self.error = self.error or error
        self._sockets.shut()

    def close(self) -> None:
        self._session.close()

    def request(
        self, method: str, path: str, body: dict[str, Any] | None, timeout_s: float | None, run_token: str | None = None
    ) -> Any:
        """Decoded JSON of a 200 answer; see `request_text`. Raises: CallFailed, also for what is not JSON."""
        text = self.request_text(method, path, body, timeout_s, run_token)
        try:
            return json.loads(text)
        except ValueError as error:
            raise CallFailed(self.base_url + path, "answer", f"not JSON: {_short(text)}") from error

    def request_text(
        self, method: str, path: str, body: dict[str, Any] | None, timeout_s: float | None, run_token: str | None = None
    ) -> str:
        """Text of a 200 answer.

        Args:
            timeout_s: bound on the whole call, None for no bound.
            run_token: proves that the call comes from the run that holds the server.

        Raises:
            CallFailed: everything that can go wrong with one call.
            BaseException: the reason of `cut`.
        """
        url = self.base_url + path
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        try:
            status, text = self._exchange(method, url, body, timeout_s, deadline, run_token)
        except requests.Timeout as error:
            raise self.error or CallFailed(
                url, "timeout", f"no answer within {timeout_s or CONNECT_TIMEOUT_S:g} s"
            ) from error
        except (requests.RequestException, HTTPError, OSError) as error:
            late = deadline is not None and time.monotonic() >= deadline
            raise self.error or CallFailed(url, "timeout" if late else "connection", _reason(error)) from error
        if self.error is not None:
            raise self.error
        if status != 200:
            raise CallFailed(url, "status", f"HTTP {status}: {_short(text)}", status, text)
        return text

    def _exchange(
        self,
        method: str,
        url: str,
        body: dict[str, Any] | None,
        timeout_s: float | None,
        deadline: float | None,
        run_token: str | None,
    ) -> tuple[int, str]:
        """(status, text). `requests` bounds each read; a server that answers in drops is bounded here."""
        if self.error is not None:
            raise self.error
        connect_s = CONNECT_TIMEOUT_S if timeout_s is None else min(CONNECT_TIMEOUT_S, timeout_s)
        options = {"json": body, "timeout": (connect_s, timeout_s), "stream": True, "allow_redirects": False}
        options["headers"] = {"Run-Token": run_token} if run_token else None
        with self._session.request(method, url, **options) as response:
            parts = []
            # Not iter_content, which returns only when a piece is full.
            while part := response.raw.read1(1 << 16, decode_content=True):
                parts.append(part)
                if deadline is not None and time.monotonic() > deadline:
                    raise requests.ReadTimeout("the answer took too long")
            return response.status_code, b"".join(parts).decode(errors="replace")


class _Sockets:
    """The connections of one link that may be open."""

    def __init__(self) -> None:
        self.is_shut = False
        self.connections: list[Any] = []

    def opened(self, connection: Any) -> None:
        self.connections = [old for old in self.connections if old.sock is not None] + [connection]
        if self.is_shut:
            self.shut()

    def shut(self) -> None:
        self.is_shut = True
        for connection in self.connections:
            try:
                # Of the plain socket class: the one of TLS sockets takes the TLS object from under the reading thread.
                socket.socket.shutdown(connection.sock, socket.SHUT_RDWR)
            except (OSError, TypeError):
                pass  # closed already


class _CuttableAdapter(HTTPAdapter):
    """Tells `sockets` about each connection that urllib3 opens."""

    def __init__(self, sockets: _Sockets) -> None:
        self._pools = {"http": _telling(HTTPConnectionPool, sockets), "https": _telling(HTTPSConnectionPool, sockets)}
        super().__init__(max_retries=0)

    def init_poolmanager(self, *args: Any, **kwargs: Any) -> None:
        super().init_poolmanager(*args, **kwargs)
        self.poolmanager.pool_classes_by_scheme = self._pools

    def proxy_manager_for(self, *args: Any, **kwargs: Any) -> Any:
        manager = super().proxy_manager_for(*args, **kwargs)
        manager.pool_classes_by_scheme = self._pools
        return manager


def _telling(pool_class: type, sockets: _Sockets) -> type:
    class Connection(pool_class.ConnectionCls):
        def connect(self) -> None:
            super().connect()
            sockets.opened(self)

    return type(pool_class.__name__, (pool_class,), {"ConnectionCls": Connection})


def _bearer(token: str) -> Callable[[requests.PreparedRequest], requests.PreparedRequest]:
    def sign(request: requests.PreparedRequest) -> requests.PreparedRequest:
        request.headers["Authorization"] = f"Bearer {token}"
        return request

    return sign


def is_loopback(url: str) -> bool:
    """Does the url name this very machine by a loopback address or name? Proxies never apply to those (CON-2)."""
    host = (urlsplit(url).hostname or "").rstrip(".")
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _in_threads(jobs: list[Callable[[], None]], on_error: Callable[[BaseException], None] | None = None) -> None:
    """Run all jobs at once, one thread each, and return when all have ended.

    The first error, or Ctrl-C here, goes to `on_error`, which must make the other jobs end; then it is raised.
    """
    errors: list[BaseException] = []

    def run(job: Callable[[], None]) -> None:
        try:
            job()
        except BaseException as error:  # noqa: BLE001  (raised again below, in the caller's thread)
            errors.append(error)
            if on_error is not None:
                on_error(error)

    threads = [threading.Thread(target=run, args=(job,), daemon=True) for job in jobs]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            thread.join()
    except BaseException as error:
        if on_error is not None:
            on_error(error)
        raise
    if errors:
        raise errors[0]


def _reason(error: Exception) -> str:
    """The innermost cause, which says more than the layers around it."""
    while (error.__cause__ or error.__context__) is not None:
        error = error.__cause__ or error.__context__
    return f"{type(error).__name__}: {error}"


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text if len(text) <= TEXT_LIMIT else text[:TEXT_LIMIT] + "..."
