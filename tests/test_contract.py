"""docs/contract.md defines every number that is cited; its requirements have tests; the paths it names exist."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "docs" / "contract.md").read_text()
PREFIXES = "CFG|DAT|ROL|SRV|CON|DIS|SYN|TGT|PCK|LRN|LOG|GRP|FAM"
FOLDERS = ("utils", "tests", "tools", "studies", "benchmarks", "configs", "ds_configs", "docs")
SUFFIXES = {".py", ".md", ".yaml", ".json"}

# Number, mark and text of each entry, in order.
ENTRY = re.compile(
    rf'^- <a id="[^"]*"></a>\*\*((?:{PREFIXES})-\d+)\*\*(?: \*\(([^)]*)\)\*)? ((?:.+\n)(?:  .+\n)*)', re.M
)
ENTRIES = ENTRY.findall(TEXT)
NOT_BUILT = {number for number, mark, _ in ENTRIES if mark == "not built yet"}
PATH = re.compile(r"`((?:[\w.-]+/)+[\w.-]*|[\w-]+\.(?:py|md)|Makefile)`")


def in_text(text: str) -> set[str]:
    """Numbers as prose cites them: SYN-4."""
    return set(re.findall(rf"\b(?:{PREFIXES})-\d+\b", text))


def in_name(name: str) -> set[str]:
    """Numbers as the names of tests cite them: test_syn_4_..., test_..._SYN_4."""
    found = re.findall(rf"(?<=_)({PREFIXES})_(\d+)(?=_|$)", name, re.I)
    return {f"{prefix.upper()}-{number}" for prefix, number in found}


def by_test(path: Path) -> Iterator[set[str]]:
    """The numbers of each test in a file, from its name and its docstring."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test"):
            yield in_name(node.name) | in_text(ast.get_docstring(node) or "")


def files() -> list[Path]:
    """Everything in the repository that may cite a number."""
    found = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.suffix in SUFFIXES]
    return [*found, *(path for path in ROOT.iterdir() if path.is_file() and not path.name.startswith("."))]


TEST_FILES = [path for path in sorted((ROOT / "tests").rglob("test_*.py")) if path != Path(__file__)]
CITED_BY = {path: set().union(*by_test(path)) for path in TEST_FILES}
CITED_BY_TESTS = set().union(*CITED_BY.values())


def test_numbers_count_up_and_have_one_anchor_each():
    assert len(ENTRIES) == len(re.findall("^- ", TEXT, re.M)), "an entry that cannot be read"
    for prefix in PREFIXES.split("|"):
        own = [number for number, _, _ in ENTRIES if number.startswith(prefix)]
        assert own == [f"{prefix}-{i + 1}" for i in range(len(own))] != []
    assert re.findall(r'<a id="([^"]*)"', TEXT) == [number.lower() for number, _, _ in ENTRIES]


def test_links_lead_somewhere():
    anchors = set(re.findall(r'<a id="([^"]*)"', TEXT))
    headings = [
        re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in re.findall("^#+ (.+)$", TEXT, re.M)
    ]
    assert set(re.findall(r"\]\(#([^)]*)\)", TEXT)) - anchors <= set(headings)


def test_marks_are_explained():
    for number, mark, text in ENTRIES:
        assert mark in ("", "partly", "not built yet"), number
        assert ("*Missing:" in text) == (mark == "partly"), number
        assert re.search(r"\*So\s+far:", text) is None or mark == "not built yet", number


def test_every_cited_number_is_defined():
    defined = {number for number, _, _ in ENTRIES}
    cited = {path: in_text(path.read_text(errors="replace")) | CITED_BY.get(path, set()) for path in files()}
    assert {str(path): numbers - defined for path, numbers in cited.items() if numbers - defined} == {}


def test_what_is_built_is_tested():
    assert {number for number, _, _ in ENTRIES} - NOT_BUILT <= CITED_BY_TESTS


def test_what_is_tested_is_not_called_unbuilt():
    assert NOT_BUILT & CITED_BY_TESTS == set()


def test_named_paths_exist():
    built = ENTRY.sub(lambda entry: "" if entry[1] in NOT_BUILT else entry[0], TEXT)
    named = set(PATH.findall(built))
    assert len(named) > 50 and {path for path in named if not (ROOT / path).exists()} == set()


def test_every_section_names_its_code_and_its_tests_which_cite_it():
    for section in TEXT.split("\n## ")[1:]:
        code, tests = re.findall(r"^\| Code \| Tests \|\n\|---\|---\|\n\| (.*) \| (.*) \|$", section, re.M)[0]
        assert PATH.search(code) and PATH.search(tests), section[:40]
        own = {number for number, _, _ in ENTRY.findall(section)}
        if own <= NOT_BUILT:
            continue
        assert {path for path in PATH.findall(tests) if not own & CITED_BY[ROOT / path]} == set()
