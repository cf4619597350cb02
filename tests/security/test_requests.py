"""SRV-10, SRV-11: what is the caller's mistake is answered with a 4xx, or fails alone; its neighbours are answered, and
nothing it says forges a line of the log."""

import asyncio
import hmac
import io
import logging
import math
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

import jinja2  # noqa: E402
from fastapi.testclient import TestClient  # noqa: E402

from tests.server.test_engine import FINISH, INIT, START, UPDATE, FakeLLM, FakeTokenizer, make  # noqa: E402
from utils.server.app import MAX_BODY_BYTES, make_app  # noqa: E402
from utils.server.engine import UpdateFailed  # noqa: E402
from utils.server.process import escape_logs  # noqa: E402

ROOT = Path(__file__).parents[2]

TEMPLATE = """{% for m in messages %}
{%- if m.content == 'refused' %}{{ raise_exception('no such ' + 'x' * 9999) }}{% endif -%}
{{ m.role + m.content }}{% endfor %}"""  # of a model without images: a list of parts is a TypeError


class TemplateTokenizer(FakeTokenizer):
    def apply_chat_template(self, messages, **_):
        def raise_exception(reason):
            raise jinja2.TemplateError(reason)

        return jinja2.Template(TEMPLATE).render(messages=messages, raise_exception=raise_exception)


def ask(content, **fields) -> dict:
    return {"messages": [{"role": "user", "content": content}], **fields}


def client_of(engine, updates) -> TestClient:
    return TestClient(make_app(engine, updates, None), raise_server_exceptions=False)


def test_a_chat_template_that_raises_fails_its_own_request_SRV_10():
    _, engine, updates = make()
    engine.processor = TemplateTokenizer()
    client = client_of(engine, updates)
    requests = [ask("a"), ask("refused"), ask("b", images=["/nowhere.png"]), ask("c")]
    answer = client.post("/infer/", json={"infer_requests": requests})
    assert answer.status_code == 200, answer.text
    errors = [output["rollout_infos"].get("error") for output in answer.json()]
    assert errors[0] is errors[3] is None
    assert "no such xxx" in errors[1] and len(errors[1]) < 300
    assert "does not take these messages" in errors[2] and "str" in errors[2]
    for request in requests[1:3]:
        answer = client.post("/probe/", json={"infer_request": request})
        assert answer.status_code == 422 and "does not take these messages" in answer.text


class FakeLLMWithLogprobs(FakeLLM):
    """Gives each token the log-probability that the prompt's only token id chooses, and a token that was ruled out."""

    chosen = [-0.5, -math.inf, math.nan]

    async def generate(self, prompt, *args, **kwargs):
        logprob = self.chosen[prompt["prompt_token_ids"][0] - 1]  # FakeTokenizer's ids are lengths of text
        async for output in super().generate(prompt, *args, **kwargs):
            entries = {t: SimpleNamespace(logprob=logprob, decoded_token=str(t)) for t in (7, 8, 2)}
            entries[9] = SimpleNamespace(logprob=-math.inf, decoded_token="9")
            output.outputs[0].logprobs = [entries] * 3
            yield output


def test_a_logprob_that_is_no_json_fails_its_own_request_SRV_10():
    _, engine, updates = make()
    engine.llm.__class__ = FakeLLMWithLogprobs
    body = {"infer_requests": [ask("x" * n) for n in (1, 2, 3)], "request_config": {"logprobs": True}}
    answer = client_of(engine, updates).post("/infer/", json=body)
    assert answer.status_code == 200, answer.text
    good, *bad = answer.json()
    assert good["rollout_logprobs"] == [[-0.5, -0.5]] and good["rollout_infos"]["stop_logprob"] == -0.5
    top = [position["top_logprobs"] for position in good["response"]["choices"][0]["logprobs"]["content"]]
    assert [[entry["token_id"] for entry in own] for own in top] == [[7, 8, 2]] * 2  # without token 9
    assert ["not finite" in output["rollout_infos"]["error"] for output in bad] == [True, True]


@pytest.mark.parametrize("offset", [2**16 + 1, 2**63 - 1, 2**70, int("9" * 4300)], ids=["16", "63", "70", "4300"])
def test_ranks_that_nobody_has_are_refused_and_the_server_stays_free_SRV_10(offset):
    """The last has as many digits as Python reads, and its successor more than Python prints."""
    llm, engine, updates = make()
    client = client_of(engine, updates)
    body = INIT.model_dump() | {"rank_offset": offset, "world_size": 2}
    if offset < 2**71:
        body["world_size"] = offset + 2
    answer = client.post("/init_communicator/", json=body)
    assert answer.status_code == 422 and "rank_offset" in answer.text and len(answer.text) < 300
    assert updates.owner is None and not llm.log and client.get("/health/").json()["owner"] is None


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"shapes": [[2**70]]}, "shapes"),
        ({"shapes": [[2**63]]}, "shapes"),
        ({"shapes": [[-1]]}, "shapes"),
        ({"shapes": [[2**20] * 3]}, "shapes"),
        ({"names": ["v", "w"], "dtype_names": ["uint8"] * 2, "shapes": [[2**49], [2**49 + 1]]}, "shapes"),
        ({"dtype_names": ["save"]}, "dtype_names"),
    ],
)
def test_tensors_that_cannot_exist_are_refused_and_the_update_goes_on_SRV_10(change, named):
    llm, engine, updates = make()
    client = client_of(engine, updates)
    headers = {"Run-Token": client.post("/init_communicator/", json=INIT.model_dump()).json()["run_token"]}
    assert client.post("/start_weight_update/", json=START.model_dump(), headers=headers).status_code == 200
    answer = client.post("/update_weights/", json=UPDATE.model_dump() | change, headers=headers)
    assert answer.status_code == 422 and named in answer.text and len(answer.text) < 300
    assert engine.weights.state == "updating" and not any(step.startswith("update@") for step in llm.log)
    assert client.post("/update_weights/", json=UPDATE.model_dump(), headers=headers).status_code == 200


@pytest.mark.parametrize(
    ("length", "status"),
    [(b"0" * 4500 + b"2", 200), (b"9" * 4501, 413), (b"0" * 4492 + b"%d" % (MAX_BODY_BYTES + 1), 413)],
    ids=["two", "huge", "too much"],
)
def test_a_length_of_4501_digits_is_a_length_SRV_10(length, status):
    """Sent past the HTTP parser, which refuses more than 20 digits itself."""
    _, engine, updates = make()
    app = make_app(engine, updates, None)
    body = b'{"infer_requests": []}'
    headers = [(b"content-type", b"application/json"), (b"content-length", length), (b"host", b"localhost")]
    scope = {"type": "http", "http_version": "1.1", "method": "POST", "path": "/infer/", "raw_path": b"/infer/"}
    scope |= {"headers": headers, "query_string": b"", "scheme": "http", "root_path": "", "server": ("localhost", 1)}
    sent = []

    async def receive():
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message):
        sent.append(message)

    asyncio.run(app(scope, receive, send))
    assert sent[0]["status"] == status


def test_finish_fits_its_start_and_something_was_sent_SRV_10():
    """SRV-10, SYN-8: old weights get no new name, and new ones no other than was announced; the update goes on."""
    llm, engine, updates = make()
    client = client_of(engine, updates)
    headers = {"Run-Token": client.post("/init_communicator/", json=INIT.model_dump()).json()["run_token"]}

    def post(step, call, **change):
        answer = client.post(f"/{step}/", json=call.model_dump() | change, headers=headers)
        return answer.status_code, answer.text

    for version in ("a:1", "a:2"):  # what an earlier update received or was named does not count
        assert post("start_weight_update", START, version=version)[0] == 200
        status, text = post("finish_weight_update", FINISH, version=version)
        assert status == 409 and "no tensor was sent" in text
        assert post("update_weights", UPDATE)[0] == 200
        status, text = post("finish_weight_update", FINISH, version="a:999")
        assert status == 409 and "another version" in text
        assert engine.weights.state == "updating" and not any("finish" in step for step in llm.log)
        assert post("finish_weight_update", FINISH, version=version)[0] == 200
        assert client.get("/weight_version/").json()["weight_version"] == version
        llm.log.clear()


def test_tokens_are_compared_in_constant_time_SRV_3(monkeypatch):
    """SRV-3: both of them; nothing else tells a wrong one from the right one."""
    compared, compare = [], hmac.compare_digest
    monkeypatch.setattr(hmac, "compare_digest", lambda *pair: (compared.append(pair), compare(*pair))[1])
    _, engine, updates = make()
    client = TestClient(make_app(engine, updates, "access"))
    header = {"Authorization": "Bearer access"}
    assert client.get("/health/").status_code == 401 and len(compared) == 1
    assert client.post("/init_communicator/", json=INIT.model_dump(), headers=header).status_code == 200
    compared.clear()
    assert client.post("/reset_prefix_cache/", headers=header | {"Run-Token": "x"}).status_code == 403
    assert len(compared) == 2


FAKE = "x\r\nFAKE: rollout server: ready\x1b[2K\u2028FAKE\x85FAKE\u202e"


@pytest.fixture
def log():
    """What the server's process writes to its log."""
    stream, factory, root = io.StringIO(), logging.getLogRecordFactory(), logging.getLogger()
    handler = logging.StreamHandler(stream)
    root.addHandler(handler)
    escape_logs()
    yield stream
    logging.setLogRecordFactory(factory)
    root.removeHandler(handler)


def assert_is_safe(text: str, num_lines: int | None = None) -> None:
    assert "FAKE" in text and text.replace("\n", "").isprintable(), repr(text)
    assert not any(line.lstrip().startswith("FAKE") for line in text.splitlines())
    assert num_lines in (None, len(text.splitlines()))


def test_nothing_that_a_request_says_forges_a_line_of_the_log_SRV_11(log):
    """What HTTP logs, and what an update does: its names are set past their own form, which may allow less."""
    llm, engine, updates = make()
    client = client_of(engine, updates)
    client.post("/probe/", json={"infer_request": ask("x", images=[f"/{FAKE}"])})
    assert_is_safe(log.getvalue(), num_lines=1)

    async def run():
        await updates.init(INIT.model_copy(update={"run_id": FAKE}))
        llm.failing_step = "start"
        with pytest.raises(UpdateFailed):
            await updates.start(START.model_copy(update={"run_id": FAKE, "version": FAKE}))

    asyncio.run(run())
    assert_is_safe(log.getvalue(), num_lines=2)


def test_a_traceback_keeps_its_lines_and_its_messages_have_one_each_SRV_11(log):
    try:
        try:
            raise KeyError("cause")
        except KeyError as error:
            raise ValueError(FAKE) from error
    except ValueError:
        logging.getLogger("vllm.x").exception("loading %s failed", FAKE)
    text = log.getvalue()
    assert_is_safe(text)
    assert "\nTraceback (most recent call last):\n  File " in text and "\nValueError: x\\r\\nFAKE" in text


@pytest.mark.parametrize(
    "begin",
    [
        "import rollout_server, sys; sys.argv = ['x', '--config', '/nowhere.yaml']\n"
        "try: rollout_server.main()\nexcept SystemExit: pass",
        "import utils.server.process; utils.server.process.begin_as_child()",
    ],
    ids=["front", "child"],
)
def test_every_process_of_the_server_escapes_its_log_SRV_11(begin):
    """The front and those that vLLM spawns, also through vLLM's own loggers, which are set up later."""
    say = f"import logging, vllm.logger; vllm.logger._configure_vllm_root_logger()\nfake = {FAKE!r}\n"
    say += "for name in ('utils.x', 'vllm.x'): logging.getLogger(name).error('told %s', fake)"
    done = subprocess.run(
        [sys.executable, "-c", f"{begin}\n{say}"], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    told = [line for line in (done.stdout + done.stderr).splitlines() if "FAKE" in line]
    assert len(told) == 2 and all("told x\\r\\nFAKE" in line for line in told), done.stderr
