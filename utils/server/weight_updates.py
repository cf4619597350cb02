"""Weight updates of a running rollout engine, one owner and one update at a time, and the state they leave it in."""

import asyncio
import contextlib
import hmac
import logging
import math
import secrets
import time
from collections.abc import AsyncIterator
from typing import Any, Literal

import torch

from utils.server.engine import ADAPTER, BadCall, Conflict, NotOwner, RolloutEngine, UpdateFailed
from utils.server.protocol import FinishWeightUpdate, InitCommunicator, OwnedCall, StartWeightUpdate, UpdateWeights
from utils.sync.wire import is_adapter_tensor

logger = logging.getLogger(__name__)

MAX_SILENCE_S = 600.0  # between two steps of an update, and two buckets, whatever its run allows
MAX_UPDATE_BYTES = 1 << 50  # of all tensors of one update call
WATCH_INTERVAL_S = 1.0  # between two looks at an update that waits for its next step


class WeightUpdates:
    """Brings new weights into all replicas: idle -> updating -> idle, or dirty when anything goes wrong in between.

    Calls are served one at a time. The server is owned by the run that opened its communicator last, until that is
    closed or broken or its learner is dead; every other run gets `Conflict`. The owner proves itself by a token, which
    only the answer to its `init` holds.
    """

    def __init__(self, engine: RolloutEngine, transport: Literal["gloo", "nccl"]) -> None:
        self.engine = engine
        self.weights = engine.weights
        self.transport = transport
        self.owner: str | None = None
        self._token: str | None = None  # the owner's
        self.lock = asyncio.Lock()  # held while a call is served
        self._must_be_full = False
        self._carries_adapter = False  # the update in progress fills the LoRA slot (SYN-10)
        self._as_loaded = True  # no update has touched the engine's own weights since its start
        self._coming: str | None = None  # version that the update in progress was started for
        self._has_received = False  # tensors, in the update in progress
        self._watch: asyncio.Task | None = None  # of the update in progress

    def check_token(self, token: str) -> None:
        """Raise `NotOwner` unless `token` is that of the run that opened the communicator."""
        if not self._is_owners(token):
            owner = f"run {self.owner}" if self.owner else "no run yet"
            raise NotOwner(f"wrong or no Run-Token: this server belongs to {owner}; open the communicator first")

    async def init(self, call: InitCommunicator, token: str = "") -> dict[str, Any]:
        """Open the communicator in place of an older one; return when the learner (rank 0) and all workers have joined.

        Returns:
            `run_token`, which all other calls of this run have to carry; boot id and transport.

        Raises:
            BadCall: `world_size` does not fit this server, or nobody has so many ranks.
            Conflict: another run's update is in progress, or its learner is alive and `token` is not its token.
            UpdateFailed: no rendezvous within `open_timeout_s`.
        """
        deadline = time.monotonic() + call.open_timeout_s
        expected = call.rank_offset + self.engine.world_size
        if call.world_size != expected:
            raise BadCall(f"world_size must be rank_offset + the server's devices = {expected}")
        try:
            async with asyncio.timeout(deadline - time.monotonic()):
                await self.lock.acquire()
        except TimeoutError:
            owner = f"run {self.owner}" if self.owner else "another run"
            raise Conflict(f"{owner} is in the middle of a weight update") from None
        try:
            if self.owner and not self._is_owners(token) and any(await self.engine.on_all_workers("learner_is_alive")):
                alive = f"run {self.owner} holds this server and its learner is alive"
                raise Conflict(f"{alive}; end that run or use another server")
            if self.weights.state == "updating":  # its learner died
                await self._fail(f"run {call.run_id} took over during an update of run {self.owner}")
            self.owner = self._token = None  # until it is open: `/health/` names a run that has this server, or none
            self.engine.update_s = call.timeout_s  # how long the learner waits for each step
            await self._open(call, deadline)
            self.owner, self._token = call.run_id, secrets.token_urlsafe(32)
            return {"boot_id": self.engine.boot_id, "transport": self.transport, "run_token": self._token}
        finally:
            self.lock.release()

    async def _open(self, call: InitCommunicator, deadline: float) -> None:
        """Open the new owner's communicator on all workers."""
        bucket_s, left_s = min(call.timeout_s, MAX_SILENCE_S), max(0.1, deadline - time.monotonic())
        limits = {"timeout_s": bucket_s, "open_timeout_s": left_s}
        step, payload = "init", call.model_dump(exclude={"run_id"}) | limits
        try:
            while any(await self.engine.on_all_workers(step, payload)):
                step, payload = "opening", {}
                await asyncio.sleep(0.05)
        except asyncio.CancelledError:  # the caller is gone
            await self.engine.on_all_workers("close")
            raise

    async def close(self, call: OwnedCall) -> dict[str, Any]:
        async with self.lock:
            self._check_owner(call)
            if self.weights.state == "updating":
                await self._fail("the communicator was closed during an update")
            await self.engine.on_all_workers("close")
            self.owner = self._token = None
        return {}

    async def start(self, call: StartWeightUpdate) -> dict[str, Any]:
        """Pause generation as `call.pause` says and prepare the workers for new weights."""
        async with self._step(call, f"start of {call.version}", is_first=True):
            self._must_be_full = self.weights.state == "dirty"
            self._coming, self._has_received = call.version, False
            self.weights.keeps_running = call.pause == "keep"
            self.weights.move("updating", self.weights.version)
            await self._pause(call.pause)
            await self.engine.on_all_workers("start")
            self._watch = asyncio.create_task(self._end_if_abandoned(self.weights.num_updates))
        return {}

    async def _pause(self, mode: str) -> None:
        """Pause generation; with `wait` that takes as long as other clients' answers do. Raises `UpdateFailed` when the
        learner is gone before (SRV-12); one that lives sets its own limit, and hangs up."""
        # vLLM's `pause_generation` without its 20 ms of sleep: answers carry the version that made them.
        # Caches stay: nobody reads them before the end of the update drops them.
        pause = asyncio.ensure_future(self.engine.llm.engine_core.pause_scheduler_async(mode=mode, clear_cache=False))
        try:
            while not (await asyncio.wait({pause}, timeout=WATCH_INTERVAL_S))[0]:
                if not any(await self.engine.on_all_workers("learner_is_alive")):
                    raise UpdateFailed(f"the learner of run {self.owner} is gone")
            pause.result()
        finally:
            pause.cancel()

    async def update(self, call: UpdateWeights) -> dict[str, Any]:
        """Receive the named tensors on every worker.

        Returns `digests`, per worker, of all tensors that it holds by now, if requested (SYN-7); `parameters`: those of
        the engine that each of these tensors went into, on any worker (SYN-6).

        Raises:
            BadCall: a tensor cannot exist as described. The update goes on.
            UpdateFailed: a worker did not receive or load the tensors.
        """
        _check_tensors(call)
        async with self._step(call, "update"):
            self._carries_adapter = any(is_adapter_tensor(name) for name in call.names)
            if self._carries_adapter and not self._as_loaded:
                raise UpdateFailed("an adapter fits only weights as loaded; restart the server, or sync in full")
            self._as_loaded = self._carries_adapter
            workers = await self.engine.on_all_workers("update", call.model_dump(exclude={"run_id"}))
            self._has_received = True
        goes = [worker["parameters"] for worker in workers]
        parameters = {name: sorted(set().union(*(own.get(name, ()) for own in goes))) for name in call.names}
        return {"digests": [worker["digests"] for worker in workers] if call.digest else [], "parameters": parameters}

    async def finish(self, call: FinishWeightUpdate) -> dict[str, Any]:
        """Put the received weights in force, drop every cache made with the old ones, admit requests again.

        Returns the version, and the engine's parameters that this update did not touch.

        Raises:
            Conflict: another version than `start` named, or nothing was sent: old weights would get a new name. The
                update goes on.
            UpdateFailed: the weights are not whole.
        """
        engine = self.engine
        async with self._step(call, f"finish of {call.version}"):
            if call.version != self._coming:
                raise Conflict("this update was started for another version; finish that one, or abort")
            if not self._has_received:
                raise Conflict("no tensor was sent in this update; send some first, or abort")
            missing = sorted(set().union(*await engine.on_all_workers("finish")))
            # An adapter goes beside weights that are as loaded, which no failed update has touched (`update`).
            if missing and self._must_be_full and not self._carries_adapter:
                names = ", ".join(missing[:5])
                raise UpdateFailed(f"after a failed update all tensors are needed; {len(missing)} missing: {names}")
            engine.adapter = ADAPTER if self._carries_adapter else None
            *_, was_dropped = await asyncio.gather(  # at once (SYN-9)
                engine.llm.update_weight_version(call.version),
                engine.llm.reset_mm_cache(),
                engine.llm.reset_encoder_cache(),
                # Requests held over the update are recomputed; what is kept outside the GPU (a connector) goes, too.
                engine.llm.reset_prefix_cache(self.weights.keeps_running, reset_connector=True),
            )
            if not was_dropped:
                raise UpdateFailed("vLLM did not drop its prefix cache")
            await engine.llm.resume_generation()
            self.weights.move("idle", call.version)
        return {"weight_version": call.version, "missing": missing}

    async def abort(self, call: OwnedCall) -> dict[str, str]:
        """Give up an update. Without one in progress nothing happens."""
        async with self.lock:
            self._check_owner(call)
            if self.weights.state == "updating":
                await self._fail("the update was aborted by the learner")
        return {"state": self.weights.state}

    async def reset_prefix_cache(self) -> dict[str, bool]:
        """Drop the prefix cache; false if vLLM could not because requests are running."""
        return {"reset": await self.engine.llm.reset_prefix_cache(reset_connector=True)}

    @contextlib.asynccontextmanager
    async def _step(self, call: OwnedCall, name: str, is_first: bool = False) -> AsyncIterator[None]:
        """Serve one step of the owner's update; when it fails, the whole update does."""
        async with self.lock:
            self._check_owner(call)
            if is_first and self.weights.state == "updating":
                raise Conflict("a weight update is already in progress; finish or abort it first")
            if not is_first and self.weights.state != "updating":
                raise Conflict(f"no weight update is in progress (state: {self.weights.state}); start one first")
            try:
                yield
            except Conflict:  # refused before anything was done
                raise
            except asyncio.CancelledError:
                await self._fail(f"{name}: its caller hung up")
                raise
            except Exception as error:
                await self._fail(f"{name} failed: {error}")
                raise
            finally:
                self._last_step = time.monotonic()

    async def _end_if_abandoned(self, number: int) -> None:
        """Fail update `number` when its learner is gone or sends no next step: requests wait for its end (SRV-12)."""
        while True:
            await asyncio.sleep(WATCH_INTERVAL_S)
            async with self.lock:
                if self.weights.state != "updating" or self.weights.num_updates != number:
                    return
                silent_s = time.monotonic() - self._last_step
                if silent_s > min(self.engine.update_s, MAX_SILENCE_S):
                    return await self._fail(f"run {self.owner} sent no next step of its update for {silent_s:.0f} s")
                if not any(await self.engine.on_all_workers("learner_is_alive")):
                    return await self._fail(f"the learner of run {self.owner} is gone")

    async def _fail(self, reason: str) -> None:
        """Mark the weights dirty. Workers leave the communicator, which tells a learner that is still sending. Whoever
        asked may hang up meanwhile: nobody else would do the rest."""
        logger.error("weight update given up: %s", reason)
        self.weights.move("dirty", None, reason)
        cleaning = asyncio.ensure_future(self._clean_up())
        try:
            await asyncio.shield(cleaning)
        except asyncio.CancelledError:
            await cleaning
            raise

    async def _clean_up(self) -> None:
        """Have workers leave the update, and requests go on or end."""
        if self.engine.llm.errored:
            return
        try:
            await self.engine.on_all_workers("abort")
            await self.engine.llm.abort(list(self.engine.ids_in_flight))
            # A pause that still waits for answers ends with them: engines of a mixture of experts do not resume before.
            await self.engine.llm.engine_core.pause_scheduler_async(mode="abort", clear_cache=False)
            await self.engine.llm.resume_generation()
        except Exception:  # the first error matters; the next update starts by resetting the workers
            logger.exception("cleaning up after the failed weight update failed, too")

    def _is_owners(self, token: str) -> bool:
        return self._token is not None and hmac.compare_digest(token.encode(), self._token.encode())

    def _check_owner(self, call: OwnedCall) -> None:
        if call.run_id != self.owner:
            raise Conflict(f"this server belongs to run {self.owner}, not {call.run_id}; open the communicator first")


def _check_tensors(call: UpdateWeights) -> None:
    """Raise `BadCall` for tensors that cannot exist, which workers would find out only in the middle of the update."""
    num_bytes = 0
    for i, (dtype_name, shape) in enumerate(zip(call.dtype_names, call.shapes, strict=True)):
        dtype = getattr(torch, dtype_name, None)
        if not isinstance(dtype, torch.dtype):
            raise BadCall(f"dtype_names[{i}] is no dtype of torch")
        num_bytes += math.prod(shape) * dtype.itemsize
        if num_bytes > MAX_UPDATE_BYTES:
            raise BadCall(f"shapes: the tensors up to number {i} take more than {MAX_UPDATE_BYTES >> 40} TiB")
