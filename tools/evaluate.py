"""Score a finished checkpoint on a JSONL file: detection scores as in training (LRN-7), and COCO's average precision.

    python -m tools.evaluate --checkpoint RUN/checkpoint-N/merged --data FILE [--config FILE]

Generates greedily, with the strict parser and the scores of training, then scores the boxes again by COCO's rules. The
scores go to `--output FILE.json`, the responses to `FILE.jsonl` next to it, in the form of a run's
`eval/step_N.jsonl`: objects, the text they were read from, and how it ended. Prompt, image sizes, dtype, response
length and IoU threshold come from `--config`, or else from the schema's defaults.

COCO ranks detections by confidence. With vLLM that of a box comes from the log-probabilities of its own tokens
(TGT-14). Beside these figures stand those of the same boxes with a constant score, where ties rank in the order of the
file, and in the order of writing within a response. The hf backend reports no log-probabilities: it has only those.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import nn
from tqdm import tqdm

from tools.convert import check_not_inputs
from tools.lengths import prompt_lengths
from utils.config.checkpoint_files import checkpoint_problems
from utils.config.load import exit_with, load_config_or_exit, reason_of
from utils.config.plan import at_least_one
from utils.config.schema import Config, Data, Model, RolloutMatching
from utils.data.encoding import encode_prompt, grid_of, load_processor, prompt_chat
from utils.data.images import as_file
from utils.data.mistakes import BadLine, ProblemCounts
from utils.data.samples import DataError, LineReader, Sample, labels_in_both, load_samples
from utils.dist import Ranks
from utils.families import family_in
from utils.geometry import Object, coco_box, normal_label, to_norm1000
from utils.parsing import TokenTable, parse_answer
from utils.rollout.backend import RolloutContext, RolloutResult, RolloutSampling, rollout_requests
from utils.scores import (
    confidences,
    count_evaluation,
    evaluation_scores,
    label_counts,
    label_of,
    prediction_record,
)

COCO_NAMES = ("AP", "AP50", "AP75", "AP_small", "AP_medium", "AP_large", "AR1", "AR10", "AR100")
BROKEN_SCORES = re.compile(r'\s*($|\{\s*"(checkpoint|data|step)":)')  # how a file of scores that was cut off begins
VLLM_BATCHES = 16  # batches per call, so that vLLM always has requests waiting


def main() -> None:
    args = parse_args()
    output = Path(args.output or Path(args.checkpoint) / "evaluation" / f"{Path(args.data).stem}.json")
    cfg = None if args.config is None else load_config_or_exit(args.config)
    model, data, rm = settings(cfg, args.checkpoint)
    annotated = annotated_labels(cfg, args.data)
    skipped: list[BadLine] | None = [] if data.on_bad_sample == "skip" else None
    try:
        check_not_inputs([output, output.with_suffix(".jsonl")], {"--data": args.data, "--config": args.config})
        check_output(output, args.data, args.limit)
        check_checkpoint(Path(args.checkpoint), rm.answer_format)
        make_writable(output)
        processor = load_processor(args.checkpoint, model.image_min_pixels, model.image_max_pixels)
        grid = grid_of(processor, rm.format)
        reader = LineReader(data.prompt, data.object_order, rm.format, grid, needs_objects=True)
        samples = load_samples([args.data], skipped=skipped, reader=reader)[0][: args.limit]
        samples = [replace(own, annotated=labels_in_both(own.annotated, annotated)) for own in samples]
        table = TokenTable.from_tokenizer(processor.tokenizer, rm.format)
        prompt_lengths(samples, processor)
    except (DataError, ValueError, OSError) as error:
        exit_with(error)
    if skipped:
        problems = ProblemCounts()
        for line in skipped:
            problems.add(line)
        print(f"{len(skipped)} bad lines left out (data.on_bad_sample: skip)\n{problems.report()}", flush=True)
    backend = args.backend or ("vllm" if find_spec("vllm") else "hf")
    generate = generate_with_vllm if backend == "vllm" else generate_with_hf
    sampling = RolloutSampling(max_new_tokens=rm.max_new_tokens, logprobs=backend == "vllm")
    stream = generate(model, processor, samples, sampling, args.batch_size)
    responses = list(tqdm(stream, total=len(samples), unit="image", disable=None))
    result, predictions = score(samples, responses, table, rm.eval.iou_threshold, rm.eval.new_labels)
    data_file = str(Path(args.data).resolve())  # as `check_output` compares it, from whatever folder
    about = {"checkpoint": args.checkpoint, "data": data_file, "limit": args.limit, "config": args.config}
    about["backend"] = backend
    show(result, f"{args.checkpoint} on {len(samples)} images ({backend}, {model.dtype}, greedy)")
    about |= {"dtype": model.dtype, "iou_threshold": rm.eval.iou_threshold}
    try:
        write(output, about | result, predictions)
    except OSError as error:  # a full disk; the scores stand above
        exit_with(f"{output}: the scores or the answers cannot be written: {reason_of(error)}")
    print(f"scores: {output}   responses: {output.with_suffix('.jsonl')}")
    print(f"for other tools: python -m tools.export {shlex.quote(str(output.with_suffix('.jsonl')))} --output DIR")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", required=True, metavar="DIR", help="in Hugging Face form, e.g. .../merged")
    parser.add_argument("--data", required=True, metavar="FILE", help="JSONL with ground truth")
    parser.add_argument("--config", metavar="FILE", help="YAML of the run (default: the schema's defaults)")
    parser.add_argument("--backend", choices=("vllm", "hf"), help="default: vllm if it is installed")
    parser.add_argument(
        "--output", type=json_file, metavar="FILE.json", help="default: DIR/evaluation/NAME_OF_DATA.json"
    )
    parser.add_argument("--limit", type=at_least_one, metavar="N", help="score only the first N samples")
    parser.add_argument(
        "--batch-size", type=at_least_one, default=16, metavar="N", help="sequences per call (default 16)"
    )
    return parser.parse_args()


def json_file(text: str) -> str:
    if not text.endswith(".json"):
        raise argparse.ArgumentTypeError(f"{text!r} must end in .json; the answers go beside it, into .jsonl")
    return text


def settings(cfg: Config | None, checkpoint: str) -> tuple[Model, Data, RolloutMatching]:
    """Return the config's sections for generating and scoring, with `checkpoint` as the model."""
    if cfg is None:
        return Model(path=checkpoint), Data(), RolloutMatching()
    return cfg.model.model_copy(update={"path": checkpoint}), cfg.data, cfg.rm


def annotated_labels(cfg: Config | None, data: str) -> frozenset[str] | None:
    """Return the `annotated` of the config's entry of the file `data`, if it has one (DAT-5, TGT-12)."""
    if cfg is None:
        return None
    files = [*(cfg.custom.val_jsonl or []), *cfg.custom.train_jsonl]
    named = [own for own in files if Path(own.path).resolve() == Path(data).resolve()]
    return frozenset(map(normal_label, named[0].annotated)) if named and named[0].annotated is not None else None


def check_output(output: Path, data: str, limit: int | None) -> None:
    """Raise ValueError if `output` holds the scores of another data file (files in different folders often share a
    name) or of another `--limit`, or no evaluation wrote it or the file of the answers beside it."""
    beside = output.with_suffix(".jsonl")
    if output.is_dir():
        raise ValueError(f"--output: {output} is a folder; name a file")
    if not output.exists():
        if beside.exists():  # data, most likely: no evaluation wrote it
            raise ValueError(f"{beside}: exists, and would be overwritten; name another --output, or delete it")
        return
    text = output.read_text(errors="replace")
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if found is None and BROKEN_SCORES.match(text):  # a killed run's
        return
    if not isinstance(found, dict) or not found.keys() & {"f1", "reward"}:  # of this program, or of a run
        rule = "no evaluation wrote it; it would be overwritten: name another --output, or delete it"
        raise ValueError(f"{output}: exists, and {rule}")
    held, held_limit = found.get("data"), found.get("limit")
    if held and (Path(held).resolve() != Path(data).resolve() or held_limit != limit):
        what = f"{held}, " + ("all samples" if held_limit is None else f"--limit {held_limit}")
        raise ValueError(f"{output}: holds the scores of {what}; delete it or name another file with --output")


def make_writable(output: Path) -> None:
    """Make the folder of `output`. Raises ValueError where the scores or the answers could not be written."""
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        for path in (output, output.with_suffix(".jsonl")):
            is_new = not path.exists()
            path.open("a").close()
            if is_new:
                path.unlink()
    except OSError as error:
        raise ValueError(f"{output}: cannot be written ({reason_of(error)}); name another file with --output") from None


def check_checkpoint(folder: Path, answer_format: str) -> None:
    """Raise ValueError if `folder` is no checkpoint in Hugging Face form (the message names one inside it, if any), or
    one that is not whole, of a family that is not supported, or not in this answer format (FAM-2)."""
    if not (folder / "config.json").is_file():
        inside = folder / "merged"
        advice = f"use {inside}" if inside.is_dir() else "name a directory in Hugging Face form (checkpoint-N/merged)"
        raise ValueError(f"--checkpoint {folder}: no config.json there; {advice}")
    if found := checkpoint_problems(folder):
        raise ValueError("\n".join(f"--checkpoint {folder}: {rule}" for rule in found))
    if rule := family_in(folder).form_problem(answer_format):
        rule = f"answer_format={answer_format}: {rule}"
        raise ValueError(f"--checkpoint {folder}: {rule}; pass the --config that it was trained with")


# ---------------------------------------------------------------------------------------------------------------------
# responses


def generate_with_vllm(
    model: Model, processor: Any, samples: Sequence[Sample], sampling: RolloutSampling, batch_size: int
) -> Iterator[RolloutResult]:
    """Yield responses in order, from a vLLM engine in this process with just enough length for `samples`."""
    from utils.rollout.colocate import read_output, sampling_params, start_engine, vllm_prompt

    ranks = Ranks()
    ranks.open()
    longest = max(prompt_lengths(samples, processor))
    llm = start_engine(
        model,
        ranks.device,
        tensor_parallel_size=1,
        gpu_memory_utilization=0.9,
        max_model_len=longest + sampling.max_new_tokens,
        decode_batch_size=batch_size,
    )
    try:
        for part in _batches(samples, VLLM_BATCHES * batch_size):
            prompts = [vllm_prompt(processor, prompt_chat(sample), sample.images) for sample in part]
            for output in llm.generate(prompts, sampling_params(sampling, seed=0), use_tqdm=False):
                yield read_output(output, None)
    finally:
        llm.llm_engine.engine_core.shutdown()
        ranks.close()


class PlainEngine(nn.Module):
    """Replacement for DeepSpeed's engine in the hf backend: nothing is sharded, so it only calls the model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.module = nn.Module()
        self.module.model = model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


def generate_with_hf(
    model: Model, processor: Any, samples: Sequence[Sample], sampling: RolloutSampling, batch_size: int
) -> Iterator[RolloutResult]:
    """Yield responses in order, from transformers' `generate` through the backend that training uses."""
    from utils.learner.model import load_model
    from utils.rollout.hf import HfEngine

    ranks = Ranks()
    loaded = load_model(model.path, model.dtype, model.attn_implementation).to(ranks.device)
    learner = SimpleNamespace(model=loaded, engine=PlainEngine(loaded))
    engine = HfEngine(learner, ranks, processor, batch_size)
    context = RolloutContext(run_seed=0, global_step=0, micro_step_idx=0, policy_version=None)  # greedy needs no seed
    for part in _batches(samples, batch_size):
        requests = rollout_requests(part, [encode_prompt(sample, processor) for sample in part])
        yield from engine.generate(requests, sampling, context)


def _batches(samples: Sequence[Sample], size: int) -> Iterator[Sequence[Sample]]:
    """Consecutive slices; the images of a slice are in memory together."""
    return (samples[start : start + size] for start in range(0, len(samples), size))


# ---------------------------------------------------------------------------------------------------------------------
# scores


def score(
    samples: Sequence[Sample],
    responses: Sequence[RolloutResult],
    table: TokenTable,
    iou_threshold: float,
    new_labels: Sequence[str] = (),
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return all scores and one record per response.

    COCO's scores stand under `coco`: with confidences where all responses have log-probabilities, and under
    `coco_constant` with a constant score.
    """
    counts: Counter[str] = Counter()
    predictions, objects, ranking = [], [], []
    for sample, response in zip(samples, responses, strict=True):
        parsed = parse_answer(response.response_token_ids, table)
        truncated = response.finish_reason == "length"
        failed = response.error is not None
        counts.update(count_evaluation(parsed, sample, iou_threshold, truncated, failed))
        predictions.append(prediction_record(sample, parsed, response.logprobs, response.text, response.finish_reason))
        objects.append(parsed.pred_objects)
        ranking.append(confidences(parsed, response.logprobs))
    found = evaluation_scores(counts, new_labels) | {"labels": label_counts(counts)}
    found["coco_constant"] = coco_scores(samples, objects)
    if all(own is not None for own in ranking):
        found["coco"] = coco_scores(samples, objects, ranking)
    return found, predictions


def coco_scores(
    samples: Sequence[Sample],
    predictions: Sequence[Sequence[Object]],
    ranking: Sequence[Sequence[float]] | None = None,
) -> dict[str, float | None]:
    """Return COCO's box precisions and recalls (`COCO_NAMES`); None if there is no such object to find.

    Where samples say for which labels they are annotated (TGT-12), the rules of LVIS apply: a prediction of any other
    label costs nothing.

    Boxes are in pixels of the sample's first image; polygons count with their bounding boxes; areas are those of boxes.
    Categories are the ground truth's labels, compared as in training; a prediction with another label belongs to no
    category and costs nothing, as in COCO itself. At most 100 predictions of a category count per image.

    Args:
        ranking: the confidence of each prediction; None: all the same.
    """
    from faster_coco_eval import COCO, COCOeval_faster

    names = sorted({label_of(object_) for sample in samples for object_ in sample.objects})
    if not names:
        return dict.fromkeys(COCO_NAMES)
    category_of = {name: index for index, name in enumerate(names, start=1)}

    def entries(
        sides: Sequence[Sequence[Object]], marks: Sequence[Sequence[float]] | None = None
    ) -> list[dict[str, Any]]:
        found = [
            {
                "image_id": image_id,
                "category_id": category_of[label_of(o)],
                "score": 1.0 if marks is None else marks[image_id - 1][number],
                **_pixel_box(o, sample),
            }
            for image_id, (sample, side) in enumerate(zip(samples, sides, strict=True), start=1)
            for number, o in enumerate(side)
            if label_of(o) in category_of
        ]
        return [{"id": number, "iscrowd": 0, **entry} for number, entry in enumerate(found, start=1)]

    truth = COCO(
        {
            "images": [{"id": i, **_lvis_image(s, category_of)} for i, s in enumerate(samples, start=1)],
            "categories": [{"id": index, "name": name, "frequency": "f"} for name, index in category_of.items()],
            "annotations": entries([sample.objects for sample in samples]),
        }
    )
    is_partial = any(sample.annotated is not None for sample in samples)
    evaluator = COCOeval_faster(truth, truth.loadRes(entries(predictions, ranking)), "bbox", lvis_style=is_partial)
    evaluator.run()
    values = [float(value) for value in evaluator.stats[: len(COCO_NAMES)]]
    return {name: None if value < 0 else value for name, value in zip(COCO_NAMES, values, strict=True)}


def _lvis_image(sample: Sample, category_of: dict[str, int]) -> dict[str, Any]:
    """Size, and LVIS's lists of categories known to be absent and of those annotated in part."""
    annotated = set(category_of) if sample.annotated is None else sample.annotated & set(category_of)
    present = {label_of(object_) for object_ in sample.objects}
    width, height = sample.size_px
    return {
        "width": width,
        "height": height,
        "neg_category_ids": [category_of[name] for name in sorted(annotated - present)],
        "not_exhaustive_category_ids": [category_of[name] for name in sorted(present - annotated)],
    }


def _pixel_box(object_: Object, sample: Sample) -> dict[str, Any]:
    """Return COCO's `bbox` and `area`, in pixels."""
    bbox, area = coco_box(to_norm1000(object_, sample.grid), sample.size_px)
    return {"bbox": bbox, "area": area}


# ---------------------------------------------------------------------------------------------------------------------
# results


def write(output: Path, result: dict[str, Any], predictions: Sequence[dict[str, Any]]) -> None:
    """Write scores and answers; images that are embedded in the data are written to files, which the answers name.
    Raises OSError."""
    output.write_text(json.dumps(result, indent=2) + "\n")
    folder = output.with_name(f"{output.stem}_images")
    with output.with_suffix(".jsonl").open("w", encoding="utf-8") as file:
        for record in sorted(predictions, key=lambda record: record["id"]):
            images = [as_file(image, folder) for image in record["images"]]
            file.write(json.dumps(record | {"images": images}) + "\n")


def show(result: dict[str, Any], title: str) -> None:
    table = Table(title=Text(title))
    table.add_column("score")
    table.add_column("value", justify="right")
    for name, value in result.items():
        if not isinstance(value, dict) and name != "num_images":
            table.add_row(name, str(value) if isinstance(value, int) else f"{value:.4f}")
    for key, title in (("coco", "COCO {}"), ("coco_constant", "COCO {}, constant scores")):
        table.add_section()
        for name, value in result.get(key, {}).items():
            table.add_row(title.format(name), "-" if value is None else f"{value:.4f}")
    Console().print(table)
    labels = Table("label", "objects", "predicted", "precision", "recall", "F1", title="labels")
    for label, row in result["labels"].items():
        ratios = (f"{row[name]:.4f}" for name in ("precision", "recall", "f1"))
        labels.add_row(Text(label), str(row["num_gt"]), str(row["num_pred"]), *ratios)
    Console().print(labels)


if __name__ == "__main__":
    main()
