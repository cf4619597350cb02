"""docs/promises.md names tests that exist for every promise of docs/security.md and docs/faults.md; the numbers on
these pages are those of the code."""

import ast
import re
from pathlib import Path

import pytest
from PIL import PngImagePlugin

pytest.importorskip("vllm")

from utils.config.rollout import MAX_IMAGE_PIXELS  # noqa: E402
from utils.dist import MAX_MESSAGE_BYTES  # noqa: E402
from utils.rollout.client import STOP_S  # noqa: E402
from utils.run import prefetch  # noqa: E402
from utils.run.policy import MAX_RECOVERIES  # noqa: E402
from utils.run.shutdown import STOPPED_STATUS  # noqa: E402
from utils.server import app, engine, front, images, process, protocol, weight_updates  # noqa: E402
from utils.sync import transports, vllm_worker  # noqa: E402

ROOT = Path(__file__).parents[1]
PAGES = {name: " ".join((ROOT / "docs" / f"{name}.md").read_text().split()) for name in ("security", "faults")}
ROWS = re.findall(r"^\| (?!promise)(.+?) \| (.+) \|$", (ROOT / "docs" / "promises.md").read_text(), re.M)
SECURITY = [
    f"At most {images.MAX_IMAGE_BYTES >> 20} MiB of bytes each",
    f"`rollout_server.max_image_pixels` ({MAX_IMAGE_PIXELS >> 20} Mi) for all images of a request",
    f"and {engine.CALL_IMAGES} times that for a call",
    f"at most {images.MAX_DECODING >> 20} Mi pixels are decoded at once",
    f"At most {front.MAX_CONNECTIONS}, heads of at most {front.MAX_HEAD_BYTES >> 10} KiB",
    f"A head must be whole within {front.HEAD_S:g} s, a body within {front.BODY_S:g} s",
    f"and an answer be read within {front.ANSWER_S:g} s",
    f"connection is closed after {front.front_config(app.limit_body).timeout_keep_alive} s",
    f"A body must come within {images.URL_TOTAL_S:g} s, and no wait",
    f"wait for a byte takes more than {images.URL_TIMEOUT_S:g} s",
    f"next step for `timeout_s` (at most {weight_updates.MAX_SILENCE_S:g} s)",
    f"Bodies of at most {app.MAX_BODY_BYTES >> 20} MiB and {app.MAX_VALUES:,} values (413)",
    f"of a call that asks for log-probabilities are at most {engine.MAX_LOGPROBS:,} (422)",
    f"it has at most {images.MAX_PIECES:,} strips or tiles; a PNG's texts have at most "
    f"{PngImagePlugin.MAX_TEXT_MEMORY >> 20} MiB",
    f"one body of more than {app.LARGE_BODY_BYTES >> 20} MiB is parsed at a time",
    f"at most {weight_updates.MAX_UPDATE_BYTES >> 50} PiB, a communicator at most {protocol.MAX_RANKS} ranks",
    f"or the learner has not answered for {vllm_worker.LEARNER_TIMEOUT_S:g} s",
    f"Ranks tell each other JSON, at most {MAX_MESSAGE_BYTES >> 30} GiB each",
]
FAULTS = [
    f"{dict(enumerate(('no', 'one', 'two', 'three', 'four', 'five')))[MAX_RECOVERIES]} times in one step",
    f"whatever is left after {process.SHUTDOWN_S:g} s is killed",
    f"exit status {STOPPED_STATUS}",
    f"{STOP_S:g} s after a stop request",
    f"| {prefetch.STOP_S:g} s, then it saves |",
    f"{images.URL_TIMEOUT_S:g} s without a byte, {images.URL_TOTAL_S:g} s for the body",
    f"a server checks whether the learner that owns it is alive | {vllm_worker.LEARNER_TIMEOUT_S:g} s",
    f"at `sync.timeout_s` every {transports.WATCH_INTERVAL_S:g} s",
    f"no answer for {vllm_worker.LEARNER_TIMEOUT_S:g} s: it does not",
]


def promises() -> set[str]:
    """The bold beginnings of what is guaranteed, and the first cells of the tables of faults and calls."""
    security = (ROOT / "docs" / "security.md").read_text()
    guaranteed = security.partition("## What is guaranteed")[2].partition("## What is not")[0]
    headings = {heading.rstrip(".") for heading in re.findall(r"^- \*\*(.+?)\*\*", guaranteed, re.M)}
    cells = re.findall(r"^\| (?!fault \||call \|)(.+?) \|", (ROOT / "docs" / "faults.md").read_text(), re.M)
    assert len(headings) > 10 and len(cells) > 20
    return headings | set(cells)


def test_every_promise_names_its_tests():
    assert promises() - {promise for promise, _ in ROWS} == set()
    assert len(ROWS) == len(dict(ROWS))


@pytest.mark.parametrize(("promise", "tests"), ROWS, ids=[promise[:40] for promise, _ in ROWS])
def test_the_named_tests_exist(promise, tests):
    for part in tests.split("; "):
        path, words = re.fullmatch(r"`(tests/[\w/]+\.py)` ([\w, ]+)", part).groups()
        nodes = ast.walk(ast.parse((ROOT / path).read_text()))
        names = [node.name for node in nodes if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")]
        assert [word for word in words.split(", ") if not any(word in name for name in names)] == [], path


@pytest.mark.parametrize(("page", "words"), [("security", w) for w in SECURITY] + [("faults", w) for w in FAULTS])
def test_the_numbers_on_the_page_are_those_of_the_code(page, words):
    assert words in PAGES[page]


def test_no_call_of_this_project_unpickles_LRN_11():
    """LRN-11: object collectives, pickle's own functions, and `torch.load` without `weights_only`. Pipes between a
    process and its own children are not meant."""
    programs = [*ROOT.glob("*.py"), *(path for name in ("utils", "tools") for path in (ROOT / name).rglob("*.py"))]
    programs.remove(ROOT / "utils" / "data" / "workers.py")
    nodes = [node for path in programs for node in ast.walk(ast.parse(path.read_text()))]
    calls = [(ast.unparse(node.func), node.keywords) for node in nodes if isinstance(node, ast.Call)]
    unpickles = re.compile(r"(gather|scatter|reduce)_object|_object_list$|(pickle|marshal|shelve)\.\w+$|Unpickler$")
    assert [name for name, _ in calls if unpickles.search(name)] == []
    loads = [[ast.unparse(keyword) for keyword in keywords] for name, keywords in calls if name == "torch.load"]
    assert loads and all("weights_only=True" in given for given in loads)
