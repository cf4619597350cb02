"""What a connection may cost before a request is understood: heads, waits, connections; and for whom it is meant."""

import asyncio
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import h11
import psutil
import uvicorn
from fastapi.responses import JSONResponse
from uvicorn.protocols.http.h11_impl import H11Protocol

from utils.config.rollout import is_loopback

MAX_HEAD_BYTES = 64 << 10
MAX_CONNECTIONS = 8192  # a call has two: its own, and one that looks at /health/ meanwhile
HEAD_S = 20.0  # from a connection's start, or a head's first byte, to the end of the head
BODY_S = 300.0  # from the end of the head to the end of the body
ANSWER_S = 300.0  # until a client has read what the socket could not take of an answer
READ_BYTES = 16 << 10  # at once; others wait meanwhile, for long if they are tiny chunks


class BoundedHttp(H11Protocol):
    """Closes connections beyond `MAX_CONNECTIONS`, and those whose head or body is not whole, or whose answer is not
    read, in time. Nothing limits how long an answer takes to make: `/infer/` may take hours.
    """

    _awaited: Any = None  # what the running timer waits for, a state of h11
    _timer: asyncio.TimerHandle | None = None
    _unread: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:
        transport.max_size = READ_BYTES  # type: ignore[attr-defined]  # of asyncio's transports; else 256 KiB
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=0)  # pause_writing as soon as anything waits for the client
        if len(self.connections) > MAX_CONNECTIONS:
            transport.abort()
        self._bound_wait()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.their_state is h11.DONE and len(self.conn.trailing_data[0]) > MAX_HEAD_BYTES:
            self.transport.abort()  # sends on and on behind a request that is being answered
        self._bound_wait()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.conn.their_state is h11.SEND_BODY:  # of a request that came behind the one just answered
            self._bound_wait()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread = self.loop.call_later(ANSWER_S, self.transport.abort)

    def resume_writing(self) -> None:
        self._read()
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self._read()
        super().connection_lost(exc)

    def _bound_wait(self) -> None:
        state = self.conn.their_state
        if state is self._awaited and self._timer is not None:
            return  # a byte now and then gains no time
        self._stop_timer()
        limits = {h11.IDLE: HEAD_S, h11.SEND_BODY: BODY_S}
        if state in limits:
            self._awaited = state
            self._timer = self.loop.call_later(limits[state], self.transport.abort)

    def _read(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
        self._unread = None

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None


def front_config(app: Callable[..., Awaitable[None]]) -> uvicorn.Config:
    """Return uvicorn's settings. h11, because httptools reads heads without end."""
    return uvicorn.Config(
        app,
        loop="asyncio",  # as `rollout_server` runs it; uvloop's transports have no `max_size`
        http=BoundedHttp,
        ws="none",  # an upgrade would leave `BoundedHttp`
        h11_max_incomplete_event_size=MAX_HEAD_BYTES,
        limit_concurrency=MAX_CONNECTIONS,
        log_level="warning",
        timeout_graceful_shutdown=1,
        timeout_keep_alive=75,
    )


def own_hosts(host: str) -> set[str]:
    """Return what requests to a server on `host` may name in `Host`: beyond loopback also this machine's own names."""
    names = {host.lower(), "localhost"}
    if not is_loopback(host):
        names |= {socket.gethostname().lower(), socket.getfqdn().lower()}
        names |= {a.address.partition("%")[0].lower() for own in psutil.net_if_addrs().values() for a in own}
    return names


def require_host(app: Callable[..., Awaitable[None]], hosts: set[str]) -> Callable[..., Awaitable[None]]:
    """Refuse requests whose Host header names another machine: a web page could otherwise have its own name resolve
    to this server and use it through a browser (SRV-11)."""
    refusal = JSONResponse({"detail": "the Host header is no address of this server; use the one in base_url"}, 421)

    async def checked(scope: dict, receive: Callable, send: Callable) -> None:
        given = dict(scope.get("headers", [])).get(b"host", b"").decode("latin-1").lower()
        name = given[1:].partition("]")[0] if given.startswith("[") else given.partition(":")[0]
        is_ours = name in hosts or is_loopback(name)
        await (app if is_ours or scope["type"] == "lifespan" else refusal)(scope, receive, send)

    return checked
