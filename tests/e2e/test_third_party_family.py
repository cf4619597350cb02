"""A family that this project does not know is added from outside, by `tests.glm` alone: a record and a builder."""

import re
import subprocess
import sys

import pytest

from tests.e2e.processes import ROOT

ENGINES = pytest.param("e2e", "follows or generates or both", 7, marks=[pytest.mark.slow, pytest.mark.e2e])


@pytest.mark.parametrize(("marks", "names", "num_tests"), [("not e2e", "not without_a_record", 11), ENGINES])
def test_the_conformance_suite_passes_with_a_record_and_a_builder_FAM_1_FAM_3(marks, names, num_tests):
    """FAM-1, FAM-3: GLM-4.1V, without and with a real server; stage 2 and GRPO train and resume."""
    suite = ["tests/e2e/test_families.py", "tests/test_families.py", "-k", f"glm4v and ({names})"]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.glm", "-m", marks, *suite]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1200)
    assert result.returncode == 0, result.stdout[-4000:]
    passed = re.search(r"(\d+) passed", result.stdout)
    assert passed and int(passed[1]) == num_tests
