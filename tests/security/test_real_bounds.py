"""SRV-10 with a real vLLM server: what a body may cost the front and the engines together."""

from collections.abc import Iterator

import pytest

from tests.e2e import processes
from tests.security.test_bounds import ROWS, Server


@pytest.fixture
def server(tmp_path, start_model) -> Iterator[Server]:
    real = processes.Server(tmp_path, start_model)
    try:
        real.wait_ready()
        yield Server(real.url, real.process.pid)
    finally:
        real.end()


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_small_body_costs_a_real_server_little_SRV_10(server):
    """SRV-10: all rows one after the other; the greedy answer stays what it was, and the memory does not add up."""
    answer, memory = server.answer(), server.memory()
    assert len(server.processes) > 1 and answer
    for row, (make, words) in ROWS.items():
        body = make()
        with server.watched() as seen:
            refused = server.post("/infer/", body)
        print(f"{row}: {refused.status_code}, /health/ {seen['wait']:.2f} s, {seen['growth'] / 2**20:.0f} MiB")
        assert 400 <= refused.status_code < 500 and words in refused.text, (row, refused.text[:500])
        assert seen["wait"] < 1.0 and seen["growth"] < 300 << 20, (row, seen)
    assert server.memory() - memory < 300 << 20
    assert server.answer() == answer
