"""Health and load of the rollout servers, watched from a thread while the learner waits for them (LOG-6)."""

import logging
import threading
from typing import Any

from utils.rollout.client import RolloutClient

logger = logging.getLogger(__name__)


class ServerWatch:
    """Thread that polls `server_scalars` every `period_s`, where servers generate and this is rank 0 (`enabled`).

    Requests run only while the learner waits for their responses, so polling between two steps would always find idle
    servers; and a server that hangs must not hold up the step.
    """

    def __init__(self, client: RolloutClient | None, enabled: bool, period_s: float = 2.0) -> None:
        self._client = client
        self._period_s = period_s
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._worst: dict[str, float] = {}
        if client is not None and enabled:
            threading.Thread(target=self._run, name="server-watch", daemon=True).start()

    def pop_metrics(self) -> dict[str, float]:
        """The largest value of each scalar (of `healthy` the smallest) since the last call; empty if there is none."""
        with self._lock:
            values, self._worst = self._worst, {}
        return values

    def close(self) -> None:
        """Stop polling, without waiting for a poll that is under way."""
        self._closed.set()

    def _run(self) -> None:
        while not self._closed.is_set():
            values = server_scalars(self._client)
            with self._lock:
                for name, value in values.items():
                    worse = min if name.endswith("/healthy") else max
                    self._worst[name] = worse(value, self._worst.get(name, value))
            self._closed.wait(self._period_s)


def server_scalars(client: RolloutClient, timeout_s: float = 2.0) -> dict[str, float]:
    """Health and load of each server, as scalars `server/<index>/...`; never raises.

    `healthy` (0 or 1), `health_latency_s`, `running` and `waiting` requests, `cache_usage` (used fraction of the KV
    cache, mean over replicas), `device_memory_gib` (all its devices); of device I `device_I/memory_gib` and, where the
    driver tells it, `device_I/utilization` (0 to 1). A server that does not answer has `healthy` only.
    """
    values: dict[str, float] = {}
    for index in range(len(client.servers)):
        try:
            state = _server_state(client.health(index, timeout_s), client.metrics(index))
        except Exception as error:  # noqa: BLE001  (only recorded here; a rollout that needs the server raises)
            logger.debug("server %d could not be polled: %s", index, error)
            state = {"healthy": 0.0}
        values |= {f"server/{index}/{name}": float(value) for name, value in state.items()}
    return values


def _server_state(health: dict[str, Any], metrics: dict[str, float]) -> dict[str, float]:
    state = {
        "healthy": 1.0,
        "health_latency_s": health["latency_s"],
        "running": metrics.get("vllm:num_requests_running", health.get("running", 0)),
        # requests held back by a weight update, and those in vLLM's own queue
        "waiting": health.get("waiting", 0) + metrics.get("vllm:num_requests_waiting", 0),
    }
    if "vllm:kv_cache_usage_perc" in metrics:
        num_replicas = max(metrics.get("vllm:cache_config_info", 1), 1)  # a gauge of 1 per replica; the client adds up
        state["cache_usage"] = metrics["vllm:kv_cache_usage_perc"] / num_replicas
    for series, value in metrics.items():  # of each worker, and summed over all of them
        name, _, device = series.removesuffix('"}').partition('{worker="')
        if name == "rollout_server_device_memory_bytes":
            state[f"device_{device}/memory_gib" if device else "device_memory_gib"] = value / 2**30
        elif name == "rollout_server_device_utilization" and device:
            state[f"device_{device}/utilization"] = value
    return state
