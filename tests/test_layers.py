"""The modules of `utils` import only downwards, without a cycle (docs/architecture.md)."""

import ast
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[1]
LAYERS = ["", "config", "data", "sync", "learner", "rollout", "server", "run"]  # "": the words of a step, flat
STEP = {"parsing", "answer_format", "matching", "geometry", "targets", "packing", "losses", "policy_loss", "grpo"}
FLAT = STEP | {"drafts", "token_table", "scores", "rewards", "detection_rewards", "credit", "capacity", "dist"}
FLAT |= {"families", "output"}


def imports(path: Path) -> set[str]:
    """Modules of `utils` that a file imports, in functions too; not those that only a type checker sees."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body = []
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "utils":
            submodules = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if is_module(name) else node.module for name in submodules}
    return found


def is_module(name: str) -> bool:
    return (ROOT / name.replace(".", "/")).with_suffix(".py").exists()


def layer(module: str) -> int:
    parts = module.split(".")
    return LAYERS.index(parts[1] if len(parts) == 3 else "")


GRAPH = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts): imports(path)
    for path in sorted((ROOT / "utils").rglob("*.py"))
    if path.name != "__init__.py"
}


def test_no_module_imports_upwards():
    assert {
        (module, other) for module, found in GRAPH.items() for other in found if layer(other) > layer(module)
    } == set()


def test_no_cycle():
    list(TopologicalSorter(GRAPH).static_order())  # raises CycleError


def test_the_flat_modules_are_the_words_of_a_step():
    assert {module.split(".")[1] for module in GRAPH if layer(module) == 0} == FLAT


def test_scripts_are_imported_by_nobody_and_packages_are_empty():
    files = [*(ROOT / "utils").rglob("*.py"), *(ROOT / name for name in ("train_stage2.py", "train_grpo.py"))]
    for path in [*files, ROOT / "rollout_server.py"]:
        assert not {"train_stage2", "train_grpo", "rollout_server"} & imported_names(path), path
    assert not any(path.read_text() for path in (ROOT / "utils").rglob("__init__.py"))


def imported_names(path: Path) -> set[str]:
    tree = ast.parse(path.read_text())
    plain = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    return plain | {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module}


def test_flat_modules_need_no_engine_and_no_config():
    """They work on plain values: importing them loads neither vLLM nor DeepSpeed nor the config."""
    modules = ", ".join(f"utils.{name}" for name in sorted(FLAT))
    assert imported_with(modules, {"vllm", "deepspeed", "pydantic", "transformers", "utils.config"}) == "[]"


def test_a_mistake_in_the_config_waits_for_no_heavy_import():
    """The programs read it before they load what takes seconds."""
    heavy = {"vllm", "deepspeed", "transformers", "peft"}
    assert imported_with("train_stage2, train_grpo, rollout_server", heavy) == "[]"
    assert imported_with("rollout_server", {"torch"}) == "[]"


def imported_with(modules: str, heavy: set[str]) -> str:
    code = f"import sys, {modules}; print(sorted({heavy} & sys.modules.keys()))"
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120, check=True
    )
    return run.stdout.strip()


def test_the_tree_in_the_architecture_names_every_module():
    tree = (ROOT / "docs/architecture.md").read_text().split("```")[3]
    folder, named = "", set()
    for line in tree.splitlines():
        if line.startswith("utils/"):
            folder = line.split()[0].replace("/", ".")
        elif line.startswith("  "):
            named.add(folder + line.split()[0])
    assert named == set(GRAPH)
