"""What docs/security.md promises of `rollout_server.py` as it is started: that config and token reach what checks them
(SRV-3, SRV-5, SRV-10, SRV-11), and that no log has a token, however much it tells."""

import base64
import contextlib
import io
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
from PIL import Image

pytest.importorskip("vllm")

from tests.e2e.processes import ENVIRONMENT, ROOT, config_of, free_port, write_yaml  # noqa: E402
from tests.security.served import SLOW_PORT  # noqa: E402
from tests.server.test_engine import FINISH, INIT, START, UPDATE  # noqa: E402

TOKEN = "access-s3cret"  # noqa: S105
MAX_PIXELS = 100
OPENING = INIT.model_dump() | {"world_size": 2, "open_timeout_s": 10.0}
UPDATING = {"start_weight_update": START, "update_weights": UPDATE, "finish_weight_update": FINISH}


class Served:
    """The process, what it answered while it loaded, and its log."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.port, self.log, self.loading = free_port(), folder / "log", list[requests.Response]()
        self.url = f"http://127.0.0.1:{self.port}/rollout"
        settings = {"max_image_pixels": MAX_PIXELS, "allowed_image_roots": [str(folder)], "allow_image_urls": True}
        config = write_yaml(folder / "a.yaml", config_of(folder, model, self.url, free_port(), settings))
        command = [sys.executable, "-m", "tests.security.served", "--config", str(config)]
        environment = ENVIRONMENT | {"ROLLOUT_SERVER_TOKEN": TOKEN, "VLLM_LOGGING_LEVEL": "DEBUG"}
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, cwd=ROOT, env=environment)

    def wait_ready(self) -> None:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and self.process.poll() is None:
            with contextlib.suppress(requests.ConnectionError):
                answer = requests.get(f"{self.url}/health/", timeout=10)
                if answer.status_code != 503:
                    return
                self.loading.append(answer)
            time.sleep(0.1)
        raise AssertionError(self.log.read_text()[-4000:])

    def post(self, path: str, body: Any, token: str = TOKEN, timeout: float = 30, **headers: str) -> requests.Response:
        headers |= {"Authorization": f"Bearer {token}"}
        return requests.post(f"{self.url}/{path}/", json=body, headers=headers, timeout=timeout)

    def infer(self, image: str) -> dict[str, Any]:
        """Return the `rollout_infos` of a request with this image, beside one without."""
        asked = [{"messages": [{"role": "user", "content": "x"}], "images": images} for images in ([image], [])]
        answer = self.post("infer", {"infer_requests": asked})
        assert answer.status_code == 200 and "error" not in answer.json()[1]["rollout_infos"], answer.text
        return answer.json()[0]["rollout_infos"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("served")


@pytest.fixture(scope="module")
def served(folder, start_model) -> Iterator[Served]:
    served = Served(folder, start_model)
    try:
        served.wait_ready()
        yield served
    finally:
        served.process.kill()
        served.process.wait()


def png(side: int) -> bytes:
    Image.new("RGB", (side, side)).save(found := io.BytesIO(), "PNG")
    return found.getvalue()


def test_while_loading_it_says_only_that_SRV_6(served):
    """SRV-6, SRV-3: to whoever asks, with or without a token."""
    assert served.loading
    for answer in served.loading:
        assert answer.json() == {"status": "loading", "detail": "the model is being loaded"}
        assert set(answer.headers) == {"Content-Type", "Connection", "Content-Length"}


def test_without_the_token_a_request_is_refused_before_its_body_is_read_SRV_3(served):
    """SRV-3: the token of the environment reaches the front."""
    assert served.post("infer", {"infer_requests": []}).json() == []
    assert served.post("infer", {"infer_requests": []}, token="wrong").status_code == 401
    head = "POST /rollout/infer/ HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000\r\n"
    for line, answer in (("", b" 401 "), (f"Authorization: Bearer {TOKEN}\r\n", b"")):
        with socket.create_connection(("127.0.0.1", served.port), timeout=2) as client:
            client.sendall(f"{head}{line}\r\n".encode())
            with contextlib.suppress(TimeoutError):
                assert answer in client.recv(100) and answer


def test_the_host_of_base_url_is_the_servers_and_no_other_SRV_11(served):
    """SRV-11"""
    body = {"infer_requests": []}
    assert served.post("infer", body, Host=f"localhost:{served.port}").status_code == 200
    for host in ("evil.example", f"evil.example:{served.port}", "localhost.evil.example"):
        assert served.post("infer", body, Host=host).status_code == 421, host


def test_the_limits_of_the_config_reach_the_images_SRV_5_SRV_10(served, folder):
    """SRV-5, SRV-10: `max_image_pixels`, `allowed_image_roots`, `allow_image_urls`; a bad image fails alone."""
    (folder / "small.png").write_bytes(png(10))
    assert "error" not in served.infer(str(folder / "small.png"))
    large = served.infer(base64.b64encode(png(11)).decode())
    assert large["too_large"] and f"at most {MAX_PIXELS} pixels" in large["error"]
    assert served.infer("/etc/hostname")["refused"]
    assert "cannot fetch" in served.infer("http://127.0.0.1:9/a.png")["error"]
    assert "not a readable image" in served.infer(base64.b64encode(png(10)[:40]).decode())["error"]


def test_an_opening_ends_when_its_client_hangs_up_SRV_12(served):
    """SRV-12: the next run gets the server within 5 s; it answers meanwhile."""
    slow = OPENING | {"run_id": "slow", "master_port": SLOW_PORT, "open_timeout_s": 600.0}
    with pytest.raises(requests.ReadTimeout):
        served.post("init_communicator", slow, timeout=0.5)
    assert served.post("infer", {"infer_requests": []}).status_code == 200
    start = time.monotonic()
    opened = served.post("init_communicator", OPENING)
    assert opened.status_code == 200 and time.monotonic() - start < 5, opened.text
    owner = {"Run-Token": opened.json()["run_token"]}
    assert served.post("close_communicator", {"run_id": "a"}, **owner).status_code == 200


def test_no_token_reaches_the_log_or_a_child_SRV_3(served):
    """SRV-3: at the lowest level of all loggers, uvicorn's and vLLM's too; calls that go well, that are refused, and
    one that ends in a traceback. Then SIGTERM."""
    run_token = served.post("init_communicator", OPENING).json()["run_token"]
    owner = {"Run-Token": run_token}
    answers = [served.post("init_communicator", OPENING | {"world_size": 7}, **owner)]
    answers += [served.post(path, UPDATE.model_dump()) for path in UPDATING]  # without the run's token
    answers += [served.post(path, call.model_dump(), **owner) for path, call in UPDATING.items()]
    answers += [served.post("infer", {"infer_requests": 3}), served.post("nowhere", {}), served.post("infer", "{")]
    answers += [served.post("close_communicator", {"run_id": "a"}, **owner), served.post("infer", {}, token=TOKEN[:-1])]
    assert {answer.status_code for answer in answers} >= {200, 401, 403, 404, 422, 500}
    served.process.send_signal(signal.SIGTERM)
    assert served.process.wait(20) == 0
    log = served.log.read_text()
    for told in ("DEBUG:asyncio", "TRACE:", "Traceback", "a fault of the engine", "environment of a child", "stopping"):
        assert told in log, told
    for secret in (TOKEN, run_token):
        assert secret not in log and not any(secret in answer.text for answer in answers)
    assert os.environ["PATH"] in log  # of the child
