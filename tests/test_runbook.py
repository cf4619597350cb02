"""GRP-7: the runbook is one page, and what it tells an operator to type or to watch exists."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
RUNBOOK = (ROOT / "docs" / "runbook_grpo.md").read_text()


def test_the_runbook_covers_a_run_on_one_page():
    """GRP-7."""
    assert re.findall(r"^## (.+)$", RUNBOOK, flags=re.M) == ["Start", "Watch", "Stop", "Roll back"]
    assert len(RUNBOOK.splitlines()) <= 60


def test_its_commands_and_curves_exist():
    """GRP-7."""
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.M))
    assert set(re.findall(r"\bmake ([a-z-]+) ", RUNBOOK)) == {"server", "grpo"} <= targets
    programs = [ROOT / "train_grpo.py", *(ROOT / "utils").rglob("*.py")]
    sources = "".join(path.read_text() for path in programs)
    for flag in set(re.findall(r"--[a-z][a-z-]*", RUNBOOK)) - {"--logdir"}:  # which is TensorBoard's
        assert f'"{flag}"' in sources, flag
    curves = re.findall(r"^\| `([a-z_/]+)`", RUNBOOK, flags=re.M)
    assert len(curves) >= 8
    for curve in curves:
        assert curve.rpartition("/")[2] in sources, curve
