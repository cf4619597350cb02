"""Rollout types, the prompt and version checks, and how the server backend words its requests."""

from contextlib import nullcontext
from dataclasses import replace

import pytest

from utils.capacity import EVAL_MICRO_STEP, request_seed
from utils.rollout.backend import (
    PromptMismatch,
    RolloutContext,
    RolloutRequest,
    RolloutSampling,
    ServerEngine,
    StaleRollout,
    check_prompt,
    infer_request,
    read_output,
    request_config,
)
from utils.server.protocol import ChatCompletionResponse, ChatMessage, Choice, InferCall, RequestConfig, RolloutOutput

REQUESTS = [
    RolloutRequest(f"s{i}", [{"role": "user", "content": "<image>Find all."}], [f"/data/{i}.png"], [1, 2, 3])
    for i in range(3)
]
PLACE = {"global_step": 7, "micro_step_idx": 2, "run_seed": 5}


def output(ids, version="run:3", last=None, **infos):
    """A `RolloutOutput` form as the server's own types spell it."""
    choice = Choice(message=ChatMessage(content="text"), finish_reason="stop", token_ids=ids)
    infos = {"weight_version": version, **({"last_weight_version": last} if last else {}), **infos}
    response = ChatCompletionResponse(model="m", choices=[choice], prompt_token_ids=[1, 2, 3])
    return RolloutOutput(response=response, response_token_ids=[ids], rollout_infos=infos).model_dump(mode="json")


class FakeClient:
    rank = 1

    def __init__(self, outputs):
        self.outputs, self.calls = outputs, []

    def infer(self, bodies, config, seed, note, in_small_rounds):
        self.in_small_rounds = in_small_rounds
        self.calls.append((bodies, config, seed, note))
        return self.outputs


def generate(outputs, requests=REQUESTS, expect_version="run:3"):
    client = FakeClient(outputs)
    context = RolloutContext(**PLACE, policy_version=expect_version)
    results = ServerEngine(client, None).generate(requests, RolloutSampling(), context)
    return results, client


def test_dis_3_only_evaluations_go_in_small_rounds():
    """DIS-3, LRN-7, ROL-4: a training micro-step makes one call per server and round."""
    for micro_step_idx in (1, EVAL_MICRO_STEP):
        client = FakeClient([output([10]), output([11]), output([12])])
        context = RolloutContext(**PLACE | {"micro_step_idx": micro_step_idx}, policy_version="run:3")
        ServerEngine(client, None).generate(REQUESTS, RolloutSampling(), context)
        assert client.in_small_rounds == (micro_step_idx == EVAL_MICRO_STEP)


def test_rol_1_results_hold_tokens_prompt_text_reason_and_version():
    """ROL-1, in request order."""
    results, _ = generate([output([10, 11]), output([]), output([12])])
    assert [result.response_token_ids for result in results] == [[10, 11], [], [12]]
    first = results[0]
    assert (first.prompt_token_ids, first.text, first.finish_reason) == ([1, 2, 3], "text", "stop")
    assert (first.weight_version, first.error, first.logprobs) == ("run:3", None, None)


def test_dis_5_no_request_no_call():
    """DIS-5: N = 0."""
    results, client = generate([], requests=[])
    assert results == [] and client.calls == []


def test_dis_6_the_seed_is_that_of_step_micro_step_and_rank():
    """DIS-6; LOG-1: the note says where the call belongs."""
    _, client = generate([output([1])] * 3)
    bodies, _, seed, note = client.calls[0]
    assert seed == request_seed(5, 7, 2, 1)
    assert [body["uuid"] for body in bodies] == ["s0", "s1", "s2"]
    assert (note["global_step"], note["micro_step_idx"], note["rank"]) == (7, 2, 1)
    assert note["weight_version"] == "run:3" and note["decoding"]["temperature"] == 0.0


def test_srv_4_the_server_takes_what_is_sent():
    """SRV-4: the body passes the server's strict types, with every decoding setting in it."""
    sampling = RolloutSampling(temperature=0.7, top_p=0.9, top_k=20, repetition_penalty=1.1, max_new_tokens=64)
    config = request_config(sampling) | {"seed": 3}
    call = InferCall.model_validate({"infer_requests": [infer_request(REQUESTS[0])], "request_config": config})
    sent = call.request_config
    assert (sent.temperature, sent.top_p, sent.top_k, sent.repetition_penalty) == (0.7, 0.9, 20, 1.1)
    assert (sent.max_tokens, sent.seed, call.infer_requests[0].images) == (64, 3, ["/data/0.png"])


def test_srv_4_a_sample_with_a_long_id_is_answered():
    """SRV-4: data files may have ids of any length; the server bounds those of requests (SRV-10)."""
    request = replace(REQUESTS[0], sample_id="folder/" * 50 + "7")
    _, client = generate([output([1])], [request])
    call = InferCall.model_validate({"infer_requests": client.calls[0][0]})
    assert call.infer_requests[0].uuid.endswith("/folder/7")


def test_rol_1_no_setting_is_left_to_the_checkpoint():
    """ROL-1: a server samples as colocate does, whatever generation_config.json says."""
    engine = pytest.importorskip("utils.server.engine")
    colocate = pytest.importorskip("utils.rollout.colocate")
    theirs = {"temperature": 0.3, "top_p": 0.8, "top_k": 7, "min_p": 0.2, "repetition_penalty": 1.05}
    own = RolloutSampling(
        temperature=1.0, top_p=0.9, top_k=20, repetition_penalty=1.1, max_new_tokens=64, logprobs=True
    )
    for sampling in (RolloutSampling(), own):
        sent = RequestConfig.model_validate(request_config(sampling))
        assert repr(engine.sampling_params(sent, 3, theirs)) == repr(colocate.sampling_params(sampling, 3))


def test_con_3_a_failed_request_is_an_empty_rollout():
    """CON-3: error set, no ids; its version is not checked, it is not trained on."""
    failed = RolloutOutput.failed("m", "old", "cannot read /data/1.png").model_dump(mode="json")
    results, _ = generate([output([1]), failed, output([2])])
    assert results[1].error == "cannot read /data/1.png"
    assert results[1].response_token_ids == results[1].prompt_token_ids == []
    assert results[2].response_token_ids == [2]


@pytest.mark.parametrize(
    "bad", [output([1], version="run:2"), output([1], version=None), output([1], version="run:3", last="run:4")]
)
def test_syn_8_another_version_is_never_handed_on(bad):
    """SYN-8, SYN-9: older weights, a server that never had any, or weights that changed under way."""
    with pytest.raises(StaleRollout, match="sample s1: made with weights .* requested run:3"):
        generate([output([1]), bad, output([2])])


@pytest.mark.parametrize(("version", "is_taken"), [("run:1", True), ("other:3", False), (None, False)])
def test_syn_8_ahead_of_training_older_weights_are_taken_but_those_of_this_run_alone(version, is_taken):
    """SYN-8: the caller judges their age; never another run's, or weights that no sync brought."""
    context = RolloutContext(**PLACE, policy_version="run:3", allow_stale=True)
    engine = ServerEngine(FakeClient([output([1]), output([1], version=version), output([2])]), None)
    with nullcontext() if is_taken else pytest.raises(StaleRollout, match="sample s1: made with weights"):
        results = engine.generate(REQUESTS, RolloutSampling(), context)
        assert [result.weight_version for result in results] == ["run:3", version, "run:3"]


def test_syn_8_without_expectation_the_version_is_only_told():
    """SYN-8: asynchronous prefetch decides by age itself."""
    results, _ = generate([output([1], version="run:1", last="run:2")] * 3, expect_version=None)
    assert (results[0].weight_version, results[0].last_weight_version) == ("run:1", "run:2")


def test_rol_1_logprobs_are_per_token():
    """ROL-1: lists per turn become one list."""
    assert read_output(output([4, 5]) | {"rollout_logprobs": [[-0.5, -1.0]]}).logprobs == [-0.5, -1.0]
    stopped = read_output(output([4, 5], stop_token_id=9, stop_logprob=-2.0))
    assert (stopped.stop_token_id, stopped.stop_logprob) == (9, -2.0)


def words(ids):
    return " ".join(f"w{i}" for i in ids)


def test_rol_3_equal_prompts_pass():
    """ROL-3."""
    check_prompt("s", [1, 2, 3], (1, 2, 3), words)


def test_rol_3_the_first_difference_is_shown_from_both_sides():
    """ROL-3: index, lengths and the tokens around it."""
    with pytest.raises(PromptMismatch) as error:
        check_prompt("s7", list(range(20)), [*range(12), 99, *range(13, 20)], words)
    message = str(error.value)
    assert "sample s7" in message and "at token 12 " in message
    assert "learner: ... 4='w4'" in message and ">>> 12='w12' <<<" in message
    assert ">>> 99='w99' <<<" in message and "19='w19'" in message
    assert "3='w3'" not in message.replace("13='w13'", "")


def test_rol_3_a_shorter_prompt_differs_where_it_ends():
    """ROL-3."""
    with pytest.raises(PromptMismatch, match=r"(?s)at token 2 \(lengths: learner 2, engine 3\).*>>> end <<<"):
        check_prompt("s", [1, 2], [1, 2, 3], words)
