"""SRV-10: what a body may cost. Real front, real tokenizer, in a process of its own; the engine answers at once."""

import asyncio
import base64
import contextlib
import gc
import io
import json
import os
import random
import struct
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import httpx
import psutil
import pytest
import requests
from fastapi import HTTPException
from PIL import Image
from pydantic import ValidationError

from tests.e2e.processes import free_port
from tests.server.test_images import png_with_text, tiff_of_strips
from utils.server import app, protocol
from utils.server.engine import BadCall

MAX_MODEL_LEN = 512  # of the fake engine
HELLO = {"messages": [{"role": "user", "content": "hello"}]}


class Server:
    """`processes`: the front and, where they are processes of their own, all of its engines."""

    def __init__(self, url: str, pid: int) -> None:
        self.url, front = url, psutil.Process(pid)
        self.processes = [front, *front.children(recursive=True)]

    def memory(self) -> int:
        return sum(process.memory_info().rss for process in self.processes)

    def post(self, path: str, body: bytes) -> requests.Response:
        return requests.post(self.url + path, body, headers={"content-type": "application/json"}, timeout=120)

    def answer(self) -> str:
        greedy = {"temperature": 0.0, "max_tokens": 16}
        found = self.post("/infer/", call(HELLO, request_config=greedy)).json()
        return found[0]["response"]["choices"][0]["message"]["content"]

    @contextlib.contextmanager
    def watched(self) -> Iterator[dict[str, float]]:
        """Yields the longest wait for `/health/` in seconds, and the growth of the processes in bytes, meanwhile."""
        seen, over, before = {"wait": 0.0, "growth": 0.0}, threading.Event(), self.memory()

        def weigh() -> None:
            while not over.wait(0.01):
                seen["growth"] = max(seen["growth"], self.memory() - before)

        def ask() -> None:
            with requests.Session() as session:
                while not over.wait(0.02):
                    began = time.monotonic()
                    assert session.get(self.url + "/health/", timeout=120).status_code == 200
                    seen["wait"] = max(seen["wait"], time.monotonic() - began)

        threads = [threading.Thread(target=work) for work in (weigh, ask)]
        for thread in threads:
            thread.start()
        try:
            yield seen
        finally:
            over.set()
            for thread in threads:
                thread.join()


@pytest.fixture(scope="module")
def server(start_model) -> Iterator[Server]:
    port = free_port()
    command = [sys.executable, "-m", "tests.security.bounded_server", str(port), str(start_model)]
    environment = {**os.environ, "PYTHONHASHSEED": "0"}
    process = subprocess.Popen(command, env=environment, cwd=Path(__file__).parents[2])
    try:
        found = Server(f"http://127.0.0.1:{port}", process.pid)
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and process.poll() is None:
            with contextlib.suppress(requests.ConnectionError):
                if requests.get(found.url + "/health/", timeout=5).status_code == 200:
                    break
            time.sleep(0.2)
        found.answer()
        yield found
    finally:
        process.kill()
        process.wait()


def png(side: int) -> str:
    """A grey picture of so many pixels squared, which compresses to almost nothing."""
    rows, pack = zlib.compressobj(), bytearray()
    for _ in range(side):
        pack += rows.compress(b"\0" * (side + 1))
    pack += rows.flush()
    header = b"IHDR" + struct.pack(">IIBBBBB", side, side, 8, 0, 0, 0, 0)
    parts = [header, b"IDAT" + bytes(pack), b"IEND"]
    data = b"".join(struct.pack(">I", len(part) - 4) + part + struct.pack(">I", zlib.crc32(part)) for part in parts)
    return "data:image/png;base64," + base64.b64encode(b"\x89PNG\r\n\x1a\n" + data).decode()


def call(*asked: dict, **more) -> bytes:
    return json.dumps({"infer_requests": list(asked)} | more).encode()


def text(content: str) -> dict:
    return {"messages": [{"role": "user", "content": content}]}


def pictures(number: int, side: int) -> dict:
    return showing(*[png(side)] * number)


def showing(*images: str) -> dict:
    return {"messages": [{"role": "user", "content": "<image>" * len(images)}], "images": list(images)}


ROWS = {
    "a million numbers as requests": (lambda: call(*[3] * 10**6), "at most 524288 values"),
    "four hundred thousand numbers as requests": (lambda: call(*[3] * 400_000), "valid dictionary"),
    "a hundred thousand unknown fields": (lambda: call(HELLO | {f"x{i}": 0 for i in range(100_000)}), "fields"),
    "a hundred thousand unknown fields of the call": (lambda: call(**{f"x{i}": 0 for i in range(10**5)}), "fields"),
    "two million empty lists": (lambda: call(HELLO | {"data_dict": {"a": [[]] * 2_000_000}}), "values"),
    "six texts of a megabyte": (lambda: call(*[text("a b c, " * 140_000)] * 6), "more than 512 tokens"),
    "six texts of eight megabytes": (lambda: call(*[text("a b c, " * 1_140_000)] * 6), "more than 512 tokens"),
    "a word of eight megabytes": (lambda: call(text("a" * 8_000_000)), "more than 512 tokens"),
    "a text of nine megabytes": (lambda: call(text("a" * 9_000_000)), "characters; at most 8388608"),
    "a million image markers": (lambda: call(text("<image>" * 1_000_000)), "at most 256 images"),
    "a picture of 64 Mi pixels": (lambda: call(pictures(1, 8192)), "at most 16777216 pixels"),
    "six pictures of 64 Mi pixels": (lambda: call(*[pictures(1, 8192)] * 6), "at most 16777216 pixels"),
    "eight pictures of 16 Mi pixels": (lambda: call(pictures(8, 4096)), "at most 16777216 pixels"),
    "a picture of 2.9 million strips": (lambda: call(showing(tiff_of_strips(2_900_000))), "2900000 strips or tiles"),
    "a hundred thousand stop strings": (
        lambda: call(*[HELLO] * 8, request_config={"stop": [f"stop {i}" for i in range(100_000)]}),
        "at most 16 items",
    ),
    "a text of quotes that does not end": (lambda: b"," * 600_000 + b'"' + b'\\"' * 50_000, "at most 524288 values"),
    "deep lists": (lambda: b'{"infer_requests": ' + b"[" * 200_000 + b"]" * 200_000 + b"}", "recursion limit"),
    "a number of a million digits": (lambda: b'{"infer_requests": ' + b"9" * 10**6 + b"}", "out of range"),
}


@pytest.mark.parametrize("row", ROWS)
def test_a_small_body_costs_little_and_names_its_limit_SRV_10(server, row):
    make, words = ROWS[row]
    body = make()
    with server.watched() as seen:
        answer = server.post("/infer/", body)
    assert 400 <= answer.status_code < 500 and words in answer.text, answer.text[:500]
    assert len(answer.content) < 20_000
    assert seen["wait"] < 3.0 and seen["growth"] < 300 << 20, seen


def test_texts_in_pictures_cost_little_SRV_10(server):
    """SRV-10: 86 KiB of a PNG unpack to 63 MiB of text."""
    with server.watched() as seen:
        outputs = server.post("/infer/", call(*[showing(png_with_text(63))] * 12)).json()
    assert all("Too much memory used in text chunks" in output["rollout_infos"]["error"] for output in outputs)
    assert seen["wait"] < 3.0 and seen["growth"] < 300 << 20, seen


def test_a_picture_with_transparency_costs_no_more_than_a_call_may_SRV_10(server):
    """SRV-10: the largest picture that is allowed, in the form that takes most: 40 KiB of a request."""
    buffer = io.BytesIO()
    Image.new("RGBA", (4096, 4096), (9, 8, 7, 100)).save(buffer, "WEBP")
    picture = "data:image/webp;base64," + base64.b64encode(buffer.getvalue()).decode()
    with server.watched() as seen:
        answer = server.post("/infer/", call(showing(picture)))
    assert answer.status_code == 200 and seen["growth"] < 300 << 20, (answer.text[:500], seen)


def test_a_request_that_is_too_large_fails_alone_SRV_10(server):
    outputs = server.post("/infer/", call(HELLO, text("a b c, " * 140_000), pictures(1, 8192), HELLO)).json()
    infos = [output["rollout_infos"] for output in outputs]
    assert ["too_large" in info for info in infos] == [False, True, True, False]
    assert "max_image_pixels" in infos[2]["error"]


def test_the_images_of_a_call_have_a_limit_together_SRV_10(server):
    """17 times 16 Mi: the request that would go beyond 16 times is not decoded."""
    with server.watched() as seen:
        outputs = server.post("/infer/", call(*[pictures(1, 4096)] * 17)).json()
    assert sum("too_large" in output["rollout_infos"] for output in outputs) == 1
    assert seen["wait"] < 3.0


OPENING = {"master_address": "x", "master_port": 1, "world_size": 2, "bucket_bytes": 1, "timeout_s": 1.0}
OPENING |= {"run_id": "a", "open_timeout_s": 1.0}
TENSOR = {"run_id": "a", "names": ["w"], "dtype_names": ["float32"], "shapes": [[2]]}


@pytest.mark.parametrize(
    ("model", "fields", "wrong"),
    [
        (protocol.StartWeightUpdate, {"run_id": "a", "version": "v"}, {"run_id": "a\nFAKE: ready"}),
        (protocol.StartWeightUpdate, {"run_id": "a", "version": "v"}, {"version": "a" * 10**6}),
        (protocol.InitCommunicator, OPENING, {"master_address": "x" * 10**6}),
        (protocol.InitCommunicator, OPENING, {"world_size": 2**70 + 1}),
        (protocol.InitCommunicator, OPENING, {"open_timeout_s": 600.1}),
        (protocol.InitCommunicator, OPENING, {"rank_offset": 2**63 - 1}),
        (protocol.UpdateWeights, TENSOR, {"shapes": [[2**70]]}),
        (protocol.UpdateWeights, TENSOR, {"shapes": [[1] * 9]}),
        (protocol.UpdateWeights, TENSOR, {"names": ["w\x1b[2K"]}),
    ],
)
def test_names_and_numbers_of_weight_calls_have_bounds_SRV_10(model, fields, wrong):
    model(**fields)
    with pytest.raises(ValidationError) as error:
        model(**fields | wrong)
    assert error.value.errors()[0]["loc"][0] in wrong


def test_a_refused_field_is_not_repeated_SRV_10(server):
    answer = server.post("/init_communicator/", json.dumps(OPENING | {"a" * 10**6: 1}).encode())
    assert answer.status_code == 422 and len(answer.content) < 5000


def test_commas_in_texts_are_no_values_SRV_10():
    body = json.dumps({"a": ['\\", [{' * 10**6, 1, 2]}).encode()
    assert app.num_values(body) > app.MAX_VALUES
    assert app.parse_json(body)["a"][1:] == [1, 2]


@pytest.mark.parametrize("value", ['"",', '"\\\\",', '"\\"",'])
def test_texts_are_counted_before_they_are_looked_through_SRV_10(value, monkeypatch):
    """SRV-10: 32 MiB of empty texts took 4 s, in which nothing else ran."""
    monkeypatch.setattr(app, "_STRING", None)
    with pytest.raises(HTTPException, match="at most 524288 values"):
        app.parse_json(b'{"a": [' + value.encode() * 2_200_000 + b"0]}")


def test_as_many_texts_as_values_are_allowed_SRV_10():
    body = json.dumps({f"{i}": f"{i}" for i in range(app.MAX_VALUES)}).encode()
    assert len(app.parse_json(body)) == app.MAX_VALUES


def test_large_answers_are_written_beside_the_loop_SRV_10():
    """SRV-10: two hundred answers of a thousand tokens, with log-probabilities, that end at once."""
    from tests.server.test_engine import ask, make
    from utils.server.protocol import RequestConfig

    llm, engine, updates = make()
    over = asyncio.Event()

    async def generate(prompt, *args, **kwargs):
        await over.wait()
        step = {7: SimpleNamespace(logprob=-1 / 3, decoded_token="x")}
        output = SimpleNamespace(token_ids=[7] * 1000, text="text", logprobs=[step] * 1000, weight_versions=[])
        output.finish_reason, output.stop_reason = "length", None
        yield SimpleNamespace(prompt_token_ids=prompt["prompt_token_ids"], outputs=[output])

    llm.generate = generate
    body = call(*[HELLO] * 200, request_config={"logprobs": True})

    async def run():
        transport = httpx.ASGITransport(app.make_app(engine, updates, None))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=120) as client:
            headers = {"content-type": "application/json"}
            for _ in range(10):  # on a machine that has other work a wait may be the scheduler's
                over.clear()
                answering = asyncio.create_task(client.post("/infer/", content=body, headers=headers))
                while sum(engine.num_running) < 200:
                    await asyncio.sleep(0.01)
                gc.freeze()  # of this process, not the server's
                start, longest = time.monotonic(), 0.0
                over.set()
                while not answering.done():
                    began = time.monotonic()
                    await asyncio.sleep(0.01)
                    longest = max(longest, time.monotonic() - began)
                part = longest / (time.monotonic() - start)
                if part < 1 / 3:
                    break
            return part, answering.result(), await engine.infer(ask("hello"), RequestConfig(logprobs=True))

    part, answer, expected = asyncio.run(run())
    assert part < 1 / 3 and answer.headers["content-type"] == "application/json"
    found, expected = answer.json(), expected[0].model_dump(mode="json")
    for output in (*found, expected):
        assert output["response"].pop("id") and output["response"].pop("created")
    assert found == [expected] * 200


def test_the_logprobs_of_a_call_have_a_bound_SRV_10():
    """SRV-10: 512 positions of the model, unless the call allows fewer tokens. The client splits what is refused."""
    from tests.server.test_engine import ask, make
    from utils.server.protocol import RequestConfig

    _, engine, _ = make()
    many, limits = {"logprobs": True, "top_logprobs": 20}, [{}, {"max_tokens": 10**6}]
    for limit in limits:
        with pytest.raises(
            BadCall, match=r"103 requests x max_tokens x \(1 \+ top_logprobs\) is at most 1048576; send"
        ):
            asyncio.run(engine.infer(ask(*["bad"] * 103), RequestConfig(**many | limit)))
    for config in (many | {"max_tokens": 484}, {"logprobs": True}, many | {"logprobs": False}):
        assert len(asyncio.run(engine.infer(ask(*["bad"] * 103), RequestConfig(**config)))) == 103
    with pytest.raises(BadCall, match="2049 requests"):
        asyncio.run(engine.infer(ask(*["bad"] * 2049), RequestConfig(logprobs=True)))


def test_one_large_body_is_parsed_at_a_time_SRV_10(monkeypatch):
    """Small ones do not wait for it."""
    from tests.server.test_engine import make

    parsing, most, small = [], [], []

    def parse(body):
        if len(body) < app.LARGE_BODY_BYTES:
            small.append(len(parsing))
        else:
            parsing.append(body)
            time.sleep(0.3)
            most.append(len(parsing))
            parsing.remove(body)
        return {"infer_requests": []}

    num_at_once = app._StrictRequest._one_large_body._value  # a semaphore belongs to the loop that first waited for it
    monkeypatch.setattr(app._StrictRequest, "_one_large_body", asyncio.Semaphore(num_at_once))
    monkeypatch.setattr(app, "parse_json", parse)
    _, engine, updates = make()

    async def run():
        transport = httpx.ASGITransport(app.make_app(engine, updates, None))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            headers = {"content-type": "application/json"}
            large = [client.post("/infer/", content=b"x" * (1 << 20), headers=headers) for _ in range(3)]
            calls = asyncio.gather(*large)
            while not parsing:
                await asyncio.sleep(0.01)
            await client.post("/infer/", content=b"x", headers=headers)
            return await calls

    assert {answer.status_code for answer in asyncio.run(run())} == {200}
    assert most == [1, 1, 1] and small == [1]


# ---- 2,000 bodies that somebody could send -------------------------------------------------------------------------

PATHS = ["/infer/"] * 8 + ["/probe/", "/teacher/"]
PATHS += [
    f"/{name}/" for name in ("init_communicator", "start_weight_update", "update_weights", "finish_weight_update")
]
KEYS = ["messages", "images", "uuid", "data_dict", "audios", "tools", "role", "content", "type", "text", "image", "x"]
KEYS += [
    "image_url",
    "stop",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "seed",
    "max_tokens",
    "logprobs",
    "top_logprobs",
]
ODD = [None, True, 0, -1, 1, 3, 2**31, 2**63, 2**70, -0.0, 1e308, 1e-300, 0.5, "", "user", "assistant", "\n", "\x00"]
ODD += [
    "<image>",
    "<|im_end|>",
    "<|image_pad|>",
    "é日本🙂",
    "a" * 5000,
    "data:image/png;base64,AAAA",
    "/etc/passwd",
    "http://x",
]


def value(draw: random.Random, depth: int = 0):
    kind = draw.random()
    if kind < 0.55 or depth > 3:
        return draw.choice(ODD)
    if kind < 0.8:
        return {draw.choice(KEYS): value(draw, depth + 1) for _ in range(draw.randrange(4))}
    return [value(draw, depth + 1) for _ in range(draw.randrange(4))]


def hostile(draw: random.Random) -> tuple[str, bytes]:
    """A body that is right but for a few places, or bytes that are no body at all."""
    path = draw.choice(PATHS)
    asked = [text(str(draw.choice(ODD))) for _ in range(draw.randrange(1, 4))]
    config = {draw.choice(KEYS[12:]): draw.choice(ODD) for _ in range(draw.randrange(3))}
    body = {"infer_requests": asked, "request_config": config}
    if path in ("/probe/", "/teacher/"):
        body = {"infer_request": asked[0], "token_ids": [draw.randrange(-1, 2000) for _ in range(3)]}
    elif path != "/infer/":
        body = {"run_id": "r", "version": "v", "names": ["w"], "dtype_names": ["float32"], "shapes": [[1]]}
    messages = [request["messages"][0] for request in asked]
    for _ in range(draw.randrange(3)):
        place = draw.choice([body, *asked, *messages])
        place[draw.choice([*place, draw.choice(KEYS)])] = value(draw)
    data = json.dumps(body).encode()
    if draw.random() < 0.1:
        at = draw.randrange(len(data))
        data = data[:at] + draw.randbytes(draw.randrange(4)) + data[at + draw.randrange(3) :]
    return path, data


def test_two_thousand_bodies_leave_no_trace_SRV_10(server):
    """No 5xx, no growth, the same answer afterwards."""
    draw, before = random.Random(0), server.answer()
    statuses: dict[int, int] = {}
    for number in range(2000):
        if number == 500:
            grown = server.memory()
        path, body = hostile(draw)
        answer = server.post(path, body)
        assert answer.status_code < 500, (path, body[:2000], answer.text[:500])
        statuses[answer.status_code] = statuses.get(answer.status_code, 0) + 1
    assert statuses[200] > 100 and statuses[422] > 500, statuses
    assert server.memory() - grown < 30 << 20
    assert server.answer() == before
