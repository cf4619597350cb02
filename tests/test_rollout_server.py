"""SRV-2, SRV-3, SRV-6: what the server checks, prints and refuses before it loads anything."""

import asyncio
import contextlib
import dataclasses
import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from types import SimpleNamespace

import pytest

import rollout_server
from tests.config.test_checkpoint_files import POINTER, write_checkpoint
from tests.e2e.processes import config_of
from tests.families import build_family
from utils.config.load import build_config, load_config
from utils.config.plan import print_dry_run
from utils.config.schema import Model, ServerAddress, ServerSettings
from utils.families import split_problem
from utils.server.launch import Launch, describe, engine_args, is_loopback, model_problems, problems_of, resolve
from utils.server.process import answer_loading, listen, set_environment

ROOT = Path(__file__).parents[1]


@pytest.fixture
def model_dir(tmp_path) -> Path:
    return write_checkpoint(tmp_path, {"model_type": "qwen3_vl", "text_config": {"max_position_embeddings": 4096}})


def launch_of(model_dir: Path, *, settings: dict | None = None, **changes) -> Launch:
    common = {"vllm_max_model_len": 1024, "vllm_gpu_memory_utilization": 0.6, "cpu_kv_cache_gib": 1}
    launch = Launch(
        settings=ServerSettings(**common | (settings or {})),
        model=Model(path=str(model_dir), dtype="float32"),
        address=ServerAddress("http://127.0.0.1:8080/x", 8081),
        device="cpu",
        num_devices=None,
        data_parallel_size=2,
        lora_rank=None,
        image_roots=("/data",),
        stuck_s=120.0,
        seed=1,
    )
    return dataclasses.replace(launch, **changes)


def test_a_sound_launch_has_no_problems(model_dir):
    """SRV-2"""
    assert problems_of(launch_of(model_dir), token=None) == []


@pytest.mark.parametrize("host", ["0.0.0.0", "[::]", "10.0.0.3", "gpu-box"])
def test_beyond_loopback_needs_permission_and_a_token(model_dir, host):
    """SRV-3: both, or it refuses to start."""
    address = ServerAddress(f"http://{host}:8080", 8081)
    launch = launch_of(model_dir, address=address)
    allowed = launch_of(model_dir, address=address, settings={"allow_remote": True})
    assert len(problems_of(launch, token=None)) == 2
    assert "allow_remote" in problems_of(launch, token="t")[0]
    assert "ROLLOUT_SERVER_TOKEN" in problems_of(allowed, token=None)[0]
    assert problems_of(allowed, token="t") == []


def test_loopback_addresses():
    """SRV-3"""
    assert all(map(is_loopback, ["127.0.0.1", "127.8.8.8", "::1", "localhost"]))
    assert not any(map(is_loopback, ["0.0.0.0", "localhost.example.com", "192.168.0.1", ""]))


def test_devices_must_be_used_up_exactly(model_dir):
    """SRV-2: TP x DP equals the visible devices."""
    split = {"vllm_tensor_parallel_size": 2}
    cuda = launch_of(model_dir, device="cuda", num_devices=3, data_parallel_size=1, settings=split)
    assert "2 x data_parallel_size 1 = 2, but 3 CUDA devices" in problems_of(cuda, None)[0]
    assert problems_of(dataclasses.replace(cuda, num_devices=2), None) == []


def test_model_directory_and_length_are_checked(model_dir, tmp_path):
    """SRV-2, CFG-15: all problems at once, before loading."""
    assert f"model.path={tmp_path / 'nowhere'}: no such folder" in model_problems(tmp_path / "nowhere", 10)[0]
    assert "ends at 4096 positions" in model_problems(model_dir, 4097)[0]
    (tmp_path / "list").mkdir()
    (tmp_path / "list" / "config.json").write_text("[]")
    assert "must be JSON objects" in model_problems(tmp_path / "list", 10)[0]
    assert model_problems(model_dir, 4096) == []
    (model_dir / "model.safetensors").unlink()
    assert model_problems(model_dir, 10) == [f"model.path={model_dir}: holds no weights; download it again"]
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text('{"model_type": "gemma4"}')
    (tmp_path / "other" / "model.safetensors").touch()
    assert "a gemma4 model, which is not supported" in model_problems(tmp_path / "other", 10)[0]
    everywhere = ServerAddress("http://0.0.0.0:8080", 8081)
    both = launch_of(model_dir, address=everywhere, settings={"allow_remote": True})
    assert len(problems_of(both, None)) == 2


def test_heads_that_devices_cannot_share_are_told_before_anything_is_loaded_SRV_2(tmp_path):
    """SRV-2: vLLM would say so after minutes."""
    model = write_checkpoint(tmp_path, {"model_type": "qwen3_vl", "text_config": {"num_attention_heads": 32}})
    for devices, is_told in ((2, False), (3, True)):
        on_gpus = {"device": "cuda", "num_devices": devices, "data_parallel_size": 1}
        launch = launch_of(model, settings={"vllm_tensor_parallel_size": devices}, **on_gpus)
        rule = f"vllm_tensor_parallel_size={devices}: cannot divide the model's 32 attention heads"
        assert any(rule in problem for problem in problems_of(launch, None)) is is_told
    # By vLLM's own rule: either number divides the other.
    text = {"num_attention_heads": 28, "num_key_value_heads": 4}
    told = {n for n in (1, 2, 4, 7, 14, 28) if split_problem(text, n)}
    assert told == {7, 14} and "4 key-value heads" in split_problem(text, 7)


def test_experts_that_devices_cannot_share_are_told_before_anything_is_loaded_SRV_2(tmp_path):
    """SRV-2: vLLM cuts each expert over tensor and data parallel together, unless whole ones are spread."""
    text = {"num_attention_heads": 32, "num_experts_per_tok": 8, "num_experts": 128, "moe_intermediate_size": 512}
    model = write_checkpoint(tmp_path, {"model_type": "qwen3_vl_moe", "text_config": text})
    spread = {"vllm_engine_kwargs": {"enable_expert_parallel": True}}
    for replicas, settings, is_told in ((2, {}, False), (3, {}, True), (3, spread, False)):
        on_gpus = {"device": "cuda", "num_devices": 2 * replicas, "data_parallel_size": replicas}
        launch = launch_of(model, settings={"vllm_tensor_parallel_size": 2} | settings, **on_gpus)
        rule = (
            f"data_parallel_size={replicas}: cuts each expert's 512 values over all {2 * replicas} devices, which does"
        )
        assert any(rule in problem for problem in problems_of(launch, None)) is is_told


def test_CFG_15_an_argument_that_vllm_does_not_know_is_no_start(model_dir):
    """CFG-15, SRV-2: told before anything is loaded, in a dry run too."""
    pytest.importorskip("vllm")
    launch = launch_of(model_dir, settings={"vllm_engine_kwargs": {"max_num_batched_token": 1, "block_size": 16}})
    reason = "vLLM has no such argument; did you mean max_num_batched_tokens?"
    assert problems_of(launch, None) == [f"rollout_server.vllm_engine_kwargs.max_num_batched_token: {reason}"]


def test_the_start_up_print_names_everything(model_dir):
    """SRV-2"""
    address, settings = ServerAddress("http://127.0.0.1:8123", 8081), {"vllm_max_model_len": 12000}
    text = describe(launch_of(model_dir, address=address, settings=settings))
    for words in ("127.0.0.1", "8123", "tensor parallel   1", "data parallel     2", "12000", "1 GiB", str(model_dir)):
        assert words in text
    assert "0.6 of each device" in describe(launch_of(model_dir, device="cuda"))


def test_a_busy_port_is_an_error_that_names_its_process():
    """SRV-2"""
    first = listen("127.0.0.1", 0)
    try:
        port = first.getsockname()[1]
        with pytest.raises(OSError, match=f"127.0.0.1:{port}: Address already in use; held by process {os.getpid()}"):
            listen("127.0.0.1", port)
    finally:
        first.close()
    listen("127.0.0.1", port).close()


@pytest.mark.parametrize("host", ["nowhere.invalid", "a..b"])
def test_a_host_without_an_address_is_an_error_that_names_it(host):
    """SRV-2"""
    with pytest.raises(OSError, match=rf"cannot listen on {host}:8000: no address of that name; change base_url"):
        listen(host, 8000)


def test_a_name_that_leads_to_loopback_is_refused_where_others_are_to_reach_it(monkeypatch):
    """SRV-2: as a node's own name does in Debian's /etc/hosts. Learners would wait for a server that is up."""
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 8000))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    with pytest.raises(OSError, match=r"cannot listen on node-a:8000: here that name leads to 127.0.1.1, .* base_url"):
        listen("node-a", 8000)


def test_answers_are_not_held_back_by_nagle():
    """asyncio sets TCP_NODELAY only on sockets that name their protocol; without it every answer waits for 40 ms."""
    server = listen("127.0.0.1", 0)
    try:
        assert server.proto == socket.IPPROTO_TCP
    finally:
        server.close()


def test_while_loading_every_request_gets_503():
    """SRV-6"""
    server = listen("127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.getsockname()[1]}/health/"
    try:
        with answer_loading(server):
            silent = socket.create_connection(server.getsockname())  # a silent client does not block others for long
            start = time.monotonic()
            with pytest.raises(urllib.error.HTTPError) as error:
                urllib.request.build_opener(urllib.request.ProxyHandler({})).open(url, timeout=10)
            assert time.monotonic() - start < 5
            assert error.value.code == 503 and json.loads(error.value.read())["status"] == "loading"
            silent.close()
    finally:
        server.close()


def test_a_server_that_does_not_end_in_time_is_killed():
    """SRV-7"""
    program = "import time; from utils.server import process; process.SHUTDOWN_S = 0.5; process.kill_later()"
    begun = time.monotonic()
    run = subprocess.run(
        [sys.executable, "-c", f"{program}; time.sleep(60)"], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert run.returncode == 0 and "engines did not end in time and are killed" in run.stderr
    assert time.monotonic() - begun < 30


def test_dry_run_prints_the_learners_plan_and_starts_nothing(model_dir, tmp_path, capsys):
    """CFG-16: the YAML and the plan are the learner's, word for word; where the server would not start, status 2."""
    import yaml

    config = {
        "model": {"path": str(model_dir)},
        "global_max_length": 2048,
        "custom": {
            "trainer_variant": "rollout_matching_sft",
            "train_jsonl": "train.jsonl",
            "extra": {
                "rollout_matching": {
                    "max_new_tokens": 64,
                    "decode_batch_size": 4,
                    "vllm": {"mode": "server", "server": {"base_url": "http://127.0.0.1:8765/x", "group_port": 8766}},
                },
                "rollout_server": {"device": "cpu", "vllm_max_model_len": 512},
            },
        },
        "training": {"output_dir": str(tmp_path / "run")},
    }
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    command = [sys.executable, str(ROOT / "rollout_server.py"), "--config", str(path)]
    planned = [*command, "--dry-run", "--world-size", "2"]
    done = subprocess.run(planned, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    print_dry_run(load_config(path), world_size=2)
    assert done.stdout.startswith(plan := capsys.readouterr().out)
    assert re.search(r"^# requests per round and learner: +2$", plan, re.MULTILINE)  # 4 x 1 device / 2 learners
    assert "http://127.0.0.1:8765/x/" in done.stdout and "would not start" not in done.stdout
    done = subprocess.run([*command, "--dry-run", "--world-size", "5"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and "5 learners" in done.stderr  # DIS-2, as the learner's own

    path.write_text(path.read_text().replace("127.0.0.1", "0.0.0.0"))
    done = subprocess.run(planned, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "# plan" in done.stdout and done.stdout.count("would not start: host 0.0.0.0 is not loopback") == 2
    (model_dir / "model.safetensors").write_bytes(POINTER)
    planned = subprocess.run(planned, capture_output=True, text=True, timeout=120)
    lost = f"model.path={model_dir}: model.safetensors is a Git LFS pointer"
    assert planned.returncode == 2 and f"would not start: {lost}" in planned.stdout and planned.stderr == ""
    real = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert real.returncode == 2 and real.stderr.count("not loopback") == 2 and "Traceback" not in real.stderr
    assert lost in real.stderr


@pytest.mark.parametrize("token", ["hunter2\r", "hunter2\xe9"])
def test_a_token_that_no_header_carries_is_no_start_SRV_3(model_dir, tmp_path, token):
    """SRV-3: it would never match; its value is not shown."""
    command = [sys.executable, str(ROOT / "rollout_server.py"), "--config", str(grpo_config(model_dir, tmp_path))]
    environment = os.environ | {"ROLLOUT_SERVER_TOKEN": token}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 2 and done.stderr.startswith("ROLLOUT_SERVER_TOKEN: must be printable ASCII")
    assert "hunter2" not in done.stdout + done.stderr


def grpo_config(model_dir: Path, tmp_path: Path, **settings) -> Path:
    """The shipped preset with another model, port and launch settings."""
    import yaml

    config = {
        "extends": str(ROOT / "configs" / "grpo" / "summary_1024.yaml"),
        "model": {"path": str(model_dir)},
        "rlhf": {"vllm_server_port": [settings.pop("port", 8080)]},
        "global_max_length": 2048,
        "custom": {"extra": {"rollout_server": {"vllm_max_model_len": 2048, **settings}}},
    }
    path = tmp_path / "my grpo.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


@pytest.mark.parametrize("num_devices", [5, 6, 7])
def test_a_grpo_server_uses_up_its_devices_exactly(model_dir, tmp_path, monkeypatch, num_devices):
    """GRP-2, GRP-3, SRV-2: host and port of `rlhf`; TP 1 x DP 6 wants six devices."""
    monkeypatch.setattr("utils.server.launch.count_cuda_devices", lambda: num_devices)
    launch = resolve(load_config(grpo_config(model_dir, tmp_path)), 0)
    assert (launch.address.host, launch.address.port, launch.world_size, launch.lora_rank) == (
        "127.0.0.1",
        8080,
        6,
        None,
    )
    assert launch.stuck_s == 120.0
    found = problems_of(launch, None)
    assert len(found) == (num_devices != 6)
    assert num_devices == 6 or f"= 6, but {num_devices} CUDA devices are visible" in found[0]


def test_a_grpo_server_on_a_busy_port_names_its_process(model_dir, tmp_path):
    """GRP-2, SRV-2: exit status 2, no other port instead."""
    busy = listen("127.0.0.1", 0)
    try:
        port = busy.getsockname()[1]
        path = grpo_config(model_dir, tmp_path, port=port, device="cpu")
        command = [sys.executable, str(ROOT / "rollout_server.py"), "--config", str(path)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    finally:
        busy.close()
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert f"cannot listen on 127.0.0.1:{port}: Address already in use; held by process {os.getpid()}" in done.stderr
    assert f"start again with: python rollout_server.py --config '{path}'" in done.stderr  # as a shell takes it


@pytest.mark.parametrize("path", sorted((ROOT / "configs" / "grpo").glob("summary*.yaml")), ids=lambda path: path.stem)
def test_dry_run_of_the_grpo_presets(path):
    """GRP-3, CFG-16: all is printed also where it would not start: without the model, and without six GPUs."""
    command = [sys.executable, str(ROOT / "rollout_server.py"), "--config", str(path), "--dry-run"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2, done.stderr
    plan = "TP 1 x DP 6 = 6 device(s)"
    for words in (
        plan,
        "http://127.0.0.1:8080/",
        "data parallel     6",
        "max model length  12000",
        "0.6 of each device",
    ):
        assert words in done.stdout


def test_kernels_that_an_engine_keeps_on_cpu_are_bounded_unless_the_user_says_how(monkeypatch):
    """SRV-8: an engine that runs for days stays as large as it is after its first hours."""
    for given, kept in ((None, "256"), ("7", "7")):
        environment = {} if given is None else {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": given}
        monkeypatch.setattr(os, "environ", environment)
        set_environment("cpu", cpu_kv_cache_gib=1, world_size=1)
        assert environment["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] == kept


def test_flashinfers_sampler_is_off_unless_the_user_wants_it_SRV_2(monkeypatch):
    """SRV-2: it would be compiled when a request with top_p comes, by an nvcc that need not be there."""
    for given, kept in ((None, "0"), ("1", "1")):
        environment = {} if given is None else {"VLLM_USE_FLASHINFER_SAMPLER": given}
        monkeypatch.setattr(os, "environ", environment)
        set_environment("cuda", cpu_kv_cache_gib=1, world_size=1)
        assert environment["VLLM_USE_FLASHINFER_SAMPLER"] == kept


def test_the_engine_starts_with_the_defaults_of_vllms_own_api_server(model_dir, monkeypatch):
    """A batch server wants the prefill budget and the sequences that vLLM gives a server, not a bare engine."""
    vllm_async = pytest.importorskip("vllm.v1.engine.async_llm")
    from vllm.engine import arg_utils
    from vllm.usage.usage_lib import UsageContext

    started = {}

    def start(engine_args, **how):
        started.update(how)
        raise InterruptedError

    monkeypatch.setattr(vllm_async.AsyncLLM, "from_engine_args", start)
    monkeypatch.setattr(rollout_server, "engine_args", lambda launch: None)
    monkeypatch.setattr(rollout_server, "answer_loading", lambda server_socket: contextlib.nullcontext())
    monkeypatch.setattr("utils.data.encoding.load_processor", lambda *_: None)
    with pytest.raises(InterruptedError):
        asyncio.run(rollout_server.serve(launch_of(model_dir), None, None))
    assert started == {"usage_context": UsageContext.OPENAI_API_SERVER}

    h100 = SimpleNamespace(
        get_device_total_memory=lambda: 80 << 30,
        get_device_name=lambda: "NVIDIA H100 80GB HBM3",
        is_tpu=lambda: False,
        is_cpu=lambda: False,
    )
    monkeypatch.setattr(arg_utils, "current_platform", h100)
    budgets, sequences = arg_utils.EngineArgs.get_batch_defaults(world_size=1)
    assert (budgets[started["usage_context"]], sequences[started["usage_context"]]) == (8192, 1024)


def test_engine_and_front_get_what_the_launch_says_SRV_6_CFG_17(model_dir, monkeypatch):
    """SRV-6, CFG-17: limits of images for prompts, the time after which an engine counts as hung, the transport.
    Nothing is served before the engine has generated."""
    vllm_async = pytest.importorskip("vllm.v1.engine.async_llm")
    made: dict[str, tuple] = {}
    made_room: list[tuple[int, int]] = []
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: made_room.append(limits))

    class Engine:
        def __init__(self, *args) -> None:
            made["engine"] = args

        async def warm_up(self) -> None:
            made["warm-up"] = ()

    def update(*args):
        made["updates"] = args
        raise InterruptedError

    monkeypatch.setattr(vllm_async.AsyncLLM, "from_engine_args", lambda *_, **__: "llm")
    monkeypatch.setattr(rollout_server, "engine_args", lambda launch: None)
    monkeypatch.setattr(rollout_server, "answer_loading", lambda server_socket: contextlib.nullcontext())
    monkeypatch.setattr("utils.data.encoding.load_processor", lambda *limits: limits)
    monkeypatch.setattr("utils.server.engine.RolloutEngine", Engine)
    monkeypatch.setattr("utils.server.weight_updates.WeightUpdates", update)
    for device, transport in (("cpu", "gloo"), ("cuda", "nccl")):
        launch = launch_of(model_dir, stuck_s=7.0, device=device, num_devices=2)
        limits = {"image_min_pixels": 1024, "image_max_pixels": 4096}
        launch = dataclasses.replace(launch, model=launch.model.model_copy(update=limits))
        with pytest.raises(InterruptedError):
            asyncio.run(rollout_server.serve(launch, None, None))
        llm, processor, _, path, world_size, stuck_s = made["engine"]
        assert (llm, processor) == ("llm", (str(model_dir), 1024, 4096))
        assert (path, world_size, stuck_s) == (str(model_dir), 2, 7.0)
        assert made["updates"][1] == transport and list(made) == ["engine", "warm-up", "updates"]
    assert made_room == [(hard, hard)] * 2 and hard > 1024


def test_vllm_gets_every_setting_of_the_server_CFG_15(model_dir):
    """CFG-15."""
    pytest.importorskip("vllm")
    settings = {"vllm_max_num_seqs": 5, "vllm_enable_prefix_caching": False, "vllm_enable_lora": True}
    settings |= {"vllm_tensor_parallel_size": 2, "vllm_engine_kwargs": {"block_size": 16}}
    launch = launch_of(model_dir, settings=settings, lora_rank=32, seed=7)
    launch = dataclasses.replace(launch, model=launch.model.model_copy(update={"image_max_pixels": 4096}))
    args = engine_args(launch)
    assert (args.model, args.dtype, args.seed, args.max_model_len) == (str(model_dir), "float32", 7, 1024)
    assert (args.tensor_parallel_size, args.data_parallel_size, args.max_num_seqs) == (2, 2, 5)
    assert (args.enable_prefix_caching, args.enable_lora, args.max_lora_rank) == (False, True, 32)
    assert (args.mm_processor_kwargs, args.block_size) == ({"max_pixels": 4096}, 16)
    on_gpu = engine_args(dataclasses.replace(launch, device="cuda"))
    assert on_gpu.gpu_memory_utilization == 0.6
    backends = args.weight_transfer_config.backend, on_gpu.weight_transfer_config.backend
    assert backends == ("stream_gloo", "stream_nccl")


def test_a_launch_is_resolved_from_the_config_CFG_15_SRV_5_SRV_6(model_dir, tmp_path):
    """CFG-15, SRV-5, SRV-6: half of the time that learners wait, the seed, slots of vLLM's next rank, and the image
    roots of this one of two servers."""
    roots = [{"allowed_image_roots": [root]} for root in ("/a", "/b")]
    settings = {"vllm_enable_lora": True, "servers": roots}
    config = config_of(tmp_path, model_dir, "http://127.0.0.1:8080", 8081, settings, timeout_s=30.0)
    vllm = config["custom"]["extra"]["rollout_matching"]["vllm"]
    vllm["server"]["servers"].append({"base_url": "http://127.0.0.1:8090", "group_port": 8091})
    vllm["enable_lora"] = True
    config |= {"tuner": {"type": "lora", "rank": 20}}
    config["training"]["seed"] = 7
    launch = resolve(build_config(config), 1)
    assert (launch.address.port, launch.stuck_s, launch.seed, launch.lora_rank) == (8090, 15.0, 7, 32)
    assert launch.image_roots == ("/b",)


def test_limits_on_pixels_that_a_model_does_not_have_end_the_server_before_an_engine_is_loaded_FAM_2(
    tmp_path, monkeypatch, capsys
):
    """FAM-2: InternVL cuts images into tiles; an engine of 8B takes minutes to load."""
    vllm_async = pytest.importorskip("vllm.v1.engine.async_llm")
    monkeypatch.setattr(vllm_async.AsyncLLM, "from_engine_args", lambda *_, **__: pytest.fail("loaded an engine"))
    monkeypatch.setattr(rollout_server, "answer_loading", lambda server_socket: contextlib.nullcontext())
    launch = launch_of(build_family("internvl", tmp_path / "model"))
    launch = dataclasses.replace(launch, model=launch.model.model_copy(update={"image_max_pixels": 1 << 20}))
    with pytest.raises(SystemExit) as end:
        asyncio.run(rollout_server.serve(launch, None, None))
    assert end.value.code == 2
    told = "no limits in pixels; leave image_min_pixels and image_max_pixels out"
    assert told in capsys.readouterr().err


def test_SRV_7_a_server_that_is_told_to_stop_has_a_time_to_end_in(model_dir, monkeypatch):
    """SRV-7: from the first signal on, and once."""
    vllm_async = pytest.importorskip("vllm.v1.engine.async_llm")
    done = []

    class Front:
        should_exit = False

        async def serve(self, sockets) -> None:
            for number in (signal.SIGTERM, signal.SIGINT):
                assert signal.getsignal(number) not in (signal.SIG_DFL, signal.default_int_handler)
                signal.raise_signal(number)
                while not self.should_exit:
                    await asyncio.sleep(0.01)
            await asyncio.sleep(0.01)

    async def nothing() -> None:
        pass

    llm = SimpleNamespace(shutdown=lambda timeout: done.append("engines"))
    monkeypatch.setattr(vllm_async.AsyncLLM, "from_engine_args", lambda *_, **__: llm)
    monkeypatch.setattr(rollout_server, "engine_args", lambda launch: None)
    monkeypatch.setattr(rollout_server, "kill_later", lambda: done.append("killed later"))
    monkeypatch.setattr(rollout_server, "answer_loading", lambda server_socket: contextlib.nullcontext())
    monkeypatch.setattr("utils.data.encoding.load_processor", lambda *_: None)
    monkeypatch.setattr("utils.server.engine.RolloutEngine", lambda *_: SimpleNamespace(warm_up=nothing))
    monkeypatch.setattr("utils.server.weight_updates.WeightUpdates", lambda *_: None)
    monkeypatch.setattr("utils.server.app.make_app", lambda *_: SimpleNamespace(add_middleware=lambda *_, **__: None))
    monkeypatch.setattr("utils.server.front.front_config", lambda app: None)
    monkeypatch.setattr("uvicorn.Server", lambda config: Front())
    server_socket = SimpleNamespace(close=lambda: done.append("socket"))
    asyncio.run(rollout_server.serve(launch_of(model_dir), server_socket, None))
    assert done == ["killed later", "socket", "engines"]


def test_SRV_7_the_server_does_not_wait_for_pythons_own_teardown():
    """SRV-7: it takes many seconds with torch and vLLM on a busy machine, and nothing bounds it."""
    program = """
import atexit, sys, time, rollout_server
async def serve(*_):
    atexit.register(time.sleep, 60)
    print("served", end="")
for name in ("load_config_or_exit", "resolve", "listen", "set_environment"):
    setattr(rollout_server, name, __import__("unittest.mock").mock.MagicMock())
rollout_server.describe = rollout_server.problems_of = lambda *_: []
rollout_server.serve = serve
sys.argv = ["rollout_server.py", "--config", "x"]
rollout_server.main()
"""
    run = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=50)
    assert (run.returncode, run.stdout) == (0, "[]\nserved"), run.stderr
