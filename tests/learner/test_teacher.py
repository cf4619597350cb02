"""Distillation from a teacher's server, with replies that transformers computes (TGT-16)."""

import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

import train_stage2
from tests.learner.test_reference_kl import (
    LAYOUT,
    LORA,
    ONLY_KL,
    learn,
    learner_of,
    plain_kl,
    plain_logprobs,
    segments_of,
    stage2_of,
    two_models,
)
from train_stage2 import Responses, Stage2
from utils.data.encoding import tokenizer_digest
from utils.dist import DistributedError
from utils.rollout.backend import PromptMismatch
from utils.rollout.link import CallFailed, RolloutError
from utils.rollout.teacher import Teacher
from utils.run import setup
from utils.run.session import Session
from utils.targets import Segment

NOTHING = ONLY_KL | {"reference_kl": 0.0}
URL = "http://teacher:1"


class FakeClient:
    """A teacher's server: the request's only text is the index of the segment whose answer is sent."""

    rank, timeout_s, backoff_s = 1, 9.0, 0.0

    def __init__(self, model: nn.Module | None, segments: list[Segment], failures: list[CallFailed] = ()) -> None:
        self.model, self.segments, self.failures = model, segments, list(failures)
        self.stop, self.calls, self.lock = threading.Event(), [], threading.Lock()
        self.change, self.digest, self.weight_version = {}, "same", None

    def url(self, index: int) -> str:
        return URL

    def wait_ready(self) -> None:
        self.calls.append("ready")

    def health(self, index: int) -> dict:
        return {"tokenizer_digest": self.digest, "max_model_len": 64, "weight_version": self.weight_version}

    def post(self, index: int, path: str, body: dict, timeout_s: float) -> dict:
        with self.lock:
            number = int(body["infer_request"]["messages"][0]["content"])
            self.calls.append(number)
            if self.failures:
                raise self.failures.pop()
            segment = self.segments[number]
            assert (path, timeout_s, body["top_k"]) == ("/teacher/", 9.0, 20)
            count = len(body["token_ids"])
            assert body["token_ids"] == segment.input_ids[-count:].tolist()
            with torch.no_grad():
                top = plain_logprobs(self.model, segment)[len(segment) - count - 1 : -1].topk(20)
            found = {"top_token_ids": top.indices.tolist(), "top_logprobs": top.values.tolist()}
            return found | {"prompt_token_ids": segment.input_ids.tolist()} | self.change


def samples_of(segments: list[Segment]) -> list[SimpleNamespace]:
    """Samples whose only message is their number."""
    texts = [[{"role": "user", "content": str(number)}] for number in range(len(segments))]
    return [SimpleNamespace(id=f"s{number}", messages=text, images=[]) for number, text in enumerate(texts)]


def teacher_of(client: FakeClient) -> Teacher:
    return Teacher(client, decode=str)


def bucketed_kl(teacher: nn.Module, current: nn.Module, segments: list[Segment]) -> torch.Tensor:
    """Mean over the answers' tokens that have no label of the KL over 20 tokens and all others as one, in float64."""
    terms = []
    for segment in segments:
        with torch.no_grad():
            p = plain_logprobs(teacher, segment).double().exp()
        q = plain_logprobs(current, segment).double().exp()
        for index in segment.unlabelled_index - 1:
            top = p[index].topk(20).indices
            ours, theirs = torch.ones(len(q[index])), q[index][top]
            ours[top] = 0
            events = torch.cat([theirs, (q[index] * ours).sum()[None]])
            truth = torch.cat([p[index][top], (p[index] * ours).sum()[None]])
            terms.append((truth * (truth / events).log()).sum())
    return torch.stack(terms).mean()


def teachable(learner, folder, ranks, teacher: Teacher | None) -> Stage2:
    parts = {"place": lambda segment: segment, "timed": lambda part: threading.Lock(), "teacher": teacher}
    return stage2_of(learner, folder, ranks, **parts)


@pytest.mark.parametrize("with_start", [False, True])
@pytest.mark.parametrize("deepspeed", ["zero0", "zero2", "zero3"])
def test_a_whole_step_distils_what_the_server_reports_TGT_16_PCK_4_PCK_5(
    tmp_path, start_model, ranks, monkeypatch, deepspeed, with_start
):
    """TGT-16, PCK-4, PCK-5: `judge` asks, `learn` trains; packed rows against each segment alone, beside `reference_kl`
    and without it."""
    weights = NOTHING | {"reference_kl": 0.5 * with_start}
    learner = learner_of(tmp_path, start_model, ranks, LORA, weights, deepspeed, teacher={"base_url": URL, "weight": 2})
    start, current = two_models(start_model, LORA, learner)
    teacher, _ = two_models(start_model, LORA, learner)
    with torch.no_grad():
        for parameter in teacher.parameters():
            parameter.mul_(1.05)
    segments = segments_of(start)
    client = FakeClient(teacher, segments)
    run = teachable(learner, tmp_path, ranks, teacher_of(client))
    waiting = iter(segments)
    monkeypatch.setattr(train_stage2, "make_segment", lambda *_: next(waiting))
    samples = samples_of(segments)
    made = run.judge(Responses(samples, [SimpleNamespace()] * len(samples), {}), 0).segments
    assert sorted(client.calls) == [0, 1, 2, 3]  # the last has a label everywhere
    expected = bucketed_kl(teacher, current, segments)
    total = 2 * expected
    if with_start:
        total = total + 0.5 * plain_kl(start, current, segments)
    total.backward()
    norm = torch.stack([p.grad.norm() for p in current.parameters() if p.grad is not None]).norm()
    result = learn(run, [[made[i] for i in row] for row in LAYOUT], 0)
    assert expected > 0.01 and result.losses["teacher"] == pytest.approx(expected.item(), abs=1e-5)
    assert result.losses["total"] == pytest.approx(total.item(), abs=3e-5)
    assert result.grad_norm == pytest.approx(float(norm), rel=1e-4)


def test_a_stop_request_ends_waits_for_the_teacher_TGT_16_LRN_12():
    stop = SimpleNamespace(is_training=False, requested=threading.Event(), install=lambda: None)
    ended: list[threading.Event] = []
    session = SimpleNamespace(steps_done=0, stop=stop, policy=SimpleNamespace(client=None), owes_evaluation=False)
    session.cfg = SimpleNamespace(training=SimpleNamespace(eval_at_start=False))
    session.teacher = SimpleNamespace(client=SimpleNamespace(end_waits_at=ended.append))
    session.prefetcher = SimpleNamespace(end_waits_at=ended.append)
    Session.begin(session, None)
    assert ended == [stop.requested] * 2


def test_set_up_reaches_the_teacher_and_checks_it_TGT_16_CON_4(start_model, ranks, monkeypatch):
    """TGT-16, CON-4: with the tokenizer of the model in training and the learner's own prompts; on every rank."""
    seen: dict = {}

    class Client(FixedClient):
        def __init__(self, servers, rank, world_size, decode_batch_size, ways_out):
            super().__init__(None, [])
            seen.update(url=servers[0].base_url, client=self, ways_out=ways_out)
            self.digest = tokenizer_digest(start_model)

    prompts = [({"messages": []}, [1, 2, 3, 4])]
    monkeypatch.setattr(setup, "RolloutClient", Client)
    monkeypatch.setattr(setup, "make_prompts", lambda processor, limit: prompts)
    cfg = SimpleNamespace(
        model=SimpleNamespace(path=str(start_model)),
        rm=SimpleNamespace(teacher=SimpleNamespace(base_url=URL + "/")),
        rs=None,
        global_max_length=63,
    )
    processor = SimpleNamespace(tokenizer=SimpleNamespace(decode=str))
    with pytest.raises(DistributedError, match=r"reaching the teacher \(custom.extra.rollout_matching.teacher\)"):
        setup.reach_teacher(cfg, ranks, processor)
    assert "the teacher's server" in seen["ways_out"] and "rollout_matching.teacher.base_url" in seen["ways_out"]
    assert seen["url"] == URL and seen["client"].calls[1]["token_ids"] == [4]
    cfg.global_max_length = 64
    with pytest.raises(DistributedError, match="the teacher takes 63 tokens"):
        setup.reach_teacher(cfg, ranks, processor)
    cfg.global_max_length = 63
    monkeypatch.setattr(setup, "tokenizer_digest", lambda path: "of another model")
    with pytest.raises(DistributedError, match="the teacher's tokenizer is not that of model.path"):
        setup.reach_teacher(cfg, ranks, processor)


def test_a_run_without_a_teacher_asks_nobody_TGT_16(tmp_path, start_model, ranks):
    learner = learner_of(tmp_path, start_model, ranks, LORA, ONLY_KL)
    run = teachable(learner, tmp_path, ranks, None)
    segments = segments_of(learner.model)
    assert "teacher" not in learn(run, [[segments[i] for i in row] for row in LAYOUT], 0).losses


@pytest.fixture
def segment() -> Segment:
    none = np.zeros(0, dtype=np.int64)
    labels = {"coord_index": none, "coord_target": none, "text_index": none, "text_label": none, "text_weight": none}
    return Segment(sample_id="s0", input_ids=np.arange(1, 6), answer_start=3, **labels)


def reply(**changes) -> dict:
    return {"top_token_ids": [[*range(20)]] * 2, "top_logprobs": [[-1.0] * 20] * 2} | changes


class FixedClient(FakeClient):
    """Always the same reply, after the failures."""

    def post(self, index: int, path: str, body: dict, timeout_s: float) -> dict:
        self.calls.append(body)
        if self.failures:
            raise self.failures.pop()
        return {"prompt_token_ids": [1, 2, 3, 4, 5]} | self.change


@pytest.mark.parametrize(("status", "num_calls"), [(None, 3), (503, 3), (429, 3), (422, 1), (401, 1)])
def test_a_fault_that_may_pass_is_tried_again_and_named_TGT_16_CON_3(segment, status, num_calls):
    """TGT-16, CON-3: two retries; the error has rank, step, sample and url."""
    failure = CallFailed(f"{URL}/teacher/", "broken", status)
    client = FixedClient(None, [], [failure] * 3)
    with pytest.raises(RolloutError, match=f"rank 1, step 8, sample s0: the teacher at {URL}/teacher/: broken"):
        teacher_of(client).score(samples_of([segment]), [segment], 7)
    assert len(client.calls) == num_calls
    client = FixedClient(None, [], [CallFailed(URL, "broken", 503)] * 2)
    client.change = reply()
    teacher_of(client).score(samples_of([segment]), [segment], 7)
    assert segment.teacher_ids.shape == segment.teacher_logprobs.shape == (2, 20)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (reply(prompt_token_ids=[1, 2, 9, 4, 5]), PromptMismatch, "at token 2"),
        (reply(top_logprobs=[[-1.0] * 20]), RolloutError, "not 20 tokens"),
        (reply(top_logprobs=[[-1.0] * 20, [*[-1.0] * 19, float("nan")]]), RolloutError, "not 20 tokens with finite"),
        (reply(top_token_ids="x"), RolloutError, "not a teacher's answer"),
        ({}, RolloutError, "not a teacher's answer"),
    ],
)
def test_a_reply_to_another_question_is_refused_TGT_16(segment, change, error, message):
    client = FixedClient(None, [])
    client.change = change
    with pytest.raises(error, match=message):
        teacher_of(client).score(samples_of([segment]), [segment], 0)


def test_a_teacher_whose_weights_change_is_refused_TGT_16(segment):
    """TGT-16: nobody syncs a teacher. One that another run trained before may teach."""
    client = FixedClient(None, [])
    client.weight_version, client.change = "b:7", reply(weight_version="b:7")
    teacher = teacher_of(client)
    teacher.connect("same", [], longest=None)
    teacher.score(samples_of([segment]), [segment], 0)
    teacher.model, client.change = "/large", reply(weight_version="b:7", model="/small")
    with pytest.raises(RolloutError, match=r"has another model than at the start \(/small, was /large\)"):
        teacher.score(samples_of([segment]), [segment], 0)
    client.change = reply(weight_version="b:8")
    with pytest.raises(RolloutError, match=rf"sample s0: the teacher at {URL} has other weights .*\(b:8, was b:7\)"):
        teacher.score(samples_of([segment]), [segment], 0)


def test_the_start_check_wants_the_same_tokens_TGT_16():
    """TGT-16: the tokenizer by its digest, and prompt ids of every start prompt. vLLM refuses a prompt as long as the
    model's length: it wants room for one new token."""
    client = FixedClient(None, [])
    client.change = {"top_token_ids": [[*range(20)]], "top_logprobs": [[-1.0] * 20], "prompt_token_ids": [7, 8, 8]}
    teacher = teacher_of(client)
    teacher.connect("same", [({}, [7, 8])], longest=63)
    assert client.calls[0] == "ready" and client.calls[1]["token_ids"] == [8]
    with pytest.raises(PromptMismatch, match="start check"):
        teacher.connect("same", [({}, [7, 9])], longest=None)
    with pytest.raises(RolloutError, match=f"{URL}: the teacher's tokenizer is not that of model.path; serve"):
        teacher.connect("other", [], longest=63)
    message = r"takes 63 tokens, and a prompt with its answer may have 64; set rollout_server.\w+ to 65 or more"
    with pytest.raises(RolloutError, match=message):
        teacher.connect("same", [], longest=64)
