"""HTTP front of the rollout server: routes, tokens, limits, errors as status codes.

4xx: the caller's mistake, with the field (422), the wrong state or a server that a living run owns (409), a body that
is too large (413), no or a wrong access token (401) or run token (403). 503: cannot generate now. 502: a weight update
failed. What protects against whom: docs/security.md. The work is done in engine.py and weight_updates.py.
"""

import asyncio
import contextlib
import hmac
import json
import logging
import re
from collections.abc import Awaitable, Callable
from typing import Annotated, Any

import prometheus_client
import pydantic_core
from fastapi import APIRouter, Depends, FastAPI, Header, HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute

from utils.server.engine import BadCall, Conflict, NotOwner, RolloutEngine, Unavailable, UpdateFailed
from utils.server.protocol import (
    InferCall,
    InitCommunicator,
    ProbeCall,
    RolloutOutput,
    StartWeightUpdate,
    TeacherCall,
    UpdateWeights,
)
from utils.server.weight_updates import WeightUpdates

logger = logging.getLogger(__name__)

MAX_BODY_BYTES = 256 << 20  # of one request; an image sent as base64 may have 64 MiB
MAX_VALUES = 1 << 19  # of a body: strings, numbers, lists, dicts
LARGE_BODY_BYTES = 1 << 20  # parsed in a thread, one at a time
MAX_ERRORS = 20  # that a 422 lists
MAX_ECHO = 200  # characters of a request that an answer repeats at one place
STATUS = {BadCall: 422, NotOwner: 403, Conflict: 409, Unavailable: 503, UpdateFailed: 502}

# One that never ends counts as one, too: else it would be read to the body's end from each quote in it.
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)

Asgi = Callable[..., Awaitable[None]]
RunToken = Annotated[str, Header()]  # `Run-Token`, from the answer of /init_communicator/

RUNNING = prometheus_client.Gauge("rollout_server_running_requests", "requests a replica is running", ["replica"])
WAITING = prometheus_client.Gauge("rollout_server_waiting_requests", "requests waiting for a weight update")
DEVICE_LOAD = {
    name: prometheus_client.Gauge(f"rollout_server_device_{name}", f"{name} of a worker's device", ["worker"])
    for name in ("memory_bytes", "utilization")
}


def make_app(engine: RolloutEngine, updates: WeightUpdates, token: str | None, prefix: str = "") -> FastAPI:
    """Return all endpoints below `prefix` (the path part of base_url); with a token, none answers without it."""

    @contextlib.asynccontextmanager
    async def watching(_: FastAPI) -> Any:
        watch = asyncio.create_task(engine.watch())
        yield
        watch.cancel()

    app = FastAPI(title="rollout server", lifespan=watching, docs_url=None, redoc_url=None, openapi_url=None)
    app.include_router(_generation_routes(engine, updates), prefix=prefix)
    app.include_router(_weight_routes(updates), prefix=prefix)
    for error in STATUS:
        app.add_exception_handler(error, _answer_error)
    app.add_exception_handler(RequestValidationError, _list_mistakes)
    app.add_middleware(limit_body, max_bytes=MAX_BODY_BYTES)
    if token:
        app.add_middleware(require_token, token=token)
    return app


def require_token(app: Asgi, token: str) -> Asgi:
    """Refuse every HTTP request without `Authorization: Bearer TOKEN` before anything of it is read (SRV-3)."""
    expected = f"Bearer {token}".encode()
    detail = {"detail": "missing or wrong token (ROLLOUT_SERVER_TOKEN)"}
    refusal = JSONResponse(detail, 401, headers={"WWW-Authenticate": "Bearer"})

    async def checked(scope: dict, receive: Callable, send: Callable) -> None:
        given = dict(scope.get("headers", [])).get(b"authorization", b"")
        is_known = scope["type"] == "http" and hmac.compare_digest(given, expected)
        await (app if is_known or scope["type"] == "lifespan" else refusal)(scope, receive, send)

    return checked


def limit_body(app: Asgi, max_bytes: int) -> Asgi:
    """Refuse request bodies of more than `max_bytes`, announced or not, without storing them."""

    async def limited(scope: dict, receive: Callable, send: Callable) -> None:
        length = dict(scope.get("headers", [])).get(b"content-length", b"")
        digits = length.lstrip(b"0")[:20] if length.isdigit() else b""  # int() refuses some thousands of them
        announced, received = int(digits or b"0"), 0

        async def bounded() -> dict:
            nonlocal received
            message = await receive() if announced <= max_bytes else {}
            received += len(message.get("body", b""))
            if max(announced, received) > max_bytes:
                raise HTTPException(413, f"a request body has at most {max_bytes >> 20} MiB; send fewer at once")
            return message

        await app(scope, bounded, send)

    return limited


class StrictJson(APIRoute):
    """Parses bodies as strict JSON: Python's own parser accepts not-a-number and half characters (lone surrogates),
    which no answer could repeat and no tokenizer accept."""

    def get_route_handler(self) -> Callable[[Request], Awaitable[Response]]:
        handle = super().get_route_handler()

        async def strict(request: Request) -> Response:
            return await handle(_StrictRequest(request.scope, request.receive))

        return strict


class _StrictRequest(Request):
    _one_large_body = asyncio.Semaphore()

    async def json(self) -> Any:
        body = await self.body()
        try:
            if len(body) < LARGE_BODY_BYTES:
                return parse_json(body)
            async with self._one_large_body:
                return await asyncio.to_thread(parse_json, body)
        except ValueError as error:
            raise json.JSONDecodeError(str(error), "", 0) from None


def parse_json(body: bytes) -> Any:
    """Parse, unless a small body would become a large object. Raises ValueError; HTTPException 413 (SRV-10)."""
    # A string has at most two quotes without a backslash before them, and a value in a dict has a key beside it.
    num_quotes = body.count(b'"') - body.count(b'\\"')
    if num_quotes > 4 * MAX_VALUES or num_values(body) > MAX_VALUES < num_values(_STRING.sub(b"", body)):
        raise HTTPException(413, f"a request body has at most {MAX_VALUES} values; send fewer at once")
    return pydantic_core.from_json(body, allow_inf_nan=False)  # refuses more than 200 levels


def num_values(body: bytes) -> int:
    """Return an upper bound of the values in a JSON text, itself excluded."""
    return sum(map(body.count, (b",", b"[", b"{")))


def _generation_routes(engine: RolloutEngine, updates: WeightUpdates) -> APIRouter:
    router = APIRouter(route_class=StrictJson)
    weights = engine.weights

    @router.get("/health/")
    async def health() -> Response:
        body = {
            "state": weights.state,
            "boot_id": engine.boot_id,
            "weight_version": weights.version,
            "world_size": engine.world_size,
            "model": engine.model_path,
            "model_digest": engine.model_digest,
            "tokenizer_digest": engine.tokenizer_digest,
            "max_model_len": engine.max_model_len,
            "logprobs_mode": engine.logprobs_mode,
            "owner": updates.owner,
            "running": sum(engine.num_running),
            "waiting": weights.num_waiting,
        }
        problem = {}  # comes first: messages are cut
        try:
            engine.check_alive()
            if weights.state == "dirty":  # alive, so a learner may open a communicator and send full weights
                problem = {"status": "dirty", "reason": weights.reason}
        except Unavailable as error:
            problem = {"status": "dead", "reason": str(error)}
        return JSONResponse((problem or {"status": "ok"}) | body, 503 if problem else 200)

    @router.get("/get_world_size/")
    async def get_world_size() -> dict[str, int]:
        return {"world_size": engine.world_size}

    @router.get("/weight_version/")
    async def weight_version() -> dict[str, str | None]:
        return {"weight_version": weights.version, "boot_id": engine.boot_id}

    @router.post("/infer/")
    async def infer(call: InferCall, request: Request) -> Response:
        weights.check()
        outputs = await _unless_hung_up(request, engine.infer(call.infer_requests, call.request_config))
        return Response(await asyncio.to_thread(_json_list, outputs), media_type="application/json")

    # FastAPI's own encoder would hold up the others for 0.2 s where a teacher's answer has 4000 tokens (SRV-10).
    @router.post("/probe/")
    async def probe(call: ProbeCall) -> Response:
        return Response(pydantic_core.to_json(await engine.probe(call)), media_type="application/json")

    @router.post("/teacher/")
    async def teacher(call: TeacherCall, request: Request) -> Response:
        answer = await _unless_hung_up(request, engine.teach(call))
        return Response(pydantic_core.to_json(answer), media_type="application/json")

    @router.get("/metrics/")
    async def metrics() -> Response:
        WAITING.set(weights.num_waiting)
        for replica, count in enumerate(engine.num_running):
            RUNNING.labels(replica).set(count)
        if not updates.lock.locked():  # workers that receive weights answer nothing else
            with contextlib.suppress(TimeoutError, Unavailable, UpdateFailed):
                for worker, load in enumerate(await asyncio.wait_for(engine.on_all_workers("device_load"), 2.0)):
                    for name, value in load.items():
                        DEVICE_LOAD[name].labels(worker).set(value)
        return Response(prometheus_client.generate_latest(), media_type=prometheus_client.CONTENT_TYPE_LATEST)

    return router


def _json_list(outputs: list[RolloutOutput]) -> bytes:
    """Return a JSON body; of many answers it takes seconds, so in a thread (SRV-10)."""
    return b"[" + b",".join(output.model_dump_json().encode() for output in outputs) + b"]"


def _weight_routes(updates: WeightUpdates) -> APIRouter:
    """Calls of the run that owns the server: all but the one that opens the communicator need its token (SRV-3)."""

    async def check_token(run_token: RunToken = "") -> None:
        updates.check_token(run_token)

    public = APIRouter(route_class=StrictJson)
    owned = APIRouter(route_class=StrictJson, dependencies=[Depends(check_token)])

    @public.post("/init_communicator/")
    async def init_communicator(call: InitCommunicator, request: Request, run_token: RunToken = "") -> dict[str, Any]:
        return await _unless_hung_up(request, updates.init(call, run_token))

    owned.post("/close_communicator/")(updates.close)

    @owned.post("/start_weight_update/")
    async def start(call: StartWeightUpdate, request: Request) -> dict[str, Any]:
        return await _unless_hung_up(request, updates.start(call))

    @owned.post("/update_weights/")
    async def update(call: UpdateWeights, request: Request) -> dict[str, Any]:
        return await _unless_hung_up(request, updates.update(call))

    owned.post("/finish_weight_update/")(updates.finish)
    owned.post("/abort_weight_update/")(updates.abort)
    owned.post("/reset_prefix_cache/")(updates.reset_prefix_cache)
    public.include_router(owned)
    return public


async def _unless_hung_up(request: Request, work: Awaitable[Any]) -> Any:
    """Stop working for a client that hung up: its retry would find the engine busy with answers nobody reads."""
    task = asyncio.ensure_future(work)
    try:
        while not (await asyncio.wait({task}, timeout=1.0))[0]:
            if await request.is_disconnected():
                logger.warning("a client hung up; its requests are dropped")
                raise Unavailable("the client hung up")
        return task.result()
    finally:
        task.cancel()


async def _list_mistakes(_: Request, error: RequestValidationError) -> Response:
    """Answer 422 with place and rule of each mistake, but without the input, which may be huge or no JSON."""
    mistakes = [
        {
            "type": mistake["type"],
            "loc": [part if isinstance(part, int) else part[:MAX_ECHO] for part in mistake["loc"]],
            "msg": str(mistake["ctx"]["error"] if mistake["type"] == "json_invalid" else mistake["msg"])[:MAX_ECHO],
        }
        for mistake in error.errors()[:MAX_ERRORS]
    ]
    return JSONResponse({"detail": mistakes}, 422)


async def _answer_error(request: Request, error: Exception) -> Response:
    status = STATUS[type(error)]
    logger.log(logging.WARNING if status < 500 else logging.ERROR, "%s: %s", request.url.path, error)
    return JSONResponse({"detail": str(error)}, status)
