"""Rewards of an answer: named functions `(completion, sample) -> float in [0, 1]` (GRP-5).

A completion is a `str` that also has its token ids, so that a function of text stays a function of text. A user's file
named in `rlhf.reward_files` holds such functions:

    def short(completion, sample):
        return 1.0 if len(completion) < 200 else 0.0

Two families are built in. `summary_*` score the form

    <DOMAIN=street>, <TASK=SUMMARY>
    {"car": {"colour": "red", "doors": 4}, "tree": {"height": "tall"}}

against `domain` and `summary` of the sample: top-level keys are categories, the keys below them attributes; the data
define which there are. `detection_*` score stage 2's answers (TGT-1) with its parser and matching, so that GRPO can
continue from stage 2; they are in utils/detection_rewards.py.
"""

from __future__ import annotations

import difflib
import importlib.util
import inspect
import json
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, cached_property, partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from utils import detection_rewards
from utils.geometry import composed
from utils.parsing import ParsedAnswer, PredObject, parse_answer
from utils.scores import Overlaps, count_sample
from utils.token_table import TokenTable

if TYPE_CHECKING:
    from utils.data.samples import Sample
    from utils.geometry import Object

TVERSKY_ALPHA, TVERSKY_BETA = 0.3, 0.7  # of invented and missing parts. Source: Salehi et al. 2017 (arXiv:1706.05721)

_DOMAIN = re.compile(r"[^<>,\n]+")
_SUMMARY = re.compile(rf"<DOMAIN={_DOMAIN.pattern}>, <TASK=SUMMARY>\n\{{[^\n]*\}}")


class Completion(str):
    """An answer's text with its sampled tokens."""

    token_ids: list[int]  # the generated ids before the stop token
    table: TokenTable | None  # the tokenizer's, for `parsed`; None if the tokenizer has no coordinate tokens
    iou_threshold: float  # smallest IoU of a pair that counts as found (`rlhf.reward_iou`)
    max_new_tokens: int | None  # of the sampling
    _overlaps: Overlaps | None = None
    _counts: tuple[Sample, Counter[str]] | None = None

    def __new__(
        cls,
        text: str,
        token_ids: Sequence[int] = (),
        table: TokenTable | None = None,
        iou_threshold: float = 0.5,
        max_new_tokens: int | None = None,
    ) -> Completion:
        completion = super().__new__(cls, text)
        completion.token_ids = list(token_ids)
        completion.table = table
        completion.iou_threshold = iou_threshold
        completion.max_new_tokens = max_new_tokens
        return completion

    @cached_property
    def parsed(self) -> ParsedAnswer:
        """The parsed answer (TGT-2), shared by all functions. ValueError if the tokenizer has no coordinate tokens."""
        if self.table is None:
            raise ValueError("detection rewards need a tokenizer with coordinate tokens")
        return parse_answer(self.token_ids, self.table)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled for another process, it has its `parsed` along, but not the table, which is a whole tokenizer."""
        given = (str(self), self.token_ids, None, self.iou_threshold, self.max_new_tokens)
        return Completion, given, {} if self.table is None else {"parsed": self.parsed}

    @property
    def ends_as_parsed(self) -> bool:
        """Whether all tokens belong to the answer: none stands behind one that ends it for the parser."""
        return self.table is not None and len(self.table.until_stop(self.token_ids)) == len(self.token_ids)

    def overlaps(self, sample: Sample) -> Overlaps:
        """Those of the parsed objects with the sample's, shared by all functions and with answers that `holding` makes
        afterwards."""
        if self._overlaps is None or self._overlaps.truth is not sample.objects:
            self._overlaps = Overlaps(self.parsed.pred_objects, sample.objects)
        return self._overlaps

    def counts(self, sample: Sample) -> Counter[str]:
        """The answer's counts (LRN-7), shared by all functions."""
        if self._counts is None or self._counts[0] is not sample:
            self._counts = (
                sample,
                count_sample(
                    self.parsed, sample.objects, self.iou_threshold, False, sample.annotated, self.overlaps(sample)
                ),
            )
        return self._counts[1]

    def holding(self, objects: Iterable[Object]) -> Completion:
        """The same answer as if exactly these objects had been parsed; where they stand is not known (GRP-8)."""
        held = Completion(self, self.token_ids, self.table, self.iou_threshold, self.max_new_tokens)
        held.parsed = replace(self.parsed, objects=[PredObject(obj, [], (0, 0), (0, 0), 0) for obj in objects])
        held._overlaps = self._overlaps and self._overlaps.of(held.parsed.pred_objects)
        return held


KeyPath = tuple[str, ...]
RewardFunction = Callable[[Completion, "Sample"], float]
REWARDS: dict[str, RewardFunction] = {function.__name__: function for function in detection_rewards.ALL}  # built in
NEEDS: dict[str, tuple[str, ...]] = dict.fromkeys(REWARDS, ())  # keys of a data line that they require


running = [""]  # the reward that was called last, for messages; all of a process run in one thread
ROUNDING = 1e-6  # a cosine similarity of float32 vectors may be 1.0000001


class RewardError(RuntimeError):
    """A reward function failed or returned a value outside [0, 1]; names the function and the sample."""


def _reward(*needs: str) -> Callable[[RewardFunction], RewardFunction]:
    def register(function: RewardFunction) -> RewardFunction:
        REWARDS[function.__name__], NEEDS[function.__name__] = function, needs
        return function

    return register


class FileProblem(ValueError):
    """A user's file of rewards cannot be loaded."""


def load_rewards(names: Sequence[str], files: Sequence[str] = ()) -> dict[str, RewardFunction]:
    """The functions called `names`, in that order: built-in ones and those in the user's files, which are executed.

    Raises:
        FileProblem: a file cannot be loaded, or its function cannot be called.
        ValueError: a name is unknown, or two places define it.
    """
    known = [("utils/rewards.py", REWARDS), *((path, _functions_of(path)) for path in dict.fromkeys(files))]
    chosen = {}
    for name in names:
        places = [path for path, functions in known if name in functions]
        if not places:
            everything = sorted({name for _, functions in known for name in functions})
            near = difflib.get_close_matches(name, everything, 1, cutoff=0)[0]
            raise ValueError(f"there is no reward {name!r}; did you mean {near}? Available: {', '.join(everything)}")
        if len(places) > 1:
            raise ValueError(f"reward {name!r} is defined in {' and in '.join(places)}; rename one")
        chosen[name] = dict(known)[places[0]][name]
        if name not in REWARDS:
            _check_can_be_called(places[0], name, chosen[name])
    return chosen


def _functions_of(path: str) -> dict[str, RewardFunction]:
    """Public functions, partial ones and callable objects that a Python file defines, without those it imports."""
    name = f"rewards of {Path(path).resolve()}"
    try:
        file = os.stat(path)
        module = _executed(name, path, (file.st_mtime_ns, file.st_size))
    except (Exception, SystemExit) as error:  # a user's file may fail in any way
        raise FileProblem(f"{path}: cannot be loaded: {type(error).__name__}: {error}") from error
    public = {key: value for key, value in vars(module).items() if callable(value) and not key.startswith("_")}
    return {
        key: value
        for key, value in public.items()
        if isinstance(value, partial) or getattr(value, "__module__", None) == name and not inspect.isclass(value)
    }


@cache
def _executed(name: str, path: str, mark: tuple[int, int]) -> ModuleType:
    """A file's module. Executed once as long as the file is the same: it may load a model, or register something."""
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ValueError("not a Python file")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)  # dataclasses look their module up there
    spec.loader.exec_module(module)
    return module


def _check_can_be_called(path: str, name: str, function: RewardFunction) -> None:
    try:
        inspect.signature(function).bind(None, None)
        if not inspect.iscoroutinefunction(function):
            return
    except TypeError:
        pass
    raise FileProblem(f"{path}: {name} must be a plain function of (completion, sample) that returns a number")


def reward_key_problems(names: Sequence[str], samples: Sequence[Sample]) -> list[str]:
    """`file:line: reason` for every sample that lacks a key of a built-in reward; for a check before the first step."""
    readers: dict[str, list[str]] = {}
    for name in names:
        for field in NEEDS.get(name, ()):
            readers.setdefault(field, []).append(name)
    return [
        f"{sample.source}: {field}: {reason}; required by {', '.join(readers[field])}"
        for sample in samples
        for field in readers
        if (reason := _field_problem(field, sample.extra))
    ]


def _field_problem(field: str, extra: dict[str, Any]) -> str | None:
    """The problem of a field of a data line that summary rewards read, None if it is fine."""
    value = extra.get(field)
    if field == "summary":
        return None if isinstance(value, dict) else "must be an object {category: {attribute: value}}"
    is_name = isinstance(value, str) and _DOMAIN.fullmatch(value)
    return None if is_name else "must be text without <, >, comma and line break"


def score(completion: Completion, sample: Sample, rewards: Mapping[str, RewardFunction]) -> np.ndarray:
    """Each function's value for one answer, float64 `[num_functions]`; its product with `reward_weights` is the total.

    Raises:
        RewardError: a function raised, or returned anything but a number in [0, 1].
    """
    values = []
    for name, function in rewards.items():
        where = running[0] = f"reward {name} on sample {sample.id} ({sample.source})"
        try:
            value = function(completion, sample)
        except BaseException as error:  # a user's function may raise anything, and call sys.exit()
            raise RewardError(f"{where}: {type(error).__name__}: {error}") from error
        is_number = isinstance(value, int | float | np.number | np.bool_)
        if not is_number or not -ROUNDING <= value <= 1 + ROUNDING:
            raise RewardError(f"{where}: returned {value!r}; it must return a number in [0, 1]")
        values.append(min(max(float(value), 0.0), 1.0))
    return np.array(values)


@_reward()
def summary_format(completion: str, sample: Sample) -> float:
    """Two lines: a header of the right form, and something in braces; nothing before, between or after."""
    return float(_SUMMARY.fullmatch(completion) is not None)


@_reward("domain")
def summary_header(completion: str, sample: Sample) -> float:
    """The first line is the header with the sample's domain."""
    expected = f"<DOMAIN={sample.extra['domain']}>, <TASK=SUMMARY>"
    return float(composed(completion.split("\n", 1)[0]) == composed(expected))


@_reward()
def summary_strict_json(completion: str, sample: Sample) -> float:
    """The rest after the first line is one JSON object by the standard (no NaN, nothing after it)."""
    return float(_body(completion) is not None)


@_reward()
def summary_no_duplicate_keys(completion: str, sample: Sample) -> float:
    """The JSON object holds no key twice, at any depth."""
    body = _body(completion)
    return float(body is not None and not body[1])


@_reward("summary")
def summary_category_recall(completion: str, sample: Sample) -> float:
    """Fraction of the reference's categories that the answer has."""
    return _recall(completion, sample, lambda path: path[:1])


@_reward("summary")
def summary_attr_key_recall(completion: str, sample: Sample) -> float:
    """Fraction of the reference's attributes (a category and a key in it) that the answer has, whatever the values."""
    return _recall(completion, sample, lambda path: path[:2] if len(path) > 1 else ())


@_reward("summary")
def summary_attr_path_recall(completion: str, sample: Sample) -> float:
    """Fraction of the reference's key paths, from the category to a value, that the answer has, whatever the values."""
    return _recall(completion, sample, lambda path: path if len(path) > 1 else ())


@_reward("summary")
def summary_tversky(completion: str, sample: Sample) -> float:
    """Tversky index of the two multisets of (key path, value): shared / (shared + 0.3 invented + 0.7 missing).

    Source: Tversky 1977, "Features of similarity", Psychological Review 84(4).
    """
    body = _body(completion)
    if body is None:
        return 0.0
    reference = Counter(_leaves(sample.extra["summary"]))
    shared = (body[0] & reference).total()
    invented, missing = body[0].total() - shared, reference.total() - shared
    whole = shared + TVERSKY_ALPHA * invented + TVERSKY_BETA * missing
    return shared / whole if whole else 1.0


def _body(completion: str) -> tuple[Counter[tuple[KeyPath, str]], bool] | None:
    """Leaves of the JSON object after the first line, and whether a key occurs twice in it; None if there is no object.

    The last value of a repeated key counts.
    """
    has_duplicates = False

    def to_dict(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        nonlocal has_duplicates
        made = dict(pairs)
        has_duplicates |= len(made) < len(pairs)
        return made

    def refuse(constant: str) -> float:
        raise ValueError(f"{constant} is not JSON")

    try:
        value = json.loads(completion.partition("\n")[2], object_pairs_hook=to_dict, parse_constant=refuse)
        return (Counter(_leaves(value)), has_duplicates) if isinstance(value, dict) else None
    except (ValueError, RecursionError):
        return None


def _leaves(value: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, str]]:
    """(keys from the category down, value as JSON) of every value that holds no others, composed. The entries of a list
    share its path, so their order does not count."""
    if isinstance(value, dict) and (value or not path):
        for key, entry in value.items():
            yield from _leaves(entry, (*path, composed(key)))
    elif isinstance(value, list) and value:
        for entry in value:
            yield from _leaves(entry, path)
    else:
        is_whole = isinstance(value, float) and value.is_integer()
        value = composed(value) if isinstance(value, str) else value
        yield path, json.dumps(int(value) if is_whole else value)  # 4.0 is 4, but "4" is not


def _recall(completion: str, sample: Sample, part_of: Callable[[KeyPath], KeyPath]) -> float:
    """Fraction of the reference's parts that the answer has; `part_of` gives () for a path without one."""
    body = _body(completion)
    if body is None:
        return 0.0
    wanted = {part_of(path) for path, _ in _leaves(sample.extra["summary"])} - {()}
    found = {part_of(path) for path, _ in body[0]}
    return len(wanted & found) / len(wanted) if wanted else 1.0
