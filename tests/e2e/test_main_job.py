"""Stage 2 with real parts: vLLM with two engines and DeepSpeed with two ranks, which sends it merged DoRA weights."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import PeftModel
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import AutoModelForImageTextToText

from tests.e2e.processes import Server, config_of, run_learner, write_yaml
from tools.make_demo import make_dataset
from utils.config.schema import Data
from utils.data.encoding import encode_prompt, load_processor, prompt_chat
from utils.data.samples import load_samples
from utils.rollout.backend import RolloutContext, RolloutRequest, RolloutSampling, ServerEngine
from utils.rollout.client import RolloutClient
from utils.sync.wire import tensor_digest

pytestmark = pytest.mark.e2e
NUM_STEPS = 4
DORA = {"type": "lora", "use_dora": True, "rank": 4, "alpha": 8, "modules_to_save": ["embed_tokens"]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("main_job")
    train, _, _ = make_dataset(folder / "data", num_train=48, num_val=32)
    lines = [json.loads(line) for line in train.read_text().splitlines()]
    for row in lines[::2]:  # every other training sample has polygons next to its boxes (TGT-6)
        for item in row["objects"][::2]:
            x1, y1, x2, y2 = item.pop("bbox_2d")
            item["poly"] = [x1, y1, x2, y1, x2, y2, x1, y2]
    train.write_text("".join(json.dumps(row) + "\n" for row in lines))
    return folder


@pytest.fixture(scope="module")
def server(folder, warm_model):
    server = Server(folder, warm_model, vllm_data_parallel_size=2)
    try:
        yield server.wait_ready()
    finally:
        server.end()


def stage2_config(folder: Path, server: Server, model: Path, name: str, **changes) -> Path:
    config = config_of(folder, model, server.url, server.group_port, {"vllm_data_parallel_size": 2})
    matching = config["custom"]["extra"]["rollout_matching"]
    matching |= {"decode_batch_size": 8, "max_new_tokens": 200} | changes.pop("matching", {})
    matching["vllm"]["sync"] = {"bucket_mib": 1, "verify": "always"}
    config["custom"]["val_jsonl"] = str(folder / "data" / "val.jsonl")
    config["training"] = {
        "output_dir": str(folder / name),
        "max_steps": NUM_STEPS,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "learning_rate": 5e-3,
        "gradient_checkpointing": False,
        "eval_steps": NUM_STEPS,
        "eval_at_start": True,
    } | changes.pop("training", {})
    return write_yaml(folder / f"{name}.yaml", config | changes)


@pytest.fixture(scope="module")
def zero3_run(folder, server, warm_model) -> Path:
    """Run four optimizer steps under ZeRO-3 with DoRA and trained embeddings; return the run directory."""
    config = stage2_config(folder, server, warm_model, "zero3", tuner=DORA, deepspeed="zero3")
    result = run_learner("tests/e2e/train_and_check_base.py", config, num_ranks=2)
    assert result.returncode == 0, result.stdout[-6000:]
    assert "base weights unchanged" in result.stdout  # SYN-4: bit for bit
    return folder / "zero3"


def test_what_reached_the_server_is_pefts_merge_of_the_saved_adapter_SYN_4_SYN_7(zero3_run, warm_model):
    """SYN-4, SYN-7."""
    ledger = json.loads((zero3_run / "weights.json").read_text())
    assert ledger["version"].endswith(f":{NUM_STEPS}")
    base = AutoModelForImageTextToText.from_pretrained(warm_model, dtype=torch.float32)
    adapter = zero3_run / f"checkpoint-{NUM_STEPS}" / "adapter"
    merged = PeftModel.from_pretrained(base, adapter).merge_and_unload().state_dict()
    assert set(merged) - set(ledger["digests"]) == {"lm_head.weight"}
    changed = 0
    for name, digest in ledger["digests"].items():
        assert tensor_digest(merged[name]) == digest, name
        changed += not torch.equal(merged[name], base_tensor(warm_model, name))
    assert changed > 10  # training changed the weights


def base_tensor(model: Path, name: str) -> torch.Tensor:
    from safetensors import safe_open

    with safe_open(model / "model.safetensors", "pt") as file:
        return file.get_tensor(name)


def test_merged_checkpoint_loads_as_it_is_and_equals_what_was_sent_LRN_6(zero3_run):
    """LRN-6."""
    ledger = json.loads((zero3_run / "weights.json").read_text())["digests"]
    merged = AutoModelForImageTextToText.from_pretrained(zero3_run / f"checkpoint-{NUM_STEPS}" / "merged")
    state = merged.state_dict()
    assert all(tensor_digest(state[name]) == digest for name, digest in ledger.items())
    load_processor(zero3_run / f"checkpoint-{NUM_STEPS}" / "merged")


def test_engine_computes_with_the_sent_weights_like_one_freshly_loaded_SYN_7(zero3_run, server, folder):
    """SYN-7."""
    body = {"infer_request": requests_of(folder)[0], "token_ids": list(range(40, 72))}
    live = server.post("/probe/", body).json()
    fresh_server = Server(folder, zero3_run / f"checkpoint-{NUM_STEPS}" / "merged")
    try:
        fresh = fresh_server.wait_ready().post("/probe/", body).json()
    finally:
        fresh_server.end()
    assert len(live["logprobs"]) == 2
    for replica in live["logprobs"]:
        np.testing.assert_allclose(replica[1:], fresh["logprobs"][0][1:], atol=1e-4)


def test_greedy_rollouts_equal_transformers_generate_on_the_merged_checkpoint_ROL_1(zero3_run, server, folder):
    """ROL-1."""
    checkpoint = zero3_run / f"checkpoint-{NUM_STEPS}" / "merged"
    model = AutoModelForImageTextToText.from_pretrained(checkpoint, dtype=torch.float32).eval()
    processor = load_processor(checkpoint)
    samples = val_samples(folder)[:32]
    answers = server.infer(requests_of(folder)[:32], max_tokens=96, temperature=0.0)
    for sample, answer in zip(samples, answers, strict=True):
        prompt = encode_prompt(sample, processor)
        ids = torch.tensor([prompt.prompt_token_ids])
        with torch.no_grad():
            output = model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                mm_token_type_ids=(ids == model.config.image_token_id).int(),
                **prompt.vision,
                max_new_tokens=96,
                do_sample=False,
            )[0, ids.shape[1] :].tolist()
        end = processor.tokenizer.eos_token_id
        expected = output[: output.index(end)] if end in output else output
        assert answer["response_token_ids"][0] == expected, sample.id
        assert answer["response"]["prompt_token_ids"] == prompt.prompt_token_ids  # ROL-3


def val_samples(folder: Path) -> list:
    return load_samples([folder / "data" / "val.jsonl"], prompt=Data().prompt)[0]


def requests_of(folder: Path) -> list[dict]:
    return [{"messages": prompt_chat(sample), "images": sample.images} for sample in val_samples(folder)]


def test_a_run_leaves_its_records_LOG_2_LOG_3_LRN_7(zero3_run):
    """LOG-2, LOG-3, LRN-7."""
    record = json.loads((zero3_run / "run.json").read_text())
    assert record["world_size"] == 2 and record["server_world_sizes"] == [2]
    assert {"torch", "deepspeed", "transformers", "peft"} <= set(record["versions"])
    assert record["config"]["tuner"]["use_dora"] is True
    events = EventAccumulator(str(zero3_run)).Reload()
    tags = set(events.Tags()["scalars"])
    expected = {"loss/total", "loss/text", "loss/coord", "loss/w1", "loss/gate", "train/grad_norm", "rollout/f1"}
    expected |= {"seconds/rollout", "seconds/sync", "seconds/train", "sync/bytes", "train/fill_ratio", "eval/f1"}
    expected |= {"rollout/new_tokens_mean", "rollout/new_tokens_p99", "train/policy_lag", "learning_rate/llm"}
    assert expected <= tags, expected - tags
    steps = [event.step for event in events.Scalars("loss/total")]
    assert steps == list(range(1, NUM_STEPS + 1))  # once per optimizer step
    for step in (0, NUM_STEPS):
        scores = json.loads((zero3_run / "eval" / f"step_{step:06d}.json").read_text())
        answers = map(json.loads, (zero3_run / "eval" / f"step_{step:06d}.jsonl").open())
        predicted = [obj for answer in answers for obj in answer["pred"]]
        assert predicted and all(0 < obj["score"] <= 1 for obj in predicted)  # TGT-14
        assert scores["f1_50"] == scores["f1"] and scores["labels"]  # LRN-9
        assert scores["num_images"] == 32


def test_only_rollout_requests_and_weights_cross_the_process_border_LRN_3_ROL_2(zero3_run):
    """LRN-3, ROL-2: no label, target or packed row leaves the learner; a request is one sample; ranks other than 0 send
    only requests."""
    calls = {rank: [json.loads(line) for line in (zero3_run / f"sent_{rank}.jsonl").open()] for rank in (0, 1)}
    asking = {"/health/", "/get_world_size/", "/infer/"}
    weights = {"/init_communicator/", "/start_weight_update/", "/update_weights/", "/finish_weight_update/", "/probe/"}
    assert {call["path"] for call in calls[1]} == asking
    assert {call["path"] for call in calls[0]} == asking | weights | {"/metrics/"}
    rollouts = [call["body"] for rank in (0, 1) for call in calls[rank] if call["path"] == "/infer/"]
    for body in rollouts:
        assert set(body) == {"infer_requests", "request_config"}
        for request in body["infer_requests"]:
            assert set(request) == {"messages", "images", "uuid"} and len(request["images"]) == 1
    assert sum(len(body["infer_requests"]) for body in rollouts) == 2 * 32 + NUM_STEPS * 2 * 2 * 4  # two evaluations
    described = [call["body"] for call in calls[0] if call["path"] == "/update_weights/"]
    assert all(set(body) == {"run_id", "names", "dtype_names", "shapes", "digest"} for body in described)


def test_decode_batch_size_changes_how_many_go_at_once_and_nothing_else_ROL_4(zero3_run, server, folder):
    """ROL-4: one call per server and round, with up to M samples per device; results equal those of M = 1."""
    requests = [RolloutRequest(sample.id, prompt_chat(sample), sample.images, []) for sample in val_samples(folder)[:8]]
    results, sizes = {}, {}
    for batch_size in (1, 4):
        client = RolloutClient(
            [server], rank=0, world_size=1, decode_batch_size=batch_size, timeout_s=60, infer_timeout_s=None,
            max_failed_fraction=0.0,
        )  # fmt: skip
        client.wait_ready()
        sampled = RolloutSampling(temperature=1.0, max_new_tokens=24)
        context = RolloutContext(run_seed=5, global_step=3, micro_step_idx=1, policy_version=None)
        results[batch_size] = ServerEngine(client, None).generate(requests, sampled, context)
        sizes[batch_size] = [call["num_requests"] for call in client.pop_calls()]
        client.close()
    assert sizes == {1: [2, 2, 2, 2], 4: [8]}  # two devices
    assert results[1] == results[4]


def test_zero2_full_fine_tuning_without_packing_on_the_same_server_LRN_2_PCK_6(folder, server, warm_model, zero3_run):
    """LRN-2, PCK-6: a second learner takes over the server that the first left running: another ZeRO stage, another
    tuner, padded batches."""
    config = stage2_config(
        folder,
        server,
        warm_model,
        "zero2",
        tuner={"type": "full", "freeze_vit": False, "freeze_aligner": False},
        deepspeed="zero2",
        matching={"teacher_forced_ratio": 0.5, "decoding": {"temperature": 1.0}},
        training={"packing": False, "learning_rate": 1e-4},
    )
    result = run_learner("train_stage2.py", config, num_ranks=2)
    assert result.returncode == 0, result.stdout[-6000:]
    ledger = json.loads((folder / "zero2" / "weights.json").read_text())
    assert server.get("/weight_version/").json()["weight_version"] == ledger["version"]
    assert any("visual" in name for name in ledger["digests"])
