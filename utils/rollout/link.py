"""One HTTP connection whose call in flight another thread can cancel."""

import socket
import time
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

import requests
from requests.adapters import HTTPAdapter
from requests.utils import get_environ_proxies, select_proxy
from urllib3.exceptions import HTTPError

from utils.config.rollout import is_loopback

CONNECT_TIMEOUT_S = 10.0
KEEP_ALIVE_S = 2.0  # a server closes idle connections (ours after 75 s); a request sent at that very moment is lost
# `/infer/` is silent for minutes. Without keepalive a firewall may drop the connection, and nobody would ever notice.
SOCKET_OPTIONS = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 60),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 15),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 8),
)


class RolloutError(RuntimeError):
    """Rollouts cannot be generated."""


class CallFailed(RolloutError):
    """One HTTP call failed; `status` is that of a response other than 200."""

    is_timeout = False

    def __init__(self, url: str, detail: str, status: int | None = None) -> None:
        super().__init__(f"{url}: {detail}")
        self.detail = detail
        self.status = status

    @property
    def is_final(self) -> bool:
        """True if another try cannot help: a 4xx other than 408 and 429."""
        return self.status is not None and self.status < 500 and self.status not in (408, 429)


class CallTimeout(CallFailed):
    """The response was not complete in time."""

    is_timeout = True


class Link(HTTPAdapter):
    """One keep-alive connection to a server, for one thread at a time; any other thread may `cancel` it for good.

    `requests` cannot end a call from outside, and a call without timeout to a dead server never ends by itself (CON-5).
    So the link is its session's own adapter: it sees which connection urllib3 opens, and can shut its socket down.
    """

    def __init__(self, base_url: str, token: str | None) -> None:
        super().__init__()
        self.base_url = base_url
        self.error: BaseException | None = None  # given to `cancel`
        self._connection: Any = None
        self._send_s: float | None = None  # the limit of the call in flight
        self._last_use = time.monotonic()
        self._session = requests.Session()
        self._session.trust_env = not is_loopback_url(base_url)  # CON-2
        if token:
            self._session.headers["Authorization"] = f"Bearer {token}"
            self._session.auth = lambda request: request  # without one, ~/.netrc would replace the header
        self._session.adapters = {"http://": self, "https://": self}

    def cancel(self, error: BaseException) -> None:
        """End the call in flight, and refuse any later one, with `error`; the first one given counts."""
        self.error = self.error or error
        with suppress(OSError, TypeError):  # not connected: `connect` below looks at the error
            # The plain class's method: a TLS socket's own takes the TLS object away from the thread that reads.
            socket.socket.shutdown(getattr(self._connection, "sock", None), socket.SHUT_RDWR)

    def request(self, method: str, path: str, timeout_s: float | None, **options: Any) -> tuple[str, int, str]:
        """Send a request and return its url and the status and text of the whole response.

        `timeout_s` limits the whole call, None for no limit; `options` are `json` and `headers` of `requests.request`.

        Raises:
            CallFailed: no whole response, `CallTimeout` where the time was up; or the error given to `cancel`.
        """
        if self.error is not None:
            raise self.error
        if time.monotonic() - self._last_use > KEEP_ALIVE_S:
            self.close()  # the connection; the next call opens another
        url, parts = self.base_url + path, []
        limit_s = float("inf") if timeout_s is None else timeout_s
        deadline, self._send_s = time.monotonic() + limit_s, timeout_s
        options |= {"timeout": (min(CONNECT_TIMEOUT_S, limit_s), timeout_s), "stream": True, "allow_redirects": False}
        try:
            with self._session.request(method, url, **options) as response:
                while part := response.raw.read1(1 << 16, decode_content=True):  # iter_content returns full pieces only
                    parts.append(part)
                    if time.monotonic() > deadline:  # `requests` limits each read only
                        raise requests.ReadTimeout
            return url, response.status_code, b"".join(parts).decode(errors="replace")
        except (requests.RequestException, HTTPError, OSError) as error:
            if isinstance(error, requests.ConnectTimeout):
                raise CallTimeout(url, f"no connection within {options['timeout'][0]:g} s") from error
            if isinstance(error, requests.Timeout) or time.monotonic() >= deadline:
                raise CallTimeout(url, f"no answer within {timeout_s or CONNECT_TIMEOUT_S:g} s") from error
            raise CallFailed(url, _root_cause(error) + self._proxy_hint()) from error
        finally:
            self._last_use = time.monotonic()
            if self.error is not None:
                raise self.error

    def _proxy_hint(self) -> str:
        """What to know where the environment sends calls elsewhere."""
        proxies = get_environ_proxies(self.base_url) if self._session.trust_env else {}
        proxy, host = select_proxy(self.base_url, proxies), urlsplit(self.base_url).hostname
        own = proxy and urlsplit(proxy).netloc.rpartition("@")[2]  # without its password
        return f" (through the proxy {own} of the environment; set no_proxy={host} to go directly)" if proxy else ""

    def get_connection_with_tls_context(self, *args: Any, **kwargs: Any) -> Any:
        """Return urllib3's pool for the server, or for a proxy to it; `HTTPAdapter.send` calls this."""
        link, pool = self, super().get_connection_with_tls_context(*args, **kwargs)

        class Connection(type(pool).ConnectionCls):
            def connect(self) -> None:
                super().connect()
                for option in SOCKET_OPTIONS:
                    self.sock.setsockopt(*option)
                link._connection = self
                if link.error is not None:
                    link.cancel(link.error)

            def request(self, *args: Any, **kwargs: Any) -> None:
                if self.sock is None:
                    self.connect()
                self.timeout = link._send_s  # urllib3 leaves the limit of connecting in force for a body of any size
                super().request(*args, **kwargs)

        pool.ConnectionCls = Connection
        return pool


def _root_cause(error: BaseException) -> str:
    while (cause := error.__cause__ or error.__context__) is not None:
        error = cause
    return f"{type(error).__name__}: {error}"


def is_loopback_url(url: str) -> bool:
    """Does the url name this machine by a loopback address or name? Proxies never apply to those (CON-2)."""
    host = (urlsplit(url).hostname or "").rstrip(".")
    return is_loopback(host) or host.endswith(".localhost")
