"""Write docs/results_earlier.md from the records of `studies/earlier.py`. Pure functions."""

import statistics
from collections.abc import Mapping, Sequence

from studies.tables import Record, interval, last, runs_of, spread, table
from utils.config.schema import RM

TEACHER_FORCED = f"{RM}.teacher_forced_ratio"
SUPERVISED = "supervised"
EQUAL_SECONDS = "supervised, equal seconds"
PLAIN = "stage 2"
BOTH = "stage 2 + both"
WARM_UP = "warm-up"
STUDY_DUPLICATE_IOU = 0.5  # objects of these scenes never overlap: two predictions this close are the same object

COLUMNS = {
    "f1": "F1",
    "f1_no_label": "F1, no label",
    "recall": "recall",
    "precision": "precision",
    "duplicates": "duplicates / image",
    "parse_rate": "parse rate",
}

INTRODUCTION = """# Earlier results: stage 2 against plain supervised training

Records of two fully annotated tasks, where theory expects no gain. The current studies are in results.md.

Written by `python -m studies.earlier --report` from `docs/results.json`, which `python -m studies.earlier` fills.
Nothing was selected: every finished run counts, with the scores of its last step, not of its best.

**Method.** The learner (`train_stage2.py`, one rank) runs next to a real rollout server, both on CPU with one thread
each; DoRA in float32, 32 samples per optimizer step, the settings of `configs/demo/stage2.yaml`. All runs of a task
start from the same model and data; the seed determines the order of the data and the initialisation of the adapters.
*Supervised* is the same program with `RM.teacher_forced_ratio: 1` (`RM` is `custom.extra.rollout_matching`): the same
targets, losses and optimizer on the plain ground truth. *Stage 2* uses the schema's default options and greedy
rollouts; *structure* and *trim* are `RM.targets.supervise_structure` and `RM.targets.unmatched: trim`; *both* is
the two together, as in `configs/base.yaml`. *Equal seconds* is supervised training with as many steps as fit into the
seconds of stage 2 + both, on a schedule of that length.

**Seconds** are those of training: data, rollouts, weight sync, forward and backward. They exclude start-up, evaluation
and saving, and for supervised training also the sync, which it does not need. The two cores were shared with other
work, which disturbs the fastest steps least. Each part of a step therefore counts with its 10th percentile over a run,
and with the lowest value over the seeds. A variant with a single seed that ran at a busy time still looks too slow.

**Scores** are means over seeds ± standard deviation, from greedy answers on 256 held-out images after the last step. A
duplicate is a prediction with the label of an earlier one and an IoU of at least {duplicate_iou} with it. Differences
have a 95 % confidence interval (Welch's t); *same* means that it contains 0, so no difference is shown. With three
seeds, only large differences can be told from noise, and nothing corrects for comparing several variants.
"""
ABOUT = {
    "demo": """## Task "demo"

The task that `make demo` had then: 1 to 4 shapes, 4,000 fully annotated training images, and a start model that was
warmed up on 8,000 other scenes, most of which list only one object. What is left to learn is to continue after the
first object.

About the parse rate: parts of the prefix that match nothing carry no loss (TGT-6), neither a superfluous object nor
broken syntax between two good objects. Without trimming, nothing tells the model where it should have closed the list;
it continues until it hits the length limit, and its syntax decays. With trimming, such an answer ends after its last
correct object, where the model learns to close the list.

*Supervised, 294 steps* is one longer run for comparison.
""",
    "hard": """## Task "hard"

Up to 12 smaller objects per scene with 1 to 3 labels among them, and a fixed set of 1,000 training images. The start
model was trained on these same images, fully annotated, until another round raised F1 on the held-out images by less
than 0.01; the best round is the start, which flatters it a little, because it was chosen on the held-out images. By
then it makes almost no mistakes on the training images (the last column of the scores), so rollouts on them leave
little to correct.
""",
}


def text_of(records: Sequence[Record], missing: Mapping[str, Sequence[int]]) -> str:
    """Return docs/results_earlier.md. `missing`: planned runs without a record, as `task: variant` and their seeds."""
    tasks = [task for task in ABOUT if runs_of(records, task, SUPERVISED)]
    parts = [INTRODUCTION.format(duplicate_iou=STUDY_DUPLICATE_IOU), "## What was found\n", findings(records, tasks)]
    for task in tasks:
        parts += [ABOUT[task], warm_up(records, task), score_table(records, task), difference_table(records, task)]
        parts += [option_table(records, task), curve_table(records, task)]
    return "\n".join(part for part in [*parts, learning_rates(records), not_run(missing)] if part)


# ---------------------------------------------------------------------------------------------------------------------
# what the tables compare


def variants_of(records: Sequence[Record], task: str, learning_rates: bool = False) -> list[str]:
    """Return a task's variants in the order of their first record: with other learning rates, or all others."""
    names = dict.fromkeys(record["variant"] for record in records if record["task"] == task)
    return [name for name in names if name != WARM_UP and (", lr x" in name) == learning_rates]


def is_supervised(record: Record) -> bool:
    return record["overrides"].get(TEACHER_FORCED) == 1.0


def quiet_step_seconds(runs: Sequence[Record]) -> float:
    """Seconds of a variant's training step, undisturbed by other work; see the introduction."""
    parts = ("prepare", "train") if is_supervised(runs[0]) else ("prepare", "train", "rollout", "sync")
    return sum(min(run["step_seconds"][part] for run in runs) for part in parts)


def compare(records: Sequence[Record], task: str, variant: str, other: str) -> str:
    """Return `better`, `worse` or `same` (no difference shown) by F1; empty if seeds are missing."""
    bounds = interval(*(last(runs_of(records, task, name), "f1") for name in (variant, other)))
    if bounds is None:
        return ""
    return "better" if bounds[0] > 0 else "worse" if bounds[1] < 0 else "same"


# ---------------------------------------------------------------------------------------------------------------------
# tables


def score_table(records: Sequence[Record], task: str) -> str:
    """Table of scores after the last step, one line per variant; the first line is the start model."""
    start = runs_of(records, task, SUPERVISED)[0]["scores"]["0"]
    rows = [["start model", "", "0", "", *(f"{start[key]:.3f}" for key in COLUMNS), ""]]
    for name in variants_of(records, task):
        runs = runs_of(records, task, name)
        steps = runs[0]["steps"]
        rows.append(
            [name, str(len(runs)), str(steps), f"{quiet_step_seconds(runs) * steps:.0f}"]
            + [spread(last(runs, key)) for key in COLUMNS]
            + ["" if is_supervised(runs[0]) else spread([run["rollout_f1"] for run in runs])]
        )
    header = ["after the last step", "seeds", "steps", "seconds", *COLUMNS.values(), "F1 of rollouts in training"]
    return table(header, rows)


def difference_table(records: Sequence[Record], task: str) -> str:
    """Table of F1 of each stage-2 variant minus that of supervised training, at equal steps and at equal seconds."""
    rows = []
    for name in variants_of(records, task):
        ours = runs_of(records, task, name)
        if not is_supervised(ours[0]):
            rows.append([name, *(difference(records, task, name, other) for other in (SUPERVISED, EQUAL_SECONDS))])
    return table(["F1, difference to supervised", "at equal steps", "at equal seconds"], rows)


def difference(records: Sequence[Record], task: str, variant: str, other: str) -> str:
    ours, theirs = (last(runs_of(records, task, name), "f1") for name in (variant, other))
    if not theirs:
        return ""
    shown = f"{statistics.fmean(ours) - statistics.fmean(theirs):+.3f}"
    bounds = interval(ours, theirs)
    if bounds is None:
        return shown + " (one seed)"
    return f"{shown} [{bounds[0]:+.3f}, {bounds[1]:+.3f}] {compare(records, task, variant, other)}"


def option_table(records: Sequence[Record], task: str) -> str:
    """Table of the effect of each option, against the variant without it."""
    rows = []
    for name in stage2_variants(records, task):
        reference = BOTH if ", + both" in name else PLAIN
        if name != reference and runs_of(records, task, reference):
            pairs = [[last(runs_of(records, task, n), key) for n in (name, reference)] for key in list(COLUMNS)[:5]]
            deltas = [f"{statistics.fmean(ours) - statistics.fmean(theirs):+.3f}" for ours, theirs in pairs]
            deltas[0] = difference(records, task, name, reference)
            rows.append([f"{name}, against {reference}", *deltas])
    return table(["change by an option", *list(COLUMNS.values())[:5]], rows) if rows else ""


def curve_table(records: Sequence[Record], task: str) -> str:
    """Table of mean F1 at the start, at the evaluation nearest to half of the steps, and at the end."""
    rows = []
    for name in variants_of(records, task):
        columns = zip(*map(start_half_end, runs_of(records, task, name)), strict=True)
        rows.append([name, *(f"{statistics.fmean(column):.3f}" for column in columns)])
    return table(["F1 along the way", "start", "half of the steps", "end"], rows)


def start_half_end(record: Record) -> tuple[float, float, float]:
    half = min(record["scores"], key=lambda step: abs(int(step) - record["steps"] / 2))
    return tuple(record["scores"][step]["f1"] for step in ("0", half, str(record["steps"])))


def warm_up(records: Sequence[Record], task: str) -> str:
    """Table of scores after each round of the task's warm-up; empty if it has none of its own."""
    runs = runs_of(records, task, WARM_UP)
    if not runs:
        return ""
    scores = runs[0]["scores"]
    rows = [[metric, *(f"{scores[step][key]:.3f}" for step in scores)] for key, metric in list(COLUMNS.items())[:4]]
    return table(["warm-up, after steps of 16 samples", *scores], rows)


def learning_rates(records: Sequence[Record]) -> str:
    """Section with F1 at half and twice the common learning rate, one seed each; empty without such runs."""
    rows = []
    for task in ABOUT:
        for name in variants_of(records, task, learning_rates=True):
            tried = runs_of(records, task, name)[0]
            common = [run for run in runs_of(records, task, name.split(", lr x")[0]) if run["seed"] == tried["seed"]]
            if common:
                rows.append([task, name, *(f"{last([run], 'f1')[0]:.3f}" for run in (tried, common[0]))])
    if not rows:
        return ""
    about = "Is the demo's learning rate fair to both sides? One seed, the same in both columns."
    return f"## Learning rates\n\n{about}\n\n" + table(["task", "variant", "F1", "F1 at the common rate"], rows)


def not_run(missing: Mapping[str, Sequence[int]]) -> str:
    if not missing:
        return ""
    about = "## Not run yet\n\n`python -m studies.earlier` would continue with:\n\n"
    return about + "".join(f"- {name}: seeds {', '.join(map(str, seeds))}\n" for name, seeds in missing.items())


# ---------------------------------------------------------------------------------------------------------------------
# findings


def findings(records: Sequence[Record], tasks: Sequence[str]) -> str:
    """Findings task by task, and their consequences for the defaults."""
    lines = [f"- **{task}**: {task_finding(records, task)}" for task in tasks]
    lines += ["", conclusion(records, tasks), "", defaults(records, tasks), ""]
    return "\n".join(lines)


def task_finding(records: Sequence[Record], task: str) -> str:
    """F1 of start model, supervised training and best stage-2 variant; then the variants by their verdicts."""
    start = runs_of(records, task, SUPERVISED)[0]["scores"]["0"]["f1"]
    parts = [f"F1 {start:.3f} at the start"]
    for name, label in ((SUPERVISED, "supervised"), (EQUAL_SECONDS, "supervised for the seconds of stage 2")):
        if runs := runs_of(records, task, name):
            parts.append(f"{label} {spread(last(runs, 'f1'))} ({runs[0]['steps']} steps)")
    if names := stage2_variants(records, task):
        best = max(names, key=lambda name: statistics.fmean(last(runs_of(records, task, name), "f1")))
        parts.append(f"the best stage-2 variant, *{best}*, {spread(last(runs_of(records, task, best), 'f1'))}")
    means = [statistics.fmean(last(runs_of(records, task, name), "f1")) for name in variants_of(records, task)]
    no_gain = "" if max(means) > start else "No variant improves on the start model. "
    verdicts = [
        f"At equal {what} {by_verdict(records, task, other)}."
        for what, other in (("steps", SUPERVISED), ("seconds", EQUAL_SECONDS))
        if runs_of(records, task, other)
    ]
    return "; ".join(parts) + f". {no_gain}" + " ".join(verdicts)


def by_verdict(records: Sequence[Record], task: str, other: str) -> str:
    """Return `better than supervised: a, b; worse: none; ...`, of the variants with several seeds."""
    names = stage2_variants(records, task)
    better, worse, same = (
        ", ".join(f"*{name}*" for name in names if compare(records, task, name, other) == verdict) or "none"
        for verdict in ("better", "worse", "same")
    )
    return f"better than supervised: {better}; worse: {worse}; no difference shown: {same}"


def stage2_variants(records: Sequence[Record], task: str) -> list[str]:
    return [name for name in variants_of(records, task) if not is_supervised(runs_of(records, task, name)[0])]


def conclusion(records: Sequence[Record], tasks: Sequence[str]) -> str:
    """Say in one sentence whether anything beats supervised training."""
    pairs = [(task, name) for task in tasks for name in stage2_variants(records, task)]
    if not any(compare(records, *pair, other) for pair in pairs for other in (SUPERVISED, EQUAL_SECONDS)):
        return "**Too few seeds have finished for a verdict.**"
    won = {}
    for what, other in (("steps", SUPERVISED), ("seconds", EQUAL_SECONDS)):
        won[what] = [f"*{name}* on {task}" for task, name in pairs if compare(records, task, name, other) == "better"]
    if not any(won.values()):
        return (
            "**Nothing here is shown to beat plain supervised training**, neither at equal steps nor at equal seconds."
        )
    steps, seconds = (", ".join(names) or "nothing" for names in won.values())
    return f"**What beats plain supervised training:** at equal steps {steps}; at equal seconds {seconds}."


def defaults(records: Sequence[Record], tasks: Sequence[str]) -> str:
    """Say what the comparison of the stage-2 variants means for the schema's defaults."""
    verdicts = [compare(records, task, BOTH, PLAIN) for task in tasks]
    if verdicts and all(verdict == "better" for verdict in verdicts):
        return (
            "**Defaults.** With both target options on, stage 2 is better than without on every task. The contract "
            "turns them off by default, so they stay off in the schema; turn them on, as `configs/base.yaml` does."
        )
    shown = ", ".join(f"{verdict or 'too few seeds'} on {task}" for task, verdict in zip(tasks, verdicts, strict=True))
    if "better" in verdicts and set(verdicts) <= {"better", "same"}:
        return (
            f"**Defaults.** *{BOTH}* against *{PLAIN}*: {shown}. The shipped presets (`configs/base.yaml`) switch both "
            "target options on. In the schema they stay off, as the contract says, and `teacher_forced_ratio` stays 0."
        )
    return (
        f"**Defaults.** *{BOTH}* against *{PLAIN}*: {shown}. That is no clear case for changing the schema's defaults "
        "(both target options off, `teacher_forced_ratio` 0), so they stay."
    )
