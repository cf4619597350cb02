"""Adapter sync into a real server with LoRA slots, against PEFT's own merge (SYN-10)."""

import json
import logging
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import AutoModelForImageTextToText

from tests.e2e import processes
from tests.e2e.processes import Server
from tests.e2e.test_partial_sync import merged_by_peft, own_logprobs, train_a_little
from tests.e2e.test_server import asked, assert_serves, folder, save_variant  # noqa: F401
from tools.make_demo import make_dataset
from utils.config.rollout import ServerAddress
from utils.dist import Ranks
from utils.rollout.client import RolloutClient
from utils.run.rollout_log import read_rollout_log
from utils.sync.adapter_sync import AdapterSync, make_sync
from utils.sync.weight_sync import Probe, WeightSync

pytestmark = pytest.mark.e2e
LANGUAGE = r".*language_model.*\.(q_proj|v_proj|o_proj|down_proj)"


@pytest.fixture(scope="module")
def server(folder, start_model):  # noqa: F811
    with server_with_slots(folder, start_model) as server:
        yield server


@contextmanager
def server_with_slots(folder, model, **settings):  # noqa: F811
    plain = processes.config_of

    def with_slots(*args):
        config = plain(*args)
        config["custom"]["extra"]["rollout_matching"]["vllm"]["enable_lora"] = True
        return config

    processes.config_of = with_slots
    try:
        server = Server(folder, model, vllm_enable_lora=True, **settings)
    finally:
        processes.config_of = plain
    try:
        yield server.wait_ready()
    finally:
        server.end()


def tuned(start_model, targets: str):
    base = AutoModelForImageTextToText.from_pretrained(start_model, dtype=torch.float32)
    torch.manual_seed(3)
    return get_peft_model(base, LoraConfig(r=4, lora_alpha=12, target_modules=targets, alpha_pattern={"o_proj": 6}))


def open_sync(
    server: Server, model, run_id: str, fallback_to_full: bool, probe: Probe | None = None, mode: str = "adapter"
):
    client = RolloutClient([ServerAddress(server.url, server.group_port)], rank=0, world_size=1, decode_batch_size=4)
    client.wait_ready()
    sync = make_sync(
        model,
        mode,
        fallback_to_full,
        Ranks(),
        client,
        [("127.0.0.1", server.group_port)],
        run_id=run_id,
        bucket_bytes=20_000,
        timeout_s=60,
        open_timeout_s=60,
        verify="always",
        probe=probe,
    )
    sync.open()
    return sync


def test_an_adapter_in_its_slot_answers_as_the_merged_model_SYN_10(server, start_model, asked, tmp_path):  # noqa: F811
    """SYN-10: greedy token ids and log-probabilities in float32 after every sync; only adapter tensors travel."""
    model = tuned(start_model, LANGUAGE)
    ids = list(range(40, 52))

    def logprobs():
        return own_logprobs(save_variant(start_model, merged_by_peft(model), tmp_path), asked[0], ids)

    sync = open_sync(server, model, "run-a", False, Probe(asked[0], ids, logprobs))
    assert isinstance(sync, AdapterSync)
    answers = []
    for step in range(3):
        train_a_little(model)
        report = sync.sync(f"run-a:{step}")
        assert report.verified and report.num_bytes == 4 * sum(p.numel() for p in model.parameters() if p.requires_grad)
        assert_serves(server, save_variant(start_model, merged_by_peft(model), tmp_path), asked)
        answers.append(str([output["response_token_ids"] for output in server.infer(asked, max_tokens=12)]))
    assert len(set(answers)) == 3
    sync.close()


def test_the_program_trains_with_adapters_in_the_slots_SYN_10(server, start_model, folder):  # noqa: F811
    """SYN-10, CFG-9: `train_stage2.py` with `sync.mode: adapter`, one learner and plain LoRA: every sync sends the
    adapter alone, and the probe of the first one proves that the engine computes with it. The test before left
    the engine's own weights as loaded."""
    train, _, _ = make_dataset(folder / "data" / "program", num_train=8, num_val=1)  # below the server's image root
    config = processes.config_of(folder, start_model, server.url, server.group_port, {})
    config["custom"]["train_jsonl"] = str(train)
    extra = config["custom"]["extra"]
    extra["rollout_matching"]["vllm"] |= {"enable_lora": True, "sync": {"mode": "adapter", "fallback_to_full": False}}
    extra["rollout_server"]["vllm_enable_lora"] = True
    config["training"] |= {"max_steps": 2, "per_device_train_batch_size": 2, "learning_rate": 5e-3}
    config["tuner"] = {"type": "lora", "rank": 4, "target_modules": ["q_proj", "v_proj", "down_proj"]}
    path = processes.write_yaml(folder / "program.yaml", config)
    result = processes.run_learner("train_stage2.py", path, num_ranks=1)
    assert result.returncode == 0, result.stdout[-6000:]
    run_dir = Path(config["training"]["output_dir"])
    assert json.loads((run_dir / "run.json").read_text())["sync"] == {"mode": "adapter", "fallback": None}
    lines = read_rollout_log(run_dir / "rollouts.jsonl")
    assert [line["sync"] for line in lines] == [{"mode": "adapter", "fallback": None}] * 2
    events = EventAccumulator(str(run_dir)).Reload()
    sizes = [event.value for event in events.Scalars("sync/bytes")]
    saved = load_file(run_dir / "checkpoint-2" / "adapter" / "adapter_model.safetensors")
    assert sizes == [4 * sum(tensor.numel() for tensor in saved.values())] * 2  # float32
    assert [event.value for event in events.Scalars("sync/adapter")] == [1, 1]


def test_a_full_sync_into_an_engine_with_slots_empties_the_slot_SYN_10(server, start_model, asked, tmp_path, caplog):  # noqa: F811
    """SYN-10: with an adapter that has no slot in the engine (vision tower), the run continues with full syncs and
    warns once. If the slot stayed in force, the adapter would count twice."""
    model = tuned(start_model, LANGUAGE)
    train_a_little(model)
    sync = open_sync(server, model, "run-b", False)
    sync.sync("run-b:0")
    sync.close()

    model = tuned(start_model, rf"{LANGUAGE}|.*visual.*attn\.qkv")
    sync = open_sync(server, model, "run-c", True)
    for step in range(3):
        train_a_little(model)
        with caplog.at_level(logging.WARNING):
            sync.sync(f"run-c:{step}")
        assert_serves(server, save_variant(start_model, merged_by_peft(model), tmp_path), asked[:2])
    assert type(sync.current) is WeightSync
    warnings = [record.getMessage() for record in caplog.records if "adapter sync" in record.getMessage()]
    assert len(warnings) == 1 and "no LoRA slot" in warnings[0] and "visual" in warnings[0]
    sync.close()


@pytest.mark.slow
def test_requests_that_are_queued_over_a_full_sync_are_answered_SYN_10(folder, start_model, asked):  # noqa: F811
    """SYN-10, SRV-10: with room for one at a time the others name a slot that the sync takes the adapter out of. The
    engine died of them."""
    model = tuned(start_model, LANGUAGE)
    with server_with_slots(folder, start_model, vllm_max_num_seqs=1) as server:
        for run_id, mode in (("run-a", "adapter"), ("run-b", "full")):
            train_a_little(model)
            sync = open_sync(server, model, run_id, False, mode=mode)
            with ThreadPoolExecutor(3) as pool:
                calls = [
                    pool.submit(server.infer, asked[:1], max_tokens=200, temperature=1.0, seed=i) for i in (1, 2, 3)
                ]
                time.sleep(1.0)
                sync.sync(f"{run_id}:0")
                answers = [call.result()[0] for call in calls]
            sync.close()
            assert not any("error" in answer["rollout_infos"] for answer in answers), answers
            assert server.get("/health/").status_code == 200


def test_without_fallback_the_run_stops_with_the_reason_SYN_10(server, start_model):
    """SYN-10, SYN-3: the previous test's run left its merged weights in the engine. The run stops at once, not when the
    transport's 60 s are over."""
    sync = open_sync(server, tuned(start_model, LANGUAGE), "run-d", False)
    start = time.monotonic()
    with pytest.raises(RuntimeError, match="restart the server, or sync in full"):
        sync.sync("run-d:0")
    sync.close()
    assert time.monotonic() - start < 20
    assert sync.client.run_tokens[0] not in server.log.read_text()
