"""Weight updates of a running rollout engine, one owner and one update at a time, and the state they leave it in."""

import asyncio
import hmac
import logging
import secrets
from typing import Any

from utils.server.engine import IN_MEMORY, BadCall, Conflict, NotHolder, RolloutEngine, UpdateFailed
from utils.server.protocol import (
    FinishWeightUpdate,
    InitCommunicator,
    StartWeightUpdate,
    UpdateWeights,
)
from utils.sync.wire import is_adapter_tensor

logger = logging.getLogger(__name__)


class WeightUpdates:
    """Brings new weights into all replicas: idle -> updating -> idle, or dirty when anything goes wrong in between.

    Calls come one at a time. The server belongs to the run that opened its communicator last, until that is closed or
    broken or its learner is gone; a run that lost it gets `Conflict` for everything else it asks. The run proves itself
    by a token that only the answer to its `init` tells.

    Args:
        transport: gloo or nccl.
    """

    def __init__(self, engine: RolloutEngine, transport: str) -> None:
        self.engine = engine
        self.gate = engine.gate
        self.transport = transport
        self.owner: str | None = None
        self._token: str | None = None  # of the run that opened the communicator
        self._lock = asyncio.Lock()
        self._must_be_full = False
        self._carries_adapter = False  # the update in progress fills the LoRA slot (SYN-10)
        self._as_loaded = True  # no update has touched the engine's own weights since its start
        self._held = False  # requests are held over the update ("keep")

    def check_holder(self, token: str) -> None:
        """Raises `NotHolder` unless `token` is that of the run that opened the communicator."""
        if not self._is_holders(token):
            raise NotHolder(
                f"wrong or no Run-Token: this server belongs to {f'run {self.owner}' if self.owner else 'no run yet'}; "
                "open the communicator first"
            )

    async def init(self, call: InitCommunicator, token: str = "") -> dict[str, Any]:
        """Open the communicator; returns when the learner (rank 0) and all workers have met. Replaces an older one.

        Returns:
            `run_token`: what all other calls of this run have to carry; boot id and transport.

        Raises:
            BadCall: `world_size` does not fit this server.
            Conflict: another run's update is still moving, or its learner is alive and `token` is not its token.
            UpdateFailed: no rendezvous within `timeout_s`.
        """
        expected = call.rank_offset + self.engine.world_size
        if call.world_size != expected:
            raise BadCall(f"world_size must be rank_offset + the server's devices = {expected}")
        try:
            async with asyncio.timeout(call.timeout_s):
                await self._lock.acquire()
        except TimeoutError:
            raise Conflict(f"run {self.owner} is in the middle of a weight update") from None
        try:
            if self.owner and not self._is_holders(token) and any(await self.engine.on_all_workers("hears_learner")):
                raise Conflict(
                    f"run {self.owner} holds this server and its learner is alive; end that run or use another server"
                )
            if self.gate.state == "updating":  # its learner died
                await self._fail(f"run {call.run_id} took over during an update of run {self.owner}")
            self.owner, self._token = call.run_id, secrets.token_urlsafe(32)
            self.engine.update_s = call.timeout_s  # how long the learner waits for each step
            await self.engine.on_all_workers("init", self._init_info(call))
            return {"boot_id": self.engine.boot_id, "transport": self.transport, "run_token": self._token}
        finally:
            self._lock.release()

    async def close(self, run_id: str) -> None:
        async with self._lock:
            self._check_owner(run_id)
            if self.gate.state == "updating":
                await self._fail("the communicator was closed during an update")
            await self.engine.on_all_workers("close")
            self.owner = self._token = None

    async def start(self, call: StartWeightUpdate) -> None:
        """Pause generation as `call.pause` says and prepare the workers for new weights."""
        async with self._lock:
            self._check_owner(call.run_id)
            if self.gate.state == "updating":
                raise Conflict("a weight update is already in progress; finish or abort it first")
            self._must_be_full = self.gate.state == "dirty"
            self._held = call.pause == "keep"
            self.gate.move("updating", self.gate.version)
            try:
                await self._pause(call.pause)
                await self.engine.on_all_workers("start")
            except Exception as error:
                await self._fail(f"start of {call.version} failed: {error}")
                raise

    async def _pause(self, mode: str) -> None:
        """vLLM's `pause_generation` without its 20 ms of sleep: answers say themselves which weights made them. Caches
        stay: nobody reads them before the end of the update drops them."""
        await self.engine.llm.engine_core.pause_scheduler_async(mode=mode, clear_cache=False)

    async def update(self, call: UpdateWeights) -> dict[str, Any]:
        """Receive the named tensors on every worker.

        Returns:
            `digests`: per worker, of all tensors it holds by now, if asked for (SYN-7); else empty.
            `parameters`: the engine's parameters that each of these tensors went into, on whatever worker (SYN-6).
        """
        async with self._lock:
            self._check_owner(call.run_id)
            self._check_updating()
            self._carries_adapter = any(is_adapter_tensor(name) for name in call.names)
            try:
                if self._carries_adapter and not self._as_loaded:
                    raise UpdateFailed("an adapter fits only weights as loaded; restart the server, or sync in full")
                self._as_loaded = self._carries_adapter
                reports = await self.engine.on_all_workers("update", call.model_dump(exclude={"run_id"}))
            except Exception as error:
                await self._fail(f"update failed: {error}")
                raise
            parameters = {
                name: sorted(set().union(*(report["parameters"].get(name, ()) for report in reports)))
                for name in call.names
            }
            return {"digests": [r["digests"] for r in reports] if call.digest else [], "parameters": parameters}

    async def finish(self, call: FinishWeightUpdate) -> dict[str, Any]:
        """Put the received weights in force, drop every cache made with the old ones, let requests in again.

        Returns the version, and the engine's parameters that this update did not touch.
        """
        async with self._lock:
            self._check_owner(call.run_id)
            self._check_updating()
            engine = self.engine
            try:
                missing = sorted(set().union(*await engine.on_all_workers("finish")))
                if missing and self._must_be_full:
                    names = ", ".join(missing[:5])
                    raise UpdateFailed(f"after a failed update all tensors are needed; {len(missing)} missing: {names}")
                engine.adapter = IN_MEMORY if self._carries_adapter else None
                await asyncio.gather(engine.llm.update_weight_version(call.version), self._drop_caches())
                await engine.llm.resume_generation()
            except Exception as error:
                await self._fail(f"finish of {call.version} failed: {error}")
                raise
            self.gate.move("idle", call.version)
            return {"weight_version": call.version, "missing": missing}

    async def abort(self, run_id: str) -> None:
        """Give an update up. Without one in progress nothing happens."""
        async with self._lock:
            self._check_owner(run_id)
            if self.gate.state == "updating":
                await self._fail("the update was aborted by the learner")

    async def reset_prefix_cache(self) -> bool:
        """False if vLLM could not drop it because requests are running."""
        return await self.engine.llm.reset_prefix_cache()

    def is_moving(self) -> bool:
        """True while a call is being worked on."""
        return self._lock.locked()

    def _init_info(self, call: InitCommunicator) -> dict[str, Any]:
        info = call.model_dump(exclude={"run_id"})
        if self.transport == "nccl":
            size = info.pop("bucket_bytes")
            info |= {"packed": True, "packed_buffer_size_bytes": size, "packed_num_buffers": 2}
        return info

    async def _drop_caches(self) -> None:
        """Prefix, processor and encoder caches at once (SYN-9). Requests held over the change are computed anew."""
        llm = self.engine.llm
        *_, was_dropped = await asyncio.gather(
            llm.reset_mm_cache(),
            llm.reset_encoder_cache(),
            llm.reset_prefix_cache(reset_running_requests=self._held),
        )
        if not was_dropped:
            raise UpdateFailed("vLLM did not drop its prefix cache")

    async def _fail(self, reason: str) -> None:
        """Leave an update: workers out of it and of the communicator, so that a learner that is still sending hears of
        it at once; requests ended, gate open but dirty."""
        logger.error("weight update given up: %s", reason)
        self.gate.move("dirty", None, reason)
        if self.engine.llm.errored:
            return
        try:
            await self.engine.on_all_workers("abort")
            await self.engine.abort_running()
            await self.engine.llm.resume_generation()
        except Exception:  # the first error is the one to report; the next update starts by resetting the workers
            logger.exception("cleaning up after the failed weight update failed, too")

    def _is_holders(self, token: str) -> bool:
        return self._token is not None and hmac.compare_digest(token.encode(), self._token.encode())

    def _check_owner(self, run_id: str) -> None:
        if run_id != self.owner:
            raise Conflict(f"this server belongs to run {self.owner}, not {run_id}; open the communicator first")

    def _check_updating(self) -> None:
        if self.gate.state != "updating":
            raise Conflict(f"no weight update is in progress (state: {self.gate.state}); start one first")
