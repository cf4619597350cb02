"""SRV-4: the wire types take ms-swift's forms, and refuse by name what would be ignored."""

from dataclasses import asdict, fields

import pytest
from pydantic import ValidationError

from tests import ms_swift
from utils.server.protocol import (
    InferCall,
    InitCommunicator,
    RequestConfig,
    RolloutInferRequest,
    RolloutOutput,
    UpdateWeights,
    collect_images,
)

GOOD_REQUEST = {"messages": [{"role": "user", "content": "<image>hello"}], "images": ["a.png"], "uuid": "x"}


@pytest.fixture(scope="module")
def swift():
    return ms_swift.load().protocol


def test_every_field_of_ms_swifts_requests_arrives_as_it_was_sent(swift):
    """SRV-4: no field of theirs is unknown here, none changes on the way."""
    request = asdict(swift.RolloutInferRequest(**GOOD_REQUEST, data_dict={"solution": 3}))
    config = asdict(swift.RequestConfig(max_tokens=8, temperature=1.0, top_k=-1, top_p=1.0, seed=1))
    body = {"infer_requests": [request], "request_config": config}
    call = InferCall(**body, metrics=None, use_tqdm=False, adapter_request=None)
    assert call.infer_requests[0].model_dump() == request
    assert call.request_config.model_dump() == config
    assert InferCall(**body | {"request_config": asdict(swift.RequestConfig(stop=None))}).request_config.stop == []


@pytest.mark.parametrize(
    "config",
    [{"min_p": 0.1, "repetition_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": -0.5, "stop": ["}"]}]
    + [{"logprobs": True, "top_logprobs": 5}, {"return_details": True}],
)
def test_settings_that_can_be_honoured_are_taken(config, swift):
    """SRV-4"""
    sent = asdict(swift.RequestConfig(**config))
    assert InferCall(infer_requests=[], request_config=sent).request_config.model_dump() == sent


def test_no_setting_is_taken_and_ignored(swift):
    """SRV-4: each one is either honoured (utils.server.engine reads it) or refused at any but its neutral value."""
    honoured = {"max_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty"}
    honoured |= {"frequency_penalty", "stop", "seed", "logprobs", "top_logprobs", "return_details"}
    other = {"num_beams": 2, "stream": True, "prompt_logprobs": 1, "n": 2, "best_of": 2, "length_penalty": 0.5}
    for field in {field.name for field in fields(swift.RequestConfig)} - honoured:
        with pytest.raises(ValidationError):
            RequestConfig(**{field: other.get(field, "x")})
    for field in {field.name for field in fields(swift.RolloutInferRequest)} - {
        "messages",
        "images",
        "uuid",
        "data_dict",
    }:
        with pytest.raises(ValidationError, match=field):
            RolloutInferRequest(**GOOD_REQUEST | {field: "auto"})


def test_an_answer_has_ms_swifts_form_and_no_other_field():
    """SRV-4: a real answer is checked in tests/e2e/test_server.py."""
    for output in (RolloutOutput.failed("model", None, "broken"), RolloutOutput.failed("m", "r:1", "no", "refused")):
        read = ms_swift.read_answer(output.model_dump(mode="json"))
        assert read.response.choices[0].finish_reason is None and read.rollout_infos == output.rollout_infos


def test_a_missing_or_null_request_config_means_defaults():
    """SRV-4"""
    assert InferCall(infer_requests=[]).request_config == RequestConfig()
    assert InferCall(infer_requests=[], request_config=None).request_config == RequestConfig()


@pytest.mark.parametrize(
    ("field", "value"),
    [("n", 2), ("stream", True), ("num_beams", 4), ("length_penalty", 0.5), ("temprature", 1.0), ("top_p", 0.0)]
    + [("stop", [""]), ("min_p", 1.5), ("max_tokens", 2**63), ("top_k", 2**63), ("temperature", float("inf"))]
    + [("temperature", "hot"), ("temperature", -1.0), ("max_tokens", 0), ("max_tokens", 1.5), ("seed", -1)],
)
def test_settings_that_cannot_be_honoured_are_errors_that_name_the_field(field, value):
    """SRV-4, SRV-5: nothing is ignored silently."""
    with pytest.raises(ValidationError) as error:
        RequestConfig(**{field: value})
    assert error.value.errors()[0]["loc"][0] == field


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"messages": "hello"}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": [{"content": "no role"}]}, "messages"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages"),
        ({"videos": ["a.mp4"]}, "videos"),
        ({"tools": [{"name": "f"}]}, "tools"),
        ({"images": [1]}, "images"),
    ],
)
def test_bad_requests_name_the_field(change, named):
    """SRV-5"""
    with pytest.raises(ValidationError) as error:
        RolloutInferRequest(**GOOD_REQUEST | change)
    assert error.value.errors()[0]["loc"][0] == named


def test_seed_of_request_i_wraps_at_two_to_the_31():
    """SRV-4: request i samples with (seed + i) mod 2^31."""
    config = RequestConfig(seed=2**31 - 2)
    assert [config.seed_of(i) for i in range(4)] == [2**31 - 2, 2**31 - 1, 0, 1]
    assert RequestConfig(seed=2**40 + 3).seed_of(1) == 4
    assert RequestConfig().seed_of(7) is None


def test_a_failed_output_has_the_form_of_the_others():
    """SRV-4, SRV-5"""
    output = RolloutOutput.failed("model", "run:3", "no such file", "refused").model_dump()
    assert output["rollout_infos"] == {"weight_version": "run:3", "error": "no such file", "refused": True}
    assert output["response"]["choices"][0]["token_ids"] == []
    assert output["response_token_ids"] == []
    assert "refused" not in RolloutOutput.failed("model", None, "broken").rollout_infos


def test_update_lists_must_have_one_length():
    with pytest.raises(ValidationError, match="1 entries for 2 names"):
        UpdateWeights(run_id="r", names=["a", "b"], dtype_names=["float32"], shapes=[[1], [2]])
    with pytest.raises(ValidationError):
        InitCommunicator(
            run_id="r", master_address="x", master_port=0, world_size=2, bucket_bytes=1, timeout_s=1, open_timeout_s=1
        )


def test_images_of_string_messages_keep_their_order():
    """SRV-4: string form with <image> markers."""
    messages = [{"role": "user", "content": "<image>a<image>"}, {"role": "user", "content": "<image>"}]
    assert collect_images(messages, ["1", "2", "3"]) == ["1", "2", "3"]


def test_content_lists_may_carry_their_images_or_take_them_from_the_list():
    """SRV-4: content-list form, ms-swift's and OpenAI's."""
    parts = [
        {"type": "image", "image": "own1"},
        {"type": "text", "text": "then <image>"},
        {"type": "image_url", "image_url": {"url": "own2"}},
        {"type": "image"},
    ]
    assert collect_images([{"role": "user", "content": parts}], ["x", "y"]) == ["own1", "x", "own2", "y"]


def test_images_without_a_marker_come_first():
    """SRV-4: as in ms-swift, and as utils.data.prompts.to_chat_messages places them."""
    assert collect_images([{"role": "user", "content": "<image>hi"}], ["extra", "marked"]) == ["extra", "marked"]
    own = [{"role": "user", "content": [{"type": "image", "image": "own"}]}]
    assert collect_images(own, ["extra"]) == ["extra", "own"]
