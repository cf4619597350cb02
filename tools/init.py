"""Write a complete, commented config for your own data and model, and print the commands that start it.

    python -m tools.init --data data/train.jsonl --model models/Qwen3-VL-8B-Instruct --gpus 4

Reads the data (JSONL as in docs/data.md, a COCO or LVIS file, or a folder with either) and the model's files, measures
prompts and true answers in tokens, and chooses batch geometry that fits the memory plan of `--dry-run`. COCO files are
converted first (tools.convert) to `data/NAME_train.jsonl` and `data/NAME_val.jsonl`. No device is used.
`--gpus 0` writes a config for a trial on CPU.
"""

import argparse
import itertools
import json
import math
import os
import shlex
import sys
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jinja2

from tools.coco import LeftOut, coco_items, no_coco_file
from tools.convert import NEGATIVE, Report, convert, find_image
from tools.lengths import prompt_lengths
from utils.answer_format import COORD_TOKENS, FORMATS, AnswerFormat
from utils.config.checkpoint_files import checkpoint_problems
from utils.config.load import ConfigError, exit_with, load_config, reason_of
from utils.config.memory import DEVICE_GIB, GIB
from utils.config.plan import Plan, at_least_one, format_plan, make_plan
from utils.config.rollout import MAX_IMAGE_PIXELS
from utils.data.encoding import grid_of, load_processor, special_words
from utils.data.images import find_in_shard
from utils.data.prompts import THINKS, leaves_thinking_open
from utils.data.samples import DataError, LineReader, Sample, load_samples
from utils.families import Family, family_in, longest_sequence, read_config, split_problem, text_config
from utils.geometry import normal_label
from utils.parsing import TokenTable

SPLITS = {"train": 0.95, "val": 0.05}  # of a COCO file that comes alone
MAX_PIXELS = 1 << 20  # of an image, as in the presets
ROWS = (512, 1024, 2048, 3072, 4096, 6144, 8192, 12000)  # lengths of a packed row
MAX_LINE_BYTES = 64 << 20  # a longer first line is that of a large COCO file; it is not parsed to find out
MAX_ROOTS = 20  # folders of images that are named one by one
FILL = 0.9  # of a row that a micro-step's samples take on average
SAMPLES_PER_STEP = 32
PARTIAL_TOKENS = 1024  # of an answer, at least, where the data list some of the objects
PARTIAL_KL = 30.0  # there it holds the other objects to the start model's view, as in the demo
OUTSIDE_GIB = 7  # beside vLLM's share of a GPU, for models of 8B
MIN_STEPS = 200  # small data are repeated until there are as many


@dataclass(frozen=True)
class DataFacts:
    """What the data need. Tokens are those of the model's tokenizer."""

    num_lines: int
    num_read: int
    num_classes: int
    objects_mean: float
    objects_max: int
    width_max: int
    height_max: int
    pixels_max: int  # of a line's images together, as a server counts them
    prompt_max: int
    answer_max: int
    segment_mean: int  # prompt and true answer
    is_partial: bool  # a quarter of the lines say for which labels they are complete (TGT-12); crowds are rarer
    positions: int | None = None  # most tokens that the model can hold, where it says so


def main() -> None:
    args = parse_args()
    try:
        text, plan = init(args)
    except (ValueError, OSError, DataError) as error:
        exit_with(error)
    print(text + format_plan(plan) + f"# wrote {args.output}; every line of the data was checked. Start it with:")
    print("\n".join(plan.layout.commands))


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--data", required=True, type=Path, metavar="DIR_OR_FILE", help="JSONL, COCO or LVIS file, or their folder")
    found = "the file beside it with val for the last train of its name; COCO and LVIS: 5 %% split off if there is none"
    add("--val", type=Path, metavar="FILE", help=f"held-out data of the same form (default: {found})")
    add("--images", type=Path, metavar="DIR", help="COCO: folder of file_name (default: looked for)")
    add("--model", required=True, type=Path, metavar="DIR", help="Hugging Face checkpoint of a supported family")
    add("--gpus", required=True, type=int, metavar="N", help="GPUs in this machine; 0: a trial on CPU")
    add("--device-gib", type=at_least_one, default=DEVICE_GIB, metavar="GIB", help=f"memory of one ({DEVICE_GIB})")
    add("--output", type=Path, metavar="FILE", help="config to write (default: NAME_OF_DATA.yaml)")
    args = parser.parse_args()
    if args.gpus < 0:
        parser.error("--gpus must not be negative")
    return args


def init(args: argparse.Namespace) -> tuple[str, Plan]:
    """Write the config; return what was found out, as comment lines, and the plan. Raises ValueError or OSError."""
    args.output = args.output or Path(f"{_name_of(args.data)}.yaml")
    if args.output.exists():
        raise ValueError(f"{args.output}: exists; remove it, or name another file with --output")
    if found := checkpoint_problems(args.model):
        raise ValueError("\n".join(f"--model {args.model}: {rule}" for rule in found))
    family = find_family(args.model)
    own = load_processor(str(args.model))
    if leaves_thinking_open(own):
        raise ValueError(f"--model {args.model}: {THINKS}")
    train, val = find_data(args.data, args.val, args.images)
    form, reason = answer_form(own.tokenizer, family)
    prompt = form.prompt
    own_limit = own.image_processor.size.get("longest_edge") or 0
    seen = load_processor(str(args.model), None, MAX_PIXELS) if own_limit > MAX_PIXELS else own  # as the config has it
    special = special_words(seen, form)
    reader = LineReader(prompt, form=form, grid_of=grid_of(seen, form), special=special, needs_objects=True)
    samples = load_samples([train], reader=reader)[0]
    held_out = load_samples([val], reader=reader)[0] if val else []
    max_pixels = pixel_limit(own, [*samples, *held_out])
    processor = load_processor(str(args.model), None, max_pixels) if max_pixels else own
    data = measure([*samples, *held_out], len(samples), processor, form)
    data = replace(data, positions=longest_sequence(read_config(args.model)))
    if data.positions and data.prompt_max + new_tokens(data) > data.positions:
        needed = f"{data.prompt_max} tokens of a prompt and {new_tokens(data)} of an answer"
        way_out = "leave out the images with the most objects, or take another model"
        raise ValueError(f"--model {args.model}: ends at {data.positions} positions, the data need {needed}; {way_out}")
    settings = {
        "answer_format": form.name,
        "format_reason": reason,
        "prompt": prompt,
        "model": str(args.model),
        "model_name": args.model.name,
        "data_name": args.data.name,
        "train": str(train),
        "val": val and str(val),
        "roots": image_roots([*samples, *held_out]),
        "max_pixels": max_pixels,
        "is_recurrent": family.mixer is not None,
        "text": text_config(read_config(args.model)),
        "unmatched": "drop_duplicates" if data.is_partial else "trim",
        "reference_kl": PARTIAL_KL if data.is_partial else 0.0,
        "rank": 64 if args.gpus else 16,
    }
    plan = fit(args.output, args.gpus, data, settings, args.device_gib)
    facts = f"{len(samples)} images to train on, {len(held_out)} to evaluate on, {data.num_classes} classes"
    return f"# {facts}; {form.name}: {reason}\n", plan


def _name_of(data: Path) -> str:
    return data.resolve().stem


# ---------------------------------------------------------------------------------------------------------------------
# what there is


def find_family(path: Path) -> Family:
    """The family of a checkpoint. Raises ValueError where `path` is no model that can be trained here."""
    try:
        return family_in(path)
    except OSError as error:
        rule = f"no readable config.json there ({reason_of(error)}); name a checkpoint"
        raise ValueError(f"--model {path}: {rule}") from None
    except ValueError as error:
        raise ValueError(f"--model {path}: {error}") from None


def answer_form(tokenizer: Any, family: Family) -> tuple[AnswerFormat, str]:
    """Coordinate tokens where the tokenizer has them, else the family's own form; and the reason."""
    try:
        TokenTable.from_tokenizer(tokenizer, COORD_TOKENS)
        return COORD_TOKENS, "the tokenizer has its tokens; a model that has not learnt them needs stage 1 first"
    except ValueError:
        if family.answer_format is None:
            raise
        form = FORMATS[family.answer_format]
        TokenTable.from_tokenizer(tokenizer, form)
        return form, "the tokenizer has no coordinate tokens"


def pixel_limit(processor: Any, samples: Sequence[Sample]) -> int | None:
    """The presets' limit of an image's pixels where model and data go beyond it; None: the model's own holds."""
    own = processor.image_processor.size.get("longest_edge")
    if own is None:
        return None  # tiles of one size
    largest = max((height * width for sample in samples for height, width in sample.image_sizes), default=0)
    return MAX_PIXELS if min(own, largest) > MAX_PIXELS else None


def find_data(data: Path, val: Path | None, images: Path | None) -> tuple[Path, Path | None]:
    """The JSONL files to train and to evaluate on, converted where they are COCO's. Raises ValueError."""
    train = data
    if data.is_dir():
        train = _pick(data, "train")
        beside = _pick(data, "val", or_none=True)
        missing = f'{data} has no other file, or several, with "val" in the name'
        beside = beside if beside != train else None  # trainval.jsonl
    elif not data.is_file():
        raise ValueError(f"--data {data}: no such file or folder")
    elif data.suffix.lower() in (".yaml", ".yml", ".xml", ".txt") and not has_sample_lines(data):
        kind = "voc" if data.suffix.lower() == ".xml" else "yolo"
        raise ValueError(f"--data {data}: convert it first: python -m tools.convert --from {kind} --help")
    else:
        beside = data.with_name("val".join(data.name.rsplit("train", 1)))
        missing = f"there is no {beside}" if beside != data else f'{data.name} has no "train" that "val" could replace'
        beside = beside if beside != data and beside.exists() else None
    if val is None and beside is not None:
        val, missing = (beside, "") if beside.stat().st_size else (None, f"{beside} is empty")
    if train.suffix == ".jsonl" or has_sample_lines(train):
        if val is None:
            _say_no_val(missing)
        return train, val
    target = Path("data") / f"{_name_of(data)}.jsonl"
    outputs = [target.with_name(f"{target.stem}_{split}.jsonl") for split in SPLITS]
    for output in outputs:
        if output.exists():
            raise ValueError(f"{output}: exists; train on it (--data {outputs[0]}), or remove it to convert again")
    if val is not None:
        if not val.is_file():
            raise ValueError(f"--val {val}: no such file")
        if has_sample_lines(val):
            rule = "is JSONL, but --data is COCO's; convert that first (tools.convert), or name a COCO file"
            raise ValueError(f"--val {val}: {rule}")
        try:
            for file, output in zip((train, val), outputs, strict=True):
                _convert(file, images, output)
        except BaseException:
            outputs[0].unlink(missing_ok=True)  # a second try would stop there
            raise
        return outputs[0], outputs[1]
    numbers = _convert(train, images, target, SPLITS).images
    if not numbers[str(outputs[1])]:
        _say_no_val(f"none of the few images is in {outputs[1]}")
        return outputs[0], None
    return outputs[0], outputs[1]


def has_sample_lines(file: Path) -> bool:
    """Whether the first line of a file that is not blank is a sample (DAT-1): JSON Lines have other endings, too."""
    with file.open("rb") as opened:
        line = b""
        while not line.strip() and (line := opened.readline(MAX_LINE_BYTES + 1)):
            pass
    if len(line) > MAX_LINE_BYTES:
        return False
    try:
        row = json.loads(line.decode("utf-8-sig"))
    except (ValueError, RecursionError):
        return False
    if not isinstance(row, dict) or {"images", "annotations"} <= row.keys() and not {"objects", "summary"} & row.keys():
        return False
    return not row.keys().isdisjoint(("images", "messages", "objects"))


def _say_no_val(reason: str) -> None:
    print(f"# no validation data: {reason}. Name a file with --val FILE; without one the run does not evaluate.")


def _convert(file: Path, images: Path | None, output: Path, splits: dict[str, float] | None = None) -> Report:
    """Convert a COCO or LVIS file and print what was left out, and why."""
    folder = _images_of(file, images)
    kind = "lvis" if any(NEGATIVE in image for image in coco_items(file, "images")) else "coco"
    report = convert(file, folder, output, splits=splits, kind=kind)
    print("".join(f"# {line}\n" for line in f"{file}, images in {folder}:\n{report.text()}".splitlines()), end="")
    return report


def _pick(folder: Path, split: str, or_none: bool = False) -> Path | None:
    """The data file of a split in a folder (or its `annotations/`): by name, or the only one."""
    lines = [path for path in folder.glob("*") if path.suffix.lower() in (".jsonl", ".ndjson")]
    found = sorted(lines) or sorted([*folder.glob("*.json"), *folder.glob("annotations/*.json")])
    named = [path for path in found if split in path.stem]
    named = [path for path in named if path.stem.startswith("instances")] or named  # of COCO's several files
    if len(named) > 1:  # a_train_val.jsonl is split off a_train.json
        named = [path for path in named if max("train", "val", key=path.stem.rfind) == split]
    if len(named) == 1:
        return named[0]
    if or_none:
        return None
    if len(found) == 1:
        return found[0]
    if not found and (nested := sorted(folder.glob("*/*.json"))):
        raise ValueError(f"--data {folder}: no JSON file in it; name one below it, such as {nested[0]}, or its folder")
    for kind, pattern in (("voc", "*.xml"), ("yolo", "*.yaml"), ("yolo", "classes.txt")):
        if not found and (next(folder.glob(pattern), None) or next(folder.glob(f"*/{pattern}"), None)):
            raise ValueError(f"--data {folder}: convert it first: python -m tools.convert --from {kind} --help")
    names = ", ".join(path.name for path in found[:5]) or "none"
    raise ValueError(f"--data {folder}: which file to train on? found {names}; name one")


def _images_of(annotations: Path, images: Path | None) -> Path:
    """The folder of a COCO file's images: `images`, unless that is the other split's and has none of the first ones.
    Then the one near it or near the file that holds most of them; of several alike the one whose name is in that of the
    file, as train2017 in instances_train2017.json."""
    first = list(itertools.islice(coco_items(annotations, "images"), 20))
    if not first:
        raise ValueError(no_coco_file(annotations))
    if images is not None and any(_file_of(image, images) for image in first):
        return images
    near = [annotations.parent, annotations.parent.parent, *([images.parent] if images is not None else [])]
    folders = [*near, *(child for folder in near for child in sorted(folder.glob("*/")))]
    by_files: dict[tuple[Path, ...], Path] = {}  # LVIS's are found from two folders; the upper one will do
    for folder in folders:
        by_files.setdefault(tuple(path for image in first if (path := _file_of(image, folder))), folder)
    most = max(map(len, by_files))
    found = [folder for files, folder in by_files.items() if len(files) == most > 0]
    if len(found) > 1:
        found = [folder for folder in found if folder.name in annotations.stem] or found
    if len(found) == 1:
        return found[0]
    if images is not None:
        return images
    where = f"are in several folders ({', '.join(map(str, found))})" if found else "are not near it"
    raise ValueError(f"{annotations}: its images {where}; name their folder with --images")


def _file_of(image: dict[str, Any], folder: Path) -> Path | None:
    """The image of a COCO file's entry, as the conversion finds it; None also where the folder may not be read."""
    try:
        return find_image(image, folder)
    except LeftOut:
        return None


def measure(samples: Sequence[Sample], num_lines: int, processor: Any, form: AnswerFormat) -> DataFacts:
    """Look at all samples; none of their images is opened. Raises DataError for prompts that cannot be encoded."""
    table = TokenTable.from_tokenizer(processor.tokenizer, form)
    prompts = prompt_lengths(samples, processor)
    answers = [len(table.encode(form.write(sample.objects))) + 1 for sample in samples]  # with the end token
    numbers = [len(sample.objects) for sample in samples]
    sizes = [size for sample in samples for size in sample.image_sizes] or [(0, 0)]
    classes = Counter(normal_label(obj.desc) for sample in samples for obj in sample.objects)
    num_partial = sum(sample.annotated is not None for sample in samples)
    return DataFacts(
        num_lines=num_lines,
        num_read=len(samples),
        num_classes=len(classes),
        objects_mean=sum(numbers) / len(numbers),
        objects_max=max(numbers),
        width_max=max(width for _, width in sizes),
        height_max=max(height for height, _ in sizes),
        pixels_max=max(sum(height * width for height, width in sample.image_sizes) for sample in samples),
        prompt_max=max(prompts),
        answer_max=max(answers),
        segment_mean=math.ceil((sum(prompts) + sum(answers)) / len(samples)),
        is_partial=4 * num_partial >= len(samples),
    )


def image_roots(samples: Sequence[Sample]) -> list[str]:
    """The folders that the images lie in; where they are many, those above them, as deep as they can be, but never /:
    a server must not read all of a machine."""
    images = [image for sample in samples for image in sample.images if not image.startswith("data:")]
    files = [image for image in images if find_in_shard(image) is None]  # from a shard the server gets the bytes
    folders = {os.path.dirname(os.path.realpath(file)) for file in files}  # the server follows links
    for depth in range(max((folder.count("/") for folder in folders), default=0), 0, -1):
        groups = defaultdict(list)
        for folder in folders:
            groups["/".join(folder.split("/")[: depth + 1])].append(folder)
        if len(groups) <= MAX_ROOTS:
            return sorted(map(os.path.commonpath, groups.values()))
    return sorted(folders)


# ---------------------------------------------------------------------------------------------------------------------
# the config


def geometry(row: int, gpus: int, learners: int, data: DataFacts) -> dict[str, Any]:
    """Batch geometry for rows of `row` tokens. A row holds about as many samples as a micro-step draws (PCK-7)."""
    rollout_devices = gpus - learners if gpus else 1
    batch = min(samples_per_learner(learners, data), max(1, int(FILL * row / data.segment_mean)))
    accumulation = round(samples_per_learner(learners, data) / batch)
    per_step = batch * accumulation * learners
    at_once = per_step if gpus > 1 else batch * learners  # servers take a step's micro-steps side by side, in one wave
    epochs = max(1, math.ceil(MIN_STEPS * per_step / data.num_lines))
    steps = max(1, epochs * data.num_lines // per_step)
    return {
        "gpus": gpus,
        "servers": gpus != 1,
        "learners": learners,
        "rollout_devices": rollout_devices,
        "row": row,
        "max_new_tokens": new_tokens(data),
        "max_model_len": min(_rounded(data.prompt_max + new_tokens(data), 256), data.positions or sys.maxsize),
        "decode": min(64, max(4, math.ceil(at_once / max(rollout_devices, 1)))),
        "batch": batch,
        "accumulation": accumulation,
        "buffer": max(64, 16 * batch),
        "samples_per_step": per_step,
        "epochs": epochs,
        "steps": steps,
        "warmup": max(1, steps // 20),
        "eval_steps": max(1, steps // 5),
    }


def learners_of(gpus: int) -> list[tuple[str, int]]:
    """DeepSpeed's engine and the number of learners, in the order in which they are tried. One GPU in four trains, as
    in the presets, or two where they share what one cannot hold; two processes on CPU."""
    few = max(1, gpus // 4) if gpus else 2
    return [("zero2", few), ("zero3", few), *[("zero3", 2 * few)] * (2 * few < gpus), ("zero3_offload", few)]


def samples_per_learner(learners: int, data: DataFacts) -> int:
    """Samples of a learner per optimizer step; small data have smaller steps."""
    wanted = max(1, min(SAMPLES_PER_STEP, data.num_lines // 10))
    return math.ceil(wanted / learners)


def engine_share(device_gib: int) -> float:
    """vLLM's share of a GPU: the default, or less where that would not leave what a sync needs (SYN-5)."""
    return min(0.85, math.floor(100 * (1 - OUTSIDE_GIB / device_gib)) / 100)


def new_tokens(data: DataFacts) -> int:
    """Room for answers half as long again as the longest true one, and ample room where images show more than is
    listed."""
    return _rounded(max(1.5 * data.answer_max, PARTIAL_TOKENS * data.is_partial), 64)


def _rounded(value: float, step: int) -> int:
    return math.ceil(value / step) * step


def fit(output: Path, gpus: int, data: DataFacts, settings: dict[str, Any], device_gib: int = DEVICE_GIB) -> Plan:
    """Write the first config that loads, passes all checks and fits the memory plan, and return its plan.

    Tried are rows from those that hold a learner's samples of a step down to those that hold the longest one, then the
    same with the next engine of `learners_of`. Raises ValueError with what the last one lacked, and leaves no file.
    """
    if gpus and device_gib <= OUTSIDE_GIB:
        rule = f"a rollout GPU keeps {OUTSIDE_GIB} GiB free for weights that come in; take GPUs with more memory"
        raise ValueError(f"--device-gib {device_gib}: {rule}")
    settings = settings | {"device_gib": device_gib, "share": engine_share(device_gib)}
    settings["max_image_pixels"] = data.pixels_max if data.pixels_max > MAX_IMAGE_PIXELS else None
    longest = data.prompt_max + new_tokens(data) + data.answer_max
    error: ConfigError | None = None
    output.parent.mkdir(parents=True, exist_ok=True)
    for engine, learners in learners_of(gpus):
        wanted = max(longest, samples_per_learner(learners, data) * data.segment_mean / FILL)
        largest = next((row for row in ROWS if row >= wanted), ROWS[-1])
        for row in [row for row in reversed(ROWS) if longest <= row <= largest] or [_rounded(longest, 256)]:
            shape = geometry(row, gpus, learners, data)
            try:
                return _attempt(output, settings | shape | {"data": data, "deepspeed": engine})
            except ConfigError as problem:
                output.unlink(missing_ok=True)
                error = problem
    raise ValueError(f"no batch geometry fits {gpus} GPU(s); the last one tried:\n{error}")


def _attempt(output: Path, values: dict[str, Any]) -> Plan:
    """Write a config and derive its plan; its commands then go into the header."""
    learners, devices = values["learners"], values["rollout_devices"]
    experts = bool(values.get("text", {}).get("num_experts_per_tok"))
    # Experts fill most of a model: one engine over all devices holds them once.
    sizes = [n for n in range(devices, 0, -1) if devices % n == 0] if experts else []
    tensor = next((size for size in sizes if not split_problem(values["text"], size)), 1)
    values = values | {"has_experts": experts, "tensor": tensor, "replicas": devices // tensor}
    hardware = f"{values['gpus']} GPUs of {values['device_gib']} GB" if values["gpus"] else "2 CPU cores"
    text = {
        "file": str(output),
        "run": f"runs/{output.stem}",
        "hardware": f"{hardware}; learners: {learners}",
        "device_option": "" if values["device_gib"] == DEVICE_GIB else f" --device-gib {values['device_gib']}",
        "commands": ["-"],
        "memory": "-",
    }
    output.write_text(_render(values | text), encoding="utf-8")
    plan = make_plan(load_config(output), learners, values["device_gib"])
    parts = plan.learner_memory
    memory = f"{sum(parts.values()) / GIB:.1f} GiB per learner (estimate of --dry-run)" if parts else "unknown"
    known = {"commands": plan.layout.commands, "memory": memory}
    output.write_text(_render(values | text | known), encoding="utf-8")
    return plan


def _render(values: dict[str, Any]) -> str:
    environment = jinja2.Environment(  # noqa: S701  (YAML, whose strings are written as JSON)
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["quote"] = shlex.quote
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    return environment.get_template("init.yaml.j2").render(values)


if __name__ == "__main__":
    main()
