"""One round of a rank's requests: a batch for each rollout server, all at once, through retries, halves and faults.

The threads of a round:
    the caller's     Round.run: starts the batches, waits for all of them, raises the first error
    infer-<server>   ServerBatch.run: one server's `/infer/` calls over one `Link`
    health-<server>  HealthWatch: polls `/health/` during the batch; a lost server cancels the round
"""

import logging
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from typing import Any

from utils.capacity import call_seed, requests_per_server
from utils.rollout.link import CONNECT_TIMEOUT_S, CallFailed, CallTimeout, Link, RolloutError
from utils.rollout.responses import excerpt, is_dirty, read_health, read_outputs

log = logging.getLogger(__name__)

NUM_RETRIES = 2  # of a call, before it is split or given up
Client = Any  # a `RolloutClient`, whose module imports this one


class ServerGone(RolloutError):
    """A server gave no good response for `timeout_s`, was restarted, or needs full weights first (CON-4)."""


class SlotGate:
    """Lets rounds in, first come, first served, while there is room in a rank's `slots` on each server, and for not
    more than `chunk` requests in all (DIS-3, DIS-4)."""

    def __init__(self, chunk: int, slots: Sequence[int]) -> None:
        self._line = threading.Semaphore()
        self._room = [threading.Semaphore(size) for size in (chunk, *slots)]
        self.error: BaseException | None = None  # a lost server: it could be back without weights (CON-4)

    @contextmanager
    def let_in(self, counts: Sequence[int]) -> Iterator[None]:
        """Wait for room for `counts` requests per server, and hold it inside the context."""
        with ExitStack() as held:
            with self._line:
                for room, count in zip(self._room, (sum(counts), *counts), strict=True):
                    for _ in range(count):
                        held.enter_context(room)
            if self.error is not None:
                raise self.error
            yield


@dataclass(frozen=True)
class InferJob:
    """The arguments of one `RolloutClient.infer`, and its `outputs` as they come in."""

    infer_requests: Sequence[dict[str, Any]]
    request_config: dict[str, Any]
    seed: int
    labels: dict[str, Any]
    outputs: list[Any]


class Round:
    """One round of a job: a batch per server, all at once. The first failure cancels the others' calls (CON-5)."""

    def __init__(self, client: Client, job: InferJob, numbers: range) -> None:
        self.error: BaseException | None = None  # the first failure
        self.cancelled = threading.Event()
        self._links: list[Link] = []  # of the batches while they run
        self._lock = threading.Lock()  # guards `error` and the links: a late cancel must not reach a link's next user
        self._batches: list[ServerBatch] = []
        self._gate: SlotGate = client.gate
        self._counts = requests_per_server(len(numbers), *client.sizes)
        for index, count in enumerate(self._counts):
            if count:
                self._batches.append(ServerBatch(client, self, job, index, numbers[:count]))
            numbers = numbers[count:]

    def run(self) -> None:
        """Fill in the job's outputs once there are slots. Returns when all threads ended. Raises: the first failure."""
        with self._gate.let_in(self._counts), ExitStack() as stack:
            self._links = [stack.enter_context(batch.client.link(batch.index)) for batch in self._batches]
            threads = [
                threading.Thread(target=batch.run, args=(link,), name=f"infer-{batch.index}", daemon=True)
                for batch, link in zip(self._batches, self._links, strict=True)
            ]
            try:
                for thread in threads:
                    thread.start()
                for batch in self._batches:
                    batch.ended.wait()  # not `join`: Python 3.11 takes a thread for ended if Ctrl-C interrupts that
            except BaseException as error:  # Ctrl-C
                self.cancel(error)
                raise
            finally:
                for thread in threads:
                    if thread.ident is not None:
                        thread.join()
                with self._lock:
                    self._links.clear()
        self.raise_if_cancelled()

    def cancel(self, error: BaseException) -> None:
        """End all calls of the round; from any thread. The first error counts."""
        if isinstance(error, ServerGone):
            self._gate.error = error
        with self._lock:
            self.error = self.error or error
            self.cancelled.set()
            for link in self._links:
                link.cancel(self.error)

    def raise_if_cancelled(self) -> None:
        """Raise the error that ended the round, if any."""
        if self.error is not None:
            raise self.error


@dataclass(eq=False)
class ServerBatch:
    """One server's part of a round: the requests `numbers` of a job, their calls, retries and halves."""

    client: Client
    round: Round
    job: InferJob
    index: int
    numbers: range
    ended: threading.Event = field(default_factory=threading.Event)
    num_splits: int = 0  # since the last call

    def run(self, link: Link) -> None:
        """Fill in the outputs of all requests, or cancel the round: by one call, its retries, then half by half."""
        try:
            with closing(HealthWatch(self.client, self.round, self.index)) as watch:
                pending = [(self.numbers, 0)]  # with the number of failed attempts
                while pending:
                    numbers, attempt = pending.pop()
                    try:
                        pending += self._store(numbers, self._call(link, numbers, attempt))
                    except CallFailed as failure:
                        pending += self._after_failure(failure, numbers, attempt, watch)
        except BaseException as error:  # noqa: BLE001  (raised by `Round.run`, in the caller's thread)
            self.round.cancel(error)
        finally:
            self.ended.set()

    def _call(self, link: Link, numbers: range, attempt: int) -> list[dict[str, Any]]:
        """Make one `/infer/` call and return its outputs, checked for form. Raises: CallFailed."""
        seed = call_seed(self.job.seed, numbers.start)
        requests = list(self.job.infer_requests[numbers.start : numbers.stop])
        body = {"infer_requests": requests, "request_config": {**self.job.request_config, "seed": seed}}
        record = {**self.job.labels, "server": self.index, "url": self.client.url(self.index), "seed": seed}
        record |= {"group_port": self.client.servers[self.index].group_port}
        record |= {"first_request": numbers.start, "num_requests": len(numbers)}
        record |= {"attempt": attempt + 1, "splits": self.num_splits, "outcome": "ok", "timed_out": False}
        self.num_splits = 0
        start = time.monotonic()
        try:
            return read_outputs(*link.request("POST", "/infer/", self.client.infer_timeout_s, json=body), len(numbers))
        except BaseException as error:
            record["outcome"] = str(error) or type(error).__name__
            record["timed_out"] = isinstance(error, CallTimeout)
            raise
        finally:
            self.client.calls.append({**record, "seconds": time.monotonic() - start})

    def _after_failure(
        self, failure: CallFailed, numbers: range, attempt: int, watch: "HealthWatch"
    ) -> list[tuple[range, int]]:
        """Return what to call next, last one first: the same, its halves, or nothing for a request given up (CON-3)."""
        failed_at = time.monotonic()
        self.round.raise_if_cancelled()
        if failure.status not in (400, 413, 422):  # the same body gets the same response
            if failure.is_final:
                raise failure  # not our server, or it rejects the token: no matter of one sample
            log.warning("requests %d-%d, try %d: %s", numbers[0], numbers[-1], attempt + 1, failure)
            self.round.cancelled.wait(self.client.backoff_s * 2 ** (attempt % NUM_RETRIES))  # smaller calls begin anew
            watch.wait_good(failed_at)
            if attempt < NUM_RETRIES:
                return [(numbers, attempt + 1)]
        if len(numbers) == 1:
            log.warning("giving up request %d: %s", numbers[0], failure)
            infos = {"error": str(failure)}
            self._store(numbers, [{"response": None, "response_token_ids": [], "rollout_infos": infos}])
            return []
        log.warning("splitting requests %d-%d: %s", numbers[0], numbers[-1], failure)
        self.num_splits += 1
        half = (len(numbers) + 1) // 2
        return [(numbers[half:], 0), (numbers[:half], 0)]

    def _store(self, numbers: range, outputs: list[dict[str, Any]]) -> list[tuple[range, int]]:
        """Put outputs where they belong; return what to call again: requests that were too large beside the others.

        Raises: RolloutError for a refused request, or too many failed ones.
        """
        again: list[range] = []
        reasons = []
        for number, output in zip(numbers, outputs, strict=True):
            if output["rollout_infos"].get("too_large") and len(numbers) > 1:  # a call's images have a limit together
                joins = again and again[-1].stop == number
                again.append(range(again.pop().start if joins else number, number + 1))
                reasons.append(output["rollout_infos"].get("error"))
                continue
            error = output["rollout_infos"].get("error")
            where = f"{self.client.url(self.index)}, request {self.job.infer_requests[number].get('uuid') or number}"
            if output["rollout_infos"].get("refused"):
                raise RolloutError(
                    f"{where}: refused: {error}; let the server read it: "
                    "custom.extra.rollout_server.allowed_image_roots (paths) or allow_image_urls"
                )
            if error is not None:
                log.warning("%s: empty rollout: %s", where, error)
            self.client.count_request(None if error is None else f"{where}: {error}")
            self.job.outputs[number] = output
        if again:
            log.warning(
                "%s: %d of %d requests go again in further calls; the first was refused beside the others: %s",
                *(self.client.url(self.index), len(reasons), len(numbers), reasons[0]),
            )
            self.num_splits += 1
        return [(own, 0) for own in reversed(again)]


@dataclass(eq=False)
class HealthWatch:
    """Polls a server's `/health/` while a batch runs, and cancels the round when the server is gone (CON-5)."""

    client: Client
    round: Round
    index: int

    def __post_init__(self) -> None:
        self.good_until = time.monotonic()  # when the last good response came
        self.good_since = self.good_until  # when its poll began
        self.last_failure = "no answer yet"
        self._link = Link(self.client.url(self.index), self.client.token)  # cancelled: the watch is closed
        self._wake = threading.Event()
        threading.Thread(target=self._run, name=f"health-{self.index}", daemon=True).start()

    def close(self) -> None:
        """End the thread, also during a poll that hangs. Does not wait for it."""
        self._link.cancel(RolloutError("the batch has ended"))
        self._wake.set()

    def wait_good(self, since: float) -> None:
        """Return once a poll that began after `since` got a good response. Raises: the error that ended the round."""
        self._wake.set()
        while self.good_since < since and not self.round.cancelled.wait(0.02):
            pass
        self.round.raise_if_cancelled()

    def _run(self) -> None:
        try:
            while self._link.error is None:
                self._wake.wait(self.client.poll_s)
                self._wake.clear()
                self._poll()
        except Exception as error:  # a bug, too: a watch that dies unseen would let a call wait for ever
            if self._link.error is None:
                self.round.cancel(error)
        finally:
            self._link.close()

    def _poll(self) -> None:
        """Look at the server once. Raises: ServerGone; RolloutError if it belongs to another run."""
        left_s = self.good_until + self.client.timeout_s - time.monotonic()
        if left_s <= 0:
            raise self._gone(f"no good answer for {self.client.timeout_s:g} s; last: {self.last_failure}")
        start = time.monotonic()
        try:
            answer = self._link.request("GET", "/health/", min(left_s, CONNECT_TIMEOUT_S))
            health = read_health(*answer, allow_dirty=True)
        except CallFailed as error:
            self.last_failure = str(error)
            if self.client.stop.is_set():
                raise self._gone(f"not waited for, since a stop was requested; last: {error}") from error
            self.round.cancelled.wait(min(0.25, self.client.poll_s))
            self._wake.set()
            return
        if is_dirty(health):
            raise self._gone(f"it needs full weights: {excerpt(health)}")
        boot_id = self.client.boot_ids[self.index]
        if health["boot_id"] != boot_id:
            raise self._gone(f"restarted: boot id {health['boot_id']}, was {boot_id}")
        self.client.check_owner(self.index, health)
        self.good_since = start
        self.good_until = time.monotonic()

    def _gone(self, reason: str) -> ServerGone:
        return ServerGone(f"rollout server {self.index} at {self.client.url(self.index)} is gone: {reason}")
