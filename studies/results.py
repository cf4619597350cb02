"""Does on-policy training beat supervised training where users need it? Makes the runs of docs/results.md.

    python -m studies.results                     # all runs that docs/results.json lacks, most important first
    python -m studies.results --limit 1           # the next run only, for a machine that is shared
    python -m studies.results --study new_class   # only the runs of one study
    python -m studies.results --plan              # list what can be run next; train nothing
    python -m studies.results --further           # score kept checkpoints on the further test images; train nothing
    python -m studies.results --limit 0           # only rewrite docs/results.md

Each run is one learner process, which makes its own rollouts; no server. Settings of each arm (learning rate and, where
it has one, weight of the KL) are chosen by the same grid with one seed on the tuning images. Only then the arm runs
with five others, scored on the test images. A finished run becomes a record in docs/results.json. Runs that have a
record with the same settings are skipped, so the studies can be stopped and resumed at any time. Several processes can
make runs side by side, say one for each core: none makes what another is making.
"""

import argparse
import itertools
import json
import math
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from studies import dense, forgetting, further, new_class, partial, portable, results_report, runs, taught
from studies.arms import SEEDS, TUNING_SEED, Job, Study, find, missing, num_left, num_steps, planned, shown, starts_of
from studies.results_report import START
from studies.runs import RunFailed, Task, load_records, quiet_parts, same_run, slug, store, write_config
from studies.tables import Record
from tools import demo
from tools.cached import alone
from tools.launch import deepspeed_command
from utils.config.load import resolve_yaml

REPORT = Path("docs/results.md")
NEW_CLASSES = (new_class.NEW_CLASS, new_class.REPLAY, new_class.SHIFTED, taught.TAUGHT)
OTHERS = (*partial.PARTIAL, dense.DENSE, dense.CROWD, dense.FAINT, dense.AGAIN, forgetting.FORGETTING, forgetting.LONG)
STUDIES = {study.name: study for study in (*NEW_CLASSES, *OTHERS)}
SCORES = ("f1", "f1_mean", "f1_old", "f1_new", "precision", "recall", "counting_error", "duplicates_per_image")
SCORES += ("parse_rate", "truncated_rate")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--study", choices=list(STUDIES), help="only the runs of this study")
    parser.add_argument("--limit", type=int, metavar="N", help="make at most N runs")
    parser.add_argument("--plan", action="store_true", help="list what is missing, without training")
    parser.add_argument("--further", action="store_true", help="score kept checkpoints on the further test images")
    args = parser.parse_args()
    chosen = [STUDIES[args.study]] if args.study else list(STUDIES.values())
    if args.plan:
        print("\n".join(job.name for study in chosen for job in missing(load_records(), study)))
        return
    demo.exit_on_sigterm()
    failed = score_kept(chosen) if args.further else run_all(chosen, args.limit)
    write_report()
    if failed:
        sys.exit("failed: " + "; ".join(failed))


def write_report() -> None:
    """Rewrite docs/results.md and its plots from docs/results.json."""
    records = load_records()
    studies = list(STUDIES.values())
    left = {study.name: num_left(records, study) for study in studies}
    ours = [(STUDIES[record["task"]], record) for record in records if record["task"] in STUDIES]
    current = [as_shown for study, record in ours if (as_shown := shown(records, study, record))]
    current += [own for study, own in ours if own["variant"] == START and own["material"] == study.material]
    REPORT.write_text(results_report.text_of(studies, current, left))
    for name, svg in results_report.plots(studies, current).items():
        (REPORT.parent / name).write_text(svg)


def run_all(studies: Sequence[Study], limit: int | None = None) -> list[str]:
    """Make the missing runs, at most `limit`; return the names of those that failed, each tried once."""
    failed: list[str] = []
    for _ in itertools.count() if limit is None else range(limit):
        with ExitStack() as stack:
            job = claim_next(studies, failed, stack)
            if job is None:
                break
            portable.prepare(job.study)
            start = runs.weights_digest(start_model(job.study))
            if (others := starts_of(load_records(), job.study)) and start not in others:
                return [*failed, f"{job.name}: here the start model is {start}; other runs have {', '.join(others)}"]
            demo.say(job.name)
            commit = runs.revision()  # of what runs now: there may be another one when the run has ended
            try:
                record = run_learner(job, num_steps(job, load_records()))
            except RunFailed as error:
                print(f"FAILED {job.name}: {error}", flush=True)
                failed.append(job.name)
                continue
            store(record | {"revision": commit, "start": start})
        print(record["scores"], record["seconds"], flush=True)
    return failed


def start_model(study: Study) -> Path:
    return Path(resolve_yaml(study.config)[0]["model"]["path"])


def claim_next(studies: Sequence[Study], failed: Sequence[str], stack: ExitStack) -> Job | None:
    """Return the most important missing run that no other process makes, claimed until `stack` is left."""
    for job in (job for study in studies for job in missing(load_records(), study) if job.name not in failed):
        is_ours = stack.enter_context(alone(runs.ROOT / "claims" / f"{slug(job.name)}.lock", wait=False))
        if is_ours and find(load_records(), job) is None:  # it may have been finished since
            return job
    return None


def run_learner(job: Job, steps: int) -> Record:
    """Train once and return the record; raise RunFailed with the end of the log."""
    folder = job.study.root / slug(job.name)
    shutil.rmtree(folder, ignore_errors=True)
    every, is_grpo = math.ceil(steps / job.study.num_evals), job.arm.program == "train_grpo.py"
    run = {"training.seed": job.seed, "training.max_steps": steps, "training.eval_steps": every}
    run["training.save_steps"] = every if is_grpo else steps
    run["training.eval_at_start"] = job.arm.scores_start and job.seed == SEEDS[0] and not job.equal_seconds
    task = Task(job.study.name, job.arm.config or job.study.config)
    config, log = write_config(task, folder, job.overrides | run), folder / "learner.log"
    program = [job.arm.program] if job.arm.program.endswith(".py") else ["--module", job.arm.program]
    launcher = [*deepspeed_command(), "--num_gpus", "1"]
    command = [*launcher, "--master_port", str(demo.free_ports(1)[0]), *program, "--config", str(config)]
    if status := runs.run_to_end(command, log):
        raise RunFailed(f"status {status}; the end of {log}:\n" + log.read_text()[-2000:])
    if is_grpo:  # its own evaluation knows rewards only
        for step in sorted({*range(every, steps, every), steps}):
            output = folder / "eval" / f"step_{step:06d}.json"
            evaluate(job.study, merged(job, step), job.overrides["custom.val_jsonl"], output)
    finished = json.loads((folder / "finished.json").read_text())
    record = {
        "task": job.study.name,
        "variant": job.variant,
        "seed": job.seed,
        "overrides": job.overrides,
        "material": job.study.material,
        "steps": finished["steps"],
        "seconds": finished["seconds"],
        "step_seconds": quiet_parts(EventAccumulator(str(folder)).Reload()),
        "scores": {
            str(int(path.stem.split("_")[1])): read_scores(path) for path in sorted((folder / "eval").glob("*.json"))
        },
    }
    if job.study.further and not job.is_tuning:
        model = merged(job, record["steps"])
        record["further"] = score_further(job.study, model, job.arm.scored_as, folder / "further")
    return record


def merged(job: Job, step: int) -> Path:
    """The model that a run saved after a step."""
    return job.study.root / slug(job.name) / f"checkpoint-{step}" / "merged"


def score_kept(studies: Sequence[Study]) -> list[str]:
    """Score on the further test images what records lack that and still have a model; return the names that failed."""
    failed = []
    for study in (study for study in studies if study.further):
        portable.prepare(study)
        for record, model, suffix in kept(study):
            name = f"{study.name}: {record['variant']}, seed {record['seed']}, further test images"
            with alone(runs.ROOT / "claims" / f"{slug(name)}.lock", wait=False) as is_ours:
                if not is_ours or not model.exists() or has_further(record):
                    continue
                demo.say(name)
                output = study.root / "further_scores" / slug(name)
                try:
                    store(record | {"further": score_further(study, model, suffix, output)})
                except RunFailed as error:
                    print(f"FAILED {name}: {error}", flush=True)
                    failed.append(name)
    return failed


def has_further(record: Record) -> bool:
    """Whether docs/results.json has scores of the run on the further test images."""
    same = (own for own in load_records() if same_run(own, record) and own["material"] == record["material"])
    return any("further" in own for own in same)


def kept(study: Study) -> Iterator[tuple[Record, Path, str]]:
    """Yield the records of the start model and of test runs, each with its model and its arm's `scored_as`."""
    records = load_records()
    start = {"task": study.name, "variant": START, "seed": TUNING_SEED, "overrides": {}, "material": study.material}
    yield start | {"scores": {}}, start_model(study), ""
    for arm in study.arms:
        for job in planned(records, study, arm):
            if not job.is_tuning and (record := find(records, job)):
                yield record, merged(job, record["steps"]), arm.scored_as


def score_further(study: Study, model: Path, suffix: str, output: Path) -> dict[str, Any]:
    """Return a record's `further`; the answers stay in `output.jsonl`."""
    assert study.further is not None
    scores = output.with_name(f"{output.name}.json")
    scores.parent.mkdir(parents=True, exist_ok=True)
    evaluate(study, model, str(study.further() / f"test{suffix}.jsonl"), scores)
    return further.count_parts(scores.with_suffix(".jsonl"))


def evaluate(study: Study, model: Path, data: str, output: Path) -> None:
    """Score a model as the runs that score themselves do."""
    log = output.with_suffix(".log")
    arguments = ["--checkpoint", str(model), "--data", data, "--backend", "hf"]
    arguments += ["--config", study.config, "--output", str(output)]
    if runs.run_to_end([sys.executable, "-m", "tools.evaluate", *arguments, "--batch-size", "128"], log):
        raise RunFailed(f"tools.evaluate; the end of {log}:\n" + log.read_text()[-2000:])


def read_scores(path: Path) -> dict[str, float]:
    found = json.loads(path.read_text())
    return {key: round(found[key], 5) for key in SCORES if key in found}


if __name__ == "__main__":
    main()
