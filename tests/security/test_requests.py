"""SRV-10: what is the caller's mistake is answered with a 4xx, or fails alone; its neighbours are answered."""

import asyncio
import math
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

import jinja2  # noqa: E402
from fastapi.testclient import TestClient  # noqa: E402

from tests.server.test_engine import INIT, START, UPDATE, FakeLLM, FakeTokenizer, make  # noqa: E402
from utils.server.app import MAX_BODY_BYTES, make_app  # noqa: E402

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


@pytest.mark.parametrize("offset", [2**16 + 1, 2**63 - 1, 2**70, int("9" * 4300)])
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
    ("length", "status"), [(b"0" * 4500 + b"2", 200), (b"9" * 4501, 413), (b"%d" % (MAX_BODY_BYTES + 1), 413)]
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
