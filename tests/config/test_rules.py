"""`utils.config.rules`, and what the sections derive: servers, sync mode, lengths, the launch (CFG-5 on)."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.config.test_load import REMOVE, edited, minimal, only_problem, problems
from utils.answer_format import COORD_TOKENS, QWEN3VL
from utils.config.load import ConfigError, build_config, check_launch
from utils.config.plan import format_plan, make_plan
from utils.config.rules import length_limit
from utils.config.schema import RM, RS


def server(**keys: Any) -> dict[str, Any]:
    return edited(RM__vllm__server=keys)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({}, "neither servers nor base_url"),
        ({"servers": [{"base_url": "http://a", "group_port": 1}], "group_port": 1}, "both given"),
        (
            {"servers": [{"base_url": "http://a", "group_port": 1}], "group_port": 1},
            "brings: servers: null, or base_url",
        ),
        ({"servers": []}, "must not be empty"),
        ({"base_url": [], "group_port": []}, "must not be empty"),
        ({"base_url": "http://a"}, "belong together"),
        ({"group_port": 1}, "belong together"),
        ({"base_url": ["http://a", "http://b"], "group_port": [1]}, "2 base_urls cannot pair with 1 group_ports"),
        ({"base_url": "http://a", "group_port": [1]}, "single base_url takes a single group_port"),
        ({"base_url": ["http://a:1", "http://a:1/"], "group_port": 5}, "servers 0 and 1 are both at a:1"),
        ({"base_url": ["http://a:1/x", "http://a:1/y"], "group_port": 5}, "servers 0 and 1 are both at a:1"),
        ({"base_url": ["http://localhost:7", "http://127.0.0.1:7"], "group_port": 5}, "both at loopback:7"),
        ({"base_url": ["http://a", "http://b"], "group_port": [5, 5]}, "share group port 5"),
        ({"base_url": ["http://a", "http://b"], "group_port": 65535}, "65536, above 65535"),
        ({"base_url": "http://127.0.0.1:8000", "group_port": 8000}, "where server 0 listens"),
        ({"base_url": "127.0.0.1:8000", "group_port": 1}, "must be http(s)://HOST"),
        ({"base_url": "http://h:99999", "group_port": 1}, "must be http(s)://HOST"),
        ({"base_url": "http://h:0", "group_port": 1}, "must be http(s)://HOST"),
        ({"base_url": "http://h:1?x=1", "group_port": 1}, "must be http(s)://HOST"),
        ({"base_url": "http://h", "group_port": 0}, "must be greater than or equal to 1"),
        ({"servers": [{"base_url": "http://h"}]}, "servers[0].group_port: is required"),
        ({"servers": [{"base_url": "http://h", "group_port": "1"}]}, "servers[0].group_port"),
    ],
)
def test_CFG_7_mistakes(keys: dict[str, Any], message: str) -> None:
    """CFG-7."""
    assert message in only_problem(server(**keys))


def test_CFG_7_mistakes_are_reported_with_prefetch_on() -> None:
    """CFG-7: a rule that needs to know if there are servers does not trip over those that cannot be paired."""
    config = server(base_url=["http://a", "http://b"], group_port=[1])
    config["custom"]["extra"]["rollout_matching"]["async"] = {"enabled": True}
    assert "2 base_urls cannot pair with 1 group_ports" in only_problem(config)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"training__output_dir": "~/runs"}, 'dir="~/runs": ~ and $VAR are not expanded here; write the path out'),
        ({"model__path": "/models/$NAME"}, 'model.path="/models/$NAME": ~ and $VAR are not expanded'),
        ({"custom__train_jsonl": ["a.jsonl", "${DATA}/b.jsonl"]}, 'train_jsonl[1]="${DATA}/b.jsonl": ~ and $VAR'),
        ({"training__output_dir": ""}, 'training.output_dir="": must not be empty; name a path'),
        ({"custom__val_jsonl": [" "]}, 'custom.val_jsonl[0]=" ": must not be empty'),
        (
            {"RS": {"vllm_max_model_len": 9999, "allowed_image_roots": ["a", "~/b"]}},
            'allowed_image_roots[1]="~/b": ~ and $VAR are not expanded',
        ),
        (
            {"RS": {"vllm_max_model_len": 9999, "allowed_image_roots": [""]}},
            'allowed_image_roots[0]="": must not be empty',
        ),
        (
            {"RS": {"vllm_max_model_len": 9999, "servers": [{"allowed_image_roots": ["$DATA"]}]}},
            'servers[0].allowed_image_roots[0]="$DATA": ~ and $VAR are not expanded',
        ),
    ],
)
def test_CFG_3_paths_are_written_out(changes: dict[str, Any], message: str) -> None:
    """CFG-3."""
    assert message in only_problem(edited(**changes))


def test_DAT_3_validation_data_have_no_weight() -> None:
    """DAT-3: an evaluation takes each sample once."""
    data = edited(custom__val_jsonl=[{"path": "v.jsonl", "weight": 3}])
    assert "custom.val_jsonl[0].weight=3: counts for training data only; delete it" in only_problem(data)


def test_CFG_7_server_mode_without_servers() -> None:
    """CFG-7."""
    assert "is required by mode: server" in only_problem(edited(RM__vllm={"mode": "server"}))


ports = st.lists(st.integers(10000, 60000), min_size=1, max_size=5, unique=True)


@given(ports)
def test_CFG_7_both_forms_with_paired_lists_mean_the_same(group_ports: list[int]) -> None:
    """CFG-7."""
    urls = [f"http://node{index}:8000/prefix/" for index in range(len(group_ports))]
    entries = [{"base_url": url, "group_port": port} for url, port in zip(urls, group_ports, strict=True)]
    paired = build_config(server(base_url=urls, group_port=group_ports)).servers()
    assert paired == build_config(server(servers=entries)).servers()
    expected = [(url.rstrip("/"), port) for url, port in zip(urls, group_ports, strict=True)]
    assert [(address.base_url, address.group_port) for address in paired] == expected


@given(st.integers(1, 6), st.integers(1, 65536))
def test_CFG_7_one_port_counts_up_and_stays_a_port(num_servers: int, first: int) -> None:
    """CFG-7."""
    data = server(base_url=[f"http://node{i}" for i in range(num_servers)], group_port=first)
    if first + num_servers - 1 <= 65535:
        assert [a.group_port for a in build_config(data).servers()] == list(range(first, first + num_servers))
    else:
        assert problems(data)


@given(st.lists(st.integers(1, 4), min_size=2, max_size=4), st.lists(st.integers(1, 4), min_size=2, max_size=4))
def test_CFG_7_no_two_servers_share_a_place_or_a_group_port(url_ports: list[int], group_ports: list[int]) -> None:
    """CFG-7."""
    data = server(base_url=[f"http://h:{port}" for port in url_ports], group_port=group_ports)
    distinct = len(set(url_ports)) == len(url_ports) and len(set(group_ports)) == len(group_ports)
    if distinct and len(url_ports) == len(group_ports):
        assert len(build_config(data).servers()) == len(url_ports)
    else:
        assert problems(data)


def test_CFG_7_address_parts() -> None:
    """CFG-7."""
    (address,) = build_config(server(base_url="https://h/a/b/", group_port=9)).servers()
    assert (address.base_url, address.host, address.port) == ("https://h/a/b", "h", 443)


@pytest.mark.parametrize(("given_s", "meant_s"), [(None, None), (0, None), (-1.5, None), (30, 30.0)])
def test_CFG_8_infer_timeout_without_a_positive_number_is_none(given_s: float | None, meant_s: float | None) -> None:
    """CFG-8."""
    assert build_config(edited(RM__vllm__server__infer_timeout_s=given_s)).rm.vllm.server.infer_timeout_s == meant_s


def test_CFG_9_adapter_sync_needs_lora_slots() -> None:
    """CFG-9."""
    found = problems(edited(RM__vllm__sync={"mode": "adapter"}))
    assert any("adapter needs" in line and "enable_lora: true" in line for line in found)


def test_CFG_9_learner_and_server_agree_on_lora() -> None:
    """CFG-9."""
    settings = {"vllm_max_model_len": 2048, "servers": [{"vllm_enable_lora": True}]}
    assert "servers[0].vllm_enable_lora=true: must agree" in only_problem(edited(RS=settings))


@pytest.mark.parametrize(
    ("sync", "enable_lora", "use_dora", "expected"),
    [
        ("full", True, False, "full"),
        ("auto", False, False, "full"),
        ("auto", True, False, "adapter"),
        ("adapter", True, False, "adapter"),
        ("adapter", True, True, "adapter"),  # what was asked for; SYN-10 says what becomes of it
        ("auto", True, True, "adapter"),
        ("auto", False, True, "full"),
    ],
)
def test_CFG_9_resolved_sync_mode(sync: str, enable_lora: bool, use_dora: bool, expected: str) -> None:
    """CFG-9, CFG-10."""
    base = build_config(minimal())
    vllm = base.rm.vllm.model_copy(update={"enable_lora": enable_lora})
    vllm = vllm.model_copy(update={"sync": vllm.sync.model_copy(update={"mode": sync})})
    extra = base.custom.extra.model_copy(update={"rollout_matching": base.rm.model_copy(update={"vllm": vllm})})
    custom = base.custom.model_copy(update={"extra": extra})
    tuner = base.tuner.model_copy(update={"type": "lora", "use_dora": use_dora})
    cfg = base.model_copy(update={"custom": custom, "tuner": tuner})
    assert cfg.sync_mode() == expected
    obstacle = cfg.adapter_obstacle()
    assert (obstacle is not None) == (expected == "adapter" and use_dora)
    shown = "full, as adapter sync fails: vLLM has no LoRA slots for DoRA (tuner.use_dora)" if obstacle else expected
    assert f"# {'sync mode:':<34}{shown}\n" in format_plan(make_plan(cfg, 1))
    check_launch(cfg, 1)
    if expected == "adapter":  # CFG-10
        with pytest.raises(ConfigError, match="2 learners in server mode need full"):
            check_launch(cfg, 2)


def test_SYN_10_a_rank_beyond_vllms_slots_is_refused() -> None:
    """SYN-10: only where there are slots."""
    data = edited(tuner={"type": "lora", "rank": 513})
    build_config(data)
    data["custom"]["extra"]["rollout_matching"]["vllm"] |= {"enable_lora": True, "sync": {"mode": "auto"}}
    assert "tuner.rank=513: vLLM's slots hold at most 512; lower it" in only_problem(data)


@pytest.mark.parametrize("mode", ["adapter", "auto"])
def test_SYN_10_what_no_slot_holds_is_refused_without_fallback(mode: str) -> None:
    """SYN-10, ROL-5: DoRA, whole modules and full fine-tuning are refused by the file, but only where servers take
    adapters; with plain LoRA the run may try."""
    vllm = {"enable_lora": True, "sync": {"mode": mode, "fallback_to_full": False}}
    data = edited(RM__vllm=minimal()["custom"]["extra"]["rollout_matching"]["vllm"] | vllm)
    data["tuner"] = {"type": "lora", "use_dora": True}
    assert "fallback_to_full=false: adapter sync fails, vLLM has no LoRA slots for DoRA" in only_problem(data)
    data["tuner"] = {"type": "lora", "modules_to_save": ["embed_tokens"]}
    assert f"for whole modules (tuner.modules_to_save); set it to true, or mode: full, or use no server ({RM}" in (
        only_problem(data)
    )
    data["tuner"] = {"type": "full"}
    assert "no adapters to send (tuner.type: full)" in (found := only_problem(data))
    assert f"{RM}.vllm.mode: colocate, or {RM}.rollout_backend: hf" in found  # ROL-5
    vllm["sync"]["fallback_to_full"] = True
    assert "full, as adapter sync fails: there are no adapters" in format_plan(make_plan(build_config(data), 1))
    vllm["sync"]["fallback_to_full"] = False
    build_config(data | {"tuner": {"type": "lora"}})
    assert build_config(data | {"custom": hf_instead(data)}).connection is None


def hf_instead(data: dict[str, Any]) -> dict[str, Any]:
    """`custom` of the config, with rollouts by transformers."""
    matching = data["custom"]["extra"]["rollout_matching"] | {"rollout_backend": "hf"}
    return data["custom"] | {"extra": {"rollout_matching": matching}}


def test_CFG_15_the_shortest_of_row_and_servers() -> None:
    """CFG-15: a server's own length counts, that of one which inherits it is the common one; without servers there is
    only the row, for GRPO perhaps not even that."""
    common = {"vllm_max_model_len": 2048, "servers": [{}]}
    assert length_limit(build_config(edited())) == ("global_max_length", 4096)
    assert length_limit(build_config(edited(RS=common))) == (f"{RS}.vllm_max_model_len", 2048)
    own = common | {"servers": [{"vllm_max_model_len": 1500}]}
    assert length_limit(build_config(edited(RS=own))) == (f"{RS}.servers[0].vllm_max_model_len", 1500)
    assert length_limit(build_config(edited(RS=own, global_max_length=1400))) == ("global_max_length", 1400)
    longer = common | {"servers": [{"vllm_max_model_len": 8192}]}  # no server has the common length
    assert length_limit(build_config(edited(RS=longer))) == ("global_max_length", 4096)
    assert build_config(edited(RS=longer, RM__max_new_tokens=3000))
    without = edited(RS=own)
    without["custom"] = hf_instead(without)
    assert length_limit(build_config(without)) == ("global_max_length", 4096)


@pytest.mark.parametrize("pattern", ["*.q_proj", "a{9999999999}"])
def test_CFG_3_modules_by_a_pattern_that_is_none(pattern: str) -> None:
    """CFG-3."""
    found = only_problem(edited(tuner={"type": "lora", "target_modules": pattern}))
    assert f'tuner.target_modules="{pattern}": is not a valid regular expression: ' in found


def test_CFG_17_the_answer_format_brings_its_own_prompt() -> None:
    """CFG-17: as a default that is printed with the rest; one that is given stays."""
    assert build_config(edited()).data.prompt == COORD_TOKENS.prompt
    assert build_config(edited(RM__answer_format="qwen3vl")).data.prompt == QWEN3VL.prompt
    assert (
        build_config(edited(RM__answer_format="qwen3vl", data={"object_order": "sorted"})).data.prompt == QWEN3VL.prompt
    )
    assert build_config(edited(RM__answer_format="qwen3vl", data={"prompt": "Where?"})).data.prompt == "Where?"
    assert "answer_format" in only_problem(edited(RM__answer_format="qwen2"))


@pytest.mark.parametrize(("key", "value"), [("w1", 3.0), ("gate", 0.5), ("sigma", 4.0)])
def test_CFG_17_numbers_have_no_coordinate_loss(key: str, value: float) -> None:
    """CFG-17: what would have no effect is refused; the default, and 0 for a weight, say nothing wrong."""
    data = edited(RM__answer_format="qwen3vl", RM__losses={key: value})
    assert f"losses.{key}={value}: applies to coordinate tokens" in only_problem(data)
    build_config(edited(RM__losses={key: value}))
    build_config(edited(RM__answer_format="qwen3vl", RM__losses={"coord": 3.0, "w1": 1.0, "gate": 0.0, "sigma": 12.0}))


@pytest.mark.parametrize(
    ("tuner", "message"),
    [
        (
            {"type": "full"},
            "reference_kl=1.0: full fine-tuning keeps no copy of the start policy, as adapters do",
        ),
        ({"type": "lora", "adapter_path": "a"}, "not the starting policy; merge that adapter"),
    ],
)
def test_TGT_16_the_divergence_needs_the_policy_at_the_start(tuner: dict[str, Any], message: str) -> None:
    """TGT-16: supervised training may have it, too."""
    assert message in only_problem(edited(RM__losses={"reference_kl": 1.0}, tuner=tuner))
    build_config(edited(RM__losses={"reference_kl": 1.0}, tuner={"type": "lora"}, RM__teacher_forced_ratio=1))
    build_config(edited(RM__losses={"reference_kl": 1.0}, tuner=tuner, model__reference_path="start"))
    assert "nothing is compared with it; set " in only_problem(edited(tuner=tuner, model__reference_path="start"))


def test_TGT_12_stopping_that_is_not_learnt_is_held_by_a_reference_or_a_teacher() -> None:
    """TGT-12, TGT-16: else answers to partly annotated images would lose their end."""
    closing = {"supervise_closing": "complete"}
    message = only_problem(edited(RM__targets=closing))
    assert "complete leaves nothing that says when to stop" in message, message
    build_config(edited(RM__targets=closing, RM__losses={"reference_kl": 1.0}, tuner={"type": "lora"}))
    build_config(edited(RM__targets=closing, RM__teacher={"base_url": "http://127.0.0.1:1"}))


def test_CFG_14_packing_needs_drop_last() -> None:
    """CFG-14."""
    assert "no flush steps" in only_problem(edited(training__packing=True, training__packing_drop_last=False))
    build_config(edited(training__packing=False, training__packing_drop_last=False))


def test_CFG_14_buffer_holds_a_batch() -> None:
    """CFG-14."""
    data = edited(training__packing_buffer=7, training__per_device_train_batch_size=8)
    assert "must hold the 8 samples" in only_problem(data)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"global_max_length": REMOVE}, "global_max_length=null: is required for stage 2"),
        ({"RM__max_new_tokens": 4096}, "must fit in global_max_length=4096"),
        ({"RS": {"vllm_max_model_len": 1024}}, "max_new_tokens=1024 alone fills it"),
        (
            {"RS": {"vllm_max_model_len": 2048, "servers": [{"vllm_max_model_len": 512}]}},
            "servers[0].vllm_max_model_len=512",
        ),
    ],
)
def test_CFG_15_lengths_fit(changes: dict[str, Any], message: str) -> None:
    """CFG-15."""
    assert message in only_problem(edited(**changes))


@pytest.mark.parametrize(
    ("matching", "is_refused"),
    [
        ({"rollout_backend": "hf"}, False),
        ({"vllm": {"mode": "colocate"}}, False),
        ({"teacher_forced_ratio": 1}, False),
        ({"vllm": {"mode": "server"}}, True),  # its servers are missing, which is another problem
    ],
)
def test_CFG_15_the_length_of_a_server_that_does_not_generate_has_no_say(
    matching: dict[str, Any], is_refused: bool
) -> None:
    """CFG-15."""
    data = edited(RS={"vllm_max_model_len": 1024})
    data["custom"]["extra"]["rollout_matching"] |= matching
    if is_refused:
        assert any("max_new_tokens=1024 alone fills it" in line for line in problems(data))
    else:
        assert length_limit(build_config(data)) == ("global_max_length", 4096)


def test_CFG_15_overrides_replace_single_settings_of_one_server() -> None:
    """CFG-15."""
    settings = {"vllm_max_model_len": 2048, "device": "cuda", "servers": [{"vllm_data_parallel_size": 3}]}
    cfg = build_config(edited(RS=settings))
    own = cfg.server_settings(0)
    assert (own.vllm_data_parallel_size, own.vllm_max_model_len, own.device) == (3, 2048, "cuda")
    assert own.world_size == 3 and cfg.rs.world_size is None
    assert cfg.model_dump()["custom"]["extra"]["rollout_server"]["servers"] == [{"vllm_data_parallel_size": 3}]


def test_CFG_15_more_overrides_than_servers() -> None:
    """CFG-15."""
    assert "overrides 2 servers, but" in only_problem(edited(RS={"vllm_max_model_len": 2048, "servers": [{}, {}]}))


def test_CFG_15_engine_kwargs_do_not_repeat_own_keys() -> None:
    """CFG-15."""
    settings = {"vllm_max_model_len": 2048, "vllm_engine_kwargs": {"max_model_len": 1}, "servers": [{}]}
    assert f"use {RS}.vllm_max_model_len" in only_problem(edited(RS=settings))


def test_SRV_5_image_roots_default_to_the_data_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SRV-5."""
    monkeypatch.chdir(tmp_path)
    data = edited(custom__train_jsonl=["a/x.jsonl", "a/y.jsonl"], custom__val_jsonl="/b/v.jsonl")
    assert build_config(data).image_roots() == [f"{tmp_path}/a", "/b"]
    data = edited(RS={"vllm_max_model_len": 2048, "allowed_image_roots": ["img"]})
    assert build_config(data).image_roots() == [f"{tmp_path}/img"]


def test_DAT_3_data_files_in_all_three_forms() -> None:
    """DAT-3."""

    def files(value: Any) -> list[tuple[str, float]]:
        return [(file.path, file.weight) for file in build_config(edited(custom__train_jsonl=value)).custom.train_jsonl]

    assert files("a") == [("a", 1.0)]
    assert files(["a", "b"]) == [("a", 1.0), ("b", 1.0)]
    assert files([{"path": "a", "weight": 2}, "b"]) == [("a", 2.0), ("b", 1.0)]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tuner": {"use_dora": True}}, "tuner.use_dora=true: needs tuner.type: lora"),
        ({"tuner": {"adapter_path": "x"}}, "tuner.adapter_path="),
        ({"tuner": {"rank": 64}}, "tuner.rank=64: needs tuner.type: lora, and without it all weights train"),
        ({"tuner": {"target_modules": ["q_proj"]}}, "needs tuner.type: lora, and without it all weights train"),
        ({"tuner": {"freeze_llm": True}}, "leaves nothing to train"),
        ({"RM__async": {"version_window": 1}}, "needs custom.extra.rollout_matching.async.enabled: true"),
        ({"RM__async": {"enabled": True}, "RM__rollout_backend": "hf"}, "prefetch needs rollout servers"),
        ({"training__vit_lr": 1e-5}, "the vision tower is frozen"),
        ({"training__aligner_lr": 1e-5}, "the aligner is frozen"),
        ({"training__eval_steps": 5}, "training.eval_steps=5: evaluation needs custom.val_jsonl"),
        ({"training__eval_at_start": True}, "evaluation needs custom.val_jsonl"),
        ({"model": {"path": "m", "image_min_pixels": 5, "image_max_pixels": 4}}, "must not exceed"),
    ],
)
def test_CFG_17_contradictions_between_keys(changes: dict[str, Any], message: str) -> None:
    """CFG-17."""
    assert message in only_problem(edited(**changes))


def test_CFG_17_settings_of_adapters_wait_beside_full_fine_tuning() -> None:
    """CFG-17: a preset for it extends one with adapters, and says so."""
    build_config(edited(tuner={"type": "full", "rank": 64, "dropout": 0.1}))


def test_CFG_17_modules_to_save_stand_beside_adapters() -> None:
    """CFG-17: in full fine-tuning they neither work nor count as something that is trained."""
    saved = {"modules_to_save": ["embed_tokens"]}
    assert 'tuner.modules_to_save=["embed_tokens"]: needs tuner.type: lora' in only_problem(edited(tuner=saved))
    build_config(edited(tuner=saved | {"type": "lora", "freeze_llm": True}))
    found = problems(edited(tuner=saved | {"freeze_llm": True}))
    assert len(found) == 2 and any("leaves nothing to train" in line for line in found)


@pytest.mark.parametrize(
    ("key", "module", "is_refused"),
    [
        ("aligner_lr", "merger", False),
        ("aligner_lr", "visual", False),  # holds the aligner
        ("aligner_lr", "embed_tokens", True),
        ("vit_lr", "visual.patch_embed", False),
        ("vit_lr", "patch_embed", False),
        ("vit_lr", "merger", True),
        ("embed_lr", "merger", True),
        ("embed_lr", "embed_tokens", False),
        ("embed_lr", "lm_head", False),
    ],
)
def test_CFG_17_a_rate_of_modules_that_train_in_a_frozen_part(key: str, module: str, is_refused: bool) -> None:
    """CFG-17: `modules_to_save` are trained there, at the part's rate."""
    data = edited(tuner={"type": "lora", "modules_to_save": [module]}, **{f"training__{key}": 1e-5})
    if is_refused:
        assert f"training.{key}=1e-05: the " in (found := only_problem(data)) and " frozen; set " in found
    else:
        build_config(data)


@pytest.mark.parametrize(
    ("tuner", "way_out"),
    [
        ({}, None),
        ({"freeze_llm": True, "freeze_vit": False}, "freeze_llm: false"),
        ({"type": "lora"}, "modules_to_save: [embed_tokens]"),
    ],
)
def test_CFG_17_a_rate_of_embeddings_that_do_not_train(tuner: dict[str, Any], way_out: str | None) -> None:
    """CFG-17."""
    data = edited(tuner=tuner, training__embed_lr=1e-5)
    if way_out is None:
        build_config(data)
    else:
        told = f"training.embed_lr=1e-05: the embeddings are frozen; set tuner.{way_out}, or embed_lr: null"
        assert told in only_problem(data)


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ({"liger_kernel"}, "needs the package liger-kernel (requirements-gpu.txt)"),
        ({"cuda"}, "needs CUDA devices"),
        ({"liger_kernel", "cuda"}, "needs the package liger-kernel"),
        (set(), None),
    ],
)
def test_CFG_17_fused_kernels_that_cannot_work_name_the_way_out(missing, message) -> None:
    """CFG-17."""
    check_launch(build_config(edited()), 1, {"liger_kernel", "cuda"})
    cfg = build_config(edited(training__fused_kernels=True))
    if message is None:
        check_launch(cfg, 1, missing)
        return
    with pytest.raises(ConfigError, match="training.fused_kernels=true.*set it to false") as caught:
        check_launch(cfg, 1, missing)
    assert message in caught.value.problems[0]


def test_CFG_17_flash_attention_has_no_float32() -> None:
    """CFG-17: nothing casts what the learner gives it."""
    flash = {"path": "m", "attn_implementation": "flash_attention_2"}
    found = only_problem(edited(model=flash | {"dtype": "float32"}))
    assert 'attn_implementation="flash_attention_2": needs model.dtype: bfloat16 or float16' in found
    for dtype in ("bfloat16", "float16"):
        build_config(edited(model=flash | {"dtype": dtype}))


@pytest.mark.parametrize("missing", [{"flash_attn"}, {"cuda"}, {"flash_attn", "liger_kernel", "cuda"}])
def test_CFG_17_flash_attention_that_cannot_work_says_what_to_install(missing) -> None:
    """CFG-17."""
    check_launch(build_config(edited()), 1, {"flash_attn", "cuda"})
    cfg = build_config(edited(model__attn_implementation="flash_attention_2"))
    check_launch(cfg, 1, {"liger_kernel"})
    with pytest.raises(ConfigError, match='model.attn_implementation="flash_attention_2".*set it to sdpa') as caught:
        check_launch(cfg, 1, missing)
    assert "pip install --no-build-isolation flash-attn==" in caught.value.problems[0]


@pytest.mark.parametrize(
    ("changes", "world_size", "missing", "message"),
    [
        ({"RM__vllm__mode": "colocate"}, 2, set(), "tensor_parallel_size=4: must divide the 2 learner(s); set it to 1"),
        ({"RM__vllm": {"tensor_parallel_size": 2}}, 3, set(), "=2: must divide the 3 learner(s)"),
        ({"RM__vllm": {"tensor_parallel_size": 1}}, 2, {"vllm"}, 'rollout_backend="vllm": vLLM is not installed here'),
        ({}, 1, {"vllm"}, "vLLM is not installed here"),
    ],
)
def test_ROL_5_an_engine_that_cannot_work_names_the_way_out(
    changes: dict[str, Any], world_size: int, missing: set[str], message: str
) -> None:
    """ROL-5, CFG-6."""
    with pytest.raises(ConfigError) as caught:
        check_launch(build_config(edited(**changes)), world_size, missing)
    assert len(caught.value.problems) == 1 and message in caught.value.problems[0]
    assert "hf" in caught.value.problems[0]


def test_ROL_5_engines_that_work_pass_and_are_planned_CFG_5() -> None:
    """ROL-5, CFG-5, CFG-16: hf needs no vLLM; a size that divides the learners will do."""
    colocate = {"RM__vllm": {"tensor_parallel_size": 2}, "RM__decode_batch_size": 3}
    batch = {"training__per_device_train_batch_size": 8}
    plan = make_plan(build_config(edited(**colocate, **batch)), 4)
    assert (plan.chunk, plan.rounds) == (3, 3) and "2 vLLM engine(s) of 2 device(s)" in format_plan(plan)
    plan = make_plan(build_config(edited(RM__rollout_backend="hf", **batch)), 3)
    assert (plan.chunk, plan.rounds) == (1, 8) and "transformers' generate" in format_plan(plan)


def test_ROL_5_a_colocated_engine_refuses_lora_slots() -> None:
    """ROL-5."""
    found = only_problem(edited(RM__vllm={"enable_lora": True, "tensor_parallel_size": 1}))
    assert "vllm.enable_lora=true" in found and "sync.mode: full" in found and "rollout_backend: hf" in found


def test_all_problems_of_a_launch_are_reported_together(tmp_path: Path) -> None:
    """CFG-3, CFG-17, ROL-5."""
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"train_batch_size": 2}))
    changes = {"RM__vllm": {"tensor_parallel_size": 2}, "deepspeed": str(path), "training__fused_kernels": True}
    with pytest.raises(ConfigError) as caught:
        check_launch(build_config(edited(**changes)), 3, {"vllm", "liger_kernel"})
    keys = (f"{RM}.rollout_backend", f"{RM}.vllm.tensor_parallel_size", "training.fused_kernels", "deepspeed")
    assert [line.split(": ")[1].split("=")[0] for line in caught.value.problems] == list(keys)


SUPERVISED = {"RM__teacher_forced_ratio": 1, "RM__max_new_tokens": 9999}


@pytest.mark.parametrize("vllm", [{}, {"mode": "server"}, minimal()["custom"]["extra"]["rollout_matching"]["vllm"]])
def test_LRN_10_supervised_training_needs_no_engine(vllm: dict[str, Any]) -> None:
    """LRN-10: no servers, even those the file names, no vLLM, any number of learners; rows are prepared ahead."""
    ahead = {"enabled": True, "version_window": 1}
    cfg = build_config(edited(**SUPERVISED, RM__vllm=vllm, RM__async=ahead))
    assert not cfg.generates and not cfg.servers() and not cfg.is_colocate
    check_launch(cfg, 3, missing={"vllm"})
    text = format_plan(make_plan(cfg, 3))
    assert re.search(r"rollouts: +none: every sample trains on its ground truth", text)
    assert re.search(r"sync mode: +none", text) and "generates" not in text and "sync buckets" not in text


def test_LOG_3_trackers_are_named_alone_or_in_a_list_and_must_be_installed() -> None:
    """LOG-3, CFG-1: before anything heavy starts, and only where the learner runs."""
    for value, names in (("tensorboard", ["tensorboard"]), ("none", []), (["wandb", "mlflow"], ["wandb", "mlflow"])):
        assert build_config(edited(training__report_to=value)).training.report_to == names
    assert "training.report_to" in only_problem(edited(training__report_to="comet"))
    cfg = build_config(edited(training__report_to=["wandb", "mlflow"]))
    with pytest.raises(ConfigError) as error:
        check_launch(cfg, 1, missing={"mlflow"})
    (problem,) = error.value.problems
    assert "training.report_to" in problem and "pip install -c requirements-trackers.txt mlflow" in problem


@pytest.mark.parametrize("key", ["eval_steps", "eval_at_start"])
def test_LRN_10_evaluation_needs_the_engine_that_the_file_names(key: str) -> None:
    """LRN-10, LRN-7: servers, or transformers, which need no vLLM."""
    evaluated = {"RM__teacher_forced_ratio": 1, "custom__val_jsonl": "val.jsonl"}
    evaluated[f"training__{key}"] = True if key == "eval_at_start" else 1
    assert "is required by mode: server" in only_problem(edited(**evaluated, RM__vllm={"mode": "server"}))
    assert build_config(edited(**evaluated)).servers()
    hf = build_config(edited(**evaluated, RM__rollout_backend="hf"))
    check_launch(hf, 3, missing={"vllm"})
    assert hf.generates and not hf.servers()


def test_DAT_5_a_file_that_is_rolled_out_needs_an_engine() -> None:
    """DAT-5, LRN-10: the file's own ratio counts, not only the common one."""
    files = [{"path": "a.jsonl"}, {"path": "b.jsonl", "teacher_forced_ratio": 0}]
    assert build_config(edited(**SUPERVISED | {"RM__max_new_tokens": 9}, custom__train_jsonl=files)).generates
    files[1]["teacher_forced_ratio"] = 1.0
    assert not build_config(edited(**SUPERVISED, custom__train_jsonl=files)).generates


def test_DAT_5_only_stage_2_training_files_have_a_ratio() -> None:
    """DAT-5."""
    found = only_problem(edited(custom__val_jsonl=[{"path": "v.jsonl", "teacher_forced_ratio": 0.5}]))
    assert "custom.val_jsonl[0].teacher_forced_ratio=0.5" in found and "training data only; delete it" in found


def test_TGT_13_true_labels_need_to_be_learnt() -> None:
    """TGT-13."""
    assert build_config(edited(RM__targets={"label_context": "truth"}))
    found = only_problem(edited(RM__targets={"label_context": "truth"}, RM__matching={"label": "ignore"}))
    assert "label_context" in found and "matching.label: correct" in found


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("teacher:1", "'teacher:1' must be http(s)://HOST[:PORT][/PREFIX]; correct it"),
        ("http://localhost:8001/", "is a rollout server of this run, which generates with the weights in training"),
    ],
)
def test_TGT_16_the_teacher_is_a_server_of_its_own(url: str, message: str) -> None:
    mode = {"mode": "server", "server": {"base_url": "http://127.0.0.1:8001", "group_port": 9001}}
    found = only_problem(edited(RM__vllm=mode, RM__teacher={"base_url": url}))
    assert f'{RM}.teacher.base_url="{url}"' in found and message in found
    cfg = build_config(edited(RM__vllm=mode, RM__teacher={"base_url": "http://localhost:8100"}))
    assert cfg.rm.teacher is not None and cfg.rm.teacher.weight == 1.0 and build_config(minimal()).rm.teacher is None


def test_TGT_16_GRPO_has_no_teacher() -> None:
    teacher = {"base_url": "http://localhost:8100"}
    data = edited(custom__trainer_variant="grpo", rlhf={}, RM__teacher=teacher)
    assert any("teacher" in found and "GRPO has no teacher; delete it" in found for found in problems(data))
