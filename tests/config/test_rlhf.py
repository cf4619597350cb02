"""`utils.config.rlhf` and the rules of GRPO (CFG-4, GRP-1 to GRP-6)."""

from pathlib import Path
from typing import Any

import pytest

from tests.config.test_load import GRPO_RUNS, ROOT, edited, minimal, only_problem
from utils.config.load import (
    ConfigError,
    build_config,
    check_launch,
    load_config,
    require_server,
    require_variant,
    resolve_yaml,
)
from utils.config.plan import make_plan
from utils.config.schema import RM, RS


def grpo(**rlhf: Any) -> dict[str, Any]:
    """A valid GRPO config in server mode; keys are those of `rlhf`."""
    data = minimal() | {"rlhf": {"reward_funcs": ["detection_f1"], "vllm_server_port": [8080], **rlhf}}
    data["custom"] |= {"trainer_variant": "grpo", "extra": {"rollout_server": {"vllm_max_model_len": 4096}}}
    return data


def test_CFG_4_grpo_is_the_other_program() -> None:
    """CFG-4: and its own section is what rollout code reads as `cfg.rm`."""
    cfg = build_config(grpo(max_new_tokens=77))
    assert cfg.is_grpo and cfg.answers_per_sample == 8
    assert (cfg.rm.max_new_tokens, cfg.rollout_path("max_new_tokens")) == (77, "rlhf.max_new_tokens")
    with pytest.raises(SystemExit, match="2"):
        require_variant(cfg, "rollout_matching_sft", "train_stage2.py")
    require_variant(cfg, "grpo", "train_grpo.py")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"beta": 0.1},
            "rlhf.beta=0.1: full fine-tuning keeps no copy of the start policy, as adapters do; name the checkpoint",
        ),
        ({"beta": 0.1, "tuner": {"type": "lora", "adapter_path": "a"}}, "not the starting policy; merge that adapter"),
        ({"model": {"path": "m", "reference_path": "m"}}, 'model.reference_path="m": nothing is compared with it'),
    ],
)
def test_GRP_6_a_penalty_needs_the_policy_at_the_start(changes: dict[str, Any], message: str) -> None:
    """GRP-6: without a second copy of the model, or from a checkpoint that is named."""
    sections = {name: changes.pop(name) for name in ("tuner", "model") if name in changes}
    assert message in only_problem(grpo(**changes) | sections)
    build_config(grpo(beta=0.1) | {"tuner": {"type": "lora"}})
    build_config(grpo(beta=0.1) | {"model": {"path": "m", "reference_path": "m"}})


def test_GRP_1_LRN_8_prefetch_is_set_as_for_stage_2() -> None:
    """GRP-1, LRN-8: and answers of older weights are corrected."""
    data = grpo()
    data["custom"]["extra"]["rollout_matching"] = {"async": {"enabled": True, "version_window": 1}}
    assert build_config(data).rm.async_.version_window == 1
    data["rlhf"]["importance_correction_cap"] = None
    assert "responses of older weights" in only_problem(data)


@pytest.mark.parametrize(
    ("rlhf", "message"),
    [
        (
            {"vllm_server_host": ["127.0.0.1", "localhost"]},
            'vllm_server_host=["127.0.0.1", "localhost"]: must be a list',
        ),
        ({"vllm_server_host": []}, "vllm_server_host=[]: must be a list of exactly one host"),
        ({"vllm_server_host": ["10.0.0.1"]}, "must be loopback, 127.0.0.1 or localhost"),
        ({"vllm_server_host": ["127.0.0.2"]}, "must be loopback, 127.0.0.1 or localhost"),
        ({"vllm_server_host": "localhost"}, "must be a valid list"),
        ({"vllm_server_port": [1, 2]}, "vllm_server_port=[1, 2]: must be a list of exactly one port"),
        ({"vllm_server_port": []}, "vllm_server_port=[]: must be a list of exactly one port"),
        ({"vllm_server_port": [0]}, "must be greater than or equal to 1"),
        ({"vllm_server_group_port": 8080}, "is also the server's port, 8080"),
        ({"vllm_server_timeout": 0}, "must be greater than 0"),
        ({"sync": {"mode": "adapter"}}, 'rlhf.sync.mode="adapter": GRPO syncs merged weights'),
        ({"decoding": {"temperature": 0}}, "must be greater than or equal to 0.01"),
    ],
)
def test_GRP_2_connection_mistakes(rlhf: dict[str, Any], message: str) -> None:
    """GRP-2."""
    assert message in only_problem(grpo(**rlhf))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (None, f"{RS}=null: is required by rlhf.vllm_mode: server"),
        ({"vllm_max_model_len": 4096, "vllm_enable_lora": True}, f"{RS}.vllm_enable_lora=true: GRPO syncs merged"),
        ({"vllm_max_model_len": 4096, "servers": [{"vllm_enable_lora": True}]}, "servers[0].vllm_enable_lora=true"),
        ({"vllm_max_model_len": 0}, "vllm_max_model_len=0: must be greater than or equal to 1"),
        ({"vllm_max_model_len": -1}, "vllm_max_model_len=-1: must be greater than or equal to 1"),
        ({"vllm_max_model_len": 4095}, "vllm_max_model_len=4095: must be at least global_max_length=4096"),
        ({"vllm_max_model_len": 4096, "servers": [{}, {}]}, "overrides 2 servers, but 1 are connected"),
    ],
)
def test_GRP_2_launch_settings_mistakes(settings: dict[str, Any] | None, message: str) -> None:
    """GRP-2, CFG-15."""
    data = grpo()
    data["custom"]["extra"]["rollout_server"] = settings
    assert message in only_problem(data)


def test_GRP_2_rlhf_and_the_variant_belong_together() -> None:
    """GRP-2."""
    assert "rlhf=null: is required for trainer_variant: grpo" in only_problem(grpo() | {"rlhf": None})
    assert "belongs to trainer_variant: grpo" in only_problem(edited(rlhf=grpo()["rlhf"]))


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_GRP_2_connection_is_translated_into_the_form_of_stage_2(host: str) -> None:
    """GRP-2, CFG-7: one address, one sync, one decoding, wherever stage 2's own parts look for them."""
    rlhf = {
        "vllm_server_host": [host],
        "vllm_server_port": [8123],
        "vllm_server_group_port": 9001,
        "vllm_server_timeout": 12.0,
        "decode_batch_size": 3,
        "max_new_tokens": 77,
        "decoding": {"temperature": 0.7, "top_p": 0.9},
        "sync": {"bucket_mib": 4, "verify": "always"},
        "importance_correction_cap": None,
    }
    cfg = build_config(grpo(**rlhf))
    (address,) = cfg.servers()
    assert (address.base_url, address.group_port, cfg.connection.timeout_s) == (f"http://{host}:8123", 9001, 12.0)
    assert require_server(cfg, 0) == address
    assert (cfg.rm.rollout_backend, cfg.rm.vllm.mode, cfg.sync_mode()) == ("vllm", "server", "full")
    assert (cfg.rm.decode_batch_size, cfg.rm.max_new_tokens) == (3, 77)
    assert (cfg.rm.decoding.temperature, cfg.rm.decoding.top_p) == (0.7, 0.9)
    assert (cfg.rm.vllm.sync.bucket_mib, cfg.rm.vllm.sync.verify) == (4, "always")
    check_launch(cfg, 2)
    with pytest.raises(ConfigError, match="rlhf.vllm_server_port=.* no --server-index 1"):
        require_server(cfg, 1)


def test_GRP_2_defaults() -> None:
    """GRP-2."""
    rlhf = build_config(grpo()).rlhf
    assert (rlhf.use_vllm, rlhf.vllm_mode, rlhf.vllm_server_group_port, rlhf.vllm_server_timeout) == (
        True,
        "server",
        51216,
        240.0,
    )
    assert (rlhf.num_generations, rlhf.decoding.temperature, rlhf.beta) == (8, 1.0, 0.0)


@pytest.mark.parametrize("path", GRPO_RUNS, ids=lambda path: path.stem)
@pytest.mark.parametrize("keep_launch_settings", [False, True])
def test_GRP_2_back_to_colocate_in_two_edits(path: Path, keep_launch_settings: bool) -> None:
    """GRP-2: `vllm_mode: colocate`, and RS taken out; where it stays it is ignored, whatever it says."""
    data, _ = resolve_yaml(path)
    data["rlhf"]["vllm_mode"] = "colocate"
    settings = data["custom"]["extra"].pop("rollout_server")
    if keep_launch_settings:
        settings |= {"vllm_enable_lora": True, "vllm_max_model_len": 5, "servers": [{}, {}]}
        data["custom"]["extra"]["rollout_server"] = settings | {"vllm_engine_kwargs": {"quantization": "fp8"}}
    cfg = build_config(data)
    assert cfg.servers() == [] and cfg.connection is None and cfg.rm.vllm.mode == "colocate"
    check_launch(cfg, 2)
    data["rlhf"] |= {"vllm_server_host": ["10.0.0.1", "b"], "vllm_server_port": []}
    assert build_config(data).servers() == []


def test_GRP_2_without_vllm_nothing_of_the_server_counts() -> None:
    """GRP-2, CFG-5: `use_vllm: false` is the hf backend."""
    data = grpo(use_vllm=False, vllm_server_host=["10.0.0.1"])
    del data["custom"]["extra"]["rollout_server"]
    cfg = build_config(data)
    assert (cfg.rm.rollout_backend, cfg.connection) == ("hf", None)


def test_GRP_2_an_engine_that_cannot_work_is_named_by_the_keys_of_the_file() -> None:
    """GRP-2, ROL-5."""
    data = grpo(vllm_mode="colocate", vllm_tensor_parallel_size=2)
    with pytest.raises(ConfigError, match="rlhf.vllm_tensor_parallel_size=2: must divide the 3.*rlhf.use_vllm: false"):
        check_launch(build_config(data), 3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"global_max_length": None}, "global_max_length=null: is required with training.packing"),
        ({"rlhf__max_new_tokens": 4096}, "rlhf.max_new_tokens=4096: prompt and response must fit in global_max_length"),
    ],
)
def test_GRP_2_lengths_fit(changes: dict[str, Any], message: str) -> None:
    """GRP-2, CFG-15."""
    data = grpo()
    for path, value in changes.items():
        *parents, last = path.split("__")
        (data[parents[0]] if parents else data)[last] = value
    if "rlhf__max_new_tokens" in changes:
        data["custom"]["extra"]["rollout_server"]["vllm_max_model_len"] = 8192
    assert message in only_problem(data)


def test_CFG_14_GRP_2_no_buffer_has_to_hold_the_answers_of_a_micro_step() -> None:
    """CFG-14, GRP-2: all answers of a step are packed, and none is held back."""
    data = grpo(num_generations=64)
    data["training"] |= {"packing": True, "packing_buffer": 7, "per_device_train_batch_size": 8}
    assert build_config(data).answers_per_sample == 64


def test_GRP_2_without_packing_the_row_length_may_be_left_out() -> None:
    """GRP-2, CFG-15: except where an engine in the learner's process takes its length from it."""
    data = grpo(max_new_tokens=4095)
    data |= {"global_max_length": None, "training": {"output_dir": "o", "packing": False}}
    assert build_config(data).global_max_length is None
    data["rlhf"]["max_new_tokens"] = 4096
    assert "rlhf.max_new_tokens=4096 alone fills it" in only_problem(data)
    data["rlhf"]["vllm_mode"] = "colocate"
    assert "is required with rlhf.vllm_mode: colocate" in only_problem(data)


@pytest.mark.parametrize(
    ("key", "value"), [("decoding", {"top_p": 0.5}), ("rollout_backend", "hf"), ("losses", {"desc": 2.0})]
)
def test_GRP_2_settings_of_stage_2_have_no_say_in_grpo(key: str, value: Any) -> None:
    """GRP-2: what would be ignored is refused; what both trainers read is not."""
    data = grpo()
    shared = {"monitor_dump": {"every_steps": 5}, "answer_format": "qwen3vl"}
    data["custom"]["extra"]["rollout_matching"] = {key: value, **shared}
    assert f"{RM}.{key}=" in only_problem(data) and "is for stage 2" in only_problem(data)
    del data["custom"]["extra"]["rollout_matching"][key]
    cfg = build_config(data)
    assert cfg.rm.monitor_dump.every_steps == 5 and cfg.rm.answer_format == "qwen3vl"
    assert cfg.rollout_path("answer_format") == f"{RM}.answer_format"
    assert cfg.rollout_path("decode_batch_size") == "rlhf.decode_batch_size"


@pytest.mark.parametrize(
    ("rlhf", "message"),
    [
        ({"reward_funcs": ["a", "b"], "reward_weights": [1.0]}, "must have one weight for each of the 2 reward_funcs"),
        ({"reward_funcs": ["a"], "reward_weights": [0]}, "are all 0 at the start and at the end, so"),
        ({"reward_funcs": ["a"], "reward_weights": [{"start": 0, "end": 1, "steps": 5}]}, "are all 0 at the start, so"),
        (
            {"reward_funcs": ["a", "b"], "reward_weights": [0, {"start": 1, "end": 0, "steps": 5}]},
            "are all 0 at the end, so that no response is better than another; keep one positive",
        ),
        ({"reward_funcs": ["a"], "reward_iou": 0}, "must be above 0 and at most 1"),
        (
            {"reward_funcs": ["a"], "reward_iou": {"start": 0.5, "end": 1.5, "steps": 5}},
            "must be above 0 and at most 1",
        ),
        ({"reward_funcs": ["a"], "reward_weights": [-1.0]}, "must be greater than or equal to 0"),
        ({"reward_funcs": ["a", "b", "a"]}, "names a more than once"),
        ({"reward_funcs": []}, "must have at least 1 item"),
        ({"num_generations": 1}, "must be greater than or equal to 2"),
        ({"num_iterations": 0}, "must be greater than or equal to 1"),
        ({"scale_rewards": "std"}, "must be 'group', 'batch' or 'none'"),
        ({"loss_type": "ppo"}, "must be 'grpo', 'dapo' or 'dr_grpo'"),
        ({"epsilon": 0}, "must be greater than 0"),
        ({"epsilon": 1.1}, "must be less than or equal to 1"),
        ({"epsilon_high": 0.0}, "must be greater than 0"),
        ({"importance_sampling_level": "word"}, "must be 'token' or 'sequence'"),
        ({"importance_correction_cap": 0.99}, "must be greater than or equal to 1"),
        ({"beta": -0.1}, "must be greater than or equal to 0"),
        ({"max_resample_times": 0}, "must be greater than or equal to 1"),
    ],
)
def test_GRP_5_GRP_6_mistakes_in_rewards_and_objective(rlhf: dict[str, Any], message: str) -> None:
    """GRP-5, GRP-6."""
    assert message in only_problem(grpo(**rlhf))


def test_GRP_6_importance_correction_needs_what_tokens_are_drawn_from() -> None:
    """GRP-6: vLLM reports probabilities before temperature and filters unless it is told otherwise."""
    data = grpo(decoding={"temperature": 0.7})
    assert f"{RS}.vllm_engine_kwargs={{}}: importance correction" in only_problem(data)
    data["custom"]["extra"]["rollout_server"]["vllm_engine_kwargs"] = {"logprobs_mode": "processed_logprobs"}
    build_config(data)
    build_config(grpo(decoding={"temperature": 0.7}, importance_correction_cap=None))
    build_config(grpo(decoding={"temperature": 0.7}, use_vllm=False))
    assert build_config(grpo(decoding={"top_k": 0})).rlhf.decoding.top_k == -1  # off in vLLM and transformers, too
    for filtered in ({"top_p": 0.9}, {"top_k": 5}, {"repetition_penalty": 1.1}):
        assert "need an engine that reports probabilities" in only_problem(grpo(decoding=filtered, use_vllm=False))
        build_config(grpo(decoding=filtered, use_vllm=False, importance_correction_cap=None))


def test_GRP_6_dropout_would_change_the_probabilities_that_are_compared() -> None:
    """GRP-6: of stage 2, which compares none, it is the user's choice."""
    tuner = {"type": "lora", "dropout": 0.05}
    assert "tuner.dropout=0.05: GRPO compares probabilities" in only_problem(grpo() | {"tuner": tuner})
    build_config(edited(tuner=tuner))


@pytest.mark.parametrize("mode", ["raw_logits", "processed_logits"])
def test_TGT_14_GRP_6_an_engine_reports_no_logits(mode: str) -> None:
    """TGT-14, GRP-6: confidences and corrections would be made of numbers that are no log-probabilities."""
    data = grpo()
    data["custom"]["extra"]["rollout_server"]["vllm_engine_kwargs"] = {"logprobs_mode": mode}
    assert f"logprobs_mode: {mode} reports no log-probabilities; use raw_logprobs or" in only_problem(data)


@pytest.mark.parametrize("path", GRPO_RUNS, ids=lambda path: path.stem)
def test_GRP_3_presets_are_what_the_contract_says(path: Path) -> None:
    """GRP-3: server mode, port 8080, TP 1 x DP 6, lengths 12000, memory share 0.6; two learners."""
    from utils.rewards import load_rewards

    cfg = load_config(path)
    assert cfg.custom.trainer_variant == "grpo" and cfg.rlhf.use_vllm and cfg.rlhf.vllm_mode == "server"
    assert cfg.rlhf.vllm_server_port == [8080] and cfg.global_max_length == 12000
    settings = cfg.server_settings()
    assert (settings.vllm_tensor_parallel_size, settings.vllm_data_parallel_size) == (1, 6)
    assert (settings.vllm_max_model_len, settings.vllm_gpu_memory_utilization) == (12000, 0.6)
    assert list(load_rewards(cfg.rlhf.reward_funcs)) == cfg.rlhf.reward_funcs
    plan = make_plan(cfg, world_size=2)
    assert plan.chunk == 16 * 6 // 2 and plan.rounds == 1  # 2 prompts x 8 answers per micro-step
    assert plan.samples_per_step == 2 * 2 * 4


def test_GRP_3_presets_share_a_base_and_differ_in_rewards() -> None:
    """GRP-3."""
    first, second = (load_config(path) for path in GRPO_RUNS if not path.stem.endswith("_dora"))
    assert first.rlhf.reward_funcs != second.rlhf.reward_funcs
    assert second.rlhf.reward_weights[second.rlhf.reward_funcs.index("summary_attr_key_recall")] == 2.0
    same = {"reward_funcs": [], "reward_weights": None}
    assert first.rlhf.model_copy(update=same) == second.rlhf.model_copy(update=same)
    assert first.model_copy(update={"rlhf": None, "training": None}).model_dump(warnings=False) == second.model_copy(
        update={"rlhf": None, "training": None}
    ).model_dump(warnings=False)


@pytest.mark.parametrize("path", sorted(ROOT.glob("configs/grpo/*_dora.yaml")), ids=lambda path: path.stem)
def test_GRP_3_dora_siblings_differ_in_what_they_train(path: Path) -> None:
    """GRP-3: all three parts, with DoRA; everything else is the preset's own."""
    dora, plain = load_config(path), load_config(path.with_stem(path.stem.removesuffix("_dora")))
    assert dora.tuner.use_dora and not (dora.tuner.freeze_llm or dora.tuner.freeze_vit or dora.tuner.freeze_aligner)
    rates = {"output_dir": "", "vit_lr": None, "aligner_lr": None}
    ours, theirs = (
        cfg.model_copy(update={"tuner": None, "training": cfg.training.model_copy(update=rates)})
        for cfg in (dora, plain)
    )
    assert ours.model_dump(warnings=False) == theirs.model_dump(warnings=False)
