"""Pair predictions with ground-truth objects one to one (TGT-4). Knows overlaps only, not shapes or labels."""

import numpy as np
from scipy.optimize import linear_sum_assignment
from scipy.sparse import csr_matrix
from scipy.sparse.csgraph import connected_components

TOLERANCE = 1e-9  # of an IoU or of a sum of IoUs; far above float64 rounding, far below any real difference


def match(iou: np.ndarray, threshold: float) -> list[tuple[int, int]]:
    """The one-to-one pairing with the largest sum of IoU among pairs with `iou >= threshold`.

    Args:
        iou: float `[num_pred, num_gt]` in 0..1.
        threshold: pairs below it are never used.

    Returns:
        `(pred, gt)` pairs in ascending order of `pred`.

    Ties: an IoU is a fraction rounded to float64, so `0.5 + 0.7` and `0.6 + 0.6` may differ in the last bit. Sums
    within 1e-9 of the largest therefore count as equal to it. Of all such pairings (not just those a solver happens to
    visit) the lexicographically first is returned: the first prediction is matched if possible, to its earliest
    possible ground truth, then the second prediction, and so on. An earlier ground truth is chosen exactly if the best
    completion of the rest, solved anew, keeps the sum. Reduced costs of the first solution rule out all other
    candidates without solving.
    """
    allowed = iou >= threshold - TOLERANCE
    alone = allowed & (allowed.sum(axis=1) == 1)[:, None] & (allowed.sum(axis=0) == 1)[None, :]
    pairs: list[tuple[int, int]] = [(p, g) for p, g in np.argwhere(alone).tolist()]  # no choice: most of them
    for rows, cols in components(allowed & ~alone):
        block = np.where(allowed[np.ix_(rows, cols)], iou[np.ix_(rows, cols)], -np.inf)
        pairs += [(int(rows[p]), int(cols[g])) for p, g in enumerate(_first_optimum(block)) if g >= 0]
    return sorted(pairs)


def components(allowed: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
    """Independent sub-problems as (prediction indices, ground-truth indices), both ascending and non-empty."""
    num_pred, num_gt = allowed.shape
    rows, cols = np.nonzero(allowed)
    if not len(rows):
        return []
    size = num_pred + num_gt
    graph = csr_matrix((np.ones(len(rows)), (rows, cols + num_pred)), shape=(size, size))
    _, label = connected_components(graph, directed=False)
    has_pair = np.concatenate([allowed.any(axis=1), allowed.any(axis=0)])
    paired = np.flatnonzero(has_pair)  # the others are components of one node
    order = paired[np.argsort(label[paired], kind="stable")]
    groups = np.split(order, np.flatnonzero(np.diff(label[order])) + 1)
    return [(nodes[nodes < num_pred], nodes[nodes >= num_pred] - num_pred) for nodes in groups]


def _solve(gain: np.ndarray) -> tuple[float, np.ndarray]:
    """Largest sum of gains and the column of each row, -1 for none. `gain` `[p, g]`, -inf where a pair is forbidden.

    A forbidden pair counts as a gain of 0, like no pair, and is removed from the solution afterwards.
    """
    chosen = np.full(gain.shape[0], -1)
    if not gain.size:
        return 0.0, chosen
    rows, cols = linear_sum_assignment(np.maximum(gain, 0.0), maximize=True)
    real = gain[rows, cols] > -np.inf
    chosen[rows[real]] = cols[real]
    return float(gain[rows[real], cols[real]].sum()), chosen


def _first_optimum(gain: np.ndarray) -> np.ndarray:
    """Column of each row (-1 for none) in the lexicographically first pairing of largest sum."""
    if 1 in gain.shape:  # one pair, the first of the best
        first = int(np.argmax(gain >= gain.max() - TOLERANCE))
        return np.where(np.arange(gain.shape[0]) == first, 0, -1) if gain.shape[1] == 1 else np.array([first])
    best, chosen = _solve(gain)
    tied = _can_be_optimal(gain, chosen)
    fixed = 0.0
    free = np.ones(gain.shape[1], dtype=bool)
    for row in range(gain.shape[0]):
        if not free.any():
            chosen[row:] = -1
            break
        limit = chosen[row] if chosen[row] >= 0 else gain.shape[1]
        for col in np.flatnonzero(tied[row, :limit] & free[:limit]):
            rest = np.flatnonzero(free & (np.arange(len(free)) != col))
            value, below = _solve(gain[row + 1 :, rest])
            if fixed + gain[row, col] + value >= best - TOLERANCE:
                chosen[row] = col
                chosen[row + 1 :] = np.where(below >= 0, np.append(rest, -1)[below], -1)
                break
        if chosen[row] >= 0:
            fixed += gain[row, chosen[row]]
            free[chosen[row]] = False
    return chosen


def _can_be_optimal(gain: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    """Pairs that may occur in a pairing of largest sum: those whose reduced cost is 0 (within the tolerance), bool.

    Prices `price[g] >= 0` and profits `profit[p] >= 0` with `profit + price >= gain` everywhere and equality on chosen
    pairs prove `chosen` optimal; any pairing loses at least `profit + price - gain` for each pair it uses. They are
    the longest paths in the residual graph (Bellman-Ford, a whole matrix at a time).
    """
    matched = np.flatnonzero(chosen >= 0)
    own_gain = gain[matched, chosen[matched]]
    price = np.zeros(gain.shape[1])
    profit = np.zeros(gain.shape[0])
    for _ in range(gain.shape[1] + 1):
        profit[matched] = own_gain - price[chosen[matched]]
        raised = np.maximum(price, (gain - profit[:, None]).max(axis=0))
        if (raised <= price + 1e-15).all():
            break
        price = raised
    return profit[:, None] + price[None, :] - gain <= 2 * TOLERANCE
