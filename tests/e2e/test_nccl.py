"""The NCCL path of real programs, on CPU: vLLM and two ZeRO-3 ranks over the emulated NCCL (tests/emulated_nccl)."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from peft import PeftModel
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import AutoModelForImageTextToText

from tests.e2e.processes import Server, run_learner, write_yaml
from tests.e2e.test_partial_sync import own_logprobs
from tests.emulated_nccl import environment, marks
from tools.make_demo import make_dataset
from utils.config.schema import Data
from utils.data.encoding import prompt_chat
from utils.data.samples import load_samples
from utils.sync.wire import tensor_digest

pytestmark = pytest.mark.e2e
NUM_STEPS = 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("nccl")
    make_dataset(folder / "data", num_train=24, num_val=1)
    (folder / "marks").mkdir()
    return folder


@pytest.fixture(scope="module")
def server(folder, start_model):
    server = Server(folder, start_model, environment=environment(folder / "marks"))
    try:
        yield server.wait_ready()
    finally:
        server.end()


@pytest.fixture(scope="module")
def run(folder, server) -> Path:
    """Three optimizer steps with DoRA on the language model; small buckets, so that a sync takes many."""
    config = yaml.safe_load(server.config.read_text())
    matching = config["custom"]["extra"]["rollout_matching"]
    matching |= {"decode_batch_size": 4, "max_new_tokens": 32}
    matching["vllm"]["sync"] = {"bucket_mib": 1, "verify": "always", "timeout_s": 60.0}
    sharded = {"stage": 3, "stage3_param_persistence_threshold": 0}  # otherwise small models are never sharded
    (folder / "zero3.json").write_text(json.dumps({"zero_optimization": sharded}))
    config |= {
        "tuner": {"type": "lora", "use_dora": True, "rank": 4, "alpha": 8},
        "training": {
            "output_dir": str(folder / "run"),
            "max_steps": NUM_STEPS,
            "per_device_train_batch_size": 2,
            "learning_rate": 5e-3,
            "save_steps": 1,
            "gradient_checkpointing": False,
        },
        "deepspeed": str(folder / "zero3.json"),
    }
    config = write_yaml(folder / "run.yaml", config)
    result = run_learner("train_stage2.py", config, num_ranks=2, environment=environment(folder / "marks"))
    assert result.returncode == 0, result.stdout[-6000:]
    return folder / "run"


def test_the_run_took_the_nccl_path_and_used_it_well_SYN_1(run, folder):
    """SYN-1: rank 0 and the engine; no call after an abort, and nobody's main thread moved to another stream (A side
    stream would order the optimizer's work and the merge no longer)."""
    assert len(marks(folder / "marks", "used")) == 2
    assert not marks(folder / "marks", "violation") and not marks(folder / "marks", "side_stream")


def test_later_syncs_send_less_and_every_one_was_proven_SYN_6_SYN_7(run):
    """SYN-6, SYN-7: `verify: always` compared digests and log-probabilities after each, or the run had ended."""
    events = EventAccumulator(str(run)).Reload()
    sent = [event.value for event in events.Scalars("sync/bytes")]
    assert len(sent) == NUM_STEPS and sent[0] > sent[1] == sent[2] > 0


def test_the_server_holds_the_learners_merged_weights_SYN_4_SYN_7(run, folder, server, start_model):
    """SYN-4, SYN-7: the version in force is the ledger's last, whose digests are those of the adapter saved at that
    step, merged by PEFT; and the engine computes with them."""
    ledger = json.loads((run / "weights.json").read_text())
    assert server.get("/weight_version/").json()["weight_version"] == ledger["version"]
    base = AutoModelForImageTextToText.from_pretrained(start_model, dtype=torch.float32)
    checkpoint = run / f"checkpoint-{ledger['version'].rpartition(':')[2]}"
    merged = PeftModel.from_pretrained(base, checkpoint / "adapter").merge_and_unload().state_dict()
    assert set(merged) - set(ledger["digests"]) == {"lm_head.weight"}
    assert {name: tensor_digest(merged[name]) for name in ledger["digests"]} == ledger["digests"]
    sample = load_samples([folder / "data" / "val.jsonl"], prompt=Data().prompt)[0][0]
    request = {"messages": prompt_chat(sample), "images": sample.images}
    token_ids = list(range(40, 72))
    live = server.post("/probe/", {"infer_request": request, "token_ids": token_ids}).json()["logprobs"][0]
    ours = own_logprobs(checkpoint / "merged", request, token_ids)
    np.testing.assert_allclose(live[-len(token_ids) :], ours, atol=1e-3)
