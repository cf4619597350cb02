"""The learner's client of the rollout servers: reaching them, calling them, generating in rounds.

Requests and responses are the JSON of `utils.server.protocol` here: what they mean is up to `utils.rollout.backend`,
what weights a server needs is up to `utils.sync.weight_sync`. Failures are local to the rank that sees them: the caller
must share the outcome with the other ranks (CON-4).
"""

import logging
import re
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from utils.capacity import capacity_slots, check_capacity, chunk_size, rounds, small_round
from utils.config.rollout import ServerSettings
from utils.config.schema import ServerAddress
from utils.rollout.access import access_token
from utils.rollout.link import CONNECT_TIMEOUT_S, CallFailed, Link, RolloutError
from utils.rollout.responses import read_health, read_json, read_text
from utils.rollout.round import InferJob, Round, SlotGate

log = logging.getLogger(__name__)

FAILURE_WINDOW = 200  # samples over which `max_failed_fraction` is computed (CON-3)
LOG_EVERY_S = 10.0  # while servers are waited for
STOP_S = 5.0  # what calls of a weight sync have left after a stop request
UNREACHABLE = """not every rollout server could be reached {limit}:
{servers}
Ways out:
{ways_out}"""


@dataclass(eq=False)
class RolloutClient:
    """All configured servers, seen from one learner.

    `backoff_s` is longer than the second that the server takes to notice that a timed-out call was hung up, so that no
    device gets a request twice at once.
    """

    servers: Sequence[ServerAddress]  # in configured order
    rank: int  # of this learner
    world_size: int  # number of learners
    decode_batch_size: int  # most sequences that one device decodes at once (CFG-11)
    timeout_s: float = 240.0  # how long a server may go without a good response on `/health/` (CFG-8)
    infer_timeout_s: float | None = None  # limit of each `/infer/` call; None for none
    max_failed_fraction: float = 0.05  # of the last 200 samples, how many may end as empty rollouts (CON-3)
    token: str | None = field(default=None, repr=False)  # bearer token; None for the environment's, if there is one
    backoff_s: float = 1.5  # pause before the first retry of a call, doubled for each further one
    ways_out: str = "  start it"  # where a server cannot be reached, for the message: indented lines
    capacity_key: str = "decode_batch_size"  # path of that setting, for messages
    answers_per_sample: int = 1  # requests of each sample, which fail together where it is unreadable

    def __post_init__(self) -> None:
        self.token = self.token or access_token()
        self.poll_s = max(0.05, min(5.0, self.timeout_s / 8))
        self.world_sizes: list[int] = []  # devices per server, known after `wait_ready`
        self.boot_ids: list[str] = []  # the server processes whose responses are accepted
        self.owner: str | None = None  # the run that opened the communicators, set when it did; no other may (CON-4)
        self.run_tokens: dict[int, str] = {}  # by server, from `/init_communicator/`; sent with every `post` (SRV-3)
        self.stop = threading.Event()  # set: the run is to stop, so a server that does not answer is not waited for
        self.calls: deque[dict[str, Any]] = deque()  # records of `/infer/`, for `pop_calls`
        self._healths: list[dict[str, Any]] = []  # of `wait_ready`
        self._failed: deque[bool] = deque(maxlen=FAILURE_WINDOW * self.answers_per_sample)
        self._lock = threading.Lock()  # guards the failures and the links
        self._posting: set[Link] = set()
        self._idle: defaultdict[int, list[Link]] = defaultdict(list)  # by server

    def url(self, index: int) -> str:
        """Base url of a server, without a slash at the end."""
        return self.servers[index].base_url

    @property
    def chunk(self) -> int:
        """Most requests that this learner has in flight (DIS-3)."""
        return chunk_size(self.decode_batch_size, sum(self.world_sizes), self.world_size)

    def get(self, index: int, path: str, timeout_s: float | None = CONNECT_TIMEOUT_S) -> Any:
        """Return the decoded JSON of one GET. Raises: CallFailed."""
        with self.link(index) as link:
            return read_json(*link.request("GET", path, timeout_s))

    def post(self, index: int, path: str, body: dict[str, Any], timeout_s: float | None = None) -> Any:
        """Return the decoded JSON of one POST, sent once. Raises: CallFailed, with the url and the response."""
        headers = {"Run-Token": self.run_tokens[index]} if index in self.run_tokens else None
        if self.stop.is_set():
            timeout_s = min(timeout_s or STOP_S, STOP_S)
        with self.link(index) as link:
            try:
                with self._lock:
                    self._posting.add(link)
                return read_json(*link.request("POST", path, timeout_s, json=body, headers=headers))
            finally:
                with self._lock:  # a late cut must not reach the link's next user
                    self._posting.discard(link)

    def end_waits_at(self, stop: threading.Event) -> None:
        """Wait for no server that does not answer any more, once `stop` is set (LRN-12)."""
        self.stop = stop
        threading.Thread(target=self._cut_posts_after_stop, name="stop", daemon=True).start()

    def _cut_posts_after_stop(self) -> None:
        """Body of the `stop` thread; later posts are as short by themselves."""
        self.stop.wait()
        time.sleep(STOP_S)
        self.cut_posts(f"no answer within {STOP_S:g} s after the stop request")

    def cut_posts(self, why: str) -> None:
        """End all posts in flight, which raise CallFailed; from any thread."""
        with self._lock:
            for link in self._posting:
                link.cancel(CallFailed(link.base_url, why))

    def health(self, index: int, timeout_s: float = CONNECT_TIMEOUT_S, allow_dirty: bool = False) -> dict[str, Any]:
        """Return the response of `/health/`, with its `latency_s` (LOG-6); see `read_health`. Raises: CallFailed."""
        start = time.monotonic()
        with self.link(index) as link:
            health = read_health(*link.request("GET", "/health/", timeout_s), allow_dirty)
        return {**health, "latency_s": time.monotonic() - start}

    def lost(self) -> list[int]:
        """Return the servers that do not respond now, or are not the process whose responses are accepted (CON-4)."""
        lost = set(range(len(self.servers)))
        for index, boot_id in enumerate(self.boot_ids):
            with suppress(CallFailed):
                if self.health(index, allow_dirty=True)["boot_id"] == boot_id:
                    lost.remove(index)
        return sorted(lost)

    def metrics(self, index: int) -> dict[str, float]:
        """Return `/metrics/`: the values by `name{labels}`, and by name their sums (LOG-6). Raises: CallFailed."""
        with self.link(index) as link:
            text = read_text(*link.request("GET", "/metrics/", CONNECT_TIMEOUT_S))
        totals: Counter[str] = Counter()
        for series, name, value in re.findall(r"^(([^#\s{]+).*) (\S+)$", text, re.MULTILINE):
            totals.update(dict.fromkeys({series, name}, float(value)))
        return dict(totals)

    @contextmanager
    def link(self, index: int) -> Iterator[Link]:
        """Lend a connection to one thread. It is kept alive for the next user unless it was cancelled."""
        with self._lock:
            link = self._idle[index].pop() if self._idle[index] else Link(self.url(index), self.token)
        try:
            yield link
        finally:
            if link.error is None:
                with self._lock:
                    self._idle[index].append(link)
            else:
                link.close()

    def close(self) -> None:
        """Close idle connections. The servers stay up."""
        with self._lock:
            for idle in self._idle.values():
                while idle:
                    idle.pop().close()

    def wait_ready(self) -> None:
        """Poll every server until it is healthy, then request its world size, once (CON-1, DIS-1); again after a loss.

        A server that a failed weight update left without usable weights counts as reachable, since only the next full
        update can mend it.

        Raises:
            RolloutError: lists all servers if one did not respond in `timeout_s`; names one that came back different;
                says that they are too small for this many learners (DIS-2).
        """
        deadline, stopped = time.monotonic() + self.timeout_s, threading.Event()
        with ThreadPoolExecutor(len(self.servers)) as pool:
            polls = [pool.submit(self._poll_until_ready, i, deadline, stopped) for i in range(len(self.servers))]
            try:
                found = [poll.result() for poll in polls]
            finally:
                stopped.set()  # the others, after Ctrl-C
        if any(isinstance(health, CallFailed) for health in found):
            lines = []
            for index, (server, health) in enumerate(zip(self.servers, found, strict=True)):
                state = health.detail if isinstance(health, CallFailed) else "ready"
                lines.append(f"  {index}: {server.base_url} (group port {server.group_port}): {state}")
            limit = "before the stop request" if self.stop.is_set() else f"within {self.timeout_s:g} s"
            raise RolloutError(UNREACHABLE.format(limit=limit, servers="\n".join(lines), ways_out=self.ways_out))
        self._check_same(found)
        world_sizes = [health["world_size"] for health in found]
        try:
            check_capacity(self.decode_batch_size, sum(world_sizes), self.world_size, self.capacity_key)
        except ValueError as error:
            raise RolloutError(str(error)) from None
        self.boot_ids = [health["boot_id"] for health in found]
        self.world_sizes = world_sizes
        self.sizes = self.rank, self.world_size, self.decode_batch_size, world_sizes  # for `utils.capacity`
        self.gate = SlotGate(self.chunk, capacity_slots(*self.sizes))
        self._healths = found

    def check_model(self, path: str, digest: str | None) -> None:
        """Check that every server has the architecture and tokenizer of the model in `path` (CON-4).

        Raises: RolloutError, which names the first server with another model, and both models.
        """
        for index, health in enumerate(self._healths):
            if None not in (health.get("model_digest"), digest) and health["model_digest"] != digest:
                raise RolloutError(
                    f"{self.url(index)} serves another model than this run trains: {health.get('model')}, "
                    f"model.path={path} (their config.json or tokenizer.json differ); start a server with this run's "
                    "config"
                )

    def check_settings(self, settings: Sequence[ServerSettings]) -> None:
        """Check that every server, in order, was started with what the config says of it and answers depend on (CON-4).

        Raises: RolloutError, which names the first server that answers with less room or other log-probabilities.
        """
        for index, (health, own) in enumerate(zip(self._healths, settings, strict=False)):
            theirs, mode = health.get("max_model_len"), own.vllm_engine_kwargs.get("logprobs_mode", "raw_logprobs")
            what = None
            if theirs is not None and theirs < own.vllm_max_model_len:
                what = f"vllm_max_model_len {theirs}, and this run's config has {own.vllm_max_model_len}"
            elif health.get("logprobs_mode", mode) != mode:
                what = f"logprobs_mode {health['logprobs_mode']}, and this run's config has {mode}"
            if what:
                raise RolloutError(f"{self.url(index)} was started with {what}; start it again with this run's config")

    def check_owner(self, index: int, health: dict[str, Any]) -> None:
        """Check that no other run opened a communicator with a server since this one did. Raises: RolloutError."""
        owner = health.get("owner")
        if self.owner is not None and owner not in (None, self.owner):
            raise RolloutError(
                f"{self.url(index)} was taken over by run {owner} (this is {self.owner}); use one run per server"
            )

    def _poll_until_ready(self, index: int, deadline: float, stopped: threading.Event) -> dict[str, Any] | CallFailed:
        """Return the health and `world_size`, or the last failure at `deadline`, or where waiting cannot help."""
        next_log = time.monotonic() + LOG_EVERY_S
        while True:
            timeout_s = max(0.1, min(CONNECT_TIMEOUT_S, deadline - time.monotonic()))
            try:
                health = self.health(index, timeout_s, allow_dirty=True)
                answer = self.get(index, "/get_world_size/", timeout_s)
                if not isinstance(answer, dict) or not isinstance(answer.get("world_size"), int):
                    raise CallFailed(f"{self.url(index)}/get_world_size/", f"answered {answer!r:.300}")
                return {**health, "world_size": answer["world_size"]}
            except CallFailed as error:
                failure = error
            is_over = stopped.is_set() or self.stop.is_set() or time.monotonic() + self.poll_s >= deadline
            if failure.status in (401, 403, 421) or is_over:  # the token, or the name in the url
                return failure
            if time.monotonic() >= next_log and self.rank == 0:
                log.info("waiting for rollout server %s", failure)
                next_log = time.monotonic() + LOG_EVERY_S
            stopped.wait(min(self.poll_s, 1.0))

    def _check_same(self, healths: list[dict[str, Any]]) -> None:
        """CON-4: a server may come back as another process, but not as another server."""
        seen: dict[str, int] = {}
        for index, health in enumerate(healths):
            self.check_owner(index, health)
            first = seen.setdefault(health["boot_id"], index)
            if first != index:
                raise RolloutError(f"{self.url(first)} and {self.url(index)} are the same rollout server")
            old = self._healths[index] if self._healths else health
            for key in ("world_size", "model", "model_digest", "tokenizer_digest", "max_model_len", "logprobs_mode"):
                if health.get(key) != old.get(key):
                    change = f"{key.replace('_', ' ')} {health.get(key)} instead of {old.get(key)}"
                    raise RolloutError(f"{self.url(index)} came back with {change}; restart the run")

    def infer(
        self,
        infer_requests: Sequence[dict[str, Any]],
        request_config: dict[str, Any],
        seed: int,
        labels: dict[str, Any] | None = None,
        in_small_rounds: bool = False,
    ) -> list[dict[str, Any]]:
        """Return the responses to one micro-step's requests, in order; sent in rounds, split over servers (DIS-3 to 6).

        Requests, `request_config` (without a seed) and responses are forms of `utils.server.protocol`. Request `i`
        samples with `seed + i`. One that failed alone has `error` in its `rollout_infos` and no tokens (CON-3).
        `pop_calls` returns a record of each call, with `labels` in it. Threads may call side by side. With
        `in_small_rounds`, a list longer than `chunk` goes in small rounds side by side, to refill free slots at once.

        Raises:
            ServerGone: no good response on `/health/` for `timeout_s`, or another process responds.
            RolloutError: a refused path, too many failed requests, or a server that rejects the token.
        """
        assert self.world_sizes, "wait_ready first"
        job = InferJob(infer_requests, request_config, seed, labels or {}, [None] * len(infer_requests))
        size = small_round(*self.sizes) if in_small_rounds and len(infer_requests) > self.chunk else self.chunk
        parts = [Round(self, job, numbers) for numbers in rounds(len(infer_requests), size)]
        if size == self.chunk:
            for part in parts:
                part.run()
        else:
            with ThreadPoolExecutor(self.chunk // size) as pool:
                list(pool.map(Round.run, parts))  # after a failure no further one begins
        return job.outputs

    def count_request(self, error: str | None) -> None:
        """Count a request that ended well, or by `error`. Raises: RolloutError if too many of the last ones failed."""
        with self._lock:
            self._failed.append(error is not None)
            num_failed = sum(self._failed)
        window = self._failed.maxlen
        if error is not None and num_failed > self.max_failed_fraction * window + 1e-9:
            raise RolloutError(
                f"{num_failed} of the last {window} requests failed, more than custom.extra.rollout_matching."
                f"max_failed_fraction={self.max_failed_fraction:g} allows; last: {error}"
            )

    def pop_calls(self) -> list[dict[str, Any]]:
        """Return the records of all `/infer/` calls since the last `pop_calls`: server, seed, outcome, ... (LOG-1)."""
        return [self.calls.popleft() for _ in range(len(self.calls))]
