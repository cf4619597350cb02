"""What a run writes down about its rollouts: every call (LOG-1), a few samples to look at (LOG-4), the servers (LOG-6).

Looks on only: what it is shown was decided elsewhere, and nothing is trained on what it writes. TensorBoard and the
progress line are `utils.run.monitor`'s, pictures are `utils.run.draw`'s.
"""

import hashlib
import json
import logging
import re
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from utils.capacity import EVAL_MICRO_STEP
from utils.data.samples import Sample, open_image
from utils.dist import Ranks
from utils.geometry import Object, iou_matrix, to_norm1000
from utils.parsing import ParsedAnswer, TokenTable
from utils.rollout.backend import RolloutResult
from utils.rollout.client import RolloutClient
from utils.run.draw import draw_objects, sheet, stack, text_panel
from utils.run.monitor import Monitor
from utils.scores import object_record
from utils.targets import Target

logger = logging.getLogger(__name__)

# ---------------------------------------------------------------------------------------------------------------------
# rollouts.jsonl (LOG-1)

_TIMED_OUT = re.compile(r"no answer within|timed out|took too long")


class RolloutLog:
    """`rollouts.jsonl` under the run directory: one line per step that makes rollouts.

    A line holds `step`, `phase` (`train` or `eval`), `time`, `servers` (url and group port), `sync` (the mode in force,
    and why it is not the configured one), `weight_version`, `decoding` and `calls`: each with rank, server, url, seed,
    first request, number of requests, `global_step` and `micro_step_idx` (which seeds are made of), `attempt` (above 1
    for a retry), `outcome` (`ok` or the error) and seconds. A call of another version or decoding says so itself.

    Args:
        run_dir: made if need be, by rank 0, which writes.
        client: None where no server generates; then nothing is written at all.
        ranks: whose calls are gathered.
    """

    def __init__(self, run_dir: Path, client: RolloutClient | None, ranks: Ranks) -> None:
        self._path, self._client, self._ranks = run_dir / "rollouts.jsonl", client, ranks
        self._totals: Counter[str] = Counter()
        self._pending: list[dict[str, Any]] = []  # calls made ahead of their step
        if client is not None and ranks.is_main:
            run_dir.mkdir(parents=True, exist_ok=True)
            _end_torn_line(self._path)

    def write(
        self,
        step: int,
        version: str | None,
        sync_mode: str = "full",
        fallback: str | None = None,
        phase: str = "train",
    ) -> dict[str, float]:
        """Append a line about all calls of all ranks for this step and phase, unless there are none (collective).

        Args:
            step: as in TensorBoard: optimizer steps done, so a `train` line is about `global_step` up to `step - 1`.
            version: of the weights that the servers have.
            sync_mode: in force, `full` or `adapter`.
            fallback: why that is not the configured mode, None if it is.

        Returns:
            Its numbers as TensorBoard scalars: `rollout/...` of this step and `server/<index>/calls`, `retries` and
            `timeouts` since this process began; of an evaluation only `eval_rollout/...`. None on other ranks.
        """
        if self._client is None:
            return {}
        self._pending += self._client.take_calls()
        ready = [call for call in self._pending if _is_of(call, step, phase)]
        self._pending = [call for call in self._pending if not _is_of(call, step, phase)]
        calls_by_rank = self._ranks.gather(ready)
        if not self._ranks.is_main or not any(calls_by_rank):
            return {}
        calls = [
            {**call, "rank": rank, "attempt": attempt}
            for rank, part in enumerate(calls_by_rank)
            for call, attempt in _attempts(part)
        ]
        calls.sort(key=lambda call: [call[k] for k in ("rank", "global_step", "micro_step_idx", "first_request")])
        shared = {"weight_version": version, "decoding": calls[0]["decoding"]}
        line = {
            "step": step,
            "phase": phase,
            "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "servers": [{"url": server.base_url, "group_port": server.group_port} for server in self._client.servers],
            "sync": {"mode": sync_mode, "fallback": fallback},
            **shared,
            "calls": [_without(call, shared) for call in calls],
        }
        # One write of one whole line: what a kill can leave behind is the beginning of the last line, nothing worse.
        with self._path.open("a") as file:
            file.write(json.dumps(line, default=str) + "\n")
        self._totals.update(_totals(calls))
        prefix = "rollout" if phase == "train" else f"{phase}_rollout"
        return _scalars(calls, shared, prefix) | (dict(self._totals) if phase == "train" else {})


def read_rollout_log(path: Path) -> list[dict[str, Any]]:
    """The lines of a `rollouts.jsonl`, in order; beginnings of lines that a kill left behind are passed over."""
    lines = []
    for text in path.read_bytes().split(b"\n"):
        try:
            lines.append(json.loads(text))
        except ValueError:
            continue
    return lines


def _is_of(call: Mapping[str, Any], step: int, phase: str) -> bool:
    if phase == "train":
        return call["micro_step_idx"] != EVAL_MICRO_STEP and call["global_step"] < step
    return call["micro_step_idx"] == EVAL_MICRO_STEP


def evaluation_file(run_dir: Path, step: int) -> Path:
    """Where the scores of the evaluation at `step` lie once it is finished; every answer beside it, as `.jsonl`."""
    return run_dir / "eval" / f"step_{step:06d}.json"


def write_evaluation(
    run_dir: Path, step: int, result: Mapping[str, float], answers: Sequence[Mapping[str, Any]], is_best: bool
) -> None:
    """`eval/step_N.json` (scores) and `eval/step_N.jsonl` (every answer, by `id`) under the run directory."""
    path = evaluation_file(run_dir, step)
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = (json.dumps(answer) + "\n" for answer in sorted(answers, key=lambda answer: answer["id"]))
    path.with_suffix(".jsonl").write_text("".join(lines))
    aside = path.with_suffix(".partial")
    aside.write_text(json.dumps({"step": step, "is_best": is_best, **result}, indent=2) + "\n")
    aside.replace(path)  # last and whole: there is an evaluation where there is this file


def _end_torn_line(path: Path) -> None:
    """Where an earlier process was killed in the middle of a line, the next line must not be glued to it."""
    if path.exists() and not path.read_bytes().endswith(b"\n") and path.stat().st_size:
        with path.open("a") as file:
            file.write("\n")


def _attempts(calls: Sequence[Mapping[str, Any]]) -> list[tuple[Mapping[str, Any], int]]:
    """Calls of one rank in the order they ended, with how often the same requests have been asked for by then."""
    seen: Counter[tuple] = Counter()
    numbered = []
    for call in calls:
        key = tuple(call[k] for k in ("global_step", "micro_step_idx", "server", "first_request", "num_requests"))
        seen[key] += 1
        numbered.append((call, seen[key]))
    return numbered


def _without(call: Mapping[str, Any], shared: Mapping[str, Any]) -> dict[str, Any]:
    """The call without what its line says for all calls."""
    return {key: value for key, value in call.items() if key != "group_port" and (key, value) not in shared.items()}


def _totals(calls: Sequence[Mapping[str, Any]]) -> Counter[str]:
    """Counts per server that only ever grow."""
    totals: Counter[str] = Counter()
    for call in calls:
        prefix = f"server/{call['server']}"
        totals[f"{prefix}/calls"] += 1
        totals[f"{prefix}/retries"] += call["attempt"] > 1
        totals[f"{prefix}/timeouts"] += _timed_out(call)
    return totals


def _scalars(calls: Sequence[Mapping[str, Any]], shared: Mapping[str, Any], prefix: str) -> dict[str, float]:
    """The numbers of one line. The exact seed is in the file: TensorBoard keeps 24 bits of it."""
    values = {
        "num_calls": len(calls),
        "retries": sum(call["attempt"] > 1 for call in calls),
        "failed_calls": sum(call["outcome"] != "ok" for call in calls),
        "timeouts": sum(map(_timed_out, calls)),
        "first_seed": calls[0]["seed"],
        "call_seconds_max": max(call.get("seconds", 0.0) for call in calls),
        **{f"decoding/{name}": value for name, value in shared["decoding"].items()},
    }
    weight_step = str(shared["weight_version"]).rpartition(":")[2]
    if weight_step.isdigit():
        values["weight_version"] = int(weight_step)
    return {f"{prefix}/{name}": float(value) for name, value in values.items()}


def _timed_out(call: Mapping[str, Any]) -> bool:
    return call["outcome"] != "ok" and _TIMED_OUT.search(call["outcome"]) is not None


# ---------------------------------------------------------------------------------------------------------------------
# sample sheets (LOG-4)

UNMATCHED = "#d73027"
PAIR_COLOURS = ("#1f78b4", "#33a02c", "#6a3d9a", "#b15928", "#008b8b", "#c51b7d", "#4d4d4d", "#7a7a00")
MARKS = {"text": "#c7e9c0", "changed": "#fdd49e", "coord": "#c6dbef"}  # backgrounds of what is learnt
CUT_OFF = "#dddddd"  # background of what the usable prefix does not hold
SIDE = 448  # pixels of the longer side of a drawn image
_SHORT = 200  # characters of an image's path or data URI


@dataclass(frozen=True)
class Example:
    """One sample of a step with all that became of it; `pairs` are (prediction, ground truth) as matched."""

    sample: Sample
    answer: RolloutResult
    parsed: ParsedAnswer
    pairs: Sequence[tuple[int, int]]
    target: Target


class SampleDump:
    """A PNG sheet and a JSON file per dumped sample, `dumps/step_000040/<sample id>.{png,json}`.

    Args:
        run_dir: the run directory.
        table: of the tokenizer that the answers are written with.
        every_steps: optimizer steps between dumps, 0 for none.
        num_samples: per dump; the attribute of this name says how many to collect, 0 where none will be written.
        enabled: True on rank 0.
    """

    def __init__(self, run_dir: Path, table: TokenTable, every_steps: int, num_samples: int, enabled: bool) -> None:
        self.every_steps, self.num_samples = every_steps, num_samples if enabled and every_steps else 0
        self._folder, self._table, self._has_warned = run_dir / "dumps", table, False

    def write(self, step: int, examples: Sequence[Example], monitor: Monitor) -> None:
        """Dump the first examples if it is their step's turn; warns (once per run) where that fails, never raises."""
        if not self.num_samples or step % self.every_steps:
            return
        folder = self._folder / f"step_{step:06d}"
        names: Counter[str] = Counter()
        for index, example in enumerate(examples[: self.num_samples]):
            try:
                name = safe_name(example.sample.id)
                names[name] += 1
                name += f"-{names[name]}" if names[name] > 1 else ""
                record, picture = example_record(example, self._table), example_sheet(example, self._table)
                folder.mkdir(parents=True, exist_ok=True)
                picture.save(folder / f"{name}.png")
                text = json.dumps({"step": step, **record}, indent=1, ensure_ascii=False) + "\n"
                (folder / f"{name}.json").write_text(text, encoding="utf-8")
                monitor.image(step, f"dump/{index}", np.asarray(picture))
            except Exception as error:  # noqa: BLE001  (a picture must not end a run, whatever is wrong with it)
                self._warn_once(f"sample {example.sample.id} could not be dumped below {folder}", error)

    def _warn_once(self, what: str, error: Exception) -> None:
        if not self._has_warned:
            logger.warning("%s: %s: %s (said once per run)", what, type(error).__name__, error)
        self._has_warned = True


def safe_name(sample_id: str) -> str:
    """A file name for a sample id: itself where that is harmless, else its harmless part and a digest of all of it."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "_", sample_id).strip("._-")[:80]
    digest = hashlib.sha256(sample_id.encode(errors="surrogatepass")).hexdigest()[:8]
    return name if name and name == sample_id else f"{name}-{digest}".lstrip("-")


def example_record(example: Example, table: TokenTable) -> dict[str, Any]:
    """Everything about one sample as plain JSON values; coordinates are norm1000 (0..999), but for what stands in texts
    and what tokens learn; indices count within their own list."""
    sample, answer, parsed, target = example.sample, example.answer, example.parsed, example.target
    max_bin = table.format.max_bin
    pred_objects = [pred.object for pred in parsed.objects]
    iou = iou_matrix(pred_objects, sample.objects)
    matched_pred, matched_gt = {p for p, _ in example.pairs}, {g for _, g in example.pairs}
    return {
        "id": sample.id,
        "source": sample.source,
        "images": [image if len(image) <= _SHORT else image[:_SHORT] + "..." for image in sample.images],
        "width": sample.width,
        "height": sample.height,
        "messages": sample.messages,
        "gt": [object_record(obj, max_bin) for obj in sample.objects],
        "pred": [object_record(obj, max_bin) for obj in pred_objects],
        "pairs": [{"pred": p, "gt": g, "iou": float(iou[p, g])} for p, g in example.pairs],
        "unmatched_pred": [p for p in range(len(pred_objects)) if p not in matched_pred],
        "unmatched_gt": [g for g in range(len(sample.objects)) if g not in matched_gt],
        "rollout": {
            "text": _text(answer.response_token_ids, table),
            "token_ids": list(map(int, answer.response_token_ids)),
            "num_prefix_tokens": parsed.num_exact,
            "finish_reason": answer.finish_reason,
            "weight_version": answer.weight_version,
            "error": answer.error,
            "closed": parsed.closed,
            "dropped": parsed.dropped,
        },
        "target": {
            "text": _text(target.answer_ids.tolist(), table),
            "marked": marked_text(target, table),
            "num_prefix_tokens": target.num_prefix,
            "num_matched": target.num_matched,
            "num_appended": target.num_appended,
            "num_trimmed": target.num_trimmed,
            "respelled": target.respelled,
            "tokens": token_records(target, table),
        },
    }


def token_records(target: Target, table: TokenTable) -> list[dict[str, Any]]:
    """Per answer token: `id`, `token` (its text, bytes that are no whole character as `\\xc3`) and `kind`.

    `kind` is `none`; `text`, with the token to learn as `target_id` and `target`; or `coord`, with the bin to learn as
    `target`, fractional for polygons. Learnt tokens have a `weight` among those of their kind.
    """
    records = [{"id": token, "token": _token(token, table), "kind": "none"} for token in target.answer_ids.tolist()]
    for index, label, weight in zip(target.text_index, target.text_label, target.text_weight, strict=True):
        text = {"target_id": int(label), "target": _token(int(label), table), "weight": float(weight)}
        records[index] |= {"kind": "text", **text}
    for index, value in zip(target.coord_index, target.coord_target, strict=True):
        records[index] |= {"kind": "coord", "target": float(value), "weight": 1.0}
    return records


def marked_text(target: Target, table: TokenTable) -> str:
    """The answer to learn with its supervision: `«learnt»`, `«written->to learn»`, `<120->118.5>`; the rest is context.

    Coordinates read `<120>` where nothing is learnt.
    """
    return "".join(text if kind in ("none", "coord") else f"«{text}»" for text, kind in _runs(target, table))


def _runs(target: Target, table: TokenTable) -> list[tuple[str, str]]:
    """(text, kind) of neighbouring tokens of one kind: `none`, `text`, `changed` (learns another token) or `coord`."""
    runs: list[tuple[bytes, str]] = []
    for record in token_records(target, table):
        kind, text = record["kind"], _shown(record["id"], table)
        if kind == "coord":
            text = text[:-1] + f"->{round(record['target'], 1):g}>".encode()
        elif kind == "text" and record["target_id"] != record["id"]:
            kind, text = "changed", text + f"->{record['target']}".encode()
        if runs and runs[-1][1] == kind and kind in ("none", "text"):
            runs[-1] = (runs[-1][0] + text, kind)  # joined as bytes: a character may be spelled by several tokens
        else:
            runs.append((text, kind))
    return [(text.decode(errors="replace"), kind) for text, kind in runs]


def example_sheet(example: Example, table: TokenTable) -> Image.Image:
    """Ground truth beside prediction, then the rollout, then the target with what is learnt on coloured ground.

    A pair has one colour and one number on both sides; what has no partner is red, with an x. Objects are
    drawn in the first image only.
    """
    sample, answer, parsed, target = example.sample, example.answer, example.parsed, example.target
    pred_objects = [pred.object for pred in parsed.objects]
    number = {side: {pair[side]: k for k, pair in enumerate(example.pairs, start=1)} for side in (0, 1)}
    rows = []
    for index, source in enumerate(sample.images or [""]):
        image = _open_or_blank(source)
        sides = [(sample.objects, number[1]), (pred_objects, number[0])] if index == 0 else [([], {}), ([], {})]
        rows.append([_drawn(image, objects, numbers, table.format.max_bin) for objects, numbers in sides])
    pictures = sheet(rows, (f"ground truth ({len(sample.objects)})", f"prediction ({len(pred_objects)})"))
    width = max(pictures.width, 2 * SIDE)
    ids, kept = answer.response_token_ids, parsed.num_exact
    facts = (
        f"{sample.id}   weights {answer.weight_version}   {len(example.pairs)} matched, {target.num_appended} appended"
        f", dropped {parsed.dropped or 0}, {answer.error or answer.finish_reason}"
    )
    legend = [("learnt", MARKS["text"]), (" ", None), ("written->to learn", MARKS["changed"])]
    legend += [(" ", None), ("<coordinate->to learn>", MARKS["coord"])]
    written = [b"".join(_shown(token, table) for token in part) for part in (ids[:kept], ids[kept:])]
    return stack(
        [
            text_panel([(facts, None)], width),
            pictures,
            text_panel([("ROLLOUT   ", None), ("behind the usable prefix", CUT_OFF)], width),
            text_panel(
                [(written[0].decode(errors="replace"), None), (written[1].decode(errors="replace"), CUT_OFF)], width
            ),
            text_panel([("TARGET   ", None), *legend], width),
            text_panel([(text, MARKS.get(kind)) for text, kind in _runs(target, table)], width),
        ]
    )


def _drawn(image: Image.Image, objects: Sequence[Object], numbers: Mapping[int, int], max_bin: int) -> Image.Image:
    """The image with its objects; `numbers` holds the pair number of each matched one by its index."""
    found = [numbers.get(index) for index in range(len(objects))]
    colours = [PAIR_COLOURS[(n - 1) % len(PAIR_COLOURS)] if n else UNMATCHED for n in found]
    labels = [f"{n or 'x'} {obj.desc}" for n, obj in zip(found, objects, strict=True)]
    return draw_objects(image, [to_norm1000(obj, max_bin) for obj in objects], colours, SIDE, labels)


def _open_or_blank(source: str) -> Image.Image:
    """The image, or a grey one that says why there is none: the texts are worth a sheet without it."""
    try:
        if source:
            return open_image(source)
        reason = "no image"
    except (OSError, ValueError) as error:
        reason = str(error)
    blank = Image.new("RGB", (SIDE, SIDE), "#eeeeee")
    blank.paste(text_panel([(reason[:_SHORT], None)], SIDE), (0, 0))
    return blank


def _token(token: int, table: TokenTable) -> str:
    return table.bytes_of[token].decode(errors="backslashreplace")


def _text(token_ids: Sequence[int], table: TokenTable) -> str:
    """The text of ids, special tokens included; ids that the tokenizer does not know have none."""
    known = (table.bytes_of[token] for token in token_ids if 0 <= token < len(table.bytes_of))
    return b"".join(known).decode(errors="replace")


def _shown(token: int, table: TokenTable) -> bytes:
    """A token in a picture or marked text, where a coordinate is `<120>` for short."""
    if not 0 <= token < len(table.bytes_of):
        return b""
    return table.bytes_of[token] if table.coord_bin[token] < 0 else b"<%d>" % table.coord_bin[token]


# ---------------------------------------------------------------------------------------------------------------------
# servers (LOG-6)


def server_scalars(client: RolloutClient, timeout_s: float = 2.0) -> dict[str, float]:
    """How every server is, as `server/<index>/...` scalars; never raises.

    `healthy` (0 or 1), `health_latency_s`, `running` and `waiting` requests, `cache_usage` (share of the KV cache in
    use, mean over replicas), `device_memory_gib` (all its devices). A server that does not answer has `healthy` only.
    """
    values: dict[str, float] = {}
    for index in range(len(client.servers)):
        try:
            state = _server_state(client, index, timeout_s)
        except Exception as error:  # noqa: BLE001  (whatever it is, it is what is recorded; who needs the server stops)
            logger.debug("server %d could not be asked: %s", index, error)
            state = {"healthy": 0.0}
        values |= {f"server/{index}/{name}": float(value) for name, value in state.items()}
    return values


def _server_state(client: RolloutClient, index: int, timeout_s: float) -> dict[str, float]:
    health = client.health(index, timeout_s)
    metrics = client.metrics(index)
    state = {
        "healthy": 1.0,
        "health_latency_s": health["latency_s"],
        "running": metrics.get("vllm:num_requests_running", health.get("running", 0)),
        # those that a weight update holds back, and those in vLLM's own queue
        "waiting": health.get("waiting", 0) + metrics.get("vllm:num_requests_waiting", 0),
    }
    if "vllm:kv_cache_usage_perc" in metrics:
        num_replicas = max(metrics.get("vllm:cache_config_info", 1), 1)  # a gauge of 1 per replica; the client adds up
        state["cache_usage"] = metrics["vllm:kv_cache_usage_perc"] / num_replicas
    if "rollout_server_device_memory_bytes" in metrics:
        state["device_memory_gib"] = metrics["rollout_server_device_memory_bytes"] / 2**30
    return state


class ServerWatch:
    """Asks `server_scalars` again and again in a thread of its own.

    Requests run and wait only while the learner waits for their answers, so asking between two steps would always find
    idle servers; and a server that hangs must not hold up the step.

    Args:
        client: None where no server generates.
        enabled: True on rank 0; elsewhere nobody asks.
        period_s: pause between two looks at the servers.
    """

    def __init__(self, client: RolloutClient | None, enabled: bool, period_s: float = 2.0) -> None:
        self._client, self._period_s = client, period_s
        self._lock, self._over = threading.Lock(), threading.Event()
        self._worst: dict[str, float] = {}
        if client is not None and enabled:
            threading.Thread(target=self._run, name="server-watch", daemon=True).start()

    def take(self) -> dict[str, float]:
        """The largest value of each scalar since last taken (of `healthy` the smallest); empty if there is none."""
        with self._lock:
            values, self._worst = self._worst, {}
        return values

    def close(self) -> None:
        """Ask no more; does not wait for an answer that is under way."""
        self._over.set()

    def _run(self) -> None:
        while not self._over.is_set():
            values = server_scalars(self._client)
            with self._lock:
                for name, value in values.items():
                    worse = min if name.endswith("/healthy") else max
                    self._worst[name] = worse(value, self._worst.get(name, value))
            self._over.wait(self._period_s)
