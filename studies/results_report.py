"""The text of docs/results.md and its plots. Pure functions of the records."""

import math
import re
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from html import escape

from studies import further
from studies.arms import (
    EQUAL_SECONDS,
    TUNING_SEED,
    UNTUNED,
    Arm,
    Study,
    seconds_of_answers,
    step_seconds,
    tests_and_tuned,
    tuned,
)
from studies.tables import CONFIDENCE, Record, interval, last, runs_of, spread, table

START = "start model"
NEEDED, MIN_SEEDS = 2, 5
SHOWN, LOST, OPEN = "**shown**", "not shown", "open"  # of a version
MIN_SHARE = 0.95  # of the clock's seconds that "equal seconds" means
NUM_GIVEN_UP = 3
GIVEN_UP = "Three more were [given up after trials](results_trials.md)."
CAVEAT = """## What this does not show

- **A colour cast: what is learnt wins, more than whose answers it is learnt on.** The same training on the start
  model's answers is level with stage 2 (+0.008 [-0.002, +0.017]). It is no rival in this version, as it is in *New
  class*. If it were, only the version with twice the steps would show the claim for *Partial annotation*, and not with
  Bonferroni's correction.
- **Twice the steps: there it is a rival, and the margin is small.** Own answers are 0.011 better [+0.003, +0.019], and
  at equal seconds (218 steps) 0.022 [+0.011, +0.034]. But the rival took a learning rate that was best on the tuning
  images by 0.003 and did worse on the test images. Before, with 185 steps and a lower rate, it was closer (0.007
  [+0.0002, +0.0141]).
- **The grids end somewhere.** With twice the steps, the best learning rate lies inside the grid for all arms but SFT
  and, at equal seconds, pseudo-labels; both took the lowest and stay far below. The one KL weight is the smallest that
  was tried.
- **Trials chose how many classes an image annotates.** With three of twelve, refreshed pseudo-labels did as well.
- **Dense: the only rival is SFT with adapters, which hardly moves**, since every object is annotated. The start models
  come from rounds of full training, which ended when a round brought less than 0.01 of F1. GRPO gains about as much: on
  faint crowds +0.009 at equal seconds, and +0.014 once more, where the round after the one that was taken had lost
  0.009 on the tuning images. The gain comes from precision; counting got worse.
"""
OVERVIEW_NOTE = """
*Open*: some on-policy arm may still win. *Closest* and *strongest* are picked by these scores, of arms with five seeds:
the on-policy arm that is surest to lead all rivals, and the rival that it is least sure to lead. Names are explained
where a version has its section.
"""
COLOURS = ("#c0392b", "#e67e22", "#8e44ad", "#16a085", "#2962d6", "#555")

ABOUT = """## How it was measured

Written by `python -m studies.results --limit 0` from `docs/results.json`, which has a record of each run. [Earlier
results](results_earlier.md) on fully annotated images found nothing that beats supervised training.

- **Images.** Tuning, training and test images are disjoint.
- **Tuning.** Each arm is tuned with seed 0 on the tuning images: the same learning rates for all, times one or two
  weights where the arm has a KL (two give it twice as many tries). Then it runs with seeds 1 to 5.
- **Scores** are those on the test images after the last step: means over seeds ± standard deviation. A duplicate
  overlaps another prediction of its label by an IoU of 0.9 or more (the reward and `drop_duplicates` take 0.5).
- **Which runs count.** Every finished run of an arm does, unless it was made anew. The first one then has a task whose
  name goes on behind a comma with the reason. Trials are told in the text and have no record. Runs of one version may
  be of several revisions, which the records name.
- **Where arms were not treated alike.** Targets of stage 2 and the credit of GRPO came out of trials on other images,
  while the rivals are as the field has them. That labels are refreshed after ten steps was never tuned.
- **Equal seconds.** The arm runs as many steps as fit into the training time of the on-policy arm that a study names,
  and at least as many as that one. The learning rate is tuned once more for so many steps. Where an arm's labels are
  the start model's answers, the time for these is deducted; how long they take is read off the arm that makes them anew
  at each step, and where a version has no such arm, nothing is deducted. At first the policy's rollouts told the time.
  These take up to twice as long, with adapters beside the weights, so that such rivals had too few steps. Their runs
  were made anew (the first ones are tasks `..., answers at the policy's price`).
- **Seconds** in the tables are of all steps and such answers. Starts, tuning and evaluations are not counted. Other
  work on the machine hardly shows in them: each part of a step counts with its 10th percentile over a run, and with the
  lowest value over an arm's runs. Rollouts are made with transformers' `generate`. A rollout server would be quicker,
  which would give the rivals fewer steps at equal seconds.
- **Start models** are trained on the machine that makes the runs, and another kind of processor rounds otherwise: that
  of *Partial annotation* has an F1 of 0.859 on the test images from one kind, and 0.851, 0.846 and 0.874 from three
  others. Two that were scored twice had the same score. So records name their start model, and a version takes only
  one; earlier records do not name it. Runs from another one are left out (tasks `..., another start model`), unless a
  section says so. Newer versions have one that is trained so that all x86-64 processors with AVX2 round alike
  (`studies/portable.py`), which takes longer: in float32, without oneDNN. A step of such training gave the same weights
  on one processor and on two others that were emulated. Two machines with different Intel processors made the same
  start model; these two round alike in the usual training, too.
- **Intervals** are of 95 % (Welch's t). They cover the seeds, not which images were drawn for the test. Where a study
  has *further images* for the test, two to eight times as many, its verdict goes by these: their intervals cover the
  draw of the images, too (jackknife over 32 parts of them). None covers the start model, the training images or what
  tuning chose. Nothing corrects for comparing several arms.
"""


def text_of(studies: Sequence[Study], records: Sequence[Record], missing: Mapping[str, int]) -> str:
    """Return docs/results.md. `missing`: how many planned runs of each study have no record."""
    parts = [verdict(studies, records), overview(studies, records, missing), CAVEAT, ABOUT]
    return "\n".join(["# Results\n", *parts, sections(studies, records, missing)])


def verdict(studies: Sequence[Study], records: Sequence[Record]) -> str:
    """Return the first lines of docs/results.md: what is shown of the claim, in how many studies, where and by what."""
    claims = dict.fromkeys(study.claim for study in studies)
    state = states(studies, records)
    winners = {study.name: wins(records, study) if state[study.name] == SHOWN else [] for study in studies}
    lost_versions = [study for study in studies if state[study.name] == LOST]
    undecided = [study for study in studies if state[study.name] == OPEN]
    won: dict[str, list[str]] = {}
    for study in studies:
        if arms := winners[study.name]:
            won.setdefault(study.claim, []).append(f"{study.title}: {' and '.join(arms)}")
    open_ = {study.claim for study in undecided} - won.keys()
    lost = [claim for claim in claims if claim not in won.keys() | open_]
    confidence = 1 - (1 - CONFIDENCE) / (len(studies) + NUM_GIVEN_UP)
    sure = [study for study in studies if winners[study.name] and wins(records, study, confidence)]
    is_sure = len({study.claim for study in sure}) >= NEEDED
    shown = "shown" if is_sure else "shown, but not if one corrects for the number of versions that were tried"
    lines = [
        f"**The claim is {shown if len(won) >= NEEDED else 'not shown'}.** Sought: at equal steps and at equal "
        "seconds some on-policy arm beats every SFT arm, pseudo-labels included, with a 95 % interval above 0, in at "
        f"least {NEEDED} of {len(claims)} studies. So far it does in {len(won)}"
        + (f" ({'; '.join(place for claim in claims for place in won.get(claim, []))})" if won else "")
        + f", and does not in {len(lost)}"
        + (f" ({'; '.join(lost)})." if lost else "."),
    ]
    if unfinished := [claim for claim in claims if claim in open_]:
        lines.append(f"Not finished, so without a verdict: {'; '.join(unfinished)}.")
    behind = [study for study in undecided if any(unbeaten(records, study, arm) for arm in study.on_policy)]
    num_won = sum(len(places) for places in won.values())
    lines.append(
        f"A study counts if one of its versions shows it. Of the {len(studies)} versions below {num_won} show it, "
        f"{len(lost_versions)} do not, and {len(undecided)} have not finished; in {len(behind)} of these an on-policy "
        f"arm has lost already, and only others keep them open. {GIVEN_UP}"
    )
    if won:
        left = "; ".join(study.title for study in sure) or "none"
        lines.append(f"With {confidence:.2%} intervals (Bonferroni, over all of them) these still show it: {left}.")
    if once := [study.title for study in lost_versions if wins(records, study)]:
        lines.append(f"Shown once, but not when it was repeated, so not counted: {'; '.join(once)}.")
    lines += [shortage for study in studies if winners[study.name] and (shortage := short_of_seconds(records, study))]
    return "\n".join(lines) + "\n"


def states(studies: Sequence[Study], records: Sequence[Record]) -> dict[str, str]:
    """Where each version stands, by name. One whose repetition has lost counts for nothing."""
    refuted = [study.repeats for study in studies if study.repeats and is_lost(records, study)]
    lost = [study for study in studies if study in refuted or is_lost(records, study)]
    return {study.name: LOST if study in lost else SHOWN if wins(records, study) else OPEN for study in studies}


def overview(studies: Sequence[Study], records: Sequence[Record], missing: Mapping[str, int]) -> str:
    """Return a table of the versions: the on-policy arm that came closest to the claim, and what held it most."""
    state, rows = states(studies, records), []
    for study in studies:
        arm, rival = closest(records, study) or ("", "")
        lead = signed(*deciding_difference(records, study, arm, rival)) if arm else ""
        link = f"[{study.title}](#{re.sub(r'[^a-z0-9 -]', '', study.title.lower()).replace(' ', '-')})"
        rows.append([link, state[study.name], arm, rival, lead, str(missing.get(study.name, 0) or "")])
    header = ["version", "claim", "closest on-policy arm", "its strongest rival", "F1, difference", "runs to come"]
    return table(header, rows) + OVERVIEW_NOTE


def closest(records: Sequence[Record], study: Study) -> tuple[str, str] | None:
    """Return the on-policy arm that is surest to lead each rival, and the one it is least sure to lead.

    Only arms with `MIN_SEEDS` seeds; one that took too long only where all did. None where there is no such pair.
    """
    scored = [name for name in (*study.on_policy, *study.rivals) if is_scored(records, study, name)]
    rivals = [name for name in scored if name in study.rivals]
    ours = [name for name in scored if name in study.on_policy]
    ours = [arm for arm in ours if not is_slower_than_clock(records, study, arm)] or ours
    if not ours or not rivals:
        return None
    least = {arm: min((deciding_difference(records, study, arm, rival)[1], rival) for rival in rivals) for arm in ours}
    arm = max(least, key=least.__getitem__)
    return arm, least[arm][1]


def wins(records: Sequence[Record], study: Study, confidence: float = CONFIDENCE) -> list[str]:
    """The on-policy arms that beat each rival."""
    return [arm for arm in study.on_policy if beats_all(records, study, arm, confidence)]


def beats_all(records: Sequence[Record], study: Study, arm: str, confidence: float = CONFIDENCE) -> bool:
    """Whether `arm` beats each rival at equal steps and at equal seconds, all with `MIN_SEEDS` seeds."""
    scored = all(is_scored(records, study, name) for name in (arm, *study.rivals))
    return scored and not unbeaten(records, study, arm, confidence) and not is_slower_than_clock(records, study, arm)


def is_slower_than_clock(records: Sequence[Record], study: Study, arm: str) -> bool:
    """Whether an on-policy arm took more seconds than the rivals were given, so that none of them had as many."""
    own, whole = (seconds(records, study, name) for name in (arm, study.clock.name))
    return bool(own and whole and own * MIN_SHARE > whole)


def is_lost(records: Sequence[Record], study: Study) -> bool:
    """Whether no on-policy arm can win any more."""
    return all(unbeaten(records, study, arm) or is_slower_than_clock(records, study, arm) for arm in study.on_policy)


def unbeaten(records: Sequence[Record], study: Study, arm: str, confidence: float = CONFIDENCE) -> list[str]:
    """The rivals that `arm` does not beat, of those where both have `MIN_SEEDS` seeds: one is enough to lose."""
    done = [name for name in study.rivals if is_scored(records, study, arm) and is_scored(records, study, name)]
    return [name for name in done if deciding_difference(records, study, arm, name, confidence)[1] <= 0]


def deciding_difference(
    records: Sequence[Record], study: Study, arm: str, rival: str, confidence: float = CONFIDENCE
) -> tuple[float, float, float]:
    """Return the difference of mean F1 and the interval that a verdict goes by.

    Both are of the further test images, where a study has them.
    """
    ours, theirs = (deciding_runs(records, study, name) for name in (arm, rival))
    if study.further:
        return further.difference(ours, theirs, confidence)
    values = last(ours, "f1"), last(theirs, "f1")
    low, high = interval(*values, confidence) or (-math.inf, math.inf)
    return statistics.fmean(values[0]) - statistics.fmean(values[1]), low, high


def is_scored(records: Sequence[Record], study: Study, name: str) -> bool:
    """Whether there are `MIN_SEEDS` test runs that a verdict may go by."""
    return len(deciding_runs(records, study, name)) >= MIN_SEEDS


def deciding_runs(records: Sequence[Record], study: Study, name: str) -> list[Record]:
    """Return the test runs that a verdict goes by: where a study has further test images, those scored on them."""
    return [run for run in tests_of(records, study, name) if not study.further or "further" in run]


def short_of_seconds(records: Sequence[Record], study: Study) -> str:
    """Say which rivals had less than the equal seconds, as all runs tell that there are now; empty if none."""
    whole = seconds(records, study, study.clock.name)
    had = {name: seconds(records, study, name) for name in study.rivals if name.endswith(EQUAL_SECONDS)}
    short = [
        f"{name.removesuffix(EQUAL_SECONDS)} {took:.0f} s"
        for name, took in had.items()
        if whole and took and took < MIN_SHARE * whole
    ]
    if not short:
        return ""
    return (
        f"**With a reservation.** In {study.title} some arms had less than the equal seconds ({whole:.0f} s, of "
        f"{study.clock.name}), as quicker runs tell than those that their steps were counted from: {'; '.join(short)}."
    )


def seconds(records: Sequence[Record], study: Study, name: str) -> float | None:
    """Undisturbed seconds of all steps of a test run and of answers made once; None where they are not known yet."""
    arm, runs = arm_of(study, name), tests_of(records, study, name)
    needed = [arm, study.label_maker] if arm.has_labels_made_once and study.label_maker else [arm]
    if not runs or not all(tests_and_tuned(records, study, one) for one in needed):
        return None
    answers = seconds_of_answers(records, study) if arm.has_labels_made_once else 0.0
    return runs[0]["steps"] * step_seconds(records, study, arm) + answers


def arm_of(study: Study, name: str) -> Arm:
    plain = name.removesuffix(UNTUNED).removesuffix(EQUAL_SECONDS)
    return next(arm for arm in study.arms if arm.name == plain)


def both(records: Sequence[Record], study: Study, *names: str) -> list[list[float]]:
    return [last(tests_of(records, study, name), "f1") for name in names]


def tests_of(records: Sequence[Record], study: Study, name: str) -> list[Record]:
    return [record for record in runs_of(records, study.name, name) if record["seed"] != TUNING_SEED]


# ---------------------------------------------------------------------------------------------------------------------
# a study's section


def sections(studies: Sequence[Study], records: Sequence[Record], missing: Mapping[str, int]) -> str:
    """Return the sections of all studies. `missing`: how many planned runs of each have no record."""
    parts: list[str] = []
    for study in studies:
        parts += [f"## {study.title}\n", study.method]
        names = [name for name in study.variants if tests_of(records, study, name)]
        if names:
            parts += [f"![F1 by arm](results_{study.name}.svg)\n", score_table(records, study, names)]
            if study.num_evals > 1:
                parts.append(f"![Gain against loss](results_{study.name}_curve.svg)\n")
            parts.append(difference_table(records, study, names))
            parts.append(further_table(records, study, names))
            parts.append(lost_arms(records, study))
            parts.append(ends_of_grid(records, study, names))
            parts.append(several_starts(records, study))
        if left := missing.get(study.name, 0):
            start = "Still to come" if names else "No test run has finished; still to come"
            parts.append(f"{start}: {left} run{'s' * (left > 1)}.\n")
    return "\n".join(part for part in parts if part)


def score_table(records: Sequence[Record], study: Study, names: Sequence[str]) -> str:
    rows = []
    if start := start_scores(records, study):
        rows.append([START, "", "0", "", *(f"{start[key]:.3f}" for key in study.columns)])
    for name in names:
        runs = tests_of(records, study, name)
        took = seconds(records, study, name)
        facts = [name, str(len(runs)), str(runs[0]["steps"]), f"{took:.0f}" if took else ""]
        rows.append([*facts, *(spread(last(runs, key)) for key in study.columns)])
    return table(["after the last step", "seeds", "steps", "seconds", *study.columns.values()], rows)


def start_scores(records: Sequence[Record], study: Study) -> dict[str, float] | None:
    """Scores on the test images before the first step, which one run has."""
    runs = [run for name in study.variants for run in tests_of(records, study, name)]
    return next((run["scores"]["0"] for run in runs if "0" in run["scores"]), None)


def difference_table(records: Sequence[Record], study: Study, names: Sequence[str]) -> str:
    """Table of F1 of each on-policy arm minus that of each rival, with intervals."""
    ours = [name for name in study.on_policy if name in names]
    rivals = [name for name in (*study.rivals, *study.untuned) if name in names]
    rows = [[name, *(difference(records, study, arm, name) for arm in ours)] for name in rivals]
    return table(["F1, difference to", *ours], rows) if ours and rows else ""


def difference(records: Sequence[Record], study: Study, arm: str, rival: str) -> str:
    ours, theirs = both(records, study, arm, rival)
    value, bounds = statistics.fmean(ours) - statistics.fmean(theirs), interval(ours, theirs)
    return signed(value, *bounds) if bounds else f"{value:+.3f} (too few seeds)"


def signed(value: float, low: float, high: float) -> str:
    return f"{value:+.3f} [{low:+.3f}, {high:+.3f}]"


def further_table(records: Sequence[Record], study: Study, names: Sequence[str]) -> str:
    """Table of F1 on the further test images, and the differences of on-policy arms; empty where nothing has it."""
    start = [run for run in runs_of(records, study.name, START) if "further" in run]
    scored = {START: start} | {name: deciding_runs(records, study, name) for name in names}
    runs = {name: own for name, own in scored.items() if own}
    if not study.further or not runs:
        return ""
    ours = [name for name in study.on_policy if name in runs]
    rows = []
    for name, own in runs.items():
        differences = [signed(*further.difference(runs[arm], own)) if name not in ours else "" for arm in ours]
        rows.append([name, str(len(own)) if name != START else "", spread(further.f1(own)), *differences])
    num_images = next(iter(runs.values()))[0]["further"]["images"]
    header = [f"F1 on {num_images:,} further images", "seeds", "F1", *(f"difference of {arm}" for arm in ours)]
    return table(header, rows)


def lost_arms(records: Sequence[Record], study: Study) -> str:
    """Say which on-policy arms cannot show the claim any more, and why; empty if there are none."""
    listed = []
    for arm in study.on_policy:
        reasons = (
            [f"not above {', '.join(f'*{name}*' for name in names)}"]
            if (names := unbeaten(records, study, arm))
            else []
        )
        if is_slower_than_clock(records, study, arm):
            own, whole = (seconds(records, study, name) or 0 for name in (arm, study.clock.name))
            reasons.append(f"it took {own:.0f} s, and equal seconds are the {whole:.0f} s of *{study.clock.name}*")
        if reasons:
            listed.append(f"*{arm}* ({'; '.join(reasons)})")
    return f"Cannot show the claim any more, whatever is still to come: {'; '.join(listed)}.\n" if listed else ""


def ends_of_grid(records: Sequence[Record], study: Study, names: Sequence[str]) -> str:
    """Say which arms were best at an end of the grid, where better settings may lie beyond; empty if none was."""
    found: dict[str, list[str]] = {}
    for name in (name for name in names if not name.endswith(UNTUNED)):
        best = tuned(records, study, arm_of(study, name), name.endswith(EQUAL_SECONDS))
        if best and best.lr in (ends := (min(study.learning_rates), max(study.learning_rates))):
            found.setdefault(f"the {('lowest', 'highest')[ends.index(best.lr)]} rate ({best.lr:g})", []).append(name)
        if best and best.kl is not None and best.kl in (ends := (min(study.kl_weights), max(study.kl_weights))):
            end = ("smallest", "largest")[ends.index(best.kl)]
            found.setdefault(f"the {end} KL weight ({best.kl:g})", []).append(name)
    if not found:
        return ""
    listed = "; ".join(f"{end}: {', '.join(f'*{name}*' for name in own)}" for end, own in sorted(found.items()))
    return f"The best setting was at the edge of the grid, so that a better one may lie beyond: {listed}.\n"


def several_starts(records: Sequence[Record], study: Study) -> str:
    """Say how many runs began with which start model; empty if all with the same, as far as records name it."""
    own = Counter(run.get("start") for run in records if run["task"] == study.name and run["variant"] != START)
    unnamed = own.pop(None, 0)
    if len(own) + bool(unnamed) < 2:
        return ""
    listed = [f"{count} with `{start}`" for start, count in sorted(own.items())]
    listed += [f"{unnamed} with one that their records do not name"] if unnamed else []
    return f"Not all runs began with the same start model: {', '.join(listed)}.\n"


# ---------------------------------------------------------------------------------------------------------------------
# plots


def plots(studies: Sequence[Study], records: Sequence[Record]) -> dict[str, str]:
    """Return the SVGs of each study that has test runs, by file name below docs/."""
    drawn = [study for study in studies if any(tests_of(records, study, name) for name in study.variants)]
    bars = {f"results_{study.name}.svg": plot(records, study) for study in drawn}
    return bars | {f"results_{study.name}_curve.svg": curve(records, study) for study in drawn if study.num_evals > 1}


def plot(records: Sequence[Record], study: Study) -> str:
    """Draw a line per arm: a dot for each seed's F1 and a bar for their mean; the start model as a dashed line."""
    left, width, step, top = 400, 480, 26, 40
    names = [name for name in study.variants if tests_of(records, study, name)]
    bottom = top + step * len(names)
    shapes = [f'<text x="{left}" y="20" font-weight="bold">{escape(study.title)}: F1 on the test images</text>']
    for tenth in range(0, 11, 2):
        x = left + width * tenth / 10
        shapes.append(f'<line x1="{x:g}" y1="{top - 8}" x2="{x:g}" y2="{bottom}" stroke="#ddd"/>')
        shapes.append(f'<text x="{x:g}" y="{bottom + 16}" text-anchor="middle">{tenth / 10:g}</text>')
    if start := start_scores(records, study):
        x = left + width * start["f1"]
        shapes.append(
            f'<line x1="{x:.1f}" y1="{top - 8}" x2="{x:.1f}" y2="{bottom}" stroke="#888" stroke-dasharray="4"/>'
        )
    for row, name in enumerate(names):
        y, values = top + step * row + 8, last(tests_of(records, study, name), "f1")
        colour = "#c0392b" if name in study.on_policy else "#2962d6"
        mean = left + width * statistics.fmean(values)
        shapes.append(f'<text x="{left - 10}" y="{y + 4}" text-anchor="end">{escape(name)}</text>')
        shapes.append(f'<line x1="{mean:.1f}" y1="{y - 8}" x2="{mean:.1f}" y2="{y + 8}" stroke="{colour}"/>')
        shapes += [f'<circle cx="{left + width * value:.1f}" cy="{y}" r="3" fill="{colour}"/>' for value in values]
    return drawing(shapes, left + width + 20, bottom + 26)


def curve(records: Sequence[Record], study: Study) -> str:
    """Draw F1 of the rest over F1 of what is learnt: a line per arm from the start model, means over seeds."""
    left, top, side = 60, 40, 420
    names = [name for name in study.variants if tests_of(records, study, name)]
    shapes = [f'<text x="{left}" y="20" font-weight="bold">{escape(study.title)}: gain against loss</text>']
    for tenth in range(0, 11, 2):
        at = side * tenth / 10
        shapes.append(f'<line x1="{left + at:g}" y1="{top}" x2="{left + at:g}" y2="{top + side}" stroke="#ddd"/>')
        shapes.append(f'<line x1="{left}" y1="{top + at:g}" x2="{left + side}" y2="{top + at:g}" stroke="#ddd"/>')
        shapes.append(f'<text x="{left + at:g}" y="{top + side + 16}" text-anchor="middle">{tenth / 10:g}</text>')
        shapes.append(f'<text x="{left - 8}" y="{top + side - at + 4:g}" text-anchor="end">{tenth / 10:g}</text>')
    shapes.append(f'<text x="{left}" y="{top + side + 34}">{escape(study.columns["f1_new"])}</text>')
    shapes.append(f'<text x="{left + side + 20}" y="{top + 10}">{escape(study.columns["f1_old"])}, upwards</text>')
    for number, name in enumerate(names):
        colour, dash = COLOURS[number % len(COLOURS)], "" if name in study.on_policy else ' stroke-dasharray="4"'
        spots = [(left + side * new, top + side * (1 - old)) for new, old in path_of(records, study, name)]
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in spots)
        shapes.append(f'<polyline points="{points}" fill="none" stroke="{colour}"{dash}/>')
        shapes += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in spots]
        shapes.append(
            f'<text x="{left + side + 20}" y="{top + 34 + 18 * number}" fill="{colour}">{escape(name)}</text>'
        )
    return drawing(shapes, left + side + 280, top + side + 44)


def path_of(records: Sequence[Record], study: Study, name: str) -> list[tuple[float, float]]:
    """Return (`f1_new`, `f1_old`) of the start model and after each evaluation, means over the seeds."""
    start, runs = start_scores(records, study), tests_of(records, study, name)
    points = [(start["f1_new"], start["f1_old"])] if start else []
    for step in sorted({int(step) for step in runs[0]["scores"]} - {0}):
        scores = [run["scores"][str(step)] for run in runs]
        new, old = (statistics.fmean(score[key] for score in scores) for key in ("f1_new", "f1_old"))
        points.append((new, old))
    return points


def drawing(shapes: Sequence[str], width: int, height: int) -> str:
    size = f'width="{width}" height="{height}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12">'
    return "\n".join([head, '<rect width="100%" height="100%" fill="white"/>', *shapes, "</svg>"]) + "\n"
