"""SRV-9 placement, SRV-3 token, and the weight-update state machine (SYN-3, SYN-9), with a fake vLLM."""

import asyncio
import re
import threading
import time
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("vllm")

from fastapi.testclient import TestClient  # noqa: E402
from vllm.logprobs import FlatLogprobs  # noqa: E402
from vllm.v1.engine.logprobs import LogprobsProcessor  # noqa: E402
from vllm.v1.outputs import LogprobsTensors  # noqa: E402

from utils.server import engine  # noqa: E402
from utils.server.app import make_app  # noqa: E402
from utils.server.engine import (  # noqa: E402
    BadCall,
    Conflict,
    NotOwner,
    RolloutEngine,
    Unavailable,
    UpdateFailed,
    prompt_logprobs,
    scoring_params,
    top_logprobs,
)
from utils.server.images import ImageStore  # noqa: E402
from utils.server.protocol import (  # noqa: E402
    FinishWeightUpdate,
    InitCommunicator,
    OwnedCall,
    RequestConfig,
    RolloutInferRequest,
    StartWeightUpdate,
    UpdateWeights,
)
from utils.server.weight_updates import WeightUpdates

STUCK_S = 120.0


class FakeLLM:
    """Counts what runs on each replica; answers with the replica's number; can be told to fail."""

    def __init__(self, replicas: int = 2, seconds: float = 0.01):
        self.seconds = seconds
        self.errored = False
        self.model_config = SimpleNamespace(
            get_diff_sampling_param=dict, is_multimodal_model=False, max_model_len=512, logprobs_mode="raw_logprobs"
        )
        self.engine_core = SimpleNamespace(
            core_engines=list(range(replicas)), _call_utility_async=self._utility, pause_scheduler_async=self._pause
        )
        self.running, self.most = [0] * replicas, [0] * replicas
        self.aborted: set[str] = set()
        self.log: list[str] = []
        self.failing_step: str | None = None
        self.version = "default"
        self.missing: list[str] = []
        self.seeds: list[int | None] = []
        self.slots: list[int | None] = []  # LoRA slot per request
        self.learner_is_alive = False
        self.is_pausing = False

    async def generate(self, prompt, params, request_id, data_parallel_rank, lora_request=None):
        self.seeds.append(params.seed)
        self.slots.append(lora_request and lora_request.lora_int_id)
        self.running[data_parallel_rank] += 1
        self.most[data_parallel_rank] = max(self.most[data_parallel_rank], self.running[data_parallel_rank])
        version = self.version
        for _ in range(10):
            await asyncio.sleep(self.seconds * (1 + data_parallel_rank) / 10)
        self.running[data_parallel_rank] -= 1
        reason = "abort" if request_id in self.aborted else "stop"
        yield SimpleNamespace(
            prompt_token_ids=prompt["prompt_token_ids"],
            outputs=[
                SimpleNamespace(
                    token_ids=[7, 8, 2],
                    text="text",
                    finish_reason=reason,
                    stop_reason=None,
                    logprobs=None,
                    weight_versions=[SimpleNamespace(version=version)],
                )
            ],
        )

    async def _utility(self, method, *args, engine):
        if method == "get_weight_version":
            return self.version
        assert method == "collective_rpc"
        step = args[2][0]
        self.log.append(f"{step}@{engine}")
        failed = step == self.failing_step and engine == 1
        report = {"digests": {"w": f"digest{engine}"}, "parameters": {"w": ["model.w"]}}
        load = {"memory_bytes": 2.0**30} | ({"utilization": 0.5} if engine == 1 else {})
        results = {"update": report, "finish": self.missing, "learner_is_alive": self.learner_is_alive}
        result = (results | {"device_load": load}).get(step)
        return [{"result": result, "error": f"engine worker {engine}: boom" if failed else None}]

    async def _pause(self, mode, clear_cache):
        assert not clear_cache  # the end of the update does
        self.log.append(f"pause {mode}")
        self.is_pausing = True  # until it is over, whether or not anybody still waits for it
        while mode == "wait" and sum(self.running):
            await asyncio.sleep(0.001)
        if mode == "abort":
            self.aborted |= {f"rollout-{i}" for i in range(len(self.seeds))}
        self.is_pausing = False

    async def abort(self, ids):
        self.aborted |= set(ids)

    async def resume_generation(self):
        if self.is_pausing:  # as engines of a mixture of experts do
            raise RuntimeError("resume_scheduler called while pause is still in flight")
        self.log.append("resume")

    async def update_weight_version(self, version):
        self.version = version

    async def reset_mm_cache(self):
        self.log.append("reset mm")

    async def reset_encoder_cache(self):
        self.log.append("reset encoder")

    async def reset_prefix_cache(self, reset_running_requests=False, reset_connector=False):
        assert reset_connector  # what an engine keeps outside the GPU is of old weights, too
        self.log.append(f"reset prefix {reset_running_requests}")
        return True


class FakeTokenizer:
    chat_template = None

    def apply_chat_template(self, messages, **_):
        if messages[0]["content"] == "bad":
            raise ValueError("bad prompt")
        return messages[0]["content"]

    def __call__(self, text, **_):
        return {"input_ids": [len(text)]}


def make(**kwargs) -> tuple[FakeLLM, RolloutEngine, WeightUpdates]:
    llm = FakeLLM(**kwargs)
    engine = RolloutEngine(llm, FakeTokenizer(), ImageStore([]), "model", 2, STUCK_S)
    return llm, engine, WeightUpdates(engine, "gloo")


def ask(*contents: str) -> list[RolloutInferRequest]:
    return [RolloutInferRequest(messages=[{"role": "user", "content": text}]) for text in contents]


INIT = InitCommunicator(
    run_id="a",
    master_address="127.0.0.1",
    master_port=1,
    world_size=3,
    rank_offset=1,
    bucket_bytes=1,
    timeout_s=0.2,
    open_timeout_s=0.2,
)
START = StartWeightUpdate(run_id="a", version="a:1", pause="wait")
UPDATE = UpdateWeights(run_id="a", names=["w"], dtype_names=["float32"], shapes=[[1]], digest=True)
FINISH = FinishWeightUpdate(run_id="a", version="a:1")


def test_requests_go_to_the_replica_with_the_fewest_running():
    """SRV-9: no replica ever holds more than its even share, whatever their speeds."""

    async def run():
        llm, engine, _ = make(replicas=3)
        outputs = await engine.infer(ask(*"abcdefg"), RequestConfig(seed=5))
        assert [len(output.response.prompt_token_ids) for output in outputs] == [1] * 7
        assert llm.most == [3, 2, 2] and engine.num_running == [0, 0, 0]
        assert sorted(llm.seeds) == [5, 6, 7, 8, 9, 10, 11]

    asyncio.run(run())


def test_settings_that_a_request_leaves_open_are_those_of_the_model_SRV_4():
    """SRV-4: of its generation_config.json, as in vLLM's own server."""
    llm, asked = FakeLLM(), []
    llm.model_config.get_diff_sampling_param = lambda: {"temperature": 0.25, "top_k": 7}
    generate = llm.generate

    def note(prompt, params, *rest, **named):
        asked.append((params.temperature, params.top_k))
        return generate(prompt, params, *rest, **named)

    async def run():
        llm.generate = note
        engine = RolloutEngine(llm, FakeTokenizer(), ImageStore([]), "model", 2, STUCK_S)
        for config in (RequestConfig(), RequestConfig(temperature=0.5)):
            await engine.infer(ask("x"), config)

    asyncio.run(run())
    assert asked == [(0.25, 7), (0.5, 7)]


def test_answers_are_cut_before_the_stop_token_and_fail_alone():
    """SRV-4, SRV-5, ROL-1"""

    async def run():
        _, engine, _ = make()
        good, bad, refused = await engine.infer(
            [*ask("x", "bad"), RolloutInferRequest(messages=[{"role": "user", "content": "i"}], images=["/etc/x"])],
            RequestConfig(),
        )
        assert good.response_token_ids == [[7, 8]] and good.response.choices[0].finish_reason == "stop"
        assert good.response.choices[0].token_ids == [7, 8]
        assert good.rollout_infos == {"weight_version": None, "stop_token_id": 2}
        assert bad.rollout_infos["error"].endswith(": bad prompt") and "refused" not in bad.rollout_infos
        assert refused.rollout_infos["refused"] is True
        assert not engine.ids_in_flight and sum(engine.num_running) == 0

    asyncio.run(run())


def test_the_stop_token_is_the_one_that_the_engine_generated_ROL_1_GRP_6():
    """ROL-1, GRP-6: of several stop tokens the one sampled, with its log-probability; none after a stop string or a
    cut."""
    _, engine, _ = make()

    def infos(finish_reason, stop_reason):
        steps = [{token: SimpleNamespace(logprob=-float(token), decoded_token="x")} for token in (7, 9)]
        answer = SimpleNamespace(
            token_ids=[7, 9], text="", finish_reason=finish_reason, stop_reason=stop_reason, logprobs=steps,
            weight_versions=[],
        )  # fmt: skip
        output = engine._rollout_output(SimpleNamespace(prompt_token_ids=[1], outputs=[answer]), [])
        return output.response_token_ids, output.rollout_logprobs, output.rollout_infos

    stopped = {"weight_version": None, "stop_token_id": 9, "stop_logprob": -9.0}
    assert infos("stop", None) == infos("stop", 9) == ([[7]], [[-7.0]], stopped)
    assert infos("stop", "text") == infos("length", None) == ([[7, 9]], [[-7.0, -9.0]], {"weight_version": None})


class FakeTeacherLLM(FakeLLM):
    """Each prompt token gets the tokens 1 to k as the most likely ones and, as from vLLM, itself where it is none."""

    logprob = -0.5

    async def generate(self, prompt, params, *args, **kwargs):
        self.params = params
        async for output in super().generate(prompt, params, *args, **kwargs):
            output.prompt_logprobs = [None]
            for token in prompt["prompt_token_ids"][1:]:
                own = {token: SimpleNamespace(logprob=-9.0, rank=40)}
                ranks = range(1, params.prompt_logprobs + 1)
                top = {rank: SimpleNamespace(logprob=self.logprob * rank, rank=rank) for rank in ranks}
                output.prompt_logprobs.append(own | top)
            yield output


class TwoTokens(FakeTokenizer):
    def __call__(self, text, **_):
        return {"input_ids": [9, len(text)]}


def test_one_replica_reports_the_most_likely_tokens_TGT_16():
    """TGT-16: at the tokens of the answer only, and without the answer's own where it is not among them."""
    llm, engine, updates = make()
    llm.__class__, engine.processor = FakeTeacherLLM, TwoTokens()
    client = TestClient(make_app(engine, updates, None))
    body = {"infer_request": ask("prompt")[0].model_dump(), "token_ids": [2, 300]}
    answer = client.post("/teacher/", json=body | {"top_k": 3}).json()
    assert answer["prompt_token_ids"] == [9, 6, 2, 300] and answer["weight_version"] is None
    assert answer["top_token_ids"] == [[1, 2, 3]] * 2 and answer["top_logprobs"] == [[-0.5, -1.0, -1.5]] * 2
    assert sum(llm.most) == 1 and llm.params.max_tokens == 1
    assert len(client.post("/teacher/", json=body).json()["top_token_ids"][0]) == 20
    llm.logprob = float("-inf")
    answer = client.post("/teacher/", json=body)
    assert answer.status_code == 422 and "not finite" in answer.text


def test_a_probe_is_read_and_written_beside_the_loop_SYN_7_SRV_10(monkeypatch):
    """SYN-7, SRV-10: every replica's log-probability of every prompt token, the first aside."""
    llm, server, updates = make()
    llm.__class__, server.processor = FakeTeacherLLM, TwoTokens()
    threads = []

    def read(output):
        threads.append(threading.current_thread())
        return prompt_logprobs(output)

    monkeypatch.setattr(engine, "prompt_logprobs", read)
    body = {"infer_request": ask("prompt")[0].model_dump(), "token_ids": [2, 300]}
    answer = TestClient(make_app(server, updates, None)).post("/probe/", json=body).json()
    assert answer == {
        "logprobs": [[None, -9.0, -9.0, -9.0]] * 2,
        "prompt_token_ids": [9, 6, 2, 300],
        "weight_version": None,
    }
    assert len(threads) == 2 and {thread.name for thread in threads} == {"writer_0"}


def test_what_vllm_makes_of_a_scored_prompt_is_read_and_small_TGT_16_SRV_10():
    """TGT-16, SRV-10: by vLLM's own code, in the loop that answers `/health/`. With an object for every token it took
    2.5 s for 12000 positions, flat 0.1 s. Of 40 tokens, each less likely than the one before,
    the prompt's own is the last."""
    logprobs = torch.arange(40.0).neg().log_softmax(0)
    ids = torch.arange(100, 140)
    columns = torch.cat([torch.tensor([139]), torch.arange(100, 120)])  # as from vLLM
    found = LogprobsTensors(columns.expand(3, 21), logprobs[columns - 100].expand(3, 21), torch.full((3,), 40))
    scored = LogprobsProcessor.from_new_request(None, SimpleNamespace(sampling_params=scoring_params(20)))
    scored._update_prompt_logprobs(found)
    steps = scored.pop_prompt_logprobs()
    assert isinstance(steps, FlatLogprobs) and len(steps) == 4
    for step in steps[-3:]:
        top = top_logprobs(step, 20)
        assert list(top) == ids[:20].tolist() and list(top.values()) == logprobs[:20].tolist()
    output = SimpleNamespace(prompt_token_ids=[7, 139, 139, 139], prompt_logprobs=steps)
    assert prompt_logprobs(output) == [None, *[logprobs[39].item()] * 3]


def test_a_teacher_that_cannot_answer_says_so_TGT_16_SRV_10():
    llm, engine, updates = make()
    llm.__class__ = FakeTeacherLLM
    client = TestClient(make_app(engine, updates, None))
    body = {"infer_request": ask("prompt")[0].model_dump(), "token_ids": [2]}
    changes = {"token_ids": [[], [-1], [2**31], [0] * ((1 << 18) + 1)], "top_k": [0, 21, True]}
    for name, values in changes.items():
        for value in values:
            answer = client.post("/teacher/", json=body | {name: value})
            assert answer.status_code == 422 and answer.json()["detail"][0]["loc"][1] == name
    answer = client.post("/teacher/", json=body | {"infer_request": ask("bad")[0].model_dump()})
    assert answer.status_code == 422 and "bad prompt" in answer.text
    engine.weights.state, engine.weights.reason = "dirty", "half sent"
    assert client.post("/teacher/", json=body).status_code == 503
    engine.weights.state, llm.errored = "idle", True
    assert client.post("/teacher/", json=body).status_code == 503


@pytest.mark.parametrize("pause", ["wait", "keep"])
def test_requests_held_over_an_update_are_recomputed_SYN_9(pause):
    """SYN-9: with `keep` alone some run on; vLLM drops their blocks of the old weights only if asked to."""

    async def run():
        llm, _, updates = make()
        await updates.init(INIT)
        await updates.start(START.model_copy(update={"pause": pause}))
        await updates.update(UPDATE)
        await updates.finish(FINISH)
        assert f"reset prefix {pause == 'keep'}" in llm.log

    asyncio.run(run())


def test_an_update_in_order_then_answers_carry_the_version():
    """SYN-8, SYN-9: pause, all workers, version, caches, resume."""

    async def run():
        llm, engine, updates = make()
        answer = await updates.init(INIT)
        assert answer.pop("run_token") and answer == {"boot_id": engine.boot_id, "transport": "gloo"}
        await updates.start(START)
        late = asyncio.create_task(engine.infer(ask("late"), RequestConfig()))
        while not engine.weights.num_waiting:
            await asyncio.sleep(0.001)
        assert engine.weights.num_waiting == 1 and not llm.seeds
        answer = {"digests": [{"w": "digest0"}, {"w": "digest1"}], "parameters": {"w": ["model.w"]}}
        assert await updates.update(UPDATE) == answer
        assert await updates.finish(FINISH) == {"weight_version": "a:1", "missing": []}
        assert (await late)[0].rollout_infos == {"weight_version": "a:1", "stop_token_id": 2}
        steps = [f"{step}@{i}" for step in ("init", "start", "update", "finish") for i in (0, 1)]
        caches = ["reset mm", "reset encoder", "reset prefix False", "resume"]
        assert llm.log == [*steps[:2], "pause wait", *steps[2:], *caches]

    asyncio.run(run())


@pytest.mark.parametrize("pause", ["wait", "abort"])
def test_running_requests_finish_first_or_are_made_again(pause):
    """SYN-9: either way an answer is made by one set of weights."""

    async def run():
        llm, engine, updates = make(seconds=0.2)
        await updates.init(INIT)
        early = asyncio.create_task(engine.infer(ask("a", "b"), RequestConfig(seed=3)))
        while sum(llm.running) < 2:
            await asyncio.sleep(0.001)
        await updates.start(START.model_copy(update={"pause": pause}))
        assert sum(llm.running) == (0 if pause == "wait" else 2)
        await updates.update(UPDATE)
        await updates.finish(FINISH)
        version = None if pause == "wait" else "a:1"
        assert [output.rollout_infos["weight_version"] for output in await early] == [version] * 2
        assert sorted(llm.seeds) == ([3, 4] if pause == "wait" else [3, 3, 4, 4])

    asyncio.run(run())


def test_a_caller_that_hangs_up_takes_nothing_from_a_living_run_SRV_3():
    """SRV-3: also while the server still asks whether the owner's learner is alive."""

    async def run():
        llm, _, updates = make()
        token = (await updates.init(INIT))["run_token"]
        llm.learner_is_alive = True
        llm.log.clear()
        asked, utility = asyncio.Event(), llm.engine_core._call_utility_async

        async def slow(method, *args, engine):
            asked.set()
            await asyncio.sleep(0.2)
            return await utility(method, *args, engine=engine)

        llm.engine_core._call_utility_async = slow
        stranger = asyncio.create_task(updates.init(INIT.model_copy(update={"run_id": "b", "open_timeout_s": 9.0})))
        await asked.wait()
        stranger.cancel()
        await asyncio.wait({stranger})
        assert stranger.cancelled() and updates.owner == "a" and not any("close" in line for line in llm.log)
        updates.check_token(token)

    asyncio.run(run())


class Scripted(FakeLLM):
    """Ends its requests one after the other as told: with a reason, and the versions that made them."""

    ends: list[tuple[str, list[str]]]

    async def generate(self, *args, **kwargs):
        async for output in super().generate(*args, **kwargs):
            answer = output.outputs[0]
            answer.finish_reason, versions = self.ends.pop(0)
            answer.weight_versions = [SimpleNamespace(version=version) for version in versions]
            yield output


MIXED, WHOLE = ("stop", ["a:1", "a:2"]), ("stop", ["a:2"])


@pytest.mark.parametrize(
    ("pause", "ends", "infos"),
    [
        ("wait", [MIXED, MIXED, WHOLE], {"weight_version": "a:2"}),  # it was preempted when the engine paused
        ("keep", [MIXED], {"weight_version": "a:1", "last_weight_version": "a:2"}),
        ("wait", [("error", []), ("error", []), WHOLE], {"weight_version": "a:2"}),
        ("wait", [("error", [])] * 3, {"error": "the engine ended this request with 'error'"}),
    ],
)
def test_answers_of_two_versions_and_errors_that_pass_are_made_again_SYN_9_SRV_10(pause, ends, infos):
    async def run():
        llm, engine, updates = make()
        llm.__class__, llm.ends = Scripted, list(ends)
        await updates.init(INIT)
        await updates.start(START.model_copy(update={"pause": pause}))
        await updates.update(UPDATE)
        await updates.finish(FINISH)
        found = (await engine.infer(ask("x"), RequestConfig(seed=3)))[0].rollout_infos
        assert found.items() >= infos.items() and not llm.ends and llm.seeds == [3] * len(ends)

    asyncio.run(run())


def test_an_answer_made_while_an_update_failed_is_not_given_SYN_3():
    """SYN-3: vLLM cannot abort a request whose images it still prepares; it runs on a mixture of weights then."""

    async def run():
        llm, engine, updates = make(seconds=0.1)

        async def abort(ids):
            llm.log.append(f"not aborted: {len(ids)}")

        llm.abort = abort
        await updates.init(INIT)
        early = asyncio.create_task(engine.infer(ask("x"), RequestConfig()))
        while not llm.running[0]:
            await asyncio.sleep(0)
        llm.running = [0, 0]  # the engine does not know it yet, so its pause does not wait for it
        await updates.start(START)
        await updates.abort(OwnedCall(run_id="a"))
        assert "not aborted: 1" in llm.log
        with pytest.raises(Unavailable, match="aborted by the learner"):
            await early

    asyncio.run(run())


@pytest.mark.parametrize("step", ["start", "update", "finish"])
def test_a_failed_update_leaves_the_server_dirty_until_a_full_one(step):
    """SYN-3"""

    async def run():
        llm, engine, updates = make()
        await updates.init(INIT)
        llm.failing_step = step
        with pytest.raises(UpdateFailed, match="engine worker 1: boom"):
            await updates.start(START)
            waiting = asyncio.create_task(engine.infer(ask("x"), RequestConfig()))
            await asyncio.sleep(0)
            await updates.update(UPDATE)
            await updates.finish(FINISH)
        if step != "start":
            with pytest.raises(Unavailable, match="boom"):
                await waiting
        assert (engine.weights.state, engine.weights.version) == ("dirty", None)
        assert llm.log[-4:] == ["abort@0", "abort@1", "pause abort", "resume"]
        with pytest.raises(Unavailable, match="incomplete"):
            await engine.infer(ask("x"), RequestConfig())
        with pytest.raises(Conflict):
            await updates.update(UPDATE)

        llm.failing_step, llm.missing = None, ["v"]
        await updates.start(START)
        await updates.update(UPDATE)
        with pytest.raises(UpdateFailed, match="all tensors are needed; 1 missing: v"):
            await updates.finish(FINISH)
        llm.missing = []
        await updates.start(START)
        await updates.update(UPDATE)
        await updates.finish(FINISH)
        assert (await engine.infer(ask("x"), RequestConfig()))[0].rollout_infos["weight_version"] == "a:1"

    asyncio.run(run())


def test_a_partial_update_is_fine_on_whole_weights():
    """SYN-6"""

    async def run():
        llm, engine, updates = make()
        llm.missing = ["frozen"]
        await updates.init(INIT)
        await updates.start(START)
        await updates.update(UPDATE)
        assert (await updates.finish(FINISH))["missing"] == ["frozen"]
        assert engine.weights.state == "idle"

    asyncio.run(run())


def test_only_the_owner_updates_and_a_new_run_takes_over():
    """CON-4: another owner; a learner that died in the middle leaves the server dirty, not stuck."""

    async def run():
        _, engine, updates = make()
        with pytest.raises(Conflict):
            await updates.start(START)
        await updates.init(INIT)
        await updates.start(START)
        with pytest.raises(Conflict, match="already in progress"):
            await updates.start(START)
        with pytest.raises(Conflict, match="belongs to run a, not b"):
            await updates.abort(OwnedCall(run_id="b"))
        await updates.init(INIT.model_copy(update={"run_id": "b"}))
        assert engine.weights.state == "dirty" and updates.owner == "b"
        with pytest.raises(Conflict, match="belongs to run b"):
            await updates.update(UPDATE)
        await updates.close(OwnedCall(run_id="b"))
        assert updates.owner is None

    asyncio.run(run())


def test_abort_gives_up_and_without_an_update_does_nothing():
    async def run():
        _, engine, updates = make()
        await updates.init(INIT)
        await updates.abort(OwnedCall(run_id="a"))
        assert engine.weights.state == "idle"
        await updates.start(START)
        await updates.abort(OwnedCall(run_id="a"))
        assert engine.weights.state == "dirty"
        await updates.abort(OwnedCall(run_id="a"))

    asyncio.run(run())


def test_a_communicator_that_is_closed_during_an_update_gives_it_up_SRV_12():
    """SRV-12: requests that wait for the update's end go on; the next update has to be whole."""

    async def run():
        _, engine, updates = make()
        await updates.init(INIT)
        await updates.start(START)
        await updates.close(OwnedCall(run_id="a"))
        assert engine.weights.state == "dirty" and updates.owner is None

    asyncio.run(run())


def test_a_communicator_of_another_size_is_refused():
    """DIS-1: TP x DP workers and rank 0."""
    _, _, updates = make()
    with pytest.raises(BadCall, match="= 3"):
        asyncio.run(updates.init(INIT.model_copy(update={"world_size": 4})))


def test_a_call_that_waits_for_an_update_that_never_ends_is_refused():
    async def run():
        _, _, updates = make()
        await updates.lock.acquire()
        with pytest.raises(Conflict, match="in the middle"):
            await updates.init(INIT)

    asyncio.run(run())


def test_opening_has_one_limit_for_the_wait_and_the_rendezvous_CFG_8(monkeypatch):
    """CFG-8: what the wait for another update took is not there for the rendezvous; an update's limit plays no part."""
    call = INIT.model_copy(update={"timeout_s": 60.0, "open_timeout_s": 6.0})

    async def run():
        _, engine, updates = make()
        payloads, on_all_workers = [], engine.on_all_workers
        monkeypatch.setattr(engine, "on_all_workers", lambda *args: (payloads.append(args), on_all_workers(*args))[1])
        await updates.lock.acquire()
        asyncio.get_running_loop().call_later(3.0, updates.lock.release)
        await updates.init(call)
        step, payload = payloads[-1]
        assert step == "init" and payload["timeout_s"] == 60.0 and 0.5 < payload["open_timeout_s"] <= 3.0
        await updates.lock.acquire()
        with pytest.raises(Conflict, match="in the middle"):
            await updates.init(call.model_copy(update={"open_timeout_s": 0.6}))

    asyncio.run(asyncio.wait_for(run(), 30))


def test_health_is_good_only_while_the_server_can_generate():
    """SRV-6"""
    llm, engine, updates = make()
    client = TestClient(make_app(engine, updates, None))
    answer = client.get("/health/")
    assert answer.status_code == 200
    expected = {"status": "ok", "boot_id": engine.boot_id, "weight_version": None, "world_size": 2, "running": 0}
    assert expected.items() <= answer.json().items()
    assert client.get("/get_world_size/").json() == {"world_size": 2}

    engine.weights.move("updating", "a:1")
    assert client.get("/health/").status_code == 200
    engine.weights.move("dirty", None, "boom")
    answer = client.get("/health/")
    assert (answer.status_code, answer.json()["status"], answer.json()["reason"]) == (503, "dirty", "boom")
    infer = client.post("/infer/", json={"infer_requests": [{"messages": [{"role": "user", "content": "x"}]}]})
    assert infer.status_code == 503
    engine.weights.move("idle", "a:2")
    llm.errored = True
    assert client.get("/health/").json()["status"] == "dead"
    infer = client.post("/infer/", json={"infer_requests": [{"messages": [{"role": "user", "content": "x"}]}]})
    assert (infer.status_code, "an engine process died" in infer.text) == (503, True)  # at once: nobody would answer


def test_an_engine_that_is_silent_for_too_long_counts_as_hung_SRV_6():
    """SRV-6: in a weight update for as long as the learner waits (`sync.timeout_s`); and not once it answers."""
    llm, engine, updates = make()
    asyncio.run(updates.init(INIT.model_copy(update={"timeout_s": 300.0})))
    client = TestClient(make_app(engine, updates, None))
    for state, limit_s in (("idle", STUCK_S), ("dirty", STUCK_S), ("updating", 300.0)):
        engine.weights.move(state)
        engine.last_contact = time.monotonic() - limit_s + 60
        assert client.get("/health/").json()["status"] != "dead"
        engine.last_contact = time.monotonic() - limit_s - 1
        answer = client.get("/health/")
        assert (answer.status_code, answer.json()["status"]) == (503, "dead")
        words = r"an engine process has not answered for \d+ s; restart the server"
        assert re.fullmatch(words, answer.json()["reason"])
        asyncio.run(engine.on_all_engines("get_weight_version"))
        assert client.get("/health/").json()["status"] != "dead"


def test_a_token_is_required_on_every_endpoint():
    """SRV-3"""
    _, engine, updates = make()
    client = TestClient(make_app(engine, updates, "secret"))
    paths = [(route.path, next(iter(route.methods))) for route in client.app.routes if hasattr(route, "methods")]
    assert len(paths) >= 13
    wrong = ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "secret"}, {"Authorization": "Bearer sécret"})
    for path, method in [*paths, ("/nowhere", "GET")]:
        for headers in wrong:
            raw = {key: value.encode() for key, value in headers.items()}
            assert client.request(method, path, headers=raw).status_code == 401, path
    assert client.get("/health/", headers={"Authorization": "Bearer secret"}).status_code == 200


def test_endpoints_live_below_the_prefix_of_base_url():
    """SRV-1"""
    _, engine, updates = make()
    client = TestClient(make_app(engine, updates, None, prefix="/a/b"))
    assert client.get("/a/b/health/").status_code == 200
    assert client.get("/health/").status_code == 404


def test_metrics_tell_the_load_of_every_device_LOG_6():
    """LOG-6: of worker 0 only the memory is known."""
    _, engine, updates = make()
    lines = TestClient(make_app(engine, updates, None)).get("/metrics/").text.splitlines()
    told = [line for line in lines if line.startswith("rollout_server_device_")]
    assert told == [
        'rollout_server_device_memory_bytes{worker="0"} 1.073741824e+09',
        'rollout_server_device_memory_bytes{worker="1"} 1.073741824e+09',
        'rollout_server_device_utilization{worker="1"} 0.5',
    ]


def test_malformed_calls_get_a_4xx_with_the_field():
    """SRV-5"""
    _, engine, updates = make()
    client = TestClient(make_app(engine, updates, None))
    assert client.post("/infer/", content=b"{not json", headers={"content-type": "application/json"}).status_code == 422
    answer = client.post("/infer/", json={"infer_requests": [], "request_config": {"top_p": "high"}})
    assert answer.status_code == 422 and answer.json()["detail"][0]["loc"] == ["body", "request_config", "top_p"]
    assert client.post("/infer/", json=[]).status_code == 422
    assert client.post("/update_weights/", json=UPDATE.model_dump()).status_code == 403
    assert client.post("/infer/", json={"infer_requests": []}).json() == []


def test_requests_use_the_lora_slot_until_a_full_update_has_the_adapter_merged_in():
    """SYN-10: and an adapter is refused on top of weights that an earlier run replaced."""

    async def run():
        llm, engine, updates = make()
        adapter = UPDATE.model_copy(update={"names": ["base_model.model.x.lora_A.weight"]})
        await updates.init(INIT)
        for names in (None, adapter, adapter, UPDATE):
            if names is not None:
                await updates.start(START)
                await updates.update(names)
                await updates.finish(FINISH)
            await engine.infer(ask("a"), RequestConfig())
        assert llm.slots == [None, 1, 1, None]
        await updates.start(START)
        with pytest.raises(UpdateFailed, match="restart the server, or sync in full"):
            await updates.update(adapter)
        assert engine.weights.state == "dirty"

    asyncio.run(run())


class Queueing(FakeLLM):
    """Admits requests only after the next update: as vLLM's "wait", which leaves in the queue what does not run."""

    def __init__(self):
        super().__init__()
        self.admits = asyncio.Event()

    async def generate(self, *args, **kwargs):
        await self.admits.wait()
        async for output in super().generate(*args, **kwargs):
            yield output

    async def resume_generation(self):
        self.admits.set()


@pytest.mark.parametrize("then", ["adapter", "full"])
def test_a_request_queued_over_a_change_of_the_lora_slot_is_made_again_SYN_8_SYN_10(then):
    """SYN-8, SYN-10: it would be answered without the adapter, or name a slot that is empty, under the new version."""

    async def run():
        llm = Queueing()
        engine = RolloutEngine(llm, FakeTokenizer(), ImageStore([]), "model", 2, STUCK_S)
        updates = WeightUpdates(engine, "gloo")
        adapter = UPDATE.model_copy(update={"names": ["base_model.model.x.lora_A.weight"]})
        await updates.init(INIT)

        async def update(call):
            await updates.start(START)
            await updates.update(call)
            await updates.finish(FINISH)

        if then == "full":
            await update(adapter)
            llm.admits.clear()
        waiting = asyncio.ensure_future(engine.infer(ask("a"), RequestConfig()))
        while not engine.ids_in_flight:
            await asyncio.sleep(0.01)
        await update(adapter if then == "adapter" else UPDATE)
        await waiting
        assert llm.slots == ([None, 1] if then == "adapter" else [1, None])

    asyncio.run(run())


def test_an_adapter_goes_on_after_a_failed_update_that_touched_no_weights_CON_4_SYN_10():
    """CON-4, SYN-10: a server that froze in it is used again; what the engine holds besides is as loaded."""

    async def run():
        llm, engine, updates = make()
        adapter = UPDATE.model_copy(update={"names": ["base_model.model.x.lora_A.weight"]})
        await updates.init(INIT)
        llm.missing = ["v"]  # an adapter's tensors are none of the engine's own
        await updates.start(START)
        await updates.update(adapter)
        await updates.abort(OwnedCall(run_id="a"))
        assert engine.weights.state == "dirty"
        await updates.start(START)
        await updates.update(adapter)
        await updates.finish(FINISH)
        assert engine.weights.state == "idle"

    asyncio.run(run())


OWNED = ("close_communicator", "start_weight_update", "update_weights", "finish_weight_update", "abort_weight_update")


def test_weight_and_cache_calls_need_the_token_of_the_run_that_opened_the_communicator():
    """SRV-3: the run's name, which /health/ shows, is not enough to write into the server; the right token is."""
    llm, engine, updates = make()
    client = TestClient(make_app(engine, updates, None))
    body = UPDATE.model_dump() | FINISH.model_dump() | {"pause": "wait"}
    tokens = ["", "wrong", "wröng".encode("latin-1"), "None"]
    for path in (*OWNED, "reset_prefix_cache"):  # nobody owns it: there is no right token
        assert {client.post(f"/{path}/", json=body, headers={"Run-Token": t}).status_code for t in tokens} == {403}
    token = client.post("/init_communicator/", json=INIT.model_dump()).json()["run_token"]
    assert client.get("/health/").json()["owner"] == "a" and token not in client.get("/health/").text
    steps = list(llm.log)
    for path in (*OWNED, "reset_prefix_cache"):
        answers = [client.post(f"/{path}/", json=body, headers={"Run-Token": t}) for t in (*tokens, token[:-1])]
        assert {answer.status_code for answer in answers} == {403}, path
        assert "belongs to run a" in answers[0].json()["detail"] and token not in answers[0].text
        assert client.post(f"/{path}/", json=body).status_code == 403
    assert llm.log == steps
    owner = {"Run-Token": token}
    assert client.post("/reset_prefix_cache/", headers=owner).json() == {"reset": True}
    for path, call in (("start_weight_update", START), ("update_weights", UPDATE), ("finish_weight_update", FINISH)):
        assert client.post(f"/{path}/", json=call.model_dump(), headers=owner).status_code == 200, path
    assert client.post("/close_communicator/", json={"run_id": "a"}, headers=owner).status_code == 200
    assert client.post("/reset_prefix_cache/", headers=owner).status_code == 403


def test_a_server_is_taken_over_only_from_a_learner_that_is_gone():
    """SRV-3, GRP-4: not even under the same name, unless the token proves that it is the same run."""
    llm, engine, updates = make()
    client = TestClient(make_app(engine, updates, None))

    def init(run_id: str, token: str = "") -> tuple[int, dict]:
        body = INIT.model_dump() | {"run_id": run_id}
        answer = client.post("/init_communicator/", json=body, headers={"Run-Token": token})
        return answer.status_code, answer.json()

    first = init("a")[1]["run_token"]
    llm.learner_is_alive = True
    for run_id in ("a", "b"):
        for token in ("", "wrong"):
            status, answer = init(run_id, token)
            assert status == 409 and "run a holds this server" in answer["detail"] and first not in str(answer)
    assert updates.owner == "a"
    status, answer = init("a", first)  # the same learner opens it anew
    second = answer["run_token"]
    assert status == 200 and second != first and len(second) >= 40
    llm.learner_is_alive = False
    assert init("b")[0] == 200 and updates.owner == "b"
    assert client.post("/reset_prefix_cache/", headers={"Run-Token": second}).status_code == 403


def test_bodies_that_are_too_large_are_refused_announced_or_not(monkeypatch):
    """SRV-5: 413 after as many bytes as are allowed; the rest is never read."""
    monkeypatch.setattr("utils.server.app.MAX_BODY_BYTES", 1 << 20)
    _, engine, updates = make()
    client = TestClient(make_app(engine, updates, None))
    headers = {"content-type": "application/json"}
    assert client.post("/infer/", content=b" " * ((1 << 20) + 1), headers=headers).status_code == 413
    answer = client.post("/infer/", content=iter([b" " * (1 << 16)] * 17), headers=headers)  # chunked
    assert answer.status_code == 413 and "1 MiB" in answer.json()["detail"]
    fits = b'{"infer_requests": []}'.ljust(1 << 20)
    assert client.post("/infer/", content=fits, headers=headers).json() == []


@pytest.mark.parametrize(
    "body",
    [b'{"infer_requests": [], "request_config": {"temperature": NaN}}', b"[" * 100_000, b'{"infer_requests": "\xff"}']
    + [b'{"infer_requests": [{"messages": [{"role": "user", "content": "\\ud800"}]}]}', b"1" * 10_000, b""]
    + [
        b'{"infer_requests": [], "request_config": {"temperature": 1e999}}',
        b'{"infer_requests": [3], "x": "' + b"y" * 9999,
    ],
)
def test_what_is_not_quite_json_gets_a_short_4xx(body):
    """SRV-5: not-a-number and half characters cannot even be repeated in an error."""
    _, engine, updates = make()
    client = TestClient(make_app(engine, updates, None), raise_server_exceptions=False)
    for path in ("/infer/", "/probe/", "/teacher/", "/init_communicator/"):
        answer = client.post(path, content=body, headers={"content-type": "application/json"})
        assert answer.status_code == 422 and len(answer.content) < 2000, answer.text


def test_a_422_lists_the_first_mistakes_only():
    """SRV-5"""
    _, engine, updates = make()
    client = TestClient(make_app(engine, updates, None))
    answer = client.post("/infer/", json={"infer_requests": [dict.fromkeys("abcdefghijklmnopqrstuvw", 1)]})
    assert answer.status_code == 422 and len(answer.json()["detail"]) == 20


def test_a_run_whose_opening_failed_does_not_own_the_server_CON_4():
    """CON-4: `/health/` would stop the run that owned it before and waits for it to come back."""

    async def run():
        llm, engine, updates = make()
        token = (await updates.init(INIT))["run_token"]
        seen, on_all = [], engine.on_all_workers

        async def fails(step, payload=None):
            if step == "init":
                seen.append(updates.owner)
                raise UpdateFailed("no learner came")
            return await on_all(step, *([payload] if payload is not None else []))

        engine.on_all_workers = fails
        with pytest.raises(UpdateFailed):
            await updates.init(INIT.model_copy(update={"run_id": "b"}))
        assert seen == [None] and updates.owner is None
        with pytest.raises(NotOwner):  # nor does the token of the run before
            updates.check_token(token)

    asyncio.run(run())
