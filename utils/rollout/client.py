"""The learner's side of the rollout servers' HTTP interface: reaching them, sharing requests out, surviving faults.

Knows requests and answers only as the JSON of `utils.server.protocol`; what they mean is `utils.rollout.backend`'s
business, what weights they need is `utils.sync.weight_sync`'s. Failures are local to the rank that sees them: whoever
calls this must share the outcome with the other ranks before it goes on (CON-4).
"""

import json
import logging
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from utils.capacity import call_seed, check_capacity, chunk_size, requests_per_server, rounds
from utils.rollout.link import CONNECT_TIMEOUT_S, CallFailed, Link, RolloutError, _in_threads, _short

log = logging.getLogger(__name__)

KEEP_ALIVE_S = 2.0  # uvicorn closes idle connections after 5 s; a request sent at that very moment would be lost
NUM_RETRIES = 2  # of a call, before it is split or given up
FAILURE_WINDOW = 200  # requests that `max_failed_fraction` looks back on (CON-3)


class Address(Protocol):
    """What `utils.config.rollout.ServerAddress` offers."""

    base_url: str
    group_port: int


class ServerGone(RolloutError):
    """A server gave no good answer for `timeout_s`, was restarted, or needs full weights first (CON-4)."""

    def __init__(self, index: int, url: str, reason: str) -> None:
        super().__init__(f"rollout server {index} at {url} is gone: {reason}")
        self.index, self.url, self.reason = index, url, reason


class RolloutClient:
    """All configured servers, seen from one learner.

    Args:
        servers: their addresses, in configured order.
        rank, world_size: this learner and the number of learners.
        decode_batch_size: most sequences that one device decodes at once (CFG-11).
        timeout_s: how long a server may go without a good answer on `/health/` (CFG-8).
        infer_timeout_s: bound of each `/infer/` call; None, zero or negative for none.
        max_failed_fraction: of the last 200 requests, how many may end as empty rollouts (CON-3).
        token: bearer token; by default `ROLLOUT_SERVER_TOKEN` of the environment, none if that is not set.
        backoff_s: pause before the first retry of a call, doubled for each further one. Longer than the second that the
            server takes to notice that a timed-out call was hung up, so that no device gets a request twice at once.

    Attributes:
        world_sizes: devices per server, known after `wait_ready`.
        boot_ids: the server processes that answers are accepted from.
        owner: the run that opened the communicators, to be set when it did; another owner stops the run (CON-4).
        run_tokens: what each server's `/init_communicator/` answered, by number; goes with every `post` to it (SRV-3).
        stats: counts of `calls`, `retries`, `timeouts`, `splits` and `given_up` (requests that became empty rollouts).
    """

    def __init__(
        self,
        servers: Sequence[Address],
        rank: int,
        world_size: int,
        decode_batch_size: int,
        timeout_s: float = 240.0,
        infer_timeout_s: float | None = None,
        max_failed_fraction: float = 0.05,
        token: str | None = None,
        backoff_s: float = 1.5,
    ) -> None:
        self.servers, self.rank, self.world_size, self.decode_batch_size = (
            list(servers),
            rank,
            world_size,
            decode_batch_size,
        )
        self.timeout_s, self.backoff_s = timeout_s, backoff_s
        self.infer_timeout_s = infer_timeout_s if infer_timeout_s and infer_timeout_s > 0 else None
        self.max_failed = max_failed_fraction * FAILURE_WINDOW
        self.poll_s = max(0.05, min(5.0, timeout_s / 8))
        self.world_sizes: list[int] = []
        self.boot_ids: list[str] = []
        self.models: list[str] = []
        self.model_digests: list[str | None] = []
        self.owner: str | None = None
        self.run_tokens: dict[int, str] = {}
        self.stats: Counter[str] = Counter(calls=0, retries=0, timeouts=0, splits=0, given_up=0)
        self._token = token or os.environ.get("ROLLOUT_SERVER_TOKEN") or None
        self._calls: deque[dict[str, Any]] = deque(maxlen=10_000)
        self._failed: deque[bool] = deque(maxlen=FAILURE_WINDOW)
        self._lock = threading.Lock()  # guards the counters and the idle links
        self._round_lock = threading.Lock()  # one round per rank in flight (DIS-3)
        self._idle: list[list[Link]] = [[] for _ in self.servers]

    def url(self, index: int) -> str:
        """Base url of a server, without a slash at the end."""
        return self.servers[index].base_url.rstrip("/")

    @property
    def chunk(self) -> int:
        """Most requests that this learner sends per round (DIS-3)."""
        return chunk_size(self.decode_batch_size, sum(self.world_sizes), self.world_size)

    # Single calls

    def get(self, index: int, path: str, timeout_s: float | None = CONNECT_TIMEOUT_S) -> Any:
        """Decoded JSON of one GET. Raises: CallFailed."""
        with self._link(index) as link:
            return link.request("GET", path, None, timeout_s)

    def post(self, index: int, path: str, body: dict[str, Any], timeout_s: float | None = None) -> Any:
        """Decoded JSON of one POST, sent once. Raises: CallFailed, with the url and what the server said."""
        with self._link(index) as link:
            return link.request("POST", path, body, timeout_s, self.run_tokens.get(index))

    def health(self, index: int, timeout_s: float = CONNECT_TIMEOUT_S) -> dict[str, Any]:
        """What `/health/` says, with its `latency_s` (LOG-6). Raises: CallFailed."""
        start = time.monotonic()
        answer = self.get(index, "/health/", timeout_s)
        return {**_checked_health(f"{self.url(index)}/health/", answer), "latency_s": time.monotonic() - start}

    def lost(self) -> list[int]:
        """Servers that do not answer now, or are another process than answers are accepted from (CON-4)."""

        def is_lost(index: int) -> bool:
            try:
                health = self.health(index)
            except CallFailed as error:
                health = _dirty_health(error)
            return health is None or health["boot_id"] != self.boot_ids[index]

        return [index for index in range(len(self.servers)) if is_lost(index)]

    def metrics(self, index: int) -> dict[str, float]:
        """`/metrics/` (Prometheus text), each name summed over its labels (LOG-6). Raises: CallFailed."""
        with self._link(index) as link:
            text = link.request_text("GET", "/metrics/", None, CONNECT_TIMEOUT_S)
        totals: Counter[str] = Counter()
        for line in text.splitlines():
            if line and not line.startswith("#"):
                name, _, value = line.rpartition(" ")
                totals[name.partition("{")[0]] += float(value)
        return dict(totals)

    def pop_calls(self) -> list[dict[str, Any]]:
        """Every `/infer/` call since the last time this was asked: server, seed, first request, outcome (LOG-1)."""
        with self._lock:
            calls = list(self._calls)
            self._calls.clear()
        return calls

    def close(self) -> None:
        """Close kept connections. The servers stay up."""
        with self._lock:
            links = [link for idle in self._idle for link in idle]
            self._idle = [[] for _ in self.servers]
        for link in links:
            link.close()

    # Reaching the servers

    def wait_ready(self) -> list[int]:
        """Poll every server until it is healthy, then ask its world size, once (CON-1, DIS-1).

        May be called again after `ServerGone`. A server that a failed weight update left without usable weights counts
        as reachable, since only the next full update can mend it.

        Returns:
            Numbers of the servers that are another process than before (at first: all); they have no weights yet.

        Raises:
            RolloutError: lists each server that did not answer in `timeout_s`; or names one that came back different.
            ValueError: the servers are too small for this many learners (DIS-2).
        """
        deadline = time.monotonic() + self.timeout_s
        found: list[Any] = [None] * len(self.servers)

        def reach(index: int) -> None:
            found[index] = self._poll_until_ready(index, deadline)

        _in_threads([lambda index=index: reach(index) for index in range(len(self.servers))])
        if any(isinstance(state, Exception) for state in found):
            answers = [_last_words(state) if isinstance(state, Exception) else "ready" for state in found]
            raise RolloutError(unreachable_message(self.servers, answers, self.timeout_s))
        self._check_same(found)
        check_capacity(self.decode_batch_size, sum(size for _, size in found), self.world_size)
        old = self.boot_ids or [None] * len(found)
        self.boot_ids = [health["boot_id"] for health, _ in found]
        self.models = [health.get("model") for health, _ in found]
        self.model_digests = [health.get("model_digest") for health, _ in found]
        self.world_sizes = [size for _, size in found]
        return [index for index, boot_id in enumerate(self.boot_ids) if boot_id != old[index]]

    def check_model(self, path: str, digest: str | None) -> None:
        """Every server generates with the architecture and tokenizer that `path` holds (CON-4).

        Raises:
            RolloutError: names the first server with another model, and both.
        """
        for index, (model, own) in enumerate(zip(self.models, self.model_digests, strict=True)):
            if None not in (own, digest) and own != digest:
                raise RolloutError(
                    f"{self.url(index)} serves another model than this run trains: {model}, model.path={path} (their "
                    "config.json or tokenizer.json differ); start a server with this run's config"
                )

    def _poll_until_ready(self, index: int, deadline: float) -> tuple[dict[str, Any], int] | Exception:
        """(health, world size), or the last failure once `deadline` has passed or waiting cannot help."""
        next_word = time.monotonic() + 10.0
        while True:
            timeout_s = max(0.1, min(CONNECT_TIMEOUT_S, deadline - time.monotonic()))
            try:
                try:
                    health = self.health(index, timeout_s)
                except CallFailed as error:
                    health = _dirty_health(error)
                    if health is None:
                        raise
                answer = self.get(index, "/get_world_size/", timeout_s)
                if not isinstance(answer, dict) or not isinstance(answer.get("world_size"), int):
                    raise CallFailed(f"{self.url(index)}/get_world_size/", "answer", f"answered {_short(answer)}")
                return health, answer["world_size"]
            except CallFailed as error:
                failure = error
            if failure.status in (401, 403) or time.monotonic() + self.poll_s >= deadline:
                return failure
            if time.monotonic() >= next_word and self.rank == 0:
                log.info("waiting for rollout server %s", failure)
                next_word = time.monotonic() + 10.0
            time.sleep(min(self.poll_s, 1.0))

    def _check_same(self, found: list[tuple[dict[str, Any], int]]) -> None:
        """CON-4: a server may come back as another process, but not as another server."""
        seen: dict[str, int] = {}
        for index, (health, size) in enumerate(found):
            if (error := self._other_owner(index, health)) is not None:
                raise error
            first = seen.setdefault(health["boot_id"], index)
            if first != index:
                raise RolloutError(f"{self.url(first)} and {self.url(index)} are one and the same rollout server")
            if self.world_sizes and size != self.world_sizes[index]:
                was = self.world_sizes[index]
                raise RolloutError(f"{self.url(index)} came back with world size {size}, it had {was}; restart the run")
            if self.models and health.get("model") != self.models[index]:
                was = self.models[index]
                raise RolloutError(
                    f"{self.url(index)} came back with model {health.get('model')}, it had {was}; restart the run"
                )

    def _other_owner(self, index: int, health: dict[str, Any]) -> RolloutError | None:
        owner = health.get("owner")
        if self.owner is None or owner in (None, self.owner):
            return None
        return RolloutError(
            f"{self.url(index)} was taken over by run {owner} (this is {self.owner}); one run per server"
        )

    # Rollout requests

    def infer(
        self,
        infer_requests: Sequence[dict[str, Any]],
        request_config: dict[str, Any],
        seed: int,
        note: dict[str, Any] | None = None,
    ) -> list[dict[str, Any]]:
        """Answers to one micro-step's requests, in order: asked in rounds, shared out among the servers (DIS-3 to 6).

        Args:
            infer_requests: `RolloutInferRequest` forms.
            request_config: `RequestConfig` form, without its seed.
            seed: of request 0; request `i` samples with `seed + i`.
            note: put into the record of each call that `pop_calls` gives.

        Returns:
            `RolloutOutput` forms. A request that failed alone has `error` in its `rollout_infos` and no tokens (CON-3).

        Raises:
            ServerGone: no good answer on `/health/` for `timeout_s`, or another process answers.
            RolloutError: a refused path, too many failed requests, or a server that does not let us in.
        """
        assert self.world_sizes, "wait_ready first"
        outputs: list[Any] = [None] * len(infer_requests)
        for numbers in rounds(len(infer_requests), self.chunk) if infer_requests else []:
            with self._round_lock:
                self._run_round(infer_requests, numbers, request_config, seed, note or {}, outputs)
        return outputs

    def _run_round(
        self,
        infer_requests: Sequence[dict[str, Any]],
        numbers: range,
        request_config: dict[str, Any],
        seed: int,
        note: dict[str, Any],
        outputs: list[Any],
    ) -> None:
        """One call per server that has a share, all at once; the first server to fail ends the others' calls too."""
        counts = requests_per_server(len(numbers), self.rank, self.world_size, self.decode_batch_size, self.world_sizes)
        jobs: list[_Share] = []
        first = numbers.start
        for index, count in enumerate(counts):
            if count:
                part = infer_requests[first : first + count]
                jobs.append(_Share(self, index, first, part, request_config, seed, note, outputs))
            first += count

        def cut_all(error: BaseException) -> None:
            for job in jobs:
                job.cut(error)

        _in_threads([job.run for job in jobs], on_error=cut_all)

    def _count(self, **changes: int) -> None:
        with self._lock:
            self.stats.update(changes)

    def _record(self, failed: bool, why: str = "") -> None:
        """Count one finished request. Raises: RolloutError if too many of the last ones failed."""
        with self._lock:
            self._failed.append(failed)
            num_failed = sum(self._failed)
            self.stats["given_up"] += failed
        if failed and num_failed > self.max_failed + 1e-9:
            raise RolloutError(
                f"{num_failed} of the last {FAILURE_WINDOW} requests failed, more than custom.extra.rollout_matching."
                f"max_failed_fraction={self.max_failed / FAILURE_WINDOW:g} allows; last: {why}"
            )

    @contextmanager
    def _link(self, index: int) -> Iterator["Link"]:
        """A connection for one thread, kept alive for the next user unless it was cut."""
        link = None
        with self._lock:
            while self._idle[index] and link is None:
                link = self._idle[index].pop()
                if link.error is not None or time.monotonic() - link.last_used > KEEP_ALIVE_S:
                    link.close()
                    link = None
        link = link or Link(self.url(index), self._token)
        try:
            yield link
        finally:
            link.last_used = time.monotonic()
            if link.error is None:
                with self._lock:
                    self._idle[index].append(link)
            else:
                link.close()


class _Share:
    """One server's part of a round: its calls, their retries and halves, and the watch over its health."""

    def __init__(
        self,
        client: RolloutClient,
        index: int,
        first: int,
        part: Sequence[dict[str, Any]],
        request_config: dict[str, Any],
        seed: int,
        note: dict[str, Any],
        outputs: list[Any],
    ) -> None:
        self.client, self.index, self.first, self.part = client, index, first, part
        self.request_config, self.seed, self.note, self.outputs = request_config, seed, note, outputs
        self.cut_event = threading.Event()
        self.error: BaseException | None = None
        self.link: Link | None = None
        self._lock = threading.Lock()  # guards `error` and `link`: a late cut must not reach the link's next user

    def cut(self, error: BaseException) -> None:
        """End whatever this share is doing, from any thread; the first reason counts."""
        with self._lock:
            self.error = self.error or error
            self.cut_event.set()
            if self.link is not None:
                self.link.cut(self.error)

    def run(self) -> None:
        """Fill `outputs` with this share's answers."""
        with self.client._link(self.index) as link:
            with self._lock:
                self.link = link
            watch = _Watch(self)
            try:
                self._stop_if_cut()
                self._serve(self.first, self.part, watch)
            finally:
                watch.stop()
                with self._lock:
                    self.link = None

    def _stop_if_cut(self) -> None:
        if self.error is not None:
            raise self.error

    def _serve(self, first: int, part: Sequence[dict[str, Any]], watch: "_Watch") -> None:
        """Get `part` answered: by one call, else its retries, else half by half, else give the request up (CON-3)."""
        url = self.client.url(self.index)
        for attempt in range(NUM_RETRIES + 1):
            try:
                self._keep(first, part, self._call(first, part))
                return
            except CallFailed as error:
                failure, failed_at = error, time.monotonic()
            self._stop_if_cut()
            if failure.kind == "timeout":
                self.client._count(timeouts=1)
            if failure.status in (400, 413, 422):  # the same body gets the same answer
                break
            if failure.status is not None and failure.status < 500 and failure.status not in (408, 429):
                raise failure  # not our server, or it does not let us in: no matter of one sample
            log.warning("requests %d-%d, try %d: %s", first, first + len(part) - 1, attempt + 1, failure)
            self.cut_event.wait(self.client.backoff_s * 2 ** (attempt % NUM_RETRIES))  # smaller calls begin anew
            watch.wait_good(failed_at)
            if attempt < NUM_RETRIES:
                self.client._count(retries=1)
        if len(part) == 1:
            log.warning("gave up request %s (%s): %s", first, part[0].get("uuid"), failure)
            self._keep(first, part, [_failed_output(str(failure))])
            return
        half = (len(part) + 1) // 2
        log.warning("%s: splitting requests %d-%d: %s", url, first, first + len(part) - 1, failure)
        self.client._count(splits=1)
        self._serve(first, part[:half], watch)
        self._serve(first + half, part[half:], watch)

    def _call(self, first: int, part: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """One `/infer/` call; its answers, checked for form. Raises: CallFailed."""
        seed = call_seed(self.seed, first)
        body = {"infer_requests": list(part), "request_config": {**self.request_config, "seed": seed}}
        record = {**self.note, "server": self.index, "url": self.client.url(self.index), "seed": seed}
        record |= {"group_port": self.client.servers[self.index].group_port}
        record |= {"first_request": first, "num_requests": len(part), "outcome": "ok"}
        start = time.monotonic()
        self.client._count(calls=1)
        try:
            answer = self.link.request("POST", "/infer/", body, self.client.infer_timeout_s)
            return _checked_outputs(f"{self.client.url(self.index)}/infer/", answer, len(part))
        except Exception as error:
            record["outcome"] = str(error)
            raise
        finally:
            record["seconds"] = time.monotonic() - start
            with self.client._lock:
                self.client._calls.append(record)

    def _keep(self, first: int, part: Sequence[dict[str, Any]], answers: list[dict[str, Any]]) -> None:
        """Put answers where they belong. Raises: RolloutError for a refused request, or too many failed ones."""
        for offset, (request, answer) in enumerate(zip(part, answers, strict=True)):
            infos = answer["rollout_infos"]
            who = f"{self.client.url(self.index)}, request {request.get('uuid') or first + offset}"
            if infos.get("refused"):
                raise RolloutError(
                    f"{who}: refused: {infos.get('error')}; let the server read it: "
                    "custom.extra.rollout_server.allowed_image_roots (paths) or allow_image_urls"
                )
            error = infos.get("error")
            if error is not None:
                log.warning("%s: empty rollout: %s", who, error)
            self.client._record(error is not None, f"{who}: {error}")
            self.outputs[first + offset] = answer


class _Watch:
    """Polls a server's `/health/` while a share of a round runs, and cuts the share when the server is gone (CON-5)."""

    def __init__(self, share: _Share) -> None:
        self.share, self.client, self.index = share, share.client, share.index
        self.last_good = time.monotonic()  # when the last good answer came
        self.good_asked = self.last_good  # when it was asked for
        self.last_words = "no answer yet"
        self._link = Link(self.client.url(self.index), self.client._token)
        self._wake = threading.Event()
        self._stopped = False
        threading.Thread(target=self._run, name=f"health-{self.index}", daemon=True).start()

    def stop(self) -> None:
        """End the thread, also from within a poll that hangs. Does not wait for it."""
        self._stopped = True
        self._link.cut(RolloutError("the watch is over"))
        self._wake.set()

    def wait_good(self, since: float) -> None:
        """Return once a poll that began after `since` got a good answer. Raises: the reason if the share is cut."""
        self._wake.set()
        while self.good_asked < since:
            if self.share.cut_event.wait(0.02):
                break
        self.share._stop_if_cut()

    def _run(self) -> None:
        try:
            while not self._stopped:
                self._wake.wait(self.client.poll_s)
                self._wake.clear()
                error = None if self._stopped else self._poll()
                if error is not None:
                    self.share.cut(error)
                    return
        except Exception as error:  # a watch that dies unseen would let a call wait for ever
            if not self._stopped:
                self.share.cut(error)
        finally:
            self._link.close()

    def _poll(self) -> RolloutError | None:
        """One look at the server. Returns why the share has to end, or None."""
        left = self.last_good + self.client.timeout_s - time.monotonic()
        if left <= 0:
            return self._gone(f"no good answer for {self.client.timeout_s:g} s; last: {self.last_words}")
        asked = time.monotonic()
        try:
            health = _checked_health(self._link.base_url, self._link.request("GET", "/health/", None, left))
        except CallFailed as error:
            self.last_words = str(error)
            dirty = _dirty_health(error)
            if dirty is None and not self._stopped:
                self._pause_between_failures()
            return None if dirty is None else self._gone(f"it needs full weights: {error.detail}")
        boot_id = self.client.boot_ids[self.index]
        if health["boot_id"] != boot_id:
            return self._gone(f"restarted: boot id {health['boot_id']}, was {boot_id}")
        self.good_asked, self.last_good = asked, time.monotonic()
        return self.client._other_owner(self.index, health)

    def _gone(self, reason: str) -> ServerGone:
        return ServerGone(self.index, self.client.url(self.index), reason)

    def _pause_between_failures(self) -> None:
        self.share.cut_event.wait(min(0.25, self.client.poll_s))
        self._wake.set()


def unreachable_message(servers: Sequence[Address], answers: Sequence[str], timeout_s: float) -> str:
    """CON-1's error: each server with what it answered, and the ways out."""
    lines = [
        f"  {index}: {server.base_url} (group port {server.group_port}): {answer}"
        for index, (server, answer) in enumerate(zip(servers, answers, strict=True))
    ]
    rm = "custom.extra.rollout_matching"
    return "\n".join(
        [
            f"not every rollout server could be reached within {timeout_s:g} s:",
            *lines,
            "Ways out:",
            "  start the server: make server GPUS=<ids> CONFIG=<this file>"
            " (or: python rollout_server.py --config <this file> --server-index <number>)",
            f"  group port taken: free it, or change group_port in {rm}.vllm.server",
            f"  no server at all: {rm}.vllm.mode: colocate or {rm}.rollout_backend: hf",
        ]
    )


def _checked_health(url: str, answer: Any) -> dict[str, Any]:
    if not isinstance(answer, dict) or not isinstance(answer.get("boot_id"), str):
        raise CallFailed(url, "answer", f"something else than a rollout server answers: {_short(answer)}")
    return answer


def _dirty_health(error: CallFailed) -> dict[str, Any] | None:
    """The health of a server that is alive but was left without usable weights (503 `dirty`), else None."""
    if error.status != 503:
        return None
    try:
        answer = json.loads(error.body)
    except ValueError:
        return None
    is_dirty = (
        isinstance(answer, dict) and "dirty" in str(answer.get("status")) and isinstance(answer.get("boot_id"), str)
    )
    return answer if is_dirty else None


def _checked_outputs(url: str, answer: Any, num_requests: int) -> list[dict[str, Any]]:
    """One `RolloutOutput` form per request, each with an answer or an error. Raises: CallFailed."""
    if not isinstance(answer, list) or len(answer) != num_requests:
        got = f"{len(answer)} answers" if isinstance(answer, list) else _short(answer)
        raise CallFailed(url, "answer", f"{num_requests} requests got {got}")
    for output in answer:
        if not isinstance(output, dict) or not isinstance(output.get("rollout_infos"), dict):
            raise CallFailed(url, "answer", f"not a rollout output: {_short(output)}")
        if output["rollout_infos"].get("error") is not None:
            continue
        response = output.get("response")
        is_whole = isinstance(response, dict) and response.get("choices") and response.get("prompt_token_ids")
        if not is_whole or not isinstance(output.get("response_token_ids"), list):
            raise CallFailed(url, "answer", f"a rollout output without token ids: {_short(output)}")
    return answer


def _failed_output(error: str) -> dict[str, Any]:
    return {"response": None, "response_token_ids": [], "rollout_infos": {"error": error}}


def _last_words(error: Exception) -> str:
    return str(getattr(error, "detail", error))
