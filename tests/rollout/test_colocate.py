"""The colocate backend: a real vLLM engine beside a DoRA model in one process, and how ranks share an engine.

The engine runs in a process of its own (this file as a program), because vLLM changes the process that it lives in.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch

colocate = pytest.importorskip("utils.rollout.colocate")

from tools.make_demo import make_dataset  # noqa: E402
from utils.dist import DistributedError, Ranks  # noqa: E402
from utils.rollout.backend import Engine, RolloutContext, RolloutRequest, RolloutResult, RolloutSampling  # noqa: E402
from utils.run.policy import Policy  # noqa: E402
from utils.run.records import Timer  # noqa: E402
from utils.sync.weight_sync import Probe  # noqa: E402

pytestmark = pytest.mark.e2e
PLACE = {"global_step": 3, "micro_step_idx": 1, "run_seed": 5}


@pytest.fixture(scope="module")
def seen(warm_model, tmp_path_factory) -> dict:
    """What `main` below saw."""
    folder = tmp_path_factory.mktemp("colocate")
    make_dataset(folder / "data", num_train=5, num_val=1)
    command = [sys.executable, __file__, str(warm_model), str(folder)]
    environment = {**os.environ, "PYTHONPATH": os.getcwd(), "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    environment.pop("MASTER_PORT", None)  # of process groups that other tests have opened in this process
    run = subprocess.run(command, env=environment, timeout=400, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-5000:]
    return json.loads((folder / "seen.json").read_text())


def main(model_path: str, folder: str) -> None:
    """Answers at several points of one engine's life, as JSON in `folder`."""
    from transformers import AutoModelForImageTextToText

    from tests.rollout.test_hf import NEW_TOKENS, plain_generate, requests_of, same_but_for_ties
    from utils.config.rollout import Sync, Vllm
    from utils.config.schema import Model, Tuner
    from utils.data.encoding import load_processor
    from utils.dist import Ranks
    from utils.learner.model import apply_tuner, load_model
    from utils.rollout.colocate import ColocateEngine
    from utils.sync.merged_weights import MergedWeights
    from utils.sync.weight_sync import Probe

    ranks = Ranks()
    ranks.open()
    processor = load_processor(model_path)
    requests = requests_of(Path(folder), processor)
    tuner = {"type": "lora", "use_dora": True, "rank": 4, "freeze_vit": False, "modules_to_save": ["embed_tokens"]}
    model = apply_tuner(load_model(model_path, "float32"), Tuner(**tuner))
    plain = AutoModelForImageTextToText.from_pretrained(model_path, dtype=torch.float32).eval()
    weights = MergedWeights(model)
    model_section = Model(path=model_path, dtype="float32")
    vllm = Vllm(tensor_parallel_size=1, sync=Sync(verify="off"))
    lengths = {"max_model_len": 512, "decode_batch_size": 3}
    backend = ColocateEngine(model_section, vllm, weights, ranks, processor, **lengths)
    backend.bucket_bytes = 1 << 18  # several buckets
    decoding = RolloutSampling(max_new_tokens=NEW_TOKENS)
    seen: dict = {"num_threads_is_torchs_own": torch.set_num_threads.__module__ != "vllm.v1.worker.cpu_worker"}

    def answers(version, asked=requests, how=decoding) -> list:
        return [vars(r) for r in backend.generate(asked, how, RolloutContext(**PLACE, policy_version=version))]

    def correct(given) -> list[bool]:
        plain.load_state_dict(dict(weights.tensors()), strict=False)
        plain.tie_weights()
        pairs = zip(requests, given, strict=True)
        got = [(request, (answer["response_token_ids"], answer["finish_reason"])) for request, answer in pairs]
        return [same_but_for_ties(plain, request, ours, plain_generate(plain, request)) for request, ours in got]

    def raises(function, *args) -> str:
        try:
            function(*args)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return ""

    report = backend.sync("run:0")
    seen["num_tensors"], seen["num_bytes"] = report.num_tensors, report.num_bytes
    seen["start"] = answers("run:0")
    seen["start_correct"] = correct(seen["start"])
    with torch.no_grad():  # like an optimizer step
        for index, parameter in enumerate(p for p in model.parameters() if p.requires_grad):
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(index)))
    seen["unsynced"] = answers("run:0")
    seen["stale"] = raises(answers, "run:1")
    backend.sync("run:1")
    seen["changed"] = answers("run:1")
    seen["changed_correct"] = correct(seen["changed"])
    sampled = RolloutSampling(temperature=1.2, top_k=50, max_new_tokens=40)
    seen["sampled"], seen["sampled_again"] = answers("run:1", how=sampled), answers("run:1", how=sampled)
    seen["sampled_first"] = answers("run:1", requests[:1], sampled)
    seen["empty"] = answers("run:1", [])

    request = {"messages": requests[0].messages, "images": requests[0].images}
    token_ids = seen["changed"][0]["response_token_ids"][:8]
    backend.verify, truth = "always", own_logprobs(plain, requests[0], token_ids)
    prompt_ids = list(requests[0].prompt_token_ids)
    backend.num_syncs = 0  # prompts are compared at the first sync
    backend.probe = Probe(request, token_ids, lambda: truth, [(request, prompt_ids[1:])])
    seen["wrong_prompt"] = raises(backend.sync, "run:2")
    backend.probe = Probe(request, token_ids, lambda: truth, [(request, prompt_ids)])
    seen["verified"] = backend.sync("run:2").verified
    backend.probe = Probe(request, token_ids, lambda: truth - 0.01)
    seen["wrong_probe"] = raises(backend.sync, "run:3")

    backend.probe, name = None, weights.entries[5].name
    object.__setattr__(weights.entries[5], "name", "model.nothing.weight")
    seen["bad_tensor"] = raises(backend.sync, "run:4")
    object.__setattr__(weights.entries[5], "name", name)
    backend.sync("run:5")
    seen["after_failure"] = answers("run:5")
    backend.close()
    ranks.close()
    (Path(folder) / "seen.json").write_text(json.dumps(seen))


def own_logprobs(model, request, token_ids):
    """Log-probabilities of an answer by transformers' forward, float64 `[len(token_ids)]`."""
    ids = torch.tensor([[*request.prompt_token_ids, *token_ids]])
    images = request.vision
    is_image = (ids == model.config.image_token_id).int()
    with torch.no_grad():
        logits = model(input_ids=ids, mm_token_type_ids=is_image, **images).logits[0]
    steps = logits[-len(token_ids) - 1 : -1].double().log_softmax(-1)
    return steps.gather(1, torch.tensor(token_ids)[:, None])[:, 0].numpy()


def response_ids(answers: list[dict]) -> list[list[int]]:
    return [answer["response_token_ids"] for answer in answers]


@pytest.mark.parametrize("when", ["start", "changed"])
def test_greedy_answers_are_those_of_plain_generate_on_the_merged_weights_ROL_1_ROL_7_SYN_4(seen, when):
    """ROL-1, ROL-7, SYN-4: before and after a change of adapters and embeddings, in float32."""
    assert seen[f"{when}_correct"] == [True] * 5
    assert {answer["finish_reason"] for answer in seen["start"]} >= {"stop"}


def test_prompts_are_expanded_by_the_engine_as_by_the_learner_ROL_3(seen):
    """ROL-3: vLLM gets one placeholder per image."""
    assert [len(set(answer["prompt_token_ids"])) > 3 for answer in seen["start"]] == [True] * 5
    assert seen["start"][2]["prompt_token_ids"] == seen["changed"][2]["prompt_token_ids"]


def test_new_weights_are_in_force_after_a_sync_and_not_before_SYN_2_SYN_8(seen):
    """SYN-2, SYN-8."""
    assert response_ids(seen["unsynced"]) == response_ids(seen["start"]) != response_ids(seen["changed"])
    assert seen["stale"].startswith("StaleRollout") and "run:0" in seen["stale"] and "run:1" in seen["stale"]
    assert {answer["weight_version"] for answer in seen["changed"]} == {"run:1"}
    assert seen["num_tensors"] > 50 and seen["num_bytes"] > 1 << 20


def test_sampling_is_repeatable_by_seed_DIS_6(seen):
    """DIS-6: request i samples with seed + i, so the first alone is the first of five."""
    assert response_ids(seen["sampled"]) == response_ids(seen["sampled_again"])
    assert response_ids(seen["sampled_first"]) == response_ids(seen["sampled"])[:1]
    assert response_ids(seen["sampled"]) != response_ids(seen["changed"])
    assert seen["empty"] == []


def test_the_probe_proves_a_sync_SYN_7(seen):
    """SYN-7, second step; FAM-3: at the first sync the engine must make the learner's prompts."""
    assert seen["verified"] is True
    assert "the engine of rank 0: the engine's prompt has" in seen["wrong_prompt"]
    assert "log-probabilities of the probe are off by 0.01" in seen["wrong_probe"]
    assert "the engine of rank 0" in seen["wrong_probe"]


def test_a_failed_sync_stops_and_the_next_one_mends_it_SYN_3(seen):
    """SYN-3."""
    assert "model.nothing.weight" in seen["bad_tensor"] and "weight sync run:4 failed" in seen["bad_tensor"]
    assert response_ids(seen["after_failure"]) == response_ids(seen["changed"])


def test_torch_is_left_as_it_was(seen):
    assert seen["num_threads_is_torchs_own"]


@pytest.mark.parametrize(("family", "caches"), [("qwen3_5", False), ("qwen2_5_vl", None)])
def test_an_engine_on_cpu_is_not_asked_to_cache_recurrent_states_FAM_2_ROL_7(family, caches, tmp_path, monkeypatch):
    """FAM-2, ROL-7: vLLM 0.32 would refuse to start, and a colocated engine has no key for it. None: vLLM's default."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family}))
    monkeypatch.setattr(colocate, "LLM", lambda **kwargs: kwargs)
    monkeypatch.setattr(os, "environ", {**os.environ})
    sizes = {"tensor_parallel_size": 1, "gpu_memory_utilization": 0.4, "max_model_len": 64, "decode_batch_size": 1}
    started = colocate.start_engine(colocate.Model(path=str(tmp_path)), torch.device("cpu"), **sizes)
    assert started.get("enable_prefix_caching") is caches and not started["enable_chunked_prefill"]


@pytest.mark.parametrize(
    ("rank", "size", "expected", "own"),
    [(0, 1, ["a0", "a1"], ["a0", "a1"]), (2, 2, ["c0", "d0", "d1"], ["c0"]), (3, 2, ["c0", "d0", "d1"], ["d0", "d1"])],
)
def test_ranks_of_a_group_submit_the_same_requests_and_keep_their_own_ROL_7(rank, size, expected, own):
    """ROL-7: four ranks; with tensor parallelism 2 the last two share an engine."""
    everyone = [["a0", "a1"], [], ["c0"], ["d0", "d1"]]
    backend = object.__new__(colocate.ColocateEngine)
    backend.tensor_parallel_size = size
    backend.ranks = SimpleNamespace(rank=rank, gather_or_raise=lambda value, where: everyone)
    asked, mine = backend._gather_group(everyone[rank])
    assert asked == expected and asked[mine] == own


def test_an_engine_over_t_devices_decodes_t_times_as_many_CFG_11(monkeypatch):
    """CFG-11, CFG-6, ROL-7: what vLLM is built with."""
    built = {}
    monkeypatch.setattr(colocate, "LLM", lambda **kwargs: built.update(kwargs))
    for name in ("VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_NO_USAGE_STATS", "VLLM_USE_FLASHINFER_SAMPLER"):
        monkeypatch.setenv(name, "")
    monkeypatch.delenv("VLLM_USE_FLASHINFER_SAMPLER")
    sizes = {"tensor_parallel_size": 4, "gpu_memory_utilization": 0.45, "max_model_len": 100, "decode_batch_size": 3}
    model = colocate.Model(path="m", image_max_pixels=4096)
    colocate.start_engine(model, torch.device("cuda"), **sizes, sleeps=True)
    assert built["mm_processor_kwargs"] == model.processor_kwargs != {}
    assert built["logprobs_mode"] == "processed_logprobs", "GRPO needs those that tokens are drawn from (GRP-6)"
    assert (built["max_num_seqs"], built["tensor_parallel_size"], built["gpu_memory_utilization"]) == (12, 4, 0.45)
    assert built["enable_sleep_mode"] is True and built["distributed_executor_backend"] == "external_launcher"
    assert os.environ["VLLM_USE_FLASHINFER_SAMPLER"] == "0", "it would be compiled at the first request with top_p"


def test_starting_an_engine_changes_neither_threads_nor_random_numbers_ROL_7(start_model, monkeypatch):
    """ROL-7: vLLM's workers leave one thread (on GPUs) and the same seed on all ranks."""

    def start(**_: object) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(0)

    monkeypatch.setattr(colocate, "LLM", start)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    sizes = {"tensor_parallel_size": 1, "gpu_memory_utilization": 0.45, "max_model_len": 100, "decode_batch_size": 3}
    colocate.start_engine(colocate.Model(path=str(start_model)), torch.device("cpu"), **sizes)
    assert torch.get_num_threads() == 2 and torch.equal(torch.rand(3), expected)
    torch.set_num_threads(before)


def engine_on(llm: SimpleNamespace, ranks: Ranks, monkeypatch, probe: Probe | None = None) -> Engine:
    """A backend on a made-up `vllm.LLM`, whose weight updates succeed."""
    llm.collective_rpc = lambda *args, **kwargs: [{"error": None, "result": None}]
    llm.reset_mm_cache, llm.reset_prefix_cache = lambda: None, lambda: True
    llm.llm_engine = SimpleNamespace(reset_encoder_cache=lambda: None)
    monkeypatch.setattr(colocate, "start_engine", lambda *args, **options: llm)
    monkeypatch.setattr(colocate, "vllm_prompt", lambda *args: {})
    monkeypatch.setattr(colocate, "read_output", lambda output, version: RolloutResult([], [], "", "stop", version))
    weights = SimpleNamespace(entries=[], tensors=lambda: iter(()), dtype=torch.float32)
    vllm = colocate.Vllm(tensor_parallel_size=1)
    return colocate.ColocateEngine(colocate.Model(path="m"), vllm, weights, ranks, None, probe)


def test_no_request_draws_from_the_learners_random_numbers_LRN_5_ROL_7(monkeypatch):
    """LRN-5, ROL-7: in this process vLLM samples from torch's global generator unless a request is greedy or has a
    seed. A resumed run makes its first sync, which compares prompts, where the whole one made none."""
    asked = []

    def generate(prompts, params, use_tqdm):
        asked.extend(params if isinstance(params, list) else [params])
        step = {7: SimpleNamespace(logprob=-1.0)}
        return [SimpleNamespace(prompt_token_ids=[5], prompt_logprobs=[step])] * len(prompts)

    request = {"messages": [], "images": []}
    probe = Probe(request, [7], lambda: np.array([-1.0]), [(request, [5])])
    engine = engine_on(SimpleNamespace(generate=generate), Ranks(), monkeypatch, probe)
    engine.sync("run:0")
    sampled, context = RolloutSampling(temperature=1.0), RolloutContext(**PLACE, policy_version="run:0")
    engine.generate([RolloutRequest("s", [], [], [])] * 2, sampled, context)
    assert len(asked) == 4 and all(params.temperature == 0 or params.seed is not None for params in asked)


def test_the_engine_sleeps_and_wakes_once_per_step_ROL_7(monkeypatch):
    """ROL-7: awake from the sync, its probe included, to the last micro-step; asleep again after a failure, too."""
    calls, ranks = [], Ranks()
    llm = SimpleNamespace(
        wake_up=lambda: calls.append("wake"),
        sleep=lambda level: calls.append("sleep"),
        generate=lambda prompts, params, use_tqdm: calls.append("generate") or prompts,
    )
    engine = engine_on(llm, ranks, monkeypatch)
    engine.sleeps, engine.is_awake = True, False
    policy = Policy(engine, None, ranks, "run", 0, str, None, Timer())
    request = RolloutRequest("s", [], [], [])

    def generate(micro_steps: int, fails: bool = False) -> None:
        for micro_step in range(micro_steps):
            context = RolloutContext(0, 0, micro_step, policy.version)
            engine.generate([request], RolloutSampling(), context)
        if fails:
            raise KeyError

    policy.with_current_weights(0, lambda: generate(3), "preparing step 0")
    assert calls == ["wake", *["generate"] * 3, "sleep"]
    policy.with_current_weights(0, lambda: generate(1), "evaluation at step 0")  # no sync is due
    assert calls[5:] == ["wake", "generate", "sleep"]
    with pytest.raises(DistributedError):
        policy.with_current_weights(1, lambda: generate(2, fails=True), "preparing step 1")
    assert calls[8:] == ["wake", "generate", "generate", "sleep"]
    engine.sleeps = False
    policy.with_current_weights(2, lambda: generate(1), "preparing step 2")
    assert calls[12:] == ["generate"]


def test_an_error_while_merging_aborts_the_update_and_reaches_all_ranks_SYN_3():
    """SYN-3: it must not leave `sync` before the fence, where the other ranks wait."""
    from utils.rollout.colocate import ColocateEngine

    engine, calls = MagicMock(verify="off"), []

    def broken():
        yield [("a", None)]
        raise torch.OutOfMemoryError("no room")

    def reach_all(error, where):
        if error is not None:
            raise RuntimeError(f"{where}: {error}")

    engine._buckets, engine._weight_rpc = broken, lambda step, payload=None: calls.append(step)
    engine.ranks.raise_on_all_ranks = reach_all
    with pytest.raises(RuntimeError, match="weight sync run:1: no room"):
        ColocateEngine.sync(engine, "run:1")
    assert calls == ["start", "load", "abort"] and not engine._finish.called


def test_a_rank_whose_engine_does_not_wake_still_takes_part_in_every_gather_SYN_3_ROL_7(monkeypatch):
    """SYN-3, ROL-7: under ZeRO-3 the others are in the gathers of the merge, or in the forward of a group."""

    def wake_up() -> None:
        raise torch.OutOfMemoryError("out of memory")

    shared, ranks = [], Ranks()
    monkeypatch.setattr(ranks, "raise_on_all_ranks", lambda error, where: shared.append((type(error), where)))
    engine = engine_on(SimpleNamespace(wake_up=wake_up, generate=None), ranks, monkeypatch)
    engine.sleeps, engine.is_awake, gathered = True, False, []
    engine.weights.tensors = lambda: iter(gathered.append(name) or (name, torch.zeros(1)) for name in "ab")
    engine.sync("run:1")
    assert gathered == ["a", "b"] and shared[0] == (torch.OutOfMemoryError, "weight sync run:1")
    engine.is_awake, engine.tensor_parallel_size = False, 2
    monkeypatch.setattr(engine, "_gather_group", lambda own: (own, slice(None)))
    request = RolloutRequest("s", [], [], [])
    with pytest.raises(TypeError):  # what comes behind: here the shared error does not raise
        engine.generate([request], RolloutSampling(), RolloutContext(0, 0, 0, "run:1"))
    assert shared[-1] == (torch.OutOfMemoryError, "preparing the engine")
    assert engine.generate([], RolloutSampling(), RolloutContext(0, 0, 0, "run:1")) == []
    assert shared[-1] == (type(None), "preparing the engine")  # also a group without requests takes part


def test_a_sync_drops_what_the_old_weights_made_and_needs_every_tensor_SYN_3_SYN_9():
    """SYN-3, SYN-9."""
    from utils.rollout.colocate import ColocateEngine

    engine = MagicMock()
    engine._weight_rpc.return_value = []
    ColocateEngine._finish(engine)
    for reset in (engine.llm.reset_mm_cache, engine.llm.llm_engine.reset_encoder_cache, engine.llm.reset_prefix_cache):
        reset.assert_called_once_with()
    engine.llm.reset_prefix_cache.return_value = False
    with pytest.raises(RuntimeError, match="did not drop its prefix cache"):
        ColocateEngine._finish(engine)
    engine._weight_rpc.return_value = ["a.weight"]
    with pytest.raises(RuntimeError, match=r"tensors the engine did not get: \['a.weight'\]"):
        ColocateEngine._finish(engine)


if __name__ == "__main__":
    main(*sys.argv[1:])
