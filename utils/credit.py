"""Credit of an answer's objects and decisions (GRP-8).

S is an answer's valid objects, R(S) the rewards of an answer with these objects. Each scored token belongs to one
decision, and a decision has rewards of its own:

    object   R(S) - R(S without it). A matched object is judged as if nobody had repeated it: S without the repeats of
             others, else two right copies would blame each other. A repeat is judged in S, and so is worth less than 0.
    go on    the tokens that begin another object: R(S) - R(the objects before it), what came of going on.
    close    the tokens that close the list, and the stop token: R(S).
    rest     everything else, a header or malformed text: R(S).

Only the rewards of `detection_rewards.OF_OBJECTS` are a function of S. All others count in full for every decision.
Baselines are taken over the group, for each kind of decision apart (`utils.grpo`). To `object` and `go on` R(no object)
is added, which is the same in all of a group: advantages within it stay, and the std over several groups is that of
rewards. So with one object per answer every token's advantage is that of its answer.

A neutral object (TGT-12) decides nothing: measured against objects that found something, its 0 would count as a fault.
Its tokens are rest, or `go on` where they lead to a later object that counts, and it is in no baseline. In an answer of
neutral objects alone the first one stays in the baselines, for an answer that found nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from utils.detection_rewards import OF_OBJECTS, repeats
from utils.rewards import Completion, RewardFunction, score
from utils.scores import is_held_against
from utils.token_table import touched

if TYPE_CHECKING:
    from utils.data.samples import Sample

KINDS = ("rest", "object", "go on", "close")
REST, OBJECT, GO_ON, CLOSE = range(len(KINDS))
NONE = -1  # in place of a kind: no token belongs to the decision, and no baseline counts it


@dataclass
class Credit:
    """The decisions of one answer.

    Attributes:
        kinds: int64 `[D]`, index into `KINDS` or `NONE`; decision 0 is the rest.
        rewards: float64 `[D, F]`, each decision's own rewards.
        decisions: int64 `[N]`, the decision that each scored token belongs to.
    """

    kinds: np.ndarray
    rewards: np.ndarray
    decisions: np.ndarray


def credit_of(
    completion: Completion,
    sample: Sample,
    rewards: Mapping[str, RewardFunction],
    own: np.ndarray,
    num_tokens: int,
) -> Credit:
    """Split an answer's rewards among its decisions.

    Args:
        own: float64 `[F]`, the answer's rewards.
        num_tokens: scored tokens, a stop token included.

    Raises:
        RewardError: as `utils.rewards.score`.
    """
    of_objects = {name: function for name, function in rewards.items() if function in OF_OBJECTS}
    columns = np.flatnonzero([name in of_objects for name in rewards])
    everything = set(range(len(completion.parsed.objects)))
    again = repeats(completion, sample)

    def worth(indices: set[int]) -> np.ndarray:
        return score(completion.keeping(sorted(indices)), sample, of_objects)

    def decision(values: np.ndarray) -> np.ndarray:
        made = own.copy()
        made[columns] = values
        return made

    kinds, values = [REST], [own]
    neutral: set[int] = set()
    whole, alone, nothing = worth(everything), worth(everything - again), worth(set())
    for index, obj in enumerate(completion.parsed.pred_objects):
        others = everything if index in again else everything - again
        part = (whole if index in again else alone) - worth(others - {index})
        if not is_held_against(obj, sample.annotated) and np.allclose(part, 0):  # and no reward counts it
            neutral.add(index)
        kinds += [OBJECT, GO_ON]
        values.append(decision(nothing + part))
        values.append(decision(nothing + whole - worth(set(range(index)))))
    kinds.append(CLOSE)
    values.append(own)

    decisions, go_on = token_decisions(completion, num_tokens), 0
    for index in sorted(everything, reverse=True):
        at = 2 * index + 1
        if index in neutral:
            decisions[decisions == at] = 0
            decisions[decisions == at + 1] = go_on
            if index or neutral != everything:
                kinds[at : at + 2] = [NONE, NONE]
        else:
            go_on = at + 1
    return Credit(np.array(kinds), np.array(values), decisions)


def token_decisions(completion: Completion, num_tokens: int) -> np.ndarray:
    """The decision of each scored token, int64 `[num_tokens]`: object k is decision 2 k + 1, to go on to it 2 k + 2, to
    close is the last. A token that ends an object and goes on, or closes, belongs to that decision."""
    parsed, table = completion.parsed, completion.table
    assert table is not None, "`parsed` needs it"
    ids = table.until_stop(completion.token_ids)
    data, ends = table.scan_text(ids)
    found = np.zeros(num_tokens, dtype=np.int64)

    def assign(decision: int, start: int, end: int) -> None:
        found[: len(ids)][touched(ends, [(start, end - 1)])] = decision

    for k, pred in enumerate(parsed.objects):
        assign(2 * k + 1, *pred.byte_span)
    for k, pred in enumerate(parsed.objects):
        start = pred.byte_span[0]
        assign(2 * k + 2, pred.lead if k else start, start + 1)
    if parsed.closed:
        header = table.format.header.match(data)
        assert header is not None, "a closed answer has a header"
        assign(2 * len(parsed.objects) + 1, len(parsed.prefix_bytes) or header.end(), len(data))
        found[len(ids) :] = 2 * len(parsed.objects) + 1
    return found
