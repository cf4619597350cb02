"""`utils.config.load`: shipped files, `extends`, strictness and the report (CFG-1 to CFG-4, CFG-13, CFG-16, CFG-17)."""

import base64
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from tools.make_config_docs import TARGET, render
from utils.config.load import (
    ConfigError,
    build_config,
    dump_yaml,
    load_config,
    load_config_or_exit,
    require_server,
    require_variant,
    resolve_yaml,
)
from utils.config.rollout import Decoding
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
    allowed = {"--config", "--dry-run", "--world-size", "--resume", "--accept-changes", "--server-index"}
    allowed |= {"--local_rank", "--local-rank"}
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


def test_CFG_1_a_home_folder_that_no_shell_has_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CFG-1: make quotes CONFIG, so that it may have blanks."""
    monkeypatch.setenv("HOME", str(tmp_path))
    write(tmp_path, top="a: 1")
    assert resolve_yaml("~/top.yaml")[0] == {"a": 1}
    for odd in ("~nobody-of-this-name/top.yaml", "~nobody.yaml"):
        with pytest.raises(ConfigError, match=f"{odd}.*no such file"):
            resolve_yaml(odd)


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
        ("a:\n\t- 1", "- 1 ^; indent with spaces, not tabs"),
        ("a: [1\n", "not valid YAML: while parsing a flow sequence at line 1"),
    ],
)
def test_broken_yaml_is_one_readable_problem(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve_yaml(write(tmp_path, top=text))
    assert len(caught.value.problems) == 1 and message in caught.value.problems[0]
    assert "reached by" not in caught.value.problems[0] and "unicode string" not in caught.value.problems[0]


def test_a_file_in_another_encoding_is_told_so(tmp_path: Path) -> None:
    path = tmp_path / "latin.yaml"
    path.write_bytes("a: caf\u00e9".encode("latin-1"))
    message = r"latin.yaml: not UTF-8 \(unexpected end of data at byte 6\); save it as UTF-8"
    with pytest.raises(ConfigError, match=message):
        resolve_yaml(path)


def test_an_anchor_and_its_alias_are_reported_each_at_its_place(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(write(tmp_path, top="model: &empty {}\ncustom: *empty\ntraining: {output_dir: o}"))
    assert len(caught.value.problems) == 3  # model.path, two of custom


def test_scalars_are_read_as_yaml_1_2(tmp_path: Path) -> None:
    text = "a: 1e-5\nb: off\nc: no\nd: 010\ne: 2026-01-01\nf: 1:30\ng: true\nh: ~\ni:\nj: -1\nk: .5\nl: '3'\nm: 1_000"
    data, _ = resolve_yaml(write(tmp_path, top=text))
    expected = [1e-5, "off", "no", 10, "2026-01-01", "1:30", True, None, None, -1, 0.5, "3", "1_000"]
    assert list(data.values()) == expected
    data, _ = resolve_yaml(write(tmp_path, top="a: True\nb: FALSE\nc: Null\nd: Yes"))
    assert list(data.values()) == [True, False, None, "Yes"]


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


def test_CFG_3_a_merge_key_is_sent_to_extends() -> None:
    """CFG-3: no key is near it."""
    expected = "YAML's merge key is not supported; put what is shared into a file of its own, and name it with extends"
    assert expected in only_problem(edited(**{"training__<<": {"seed": 1}}))


def test_CFG_3_a_known_key_in_the_wrong_section_is_sent_home() -> None:
    """CFG-3."""
    assert f"did you mean {RM}.decode_batch_size?" in only_problem(edited(training__decode_batch_size=4))
    rlhf = {"reward_funcs": ["detection_f1"], "temperature": 1.0}
    found = problems(edited(custom__trainer_variant="grpo", rlhf=rlhf, **{RM: REMOVE}))
    assert any("did you mean rlhf.decoding.temperature?" in problem for problem in found)


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
        ({"RM__eval": {"iou_threshold": 0}}, "must be greater than 0"),
        ({"RS": {}}, "vllm_max_model_len: is required"),  # CFG-15
        ({"RS": {"vllm_max_model_len": 0}}, "must be greater than or equal to 1"),
        ({"RS": {"vllm_max_model_len": 2048, "vllm_data_parallel_size": "all"}}, "must be a valid integer or must be"),
        ({"training__seed": -1}, "must be greater than or equal to 0"),
        ({"training__seed": 2**32}, "must be less than or equal to 4294901759"),
        ({"training__rank_timeout_s": 1e10}, "must be less than or equal to 2000000"),
        ({"RM__vllm__server__timeout_s": 1e10}, "must be less than or equal to 2000000"),
        ({"RM__vllm__server__infer_timeout_s": 1e10}, "must be less than or equal to 2000000"),
        ({"RM__vllm__sync": {"timeout_s": 86401}}, "must be less than or equal to 86400"),
        ({"training__learning_rate": float("nan")}, "must be a finite number"),
        ({"training__packing": "yes"}, "must be a valid boolean; write true or false, without quotes"),
        ({"training__seed": "1"}, "must be a valid integer; remove the quotes"),
        ({"training__learning_rate": "1e-4"}, "must be a valid number; remove the quotes"),
        ({"training__learning_rate": "fast"}, "must be a valid number; meaning"),
        ({"model__dtype": "fp8"}, "must be 'float32', 'bfloat16' or 'float16'"),
        ({"custom__train_jsonl": []}, "must have at least 1 item"),
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
@example({"answer_format": []})
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


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("deepspeed: !!int abc", "cannot be read as int: .*abc.* line 1, column 12"),
        ("deepspeed: !!timestamp abc", "cannot be read as timestamp: .* line 1"),
        (f"training: {{seed: {'9' * 5000}}}", "cannot be read as int: .* line 1"),
        ('extends: "a\\0.yaml"', "cannot be read as str: .*a.x00.yaml' contains a NUL"),
        ('custom: {train_jsonl: "a\\0.jsonl"}', "cannot be read as str: .*a.x00.jsonl' contains a NUL"),
    ],
)
def test_CFG_3_a_value_that_yaml_cannot_make_is_told_with_its_line(tmp_path: Path, text: str, reason: str) -> None:
    """CFG-3."""
    with pytest.raises(ConfigError, match=f"top.yaml: not valid YAML: {reason}"):
        load_config(write(tmp_path, top=text))


def test_CFG_3_exit_status_2_without_traceback(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """CFG-3."""
    with pytest.raises(SystemExit) as caught:
        load_config_or_exit(write(tmp_path, top="typo: 1"))
    assert caught.value.code == 2
    message = capsys.readouterr().err
    assert "top.yaml: typo=1: unknown key" in message
    command = r"python train_stage2.py --config \S+top.yaml --dry-run"
    assert re.search(rf"to check the file again without starting anything: {command}\n$", message)


def test_CFG_3_a_launcher_hears_a_mistake_once_however_late_its_first_rank_is(tmp_path: Path) -> None:
    """CFG-3: the launcher ends rank 0 within a second of another's exit."""
    program = tmp_path / "program.py"
    program.write_text(
        "import os, sys, time\n"
        "from utils.config.load import load_config_or_exit\n"
        "time.sleep(3 if os.environ['RANK'] == '0' else 0)\n"
        "load_config_or_exit(sys.argv[-1])\n"
    )
    ranks = base64.urlsafe_b64encode(json.dumps({"localhost": [0, 1]}).encode()).decode()
    launcher = [sys.executable, "-m", "deepspeed.launcher.launch", f"--world_info={ranks}", "--master_port=1"]
    config = write(tmp_path, top="typo: 1")
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    ended = subprocess.run(
        [*launcher, program, config], capture_output=True, text=True, timeout=120, env=environment, check=False
    )
    assert ended.returncode == 2
    assert ended.stderr.count("top.yaml: typo=1: unknown key") == 1


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
        ("targets__trim_trailing_unmatched", f"{RM}.targets.unmatched: trim"),
    ],
)
@pytest.mark.parametrize("value", [None, 1, {"enabled": True}])
def test_CFG_13_retired_keys_name_their_migration(key: str, migration: str, value: Any) -> None:
    """CFG-13."""
    found = only_problem(edited(**{f"RM__{key}": value}))
    assert f"{RM}.{key.replace('__', '.')}=" in found and migration in found


def engine_argument(**arguments: Any) -> dict[str, Any]:
    return {"RS": {"vllm_max_model_len": 2048, "vllm_engine_kwargs": arguments}}


@pytest.mark.parametrize(
    ("changes", "technique"),
    [
        ({"model__load_in_4bit": True}, "QLoRA"),
        ({"tuner__bnb_4bit_quant_type": "nf4"}, "QLoRA"),
        ({"RM__vllm__fp8_rollouts": True}, "FP8"),
        (engine_argument(quantization="fp8"), "FP8"),
        (engine_argument(quantization_config={"linear": "fp8"}), "FP8"),
        (engine_argument(kv_cache_dtype="fp8_e4m3"), "FP8"),
        (engine_argument(kv_cache_dtype="int4_per_token_head"), "FP8"),
        (engine_argument(load_format="bitsandbytes"), "FP8"),
        (engine_argument(mm_encoder_attn_dtype="fp8"), "FP8"),
        ({"training__sequence_parallel_size": 2}, "sequence parallelism"),
    ],
)
def test_CFG_17_unsupported_techniques_are_refused_by_name(changes: dict[str, Any], technique: str) -> None:
    """CFG-17."""
    found = only_problem(edited(**changes))
    assert technique in found and "not supported" in found


def test_CFG_17_engine_arguments_that_quantize_nothing_are_taken() -> None:
    """CFG-17: of vLLM's own types for the KV cache all others quantize it."""
    from vllm.config.cache import CacheDType

    plain = [name for name in get_args(CacheDType) if re.fullmatch("auto|b?float16", name)]
    assert len(plain) == 3
    for name in plain:
        build_config(edited(**engine_argument(kv_cache_dtype=name, quantization=None, load_format="safetensors")))
    for name in sorted({*get_args(CacheDType)} - {*plain}):
        assert "not supported" in only_problem(edited(**engine_argument(kv_cache_dtype=name)))


def test_SYN_6_an_engine_that_moves_experts_is_refused() -> None:
    """SYN-6: the next sync would load them to where they lay at the start."""
    assert "not where EPLB moved them" in only_problem(edited(**engine_argument(enable_eplb=True)))
    build_config(edited(**engine_argument(enable_eplb=False)))


def test_CFG_4_the_right_script_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    """CFG-4."""
    cfg = build_config(minimal())
    require_variant(cfg, "rollout_matching_sft", "train_stage2.py")
    with pytest.raises(SystemExit, match="2"):
        require_variant(cfg, "grpo", "train_grpo.py")
    assert "start this file with train_stage2.py" in capsys.readouterr().err


def test_CFG_15_server_to_launch() -> None:
    """CFG-15."""
    with pytest.raises(ConfigError, match="required to launch a server"):
        require_server(build_config(minimal()), 0)
    cfg = build_config(edited(RS={"vllm_max_model_len": 2048}))
    assert require_server(cfg, 0).port == 8000
    with pytest.raises(ConfigError, match="no --server-index 1"):
        require_server(cfg, 1)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({f"{RM}.vllm.mode": "colocate"}, f'{RM}.vllm.mode="colocate": .* as its learners generate'),
        (
            {f"{RM}.rollout_backend": "hf"},
            f'{RM}.rollout_backend="hf": .* set {RM}.rollout_backend: vllm and .*: server',
        ),
        ({f"{RM}.teacher_forced_ratio": 1.0}, "training.eval_steps=0: .* as nothing is generated"),
    ],
)
def test_CFG_15_a_run_that_needs_no_server_says_why(changes, expected) -> None:
    """CFG-15: also where the file describes one."""
    with pytest.raises(ConfigError, match=expected):
        require_server(build_config(edited(RS={"vllm_max_model_len": 2048}, **changes)), 0)
