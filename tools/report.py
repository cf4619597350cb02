"""Write one self-contained HTML file about a run, for people: scores, curves, classes, pictures, settings, resuming.

    python -m tools.report RUN [--output FILE] [--images N]

Reads what `train_stage2.py` or `train_grpo.py` left in the run directory, also of a run that is not finished. What is
missing is left out with its reason. The file needs no network; its curves are SVG, and validation images are inlined as
small JPEGs. All text is escaped: labels and answers come from models and data files.
"""

import argparse
import base64
import hashlib
import json
import logging
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2

from tools import report_charts as charts
from tools.report_answers import ERRORS, Judged, choose, judge, photo, precision_recall
from tools.report_charts import Chart, Line
from utils.config.load import exit_with, reason_of
from utils.config.rlhf import rewards_detections
from utils.config.schema import Config
from utils.config.section import Section, brief, section_keys, section_of
from utils.geometry import bins_to_pixels
from utils.run.monitor import read_evaluations
from utils.run.rollout_log import rollout_lines
from utils.run.shutdown import newest_checkpoint, resume_command

logger = logging.getLogger(__name__)

NUM_IMAGES, SIDE = 24, 320  # images in the gallery, pixels of the longer side
MAX_CLASSES = 200  # rows of the table of classes
MARK = b'<meta name="generator" content="tools.report">'  # in the template
# Scores of an evaluation: title, and whether more is better.
SCORES = {
    "reward": ("reward", True),
    "f1": ("F1", True),
    "f1_old": ("F1, old classes", True),
    "f1_new": ("F1, new classes", True),
    "precision": ("precision", True),
    "recall": ("recall", True),
    "f1_no_label": ("F1 without labels", True),
    "f1_mean": ("F1, IoU 0.5:0.95", True),
    "mean_iou": ("mean IoU of matches", True),
    "counting_error": ("counting error per image", False),
    "duplicates_per_image": ("duplicates per image", False),
    "giant_rate": ("giant boxes", False),
    "parse_rate": ("answers that parse", True),
    "truncated_rate": ("truncated answers", False),
    "failed": ("failed requests", False),
}

LOSSES = ("total", "text", "coord", "w1", "gate", "reference_kl", "teacher", "policy")
# Title, whether the y axis is 0..1, and (name of the line, tag in TensorBoard). `eval/` tags are drawn with marks.
CURVES: list[tuple[str, bool, list[tuple[str, str]]]] = [
    ("loss", False, [(part, f"loss/{part}") for part in LOSSES]),
    ("reward", False, [("rollouts", "reward"), ("validation", "eval/reward")]),
    ("F1", True, [("rollouts", "rollout/f1"), ("validation", "eval/f1")]),
    (
        "precision and recall",
        True,
        [
            ("precision, rollouts", "rollout/precision"),
            ("recall, rollouts", "rollout/recall"),
            ("precision, validation", "eval/precision"),
            ("recall, validation", "eval/recall"),
        ],
    ),
    (
        "duplicates per image",
        False,
        [("rollouts", "rollout/duplicates"), ("validation", "eval/duplicates_per_image")],
    ),
    ("counting error per image", False, [("validation", "eval/counting_error")]),
    ("policy lag (steps)", False, [("mean", "train/policy_lag"), ("maximum", "train/policy_lag_max")]),
    (
        "seconds by part",
        False,
        [(part, f"seconds/{part}") for part in ("step", "rollout", "train", "sync", "prepare", "teacher")],
    ),
    ("new tokens per answer", False, [("mean", "rollout/new_tokens_mean"), ("p99", "rollout/new_tokens_p99")]),
]

Evaluation = tuple[int, dict[str, Any]]  # step, scores


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, metavar="RUN", help="run directory (training.output_dir)")
    parser.add_argument("--output", type=Path, metavar="FILE", help="default: RUN/report.html")
    parser.add_argument(
        "--images", type=int, default=NUM_IMAGES, metavar="N", help="validation images, at most (default %(default)s)"
    )
    args = parser.parse_args()
    if args.images < 0:
        parser.error("--images must be 0 or more")
    try:
        print(write_report(args.run, args.output, args.images))
    except ValueError as error:
        exit_with(error)


def write_report(run_dir: Path, output: Path | None = None, num_images: int = NUM_IMAGES) -> Path:
    """Write the report and return its path. Raises ValueError where there is no run, or no writing."""
    output = output or run_dir / "report.html"
    if output.is_file() and output != run_dir / "report.html" and (held := output.read_bytes()) and MARK not in held:
        raise ValueError(
            f"{output}: exists, and is no report; it would be overwritten: name another --output, or delete it"
        )
    page = render(read_run(run_dir, num_images))
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(page, encoding="utf-8", errors="replace")
    except OSError as error:
        raise ValueError(f"{output}: cannot be written ({error}); name another file with --output") from None
    return output


def render(view: Mapping[str, Any]) -> str:
    """The page. Its policy lets nothing be loaded, and no script run but its own."""
    folder = Path(__file__).parent
    script = (folder / "report.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    loader = jinja2.FileSystemLoader(folder)
    environment = jinja2.Environment(
        loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.get_template("report.html").render(script=script, digest=digest, **view)


# ---------------------------------------------------------------------------------------------------------------------
# what a run left behind


def read_run(run_dir: Path, num_images: int = NUM_IMAGES) -> dict[str, Any]:
    """Everything that the page shows. A part that is missing is None or empty; `notes` says why, by part."""
    try:
        record = json.loads((run_dir / "run.json").read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{run_dir}: not a run directory: run.json cannot be read ({reason_of(error)})") from None
    if not (isinstance(record, dict) and {"config", "command"} <= record.keys()):
        raise ValueError(f"{run_dir}: not a run directory: run.json is not that of a run")
    notes: dict[str, str] = {}
    finished, events = _read_json(run_dir / "finished.json"), _read_events(run_dir, notes)
    evaluations = comparable([(found["step"], found) for found in read_evaluations(run_dir)], notes)
    if not evaluations:
        notes["scores"] = "This run has not evaluated: custom.val_jsonl with training.eval_steps or eval_at_start."
    return {
        "name": run_dir.resolve().name,
        "folder": str(run_dir),
        "record": record,
        "finished": finished,
        "minutes": sum(value for _, value in _points(events, "seconds/step")) / 60,  # of all processes of the run
        "notes": notes,
        "scores": score_rows(evaluations),
        "ends": [evaluations[0][0], evaluations[-1][0]] if evaluations else [],
        "best": _best(evaluations, record["config"]),
        "curves": draw_curves(events),
        "classes": class_rows(evaluations, notes),
        "coco": _coco(run_dir, notes),
        "changed": changed_keys(record["config"]),
        "servers": _servers(run_dir, notes),
        "resume": _resume(run_dir, record, finished),
        **answers(run_dir, evaluations, record["config"], num_images, notes),
    }


def _read_json(path: Path) -> dict[str, Any] | None:
    """None if there is no such file. Raises ValueError where it is damaged."""
    try:
        return json.loads(path.read_text()) if path.exists() else None
    except ValueError as error:
        raise ValueError(f"{path}: cannot be read ({error}); delete it") from None


def comparable(evaluations: Sequence[Evaluation], notes: dict[str, str]) -> list[Evaluation]:
    """Those with the settings of the last one. Earlier versions wrote none; theirs count together."""
    shown = [own for own in evaluations if own[1].get("settings") == evaluations[-1][1].get("settings")]
    if num_left_out := len(evaluations) - len(shown):
        notes["scores"] = (
            f"{num_left_out} of {len(evaluations)} evaluations are left out: they had other settings than the last one "
            "(data, eval_limit, prompt or others that scores depend on). Curves show all."
        )
    return shown


def score_rows(evaluations: Sequence[Evaluation]) -> list[dict[str, Any]]:
    """The first and the last evaluation side by side; `is_better` is None where nothing changed."""
    if not evaluations:
        return []
    first, last = evaluations[0][1], evaluations[-1][1]
    same_labels = first.get("new_labels") == last.get("new_labels")  # f1_old and f1_new are of the same classes
    rows = []
    for key, (title, more_is_better) in SCORES.items():
        if key in first and key in last and (same_labels or key not in ("f1_old", "f1_new")):
            change = last[key] - first[key]
            is_better = None if abs(change) < 5e-4 else (change > 0) == more_is_better
            rows.append({"title": title, "first": first[key], "last": last[key], "is_better": is_better})
    return rows


def _best(evaluations: Sequence[Evaluation], config: Mapping[str, Any]) -> dict[str, Any] | None:
    """The best evaluation by the metric that the run chose."""
    best = [(step, scores) for step, scores in evaluations if scores.get("is_best")][-1:]
    metric = "reward" if _is_grpo(config) else config["training"]["metric_for_best_model"]
    metric = _setting(evaluations, "metric", metric)
    return {"step": best[0][0], "metric": metric, "value": best[0][1][metric]} if best else None


def _setting(evaluations: Sequence[Evaluation], name: str, default: Any) -> Any:
    """What the shown evaluations were made with: the config of a resumed run may say something else by now."""
    return evaluations[-1][1].get("settings", {}).get(name, default) if evaluations else default


def _is_grpo(config: Mapping[str, Any]) -> bool:
    return config["custom"]["trainer_variant"] == "grpo"


def _read_events(run_dir: Path, notes: dict[str, str]) -> Any:
    """TensorBoard's reader of the event files; None if there are none."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    if not any(run_dir.glob("events.out.tfevents.*")):
        notes["curves"] = "This run wrote no TensorBoard events (training.report_to: none)."
        return None
    return EventAccumulator(str(run_dir), size_guidance={"scalars": 0}).Reload()


def _points(events: Any, tag: str) -> list[tuple[float, float]]:
    is_known = events is not None and tag in events.Tags()["scalars"]
    return [(event.step, event.value) for event in events.Scalars(tag)] if is_known else []


def draw_curves(events: Any) -> list[Chart]:
    """The curves of `CURVES` that the event files hold."""
    images = dict(_points(events, "rollout/num_images"))
    drawn = []
    for title, is_share, tags in CURVES:
        lines = [Line(name, _points(events, tag), tag.startswith("eval/")) for name, tag in tags]
        if title == "duplicates per image":  # counted per step
            own = [(step, value / max(images.get(step, 1), 1)) for step, value in lines[0].points]
            lines[0] = Line(lines[0].name, own)
        drawn.append(charts.draw(title, lines, is_share=is_share))
    return [chart for chart in drawn if chart]


def class_rows(evaluations: Sequence[Evaluation], notes: dict[str, str]) -> list[dict[str, Any]]:
    """Scores of each class at the end, with F1 at the start; the most frequent first."""
    last = evaluations[-1][1].get("labels") if evaluations else None
    if not last:
        notes["classes"] = "No evaluation of this run counts by class."
        return []
    first = evaluations[0][1].get("labels", {})
    if len(last) > MAX_CLASSES:
        notes["classes_cut"] = f"The {MAX_CLASSES} most frequent of {len(last)} classes."
    rows = list(last.items())[:MAX_CLASSES]
    return [{"name": name, "before": first.get(name, {}).get("f1"), **row} for name, row in rows]


def _coco(run_dir: Path, notes: dict[str, str]) -> list[dict[str, Any]]:
    """Results of `tools.evaluate` on this run's checkpoints."""
    found = []
    paths = run_dir.glob("checkpoint-*/merged/evaluation/*.json")
    for path in sorted(paths, key=lambda own: (len(own.parents[2].name), own)):  # checkpoint-200 before -1000
        result = _read_json(path) or {}
        values = result.get("coco") or result.get("coco_constant") or {}
        checkpoint, is_ranked = path.parents[2].name, "coco" in result
        data = path.stem + (f", first {limit} samples" if (limit := result.get("limit")) else "")
        found.append({"checkpoint": checkpoint, "data": data, "is_ranked": is_ranked, "values": values})
    if not found:
        notes["coco"] = "No checkpoint was scored by tools.evaluate, which gives COCO's average precision."
    return found


def _servers(run_dir: Path, notes: dict[str, str]) -> dict[str, Any] | None:
    """What `rollouts.jsonl` says about the calls to the rollout servers."""
    path = run_dir / "rollouts.jsonl"
    counts, urls, fallbacks, line = Counter[str](), set[str](), set[str](), None
    for line in rollout_lines(path) if path.exists() else ():
        for call in line.get("calls", []):
            is_retry, has_failed = call.get("attempt", 1) > 1, call.get("outcome") != "ok"
            counts.update(calls=1, requests=call.get("num_requests", 0), retries=is_retry, failed=has_failed)
        urls |= {server["url"] for server in line.get("servers", [])}
        if fallback := line.get("sync", {}).get("fallback"):
            fallbacks.add(str(fallback))
    if line is None:
        notes["servers"] = "There is no rollouts.jsonl: no rollout server has generated for this run."
        return None
    numbers = {name: counts[name] for name in ("calls", "requests", "retries", "failed")}
    return numbers | {
        "urls": sorted(urls),
        "fallbacks": sorted(fallbacks),
        "version": line.get("weight_version"),
    }


def changed_keys(
    config: Mapping[str, Any], section: type[Section] = Config, prefix: str = ""
) -> list[tuple[str, str, str, str]]:
    """(path, value, default, meaning) of every key of a resolved config that differs from the schema's default."""
    rows = []
    for name, field in section_keys(section).items():
        value, inner = config.get(name), section_of(field.annotation)
        if inner is not None and isinstance(value, Mapping):
            rows += changed_keys(value, inner, f"{prefix}{name}.")
            continue
        default = field.get_default(call_default_factory=True)
        if name in config and (field.is_required() or value != default):
            shown = "required" if field.is_required() else brief(default)
            rows.append((prefix + name, json.dumps(value, ensure_ascii=False), shown, field.description or ""))
    return rows


def _resume(run_dir: Path, record: Mapping[str, Any], finished: Mapping[str, Any] | None) -> dict[str, Any]:
    """The newest checkpoint, and the commands that go on from it."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config", default="FILE")
    checkpoint, (script, *arguments) = newest_checkpoint(run_dir), record["command"]
    config = shlex.quote(parser.parse_known_args(arguments)[0].config)
    # Earlier versions kept no launch command; which GPUs and nodes they had is not known.
    launch = f"deepspeed --num_gpus {record.get('world_size', 1)} {Path(script).name} --config {config}"
    data = record["config"]["custom"].get("val_jsonl") or record["config"]["custom"]["train_jsonl"]
    rewards = record["config"]["rlhf"]["reward_funcs"] if _is_grpo(record["config"]) else None
    is_detection = rewards is None or rewards_detections(rewards)
    scored = f"--checkpoint {shlex.quote(f'{checkpoint}/merged')} --data {shlex.quote(data[0]['path'])}"
    return {
        "checkpoint": checkpoint and str(checkpoint),
        "is_finished": finished is not None,
        "launch": resume_command(record.get("launch", launch), run_dir),
        "evaluate": f"python -m tools.evaluate {scored} --config {config}" if is_detection else None,
    }


# ---------------------------------------------------------------------------------------------------------------------
# answers


def answers(
    run_dir: Path, evaluations: Sequence[Evaluation], config: Mapping[str, Any], num_images: int, notes: dict[str, str]
) -> dict[str, Any]:
    """The gallery and the precision-recall curve, from the answers of the first and the last evaluation."""
    shown = {"gallery": [], "errors": {}, "num_answers": 0, "precision_recall": None}
    threshold = config["custom"]["extra"]["rollout_matching"]["eval"]["iou_threshold"]
    threshold = _setting(evaluations, "iou_threshold", threshold)
    paths = {step: run_dir / f"eval/step_{step:06d}.jsonl" for step, _ in evaluations}
    files = _first_of_objects(paths.items()) | _first_of_objects(reversed(paths.items()))
    steps = list(files)
    if not steps:
        were_kept = any(map(_read_lines, paths.values()))
        reason = "The answers of this run are no objects in images" if were_kept else "No answers were kept"
        notes["gallery"] = notes["precision_recall"] = f"{reason}, so there is nothing to draw."
        return shown
    first, last = files[steps[0]], files[steps[-1]]
    curves = {f"step {step}": precision_recall(list(files[step].values()), threshold) for step in (steps[0], steps[-1])}
    lines = [Line(name, list(zip(c[1].tolist(), c[0].tolist(), strict=True))) for name, c in curves.items() if c]
    title = f"precision over recall at IoU {threshold:g}, all classes together"
    shown["precision_recall"] = charts.draw(title, lines, is_share=True, is_square=True)
    if shown["precision_recall"] is None:
        notes["precision_recall"] = (
            "Nothing was predicted, or without confidences, which only vLLM gives (docs/training.md)."
        )
    after = {name: judge(record, threshold) for name, record in last.items()}
    before = {name: judge(record, threshold) for name, record in first.items()} if len(steps) > 1 else {}
    if not before:
        notes["before"] = "Only one evaluation: training.eval_at_start keeps the start model's answers, too."
    names = list(after)
    for name in (names[i] for i in choose([after[name].errors for name in names], num_images)):
        shown["gallery"].append(card(last[name], before.get(name), after[name]))
    every = [own.errors for own in after.values()]
    totals = {kind: sum(1 for errors in every if errors[kind]) for kind in ERRORS}
    totals["all right"] = sum(1 for errors in every if not errors.total())
    return shown | {"errors": totals, "num_answers": len(after)}


def _first_of_objects(paths: Iterable[tuple[int, Path]]) -> dict[int, dict[tuple[Any, ...], dict[str, Any]]]:
    """The first of these evaluations that kept answers, all of objects, if any; the others' are not held in memory."""
    for step, path in paths:
        records = _read_lines(path)
        if records and all("gt" in line for line in records.values()):
            return {step: records}
    return {}


def _read_lines(path: Path) -> dict[tuple[Any, ...], dict[str, Any]]:
    """Records by id, images and how many with these came before: two files may count their lines alike, and an image
    may have several questions. All evaluations of a run write such records in the same order. None, with a warning, of
    a damaged file."""
    records, num_before = {}, Counter[tuple[Any, ...]]()
    try:
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        found = list(map(json.loads, lines))
    except ValueError as error:
        logger.warning("%s cannot be read and is left out: %s", path, error)
        return {}
    for record in found:
        key = (record["id"], *record.get("images", []))
        records[*key, num_before[key]] = record
        num_before[key] += 1
    return records


def card(record: Mapping[str, Any], before: Judged | None, after: Judged) -> dict[str, Any]:
    """One image of the gallery; without a readable image its boxes stand on a blank square, and `reason` says why."""
    width, height, uri, reason = SIDE, SIDE, "", ""
    try:
        width, height, uri = photo(record["images"][0], SIDE) if record["images"] else (SIDE, SIDE, "")
    except OSError as error:
        reason = str(error)
    sides = [("ground truth", after.gt)] + ([("before", before.pred)] if before else []) + [("after", after.pred)]
    panels = [(title, [_drawn(obj, verdict, width, height) for obj, verdict in objects]) for title, objects in sides]
    errors = {kind: number for kind, number in after.errors.items() if number} or {"all right": 1}
    return {
        "id": record["id"],
        "width": width,
        "height": height,
        "uri": uri,
        "reason": reason,
        "panels": panels,
        "errors": errors,
    }


def _drawn(obj: Any, verdict: str, width: int, height: int) -> dict[str, Any]:
    """An outline as SVG points, with the place of its label."""
    coords = bins_to_pixels(obj.coords, width, height)
    if obj.kind == "bbox_2d":
        x1, y1, x2, y2 = coords
        coords = (x1, y1, x2, y1, x2, y2, x1, y2)
    xy = [round(value, 1) for value in coords]
    points = " ".join(f"{x},{y}" for x, y in zip(xy[0::2], xy[1::2], strict=True))
    return {"desc": obj.desc, "verdict": verdict, "points": points, "x": min(xy[0::2]), "y": max(min(xy[1::2]), 12)}


if __name__ == "__main__":
    main()
