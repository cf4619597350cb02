"""Scalars of healthy, hanging and dead servers through a real client; what the watch sees between two steps."""

import time

import pytest

from tests.rollout import test_client as test_rollout_client
from tests.rollout.test_client import setting
from utils.run.server_watch import ServerWatch, server_scalars

VLLM_METRICS = b"""# HELP vllm:num_requests_running of an engine
vllm:num_requests_running{engine="0",model_name="a b"} 3.0
vllm:num_requests_running{engine="1",model_name="a b"} 4.0
vllm:num_requests_waiting{engine="0"} 5.0
vllm:kv_cache_usage_perc{engine="0"} 0.2
vllm:kv_cache_usage_perc{engine="1"} 0.4
vllm:cache_config_info{engine="0",block_size="16"} 1.0
vllm:cache_config_info{engine="1",block_size="16"} 1.0
rollout_server_device_memory_bytes{worker="0"} 1.073741824e+09
rollout_server_device_memory_bytes{worker="1"} 2.147483648e+09
rollout_server_device_utilization{worker="1"} 0.75
"""


def test_log_6_health_load_cache_and_memory_of_every_server(monkeypatch):
    """LOG-6: cache use is the mean over replicas, memory by device and in all; a dead server hides no other."""
    monkeypatch.setattr(test_rollout_client, "METRICS", VLLM_METRICS)
    with setting(1, 1) as (client, (one, two)):
        one.on_health = lambda: (200, one.health(running=7, waiting=2))
        two.on_health = lambda: (503, {"status": "dead"})
        values = server_scalars(client)
        assert 0 < values.pop("server/0/health_latency_s") < 1
        assert values.pop("server/0/cache_usage") == pytest.approx(0.3)
        expected = {"healthy": 1, "running": 7, "waiting": 7, "device_memory_gib": 3}
        expected |= {"device_0/memory_gib": 1, "device_1/memory_gib": 2, "device_1/utilization": 0.75}
        assert values == {f"server/0/{name}": value for name, value in expected.items()} | {"server/1/healthy": 0}


def test_log_6_a_server_that_reports_little_or_hangs_is_no_error():
    """LOG-6: with a short time-out, and without vLLM's metrics."""
    with setting(1, 1) as (client, (one, two)):
        two.on_health = two.hang
        start = time.monotonic()
        values = server_scalars(client, timeout_s=0.2)
        assert time.monotonic() - start < 3
        assert values["server/0/running"] == 0 and values["server/1/healthy"] == 0
        assert "server/0/cache_usage" not in values


def test_log_6_the_watch_sees_what_runs_between_two_steps():
    """LOG-6: the largest load since the last call, though the server is idle again by then; other ranks do not poll."""
    with setting(1) as (client, (server,)):
        load = [3, 9, 1]
        server.on_health = lambda: (200, server.health(running=load.pop(0) if load else 0))
        watch = ServerWatch(client, enabled=True, period_s=0.02)
        deadline = time.monotonic() + 10
        while load and time.monotonic() < deadline:
            time.sleep(0.02)
        time.sleep(0.2)
        values = watch.pop_metrics()
        assert values["server/0/running"] == 9 and values["server/0/healthy"] == 1
        server.on_health = lambda: (500, {})
        time.sleep(0.3)
        assert watch.pop_metrics()["server/0/healthy"] == 0
        watch.close()
        time.sleep(0.3)
        watch.pop_metrics()
        assert watch.pop_metrics() == {}
        num_polls = len(server.paths)
        idle = ServerWatch(client, enabled=False)
        time.sleep(0.1)
        assert (
            idle.pop_metrics() == ServerWatch(None, enabled=True).pop_metrics() == {} and len(server.paths) == num_polls
        )
