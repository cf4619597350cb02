"""`utils.config`: loading, every mistake with its message, shipped files (CFG-1..17)."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from tools.make_config_docs import TARGET, render
from utils.answer_format import COORD_TOKENS, QWEN3VL
from utils.config.load import (
    ConfigError,
    build_config,
    check_launch,
    dump_yaml,
    engine_json,
    exit_with,
    load_config,
    load_config_or_exit,
    require_server,
    require_variant,
    resolve_yaml,
)
from utils.config.plan import format_plan, make_plan
from utils.config.rollout import Decoding
from utils.config.rules import read_deepspeed
from utils.config.schema import RM, RS, Config
from utils.config.section import iter_fields, section_of

ROOT = Path(__file__).parents[2]
STUDY = [ROOT / "studies/configs" / name for name in ("demo.yaml", "hard.yaml")]
SHIPPED = sorted([*ROOT.glob("configs/demo/stage2*.yaml"), *ROOT.glob("configs/stage2/*.yaml"), *STUDY])
GRPO_RUNS = sorted(ROOT.glob("configs/grpo/summary*.yaml"))
REMOVE = object()


def minimal() -> dict[str, Any]:
    """The smallest config that is valid."""
    server = {"servers": [{"base_url": "http://127.0.0.1:8000", "group_port": 9000}]}
    return {
        "global_max_length": 4096,
        "model": {"path": "m"},
        "custom": {
            "trainer_variant": "rollout_matching_sft",
            "train_jsonl": "data/train.jsonl",
            "extra": {"rollout_matching": {"vllm": {"mode": "server", "server": server}}},
        },
        "training": {"output_dir": "out"},
    }


def edited(**changes: Any) -> dict[str, Any]:
    """`minimal()` with values at dotted paths; `__` stands for a dot, RM and RS for their sections."""
    data = minimal()
    for path, value in changes.items():
        path = path.replace("RM__", RM + ".").replace("RM", RM).replace("RS__", RS + ".").replace("RS", RS)
        *parents, last = path.replace("__", ".").split(".")
        section = data
        for key in parents:
            section = section.setdefault(key, {})
        section[last] = value
        if value is REMOVE:
            del section[last]
    return data


def problems(data: dict[str, Any]) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        build_config(data)
    return caught.value.problems


def only_problem(data: dict[str, Any]) -> str:
    found = problems(data)
    assert len(found) == 1, found
    return found[0]


def write(folder: Path, **files: str) -> Path:
    """Write `name=text` as name.yaml; returns the path of the first."""
    for name, text in files.items():
        (folder / f"{name}.yaml").write_text(text)
    return folder / f"{next(iter(files))}.yaml"


# ---------------------------------------------------------------------------------------------------------------------
# shipped files, docs, import


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_CFG_3_every_shipped_config_loads(path: Path) -> None:
    """CFG-3."""
    assert load_config(path).servers()


BASES = [ROOT / "configs/base.yaml", ROOT / "configs/grpo/base.yaml"]


@pytest.mark.parametrize("path", [*BASES, *SHIPPED, *GRPO_RUNS], ids=lambda path: f"{path.parent.name}/{path.name}")
def test_shipped_configs_open_with_purpose_command_hardware(path: Path) -> None:
    head = path.read_text()[:1500]
    assert all(f"# {word}:" in head for word in ("Purpose", "Command", "Hardware"))
    assert "# Expected:" in head or path == BASES[0]


@pytest.mark.parametrize("path", [*SHIPPED, *GRPO_RUNS], ids=lambda path: path.name)
def test_CFG_16_resolved_yaml_loads_to_the_same_config(path: Path, tmp_path: Path) -> None:
    """CFG-16."""
    cfg = load_config(path)
    again = load_config(write(tmp_path, resolved=dump_yaml(cfg)))
    assert again.model_dump() == cfg.model_dump()


def test_dump_yaml_keeps_words_that_old_yaml_reads_as_booleans(tmp_path: Path) -> None:
    cfg = build_config(edited(RM__vllm__sync={"verify": "off"}, data={"prompt": "1e-5"}))
    again = load_config(write(tmp_path, resolved=dump_yaml(cfg)))
    assert (again.rm.vllm.sync.verify, again.data.prompt) == ("off", "1e-5")


def test_CFG_17_every_key_is_described_and_the_docs_are_up_to_date() -> None:
    """CFG-17."""
    assert [
        path for path, field in iter_fields(Config) if not field.description and not section_of(field.annotation)
    ] == []
    assert TARGET.read_text() == render(), "run python -m tools.make_config_docs"


def test_importing_config_and_plan_pulls_in_no_torch() -> None:
    code = "import sys, utils.config.load, utils.config.plan; sys.exit('torch' in sys.modules or 'vllm' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_CFG_1_programs_have_operational_flags_only() -> None:
    """CFG-1."""
    allowed = {"--config", "--dry-run", "--world-size", "--resume", "--server-index", "--local_rank", "--local-rank"}
    programs = [
        ROOT / name for name in ("utils/run/program.py", "train_stage2.py", "train_grpo.py", "rollout_server.py")
    ]
    assert "--resume" in programs[0].read_text()
    for program in programs:
        assert set(re.findall(r'add_argument\(\s*"(--[\w-]+)"', program.read_text())) <= allowed, program


# ---------------------------------------------------------------------------------------------------------------------
# YAML and extends


def test_CFG_2_mappings_merge_lists_and_scalars_are_replaced(tmp_path: Path) -> None:
    """CFG-2."""
    top = write(
        tmp_path,
        top="extends: [first.yaml, second.yaml]\na: {x: 1}\nlist: [9]",
        first="a: {x: 5, y: 5, z: 5}\nlist: [1, 2, 3]\nonly: first",
        second="a: {y: 6}\nlist: [4, 5]",
    )
    data, origin = resolve_yaml(top)
    assert data == {"a": {"x": 1, "y": 6, "z": 5}, "list": [9], "only": "first"}
    named = {".".join(keys): Path(file).name for keys, file in origin.items()}
    assert named["a.x"] == "top.yaml" and named["a.y"] == "second.yaml" and named["a.z"] == "first.yaml"


def test_CFG_2_extends_is_recursive_and_relative_to_the_naming_file(tmp_path: Path) -> None:
    """CFG-2."""
    (tmp_path / "deep").mkdir()
    write(tmp_path / "deep", middle="extends: ../bottom.yaml\nb: 2")
    top = write(tmp_path, top="extends: deep/middle.yaml\nc: 3", bottom="a: 1\nb: 1\nc: 1")
    assert resolve_yaml(top)[0] == {"a": 1, "b": 2, "c": 3}


def test_CFG_2_a_mapping_replaces_a_scalar_and_the_other_way_round(tmp_path: Path) -> None:
    """CFG-2."""
    top = write(tmp_path, top="extends: base.yaml\na: {x: 1}\nb: null", base="a: 5\nb: {y: 1}")
    data, origin = resolve_yaml(top)
    assert data == {"a": {"x": 1}, "b": None}
    assert ("b", "y") not in origin


def test_CFG_2_two_parents_may_share_a_grandparent(tmp_path: Path) -> None:
    """CFG-2."""
    top = write(
        tmp_path, top="extends: [b.yaml, c.yaml]", b="extends: a.yaml\nb: 1", c="extends: a.yaml\nc: 1", a="a: 1"
    )
    assert resolve_yaml(top)[0] == {"a": 1, "b": 1, "c": 1}


def test_CFG_2_a_cycle_prints_its_chain(tmp_path: Path) -> None:
    """CFG-2."""
    top = write(tmp_path, top="extends: a.yaml", a="extends: b.yaml", b="extends: a.yaml")
    with pytest.raises(ConfigError, match=r"cycle.*top\.yaml -> .*a\.yaml -> .*b\.yaml -> .*a\.yaml"):
        resolve_yaml(top)


def test_CFG_2_a_file_that_extends_itself_is_a_cycle(tmp_path: Path) -> None:
    """CFG-2."""
    with pytest.raises(ConfigError, match="cycle"):
        resolve_yaml(write(tmp_path, top="extends: top.yaml"))


def test_CFG_2_missing_files_print_their_chains_all_together(tmp_path: Path) -> None:
    """CFG-2."""
    top = write(tmp_path, top="extends: [a.yaml, gone1.yaml]", a="extends: gone2.yaml")
    with pytest.raises(ConfigError) as caught:
        resolve_yaml(top)
    first, second = caught.value.problems
    assert re.search(r"gone2\.yaml: no such file; reached by .*top\.yaml -> .*a\.yaml -> .*gone2\.yaml", first)
    assert re.search(r"gone1\.yaml: no such file; reached by .*top\.yaml -> .*gone1\.yaml", second)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [1", "not valid YAML"),
        ("- 1\n- 2", "must hold a mapping"),
        ("a: 1\nb: 2\na: 3", "'a' is given twice"),
        ("1: 2", "must be text to be a key"),
        ("a: &x {b: *x}", "an anchor contains itself"),
        ("extends: 5", "must be a file or a list of files"),
        ("extends: [5]", "must be a file or a list of files"),
    ],
)
def test_broken_yaml_is_one_readable_problem(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve_yaml(write(tmp_path, top=text))
    assert len(caught.value.problems) == 1 and message in caught.value.problems[0]


def test_an_anchor_and_its_alias_are_reported_each_at_its_place(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(write(tmp_path, top="model: &empty {}\ncustom: *empty\ntraining: {output_dir: o}"))
    assert len(caught.value.problems) == 3  # model.path, two of custom


def test_scalars_are_read_as_yaml_1_2(tmp_path: Path) -> None:
    text = "a: 1e-5\nb: off\nc: no\nd: 010\ne: 2026-01-01\nf: 1:30\ng: true\nh: ~\ni:\nj: -1\nk: .5\nl: '3'\nm: 1_000"
    data, _ = resolve_yaml(write(tmp_path, top=text))
    expected = [1e-5, "off", "no", 10, "2026-01-01", "1:30", True, None, None, -1, 0.5, "3", "1_000"]
    assert list(data.values()) == expected


# ---------------------------------------------------------------------------------------------------------------------
# strictness and the report


def test_minimal_config_has_the_documented_defaults() -> None:
    """CFG-5, CFG-6, CFG-8, CFG-9, CFG-11, CFG-12."""
    cfg = build_config(minimal())
    assert cfg.rm.rollout_backend == "vllm" and Config.model_fields["deepspeed"].default == "zero2"
    assert type(cfg.rm.vllm)().mode == "colocate"
    assert (cfg.rm.vllm.gpu_memory_utilization, cfg.rm.vllm.tensor_parallel_size) == (0.45, 4)
    assert (cfg.rm.vllm.server.timeout_s, cfg.rm.vllm.server.infer_timeout_s) == (240.0, None)
    assert (cfg.rm.vllm.sync.mode, cfg.rm.vllm.sync.fallback_to_full, cfg.rm.vllm.sync.verify) == (
        "full",
        True,
        "first",
    )
    assert cfg.rm.decoding == Decoding(temperature=0.0, top_p=1.0, top_k=-1, repetition_penalty=1.0)
    assert (cfg.rm.decode_batch_size, cfg.rm.max_new_tokens, cfg.rm.max_failed_fraction) == (1, 1024, 0.05)
    assert cfg.sync_mode() == "full" and cfg.rs is None


def test_CFG_3_unknown_key_names_path_file_and_nearest_key(tmp_path: Path) -> None:
    """CFG-3."""
    base = yaml.safe_dump(edited(training__learning_rat=1.0))
    top = write(tmp_path, top="extends: base.yaml\ntraining: {seed: 1}", base=base)
    with pytest.raises(ConfigError) as caught:
        load_config(top)
    expected = f"{tmp_path}/base.yaml: training.learning_rat=1.0: unknown key; did you mean training.learning_rate?"
    assert caught.value.problems == [expected]


def test_CFG_3_a_known_key_in_the_wrong_section_is_sent_home() -> None:
    """CFG-3."""
    assert f"did you mean {RM}.decode_batch_size?" in only_problem(edited(training__decode_batch_size=4))


def test_CFG_3_unknown_key_like_nothing_else_still_names_a_known_one() -> None:
    """CFG-3."""
    assert re.search(r"zzzz=1: unknown key; delete it \(nearest known key: \w+", only_problem(edited(model__zzzz=1)))


def test_CFG_3_all_problems_together_fields_and_rules() -> None:
    """CFG-3."""
    data = edited(
        RM__temperature=None,
        RM__decode_batch_size=0,
        training__packing_drop_last=False,
        training__learning_rate="fast",
        tuner__use_dora=True,
        model=5,
        deepspeed="zero9",
        typo=1,
    )
    found = "\n".join(problems(data))
    for path in (
        "temperature",
        "decode_batch_size=0",
        "packing_drop_last",
        "learning_rate",
        "use_dora",
        "zero9",
        "typo=1",
    ):
        assert path in found
    assert "model=5: must be a mapping of keys" in found and "model.path" not in found
    assert len(problems(data)) == 8


def test_CFG_3_required_keys_of_an_empty_file_are_all_named() -> None:
    """CFG-3."""
    found = "\n".join(problems({}))
    for path in ("model.path", "custom.trainer_variant", "custom.train_jsonl", "training.output_dir"):
        assert f"{path}: is required" in found


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"RM__decode_batch_size": "4"}, "must be a valid integer"),
        ({"RM__decode_batch_size": True}, "must be a valid integer"),
        ({"RM__decode_batch_size": 0}, "must be greater than or equal to 1"),  # CFG-11
        ({"RM__decode_batch_size": 1.5}, "must be a valid integer"),
        ({"RM__decoding": {"temperature": -0.1}}, "temperature=-0.1: must be greater than or equal to 0"),  # CFG-12
        ({"RM__decoding": {"top_p": 0}}, "must be greater than 0"),
        ({"RM__decoding": {"top_p": 1.1}}, "must be less than or equal to 1"),
        ({"RM__decoding": {"top_k": 2.0}}, "must be a valid integer"),
        ({"RM__max_new_tokens": 0}, "must be greater than or equal to 1"),
        ({"RM__rollout_backend": "sglang"}, "must be 'vllm' or 'hf'"),  # CFG-5
        ({"RM__vllm__server__timeout_s": 0}, "must be greater than 0"),  # CFG-8
        ({"RM__vllm__server__infer_timeout_s": "1"}, "must be a valid number"),
        ({"RM__vllm__sync": {"mode": "delta"}}, "must be 'full', 'adapter' or 'auto'"),  # CFG-9
        ({"RM__vllm__sync": {"verify": False}}, "must be 'off', 'first' or 'always'"),
        ({"RM__matching": {"iou_threshold": 1.5}}, "must be less than or equal to 1"),
        ({"RS": {}}, "vllm_max_model_len: is required"),  # CFG-15
        ({"RS": {"vllm_max_model_len": 0}}, "must be greater than or equal to 1"),
        ({"RS": {"vllm_max_model_len": 2048, "vllm_data_parallel_size": "all"}}, "must be a valid integer or must be"),
        ({"training__seed": -1}, "must be greater than or equal to 0"),
        ({"training__learning_rate": float("nan")}, "must be a finite number"),
        ({"training__packing": "yes"}, "must be a valid boolean"),
        ({"model__dtype": "fp8"}, "must be 'float32', 'bfloat16' or 'float16'"),
        ({"custom__train_jsonl": []}, "List should have at least 1 item"),
        ({"custom__train_jsonl": ["a.jsonl", 5]}, "train_jsonl[1]=5: must be a mapping of keys"),
        ({"custom__train_jsonl": [{"path": "a", "weight": 0}]}, "train_jsonl[0].weight=0: must be greater than 0"),
        ({"custom__trainer_variant": "sft"}, "must be 'rollout_matching_sft' or 'grpo'"),
        ({"training": None}, "training=null: must be a mapping of keys"),
    ],
)
def test_CFG_3_wrong_types_and_ranges(changes: dict[str, Any], message: str) -> None:
    """CFG-3."""
    assert message in only_problem(edited(**changes))


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(sorted({p.rsplit(".", 1)[-1] for p, _ in iter_fields(Config)})), inner, max_size=4
            )
        ),
        max_leaves=20,
    )
)
def test_CFG_3_whatever_a_file_holds_is_reported_and_never_crashes(value: Any) -> None:
    """CFG-3."""
    data = {"model": value, "custom": value, "training": {"output_dir": value}, "tuner": value}
    assert problems(data)
    extra = {"rollout_matching": value, "rollout_server": value}
    for changes in ({"RM": value}, {"custom__extra": extra}, {"deepspeed": value}, {"rlhf": value}):
        try:
            build_config(edited(**changes))
        except ConfigError as error:
            assert error.problems


def test_CFG_3_exit_status_2_without_traceback(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """CFG-3."""
    with pytest.raises(SystemExit) as caught:
        load_config_or_exit(write(tmp_path, top="typo: 1"))
    assert caught.value.code == 2
    assert "top.yaml: typo=1: unknown key" in capsys.readouterr().err


def test_exit_with_speaks_on_the_main_rank_only(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        exit_with("said once", is_main=False)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("key", "migration"),
    [
        ("temperature", f"{RM}.decoding.temperature"),
        ("top_p", f"{RM}.decoding.top_p"),
        ("top_k", f"{RM}.decoding.top_k"),
        ("rollout_generate_batch_size", f"{RM}.decode_batch_size"),
        ("rollout_infer_batch_size", f"{RM}.decode_batch_size"),
        ("rollout_buffer", f"{RM}.async"),
        ("post_rollout_pack_scope", "always per micro-step"),
    ],
)
@pytest.mark.parametrize("value", [None, 1, {"enabled": True}])
def test_CFG_13_retired_keys_name_their_migration(key: str, migration: str, value: Any) -> None:
    """CFG-13."""
    found = only_problem(edited(**{f"RM__{key}": value}))
    assert f"{RM}.{key}=" in found and migration in found


@pytest.mark.parametrize(
    ("changes", "technique"),
    [
        ({"model__load_in_4bit": True}, "QLoRA"),
        ({"tuner__bnb_4bit_quant_type": "nf4"}, "QLoRA"),
        ({"RM__vllm__fp8_rollouts": True}, "FP8"),
        ({"RS": {"vllm_max_model_len": 2048, "vllm_engine_kwargs": {"quantization": "fp8"}}}, "FP8"),
        ({"RS": {"vllm_max_model_len": 2048, "vllm_engine_kwargs": {"kv_cache_dtype": "fp8_e4m3"}}}, "FP8"),
        ({"training__sequence_parallel_size": 2}, "sequence parallelism"),
    ],
)
def test_CFG_17_unsupported_techniques_are_refused_by_name(changes: dict[str, Any], technique: str) -> None:
    """CFG-17."""
    found = only_problem(edited(**changes))
    assert technique in found and "not supported" in found


# ---------------------------------------------------------------------------------------------------------------------
# rules across keys


def test_CFG_4_the_right_script_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    """CFG-4."""
    cfg = build_config(minimal())
    require_variant(cfg, "rollout_matching_sft", "train_stage2.py")
    with pytest.raises(SystemExit, match="2"):
        require_variant(cfg, "grpo", "train_grpo.py")
    assert "start this file with train_stage2.py" in capsys.readouterr().err


def grpo(**rlhf: Any) -> dict[str, Any]:
    """A valid GRPO config in server mode; keys are those of `rlhf`."""
    data = minimal() | {"rlhf": {"reward_funcs": ["detection_f1"], "vllm_server_port": [8080], **rlhf}}
    data["custom"] |= {"trainer_variant": "grpo", "extra": {"rollout_server": {"vllm_max_model_len": 4096}}}
    return data


def grpo_problem(data: dict[str, Any]) -> str:
    """The only thing wrong with it."""
    with pytest.raises(ConfigError) as caught:
        build_config(data)
    assert len(caught.value.problems) == 1, caught.value.problems
    return caught.value.problems[0]


def test_CFG_4_grpo_is_the_other_program() -> None:
    """CFG-4: its files are for train_grpo.py, and the same to learner and server."""
    assert build_config(grpo()) == build_config(grpo())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"beta": 0.1},
            "rlhf.beta=0.1: the reference is the model with adapters disabled; set tuner.type: lora",
        ),
        ({"beta": 0.1, "tuner": {"type": "lora", "adapter_path": "a"}}, "not the starting policy; merge that adapter"),
    ],
)
def test_GRP_6_a_penalty_needs_the_policy_at_the_start(changes: dict[str, Any], message: str) -> None:
    """GRP-6: without a second copy of the model."""
    tuner = changes.pop("tuner", {})
    assert message in grpo_problem(grpo(**changes) | {"tuner": tuner})
    build_config(grpo(beta=0.1) | {"tuner": {"type": "lora"}})


def test_GRP_1_LRN_8_prefetch_is_set_as_for_stage_2() -> None:
    """GRP-1, LRN-8: and answers of older weights are corrected."""
    data = grpo()
    data["custom"]["extra"]["rollout_matching"] = {"async": {"enabled": True, "version_window": 1}}
    assert build_config(data).rm.async_.version_window == 1
    data["rlhf"]["importance_correction_cap"] = None
    assert "responses of older weights" in grpo_problem(data)


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
        ({"decoding": {"temperature": 0}}, "must be above 0, so that the responses of a group differ"),
    ],
)
def test_GRP_2_connection_mistakes(rlhf: dict[str, Any], message: str) -> None:
    """GRP-2."""
    assert message in grpo_problem(grpo(**rlhf))


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
    assert message in grpo_problem(data)


def test_GRP_2_rlhf_and_the_variant_belong_together() -> None:
    """GRP-2."""
    assert "rlhf=null: is required for trainer_variant: grpo" in grpo_problem(grpo() | {"rlhf": None})
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
        ({"training__packing_buffer": 7}, "must hold the 8 responses"),
    ],
)
def test_GRP_2_lengths_and_buffer_fit(changes: dict[str, Any], message: str) -> None:
    """GRP-2, CFG-14, CFG-15: a micro-step makes `num_generations` answers to each sample."""
    data = grpo()
    for path, value in changes.items():
        *parents, last = path.split("__")
        (data[parents[0]] if parents else data)[last] = value
    if "rlhf__max_new_tokens" in changes:
        data["custom"]["extra"]["rollout_server"]["vllm_max_model_len"] = 8192
    assert message in grpo_problem(data)


def test_GRP_2_without_packing_the_row_length_may_be_left_out() -> None:
    """GRP-2, CFG-15: except where an engine in the learner's process takes its length from it."""
    data = grpo(max_new_tokens=4095)
    data |= {"global_max_length": None, "training": {"output_dir": "o", "packing": False}}
    assert build_config(data).global_max_length is None
    data["rlhf"]["max_new_tokens"] = 4096
    assert "rlhf.max_new_tokens=4096 fills it" in grpo_problem(data)
    data["rlhf"]["vllm_mode"] = "colocate"
    assert "is required with rlhf.vllm_mode: colocate" in grpo_problem(data)


@pytest.mark.parametrize(
    ("key", "value"), [("decoding", {"top_p": 0.5}), ("rollout_backend", "hf"), ("losses", {"w1": 2.0})]
)
def test_GRP_2_settings_of_stage_2_have_no_say_in_grpo(key: str, value: Any) -> None:
    """GRP-2: what would be ignored is refused; what both trainers read is not."""
    data = grpo()
    data["custom"]["extra"]["rollout_matching"] = {key: value, "monitor_dump": {"every_steps": 5}}
    assert f"{RM}.{key}=" in grpo_problem(data) and "is for stage 2" in grpo_problem(data)
    del data["custom"]["extra"]["rollout_matching"][key]
    assert build_config(data).rm.monitor_dump.every_steps == 5


@pytest.mark.parametrize(
    ("rlhf", "message"),
    [
        ({"reward_funcs": ["a", "b"], "reward_weights": [1.0]}, "must have one weight for each of the 2 reward_funcs"),
        ({"reward_funcs": ["a"], "reward_weights": [0]}, "are all 0"),
        ({"reward_funcs": ["a"], "reward_weights": [-1.0]}, "must be greater than or equal to 0"),
        ({"reward_funcs": ["a", "b", "a"]}, "names a more than once"),
        ({"reward_funcs": []}, "List should have at least 1 item"),
        ({"num_generations": 1}, "must be greater than or equal to 2"),
        ({"num_iterations": 0}, "must be greater than or equal to 1"),
        ({"scale_rewards": "std"}, "must be 'group', 'batch' or 'none'"),
        ({"loss_type": "ppo"}, "must be 'grpo', 'dapo' or 'dr_grpo'"),
        ({"epsilon": 0}, "must be greater than 0"),
        ({"epsilon": 1.1}, "must be less than or equal to 1"),
        ({"epsilon_high": 0.0}, "must be greater than 0"),
        ({"importance_sampling_level": "word"}, "must be 'token' or 'sequence'"),
        ({"importance_correction_cap": 0}, "must be greater than 0"),
        ({"beta": -0.1}, "must be greater than or equal to 0"),
        ({"max_resample_times": 0}, "must be greater than or equal to 1"),
    ],
)
def test_GRP_5_GRP_6_mistakes_in_rewards_and_objective(rlhf: dict[str, Any], message: str) -> None:
    """GRP-5, GRP-6."""
    assert message in grpo_problem(grpo(**rlhf))


def test_GRP_6_importance_correction_needs_what_tokens_are_drawn_from() -> None:
    """GRP-6: vLLM reports probabilities before temperature and filters unless it is told otherwise."""
    data = grpo(decoding={"temperature": 0.7})
    assert f"{RS}.vllm_engine_kwargs={{}}: importance correction" in grpo_problem(data)
    data["custom"]["extra"]["rollout_server"]["vllm_engine_kwargs"] = {"logprobs_mode": "processed_logprobs"}
    build_config(data)
    build_config(grpo(decoding={"temperature": 0.7}, importance_correction_cap=None))


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
    first, second = (load_config(path) for path in GRPO_RUNS)
    assert first.rlhf.reward_funcs != second.rlhf.reward_funcs
    assert second.rlhf.reward_weights[second.rlhf.reward_funcs.index("summary_attr_key_recall")] == 2.0
    same = {"reward_funcs": [], "reward_weights": None}
    assert first.rlhf.model_copy(update=same) == second.rlhf.model_copy(update=same)
    assert first.model_copy(update={"rlhf": None, "training": None}).model_dump(warnings=False) == second.model_copy(
        update={"rlhf": None, "training": None}
    ).model_dump(warnings=False)


def server(**keys: Any) -> dict[str, Any]:
    return edited(RM__vllm__server=keys)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({}, "neither servers nor base_url"),
        ({"servers": [{"base_url": "http://a", "group_port": 1}], "group_port": 1}, "both given"),
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
        ({"base_url": "http://h:1?x=1", "group_port": 1}, "must be http(s)://HOST"),
        ({"base_url": "http://h", "group_port": 0}, "must be greater than or equal to 1"),
        ({"servers": [{"base_url": "http://h"}]}, "servers[0].group_port: is required"),
        ({"servers": [{"base_url": "http://h", "group_port": "1"}]}, "servers[0].group_port"),
    ],
)
def test_CFG_7_mistakes(keys: dict[str, Any], message: str) -> None:
    """CFG-7."""
    assert message in only_problem(server(**keys))


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
        ("adapter", True, True, "full"),  # SYN-10: vLLM has no DoRA slots, known before the start
    ],
)
def test_CFG_9_resolved_sync_mode(sync: str, enable_lora: bool, use_dora: bool, expected: str) -> None:
    """CFG-9."""
    base = build_config(minimal())
    vllm = base.rm.vllm.model_copy(update={"enable_lora": enable_lora})
    vllm = vllm.model_copy(update={"sync": vllm.sync.model_copy(update={"mode": sync})})
    extra = base.custom.extra.model_copy(update={"rollout_matching": base.rm.model_copy(update={"vllm": vllm})})
    custom = base.custom.model_copy(update={"extra": extra})
    tuner = base.tuner.model_copy(update={"type": "lora", "use_dora": use_dora})
    cfg = base.model_copy(update={"custom": custom, "tuner": tuner})
    assert cfg.sync_mode() == expected
    check_launch(cfg, 1)
    if expected == "adapter":  # CFG-10
        with pytest.raises(ConfigError, match="2 learners in server mode need full"):
            check_launch(cfg, 2)


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
        ({"RS": {"vllm_max_model_len": 1024}}, "max_new_tokens=1024 fills it"),
        (
            {"RS": {"vllm_max_model_len": 2048, "servers": [{"vllm_max_model_len": 512}]}},
            "servers[0].vllm_max_model_len=512",
        ),
    ],
)
def test_CFG_15_lengths_fit(changes: dict[str, Any], message: str) -> None:
    """CFG-15."""
    assert message in only_problem(edited(**changes))


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


def test_CFG_15_server_to_launch() -> None:
    """CFG-15."""
    with pytest.raises(ConfigError, match="required to launch a server"):
        require_server(build_config(minimal()), 0)
    cfg = build_config(edited(RS={"vllm_max_model_len": 2048}))
    assert require_server(cfg, 0).port == 8000
    with pytest.raises(ConfigError, match="no --server-index 1"):
        require_server(cfg, 1)


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
        return [
            (file.path, file.weight) for file in build_config(edited(custom__train_jsonl=value)).custom.train_files()
        ]

    assert files("a") == [("a", 1.0)]
    assert files(["a", "b"]) == [("a", 1.0), ("b", 1.0)]
    assert files([{"path": "a", "weight": 2}, "b"]) == [("a", 2.0), ("b", 1.0)]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tuner": {"use_dora": True}}, "tuner.use_dora=true: needs tuner.type: lora"),
        ({"tuner": {"adapter_path": "x"}}, "tuner.adapter_path="),
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


@pytest.mark.parametrize(
    ("has_liger", "has_cuda", "message"),
    [
        (False, True, "needs the package liger-kernel (requirements-gpu.txt)"),
        (True, False, "needs CUDA devices"),
        (False, False, "needs the package liger-kernel"),
        (True, True, None),
    ],
)
def test_CFG_17_fused_kernels_that_cannot_work_name_the_way_out(has_liger, has_cuda, message) -> None:
    """CFG-17."""
    check_launch(build_config(edited()), 1, has_liger=False, has_cuda=False)
    cfg = build_config(edited(training__fused_kernels=True))
    if message is None:
        check_launch(cfg, 1, has_liger=has_liger, has_cuda=has_cuda)
        return
    with pytest.raises(ConfigError, match="training.fused_kernels=true.*set it to false") as caught:
        check_launch(cfg, 1, has_liger=has_liger, has_cuda=has_cuda)
    assert message in caught.value.problems[0]


@pytest.mark.parametrize(
    ("changes", "world_size", "has_vllm", "message"),
    [
        ({"RM__vllm__mode": "colocate"}, 2, True, "tensor_parallel_size=4: must divide the 2 learner(s); set it to 1"),
        ({"RM__vllm": {"tensor_parallel_size": 2}}, 3, True, "=2: must divide the 3 learner(s)"),
        ({"RM__vllm": {"tensor_parallel_size": 1}}, 2, False, 'rollout_backend="vllm": vLLM is not installed here'),
        ({}, 1, False, "vLLM is not installed here"),
    ],
)
def test_ROL_5_an_engine_that_cannot_work_names_the_way_out(
    changes: dict[str, Any], world_size: int, has_vllm: bool, message: str
) -> None:
    """ROL-5, CFG-6."""
    with pytest.raises(ConfigError) as caught:
        check_launch(build_config(edited(**changes)), world_size, has_vllm=has_vllm)
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


# ---------------------------------------------------------------------------------------------------------------------
# DeepSpeed


@pytest.mark.parametrize("path", sorted(ROOT.glob("ds_configs/*.json")), ids=lambda path: path.stem)
def test_LRN_2_shipped_deepspeed_files_hold_engine_knobs_only(path: Path) -> None:
    """LRN-2."""
    cfg = build_config(edited(deepspeed=path.stem, model__dtype="bfloat16"))
    raw, found = read_deepspeed(cfg)
    assert found == []
    check_launch(cfg, 1)
    assert raw["zero_optimization"]["stage"] == int(re.search(r"\d", path.stem)[0])
    owned = {"train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"}
    assert not owned & raw.keys() and not {"optimizer", "scheduler", "bf16", "fp16"} & raw.keys()


def test_CFG_17_engine_json_writes_in_what_the_yaml_owns() -> None:
    """CFG-17."""
    changes = {
        "per_device_train_batch_size": 3,
        "gradient_accumulation_steps": 4,
        "max_grad_norm": 0.5,
        "output_dir": "o",
    }
    result = engine_json(build_config(edited(training=changes)), world_size=2)
    assert result["train_batch_size"] == 24 and result["train_micro_batch_size_per_gpu"] == 3
    assert result["gradient_accumulation_steps"] == 4 and result["gradient_clipping"] == 0.5
    assert result["bf16"] == {"enabled": True} and "fp16" not in result
    assert result["zero_optimization"]["stage"] == 2
    float32 = engine_json(build_config(edited(model__dtype="float32")), world_size=1)
    assert "bf16" not in float32 and "fp16" not in float32


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"gradient_clipping": 2.0}, "says gradient_clipping=2.0, but training.max_grad_norm=1.0"),
        ({"gradient_accumulation_steps": 2}, "training.gradient_accumulation_steps=1"),
        ({"train_micro_batch_size_per_gpu": 2}, "training.per_device_train_batch_size=1"),
        (
            {"optimizer": {"type": "AdamW", "params": {"lr": 1.0}}},
            "optimizer.params.lr=1.0, but training.learning_rate",
        ),
        ({"optimizer": {"type": "Lamb"}}, 'says optimizer.type="Lamb"'),
        ({"scheduler": {"type": "WarmupLR"}}, "holds a scheduler, but training.lr_scheduler=cosine"),
        ({"fp16": {"enabled": True}}, 'says fp16.enabled=true, but model.dtype="bfloat16"'),
        ({"sequence_parallel_size": 2}, "sequence parallelism is not supported"),
        ([], "must hold a JSON object"),
    ],
)
def test_CFG_17_deepspeed_json_that_disagrees_names_both(tmp_path: Path, content: Any, message: str) -> None:
    """CFG-17."""
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(content))
    assert message in only_problem(edited(deepspeed=str(path)))


def test_deepspeed_json_may_repeat_the_yaml_or_say_auto(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    same = {"gradient_clipping": 1.0, "train_batch_size": 2, "bf16": {"enabled": "auto"}}
    path.write_text(json.dumps({**same, "optimizer": {"type": "AdamW", "params": {"lr": 1e-5, "betas": "auto"}}}))
    cfg = build_config(edited(deepspeed=str(path)))
    assert "optimizer" not in engine_json(cfg, world_size=2)
    for check in (engine_json, check_launch):
        with pytest.raises(ConfigError, match="train_batch_size=2, the YAML makes 3 with 3 ranks"):
            check(cfg, 3)


def test_all_problems_of_a_launch_are_reported_together(tmp_path: Path) -> None:
    """CFG-3, CFG-17, ROL-5."""
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"train_batch_size": 2}))
    changes = {"RM__vllm": {"tensor_parallel_size": 2}, "deepspeed": str(path), "training__fused_kernels": True}
    with pytest.raises(ConfigError) as caught:
        check_launch(build_config(edited(**changes)), 3, has_vllm=False, has_liger=False)
    keys = (f"{RM}.rollout_backend", f"{RM}.vllm.tensor_parallel_size", "training.fused_kernels", "deepspeed")
    assert [line.split(": ")[1].split("=")[0] for line in caught.value.problems] == list(keys)


@pytest.mark.parametrize(("name", "message"), [("zero7", "zero2, zero3"), ("gone.json", "there is no gone.json")])
def test_CFG_17_missing_deepspeed_file_names_the_known_ones(name: str, message: str) -> None:
    """CFG-17."""
    assert message in only_problem(edited(deepspeed=name))
