"""CPU work of the learner per answer: parse, match, build the target, pack (sections TGT and PCK).

Measured in processor time, since nothing waits here. Answers are made up, not generated: 70 % of a scene's objects are
found with shifted corners, a tenth of them with a wrong name; the others are missed, and random objects stand in.
"""

import random
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from benchmarks.baselines.token_scanner import Scanner, pack
from benchmarks.demo import Demo, found
from benchmarks.harness import Result, at_least, at_most, cpu, reported, take_turns
from tools.make_demo import build_tokenizer
from utils.geometry import Object, iou_matrix
from utils.matching import match
from utils.packing import Batch, CarryBuffer, collate_packed
from utils.parsing import TokenTable, parse_answer
from utils.targets import Segment, TargetOptions, build_target, format_objects, make_segment

THRESHOLD = 0.5
DESCS = ("red ring", "blue square", "green triangle", "yellow ring", "blue ring")
PROMPT = [1] * 64
NUM_ANSWERS = 8  # a micro-step of the demo
CAP = 32768


def run() -> list[Result]:
    tokenizer = build_tokenizer()
    table = TokenTable.from_tokenizer(tokenizer)
    return [
        *against_scanner(tokenizer, table, "bbox_2d"),
        *against_scanner(tokenizer, table, "poly"),
        linearity(table),
        share_of_demo_step(),
        vocabulary(),
    ]


def against_scanner(tokenizer: Any, table: TokenTable, kind: str) -> list[Result]:
    """Answers of 100 objects, against the straightforward implementation with and without its cheapest improvements."""
    answers = [make_answer(table, 100, kind, seed) for seed in range(NUM_ANSWERS)]
    seconds = take_turns(
        {
            "ours": cpu(lambda: ours(answers, table)),
            "plain": cpu(lambda: straightforward(answers, Scanner(tokenizer, table, tuned=False))),
            "tuned": cpu(lambda: straightforward(answers, Scanner(tokenizer, table, tuned=True))),
        },
        rounds=5,
        warm_ups=2,
    )
    mine, plain, tuned = (1e3 * seconds[name] / NUM_ANSWERS for name in ("ours", "plain", "tuned"))
    what = "boxes" if kind == "bbox_2d" else "polygons"
    name, unit = f"cpu: parse, match, target, pack; 100 {what}", "ms/answer"
    return [
        at_least(name, unit, mine, plain, 20) if kind == "bbox_2d" else reported(name, unit, mine, plain),
        reported(f"{name}, against the tuned scanner", unit, mine, tuned),
    ]


def ours(answers: list[tuple[list[int], list[Object]]], table: TokenTable) -> Batch:
    """Turn answers into a batch as train_stage2.py does, without images and multimodal positions."""
    buffer = CarryBuffer(CAP, max_segments=64)
    buffer.extend([segment_of(ids, gt, table) for ids, gt in answers])
    row = buffer.pop_row()
    return collate_packed(row, text_positions, table.coord_ids, dummy=row[0])


def segment_of(ids: list[int], gt: list[Object], table: TokenTable) -> Segment:
    parsed = parse_answer(ids, table)
    pairs = match(iou_matrix(parsed.pred_objects, gt), THRESHOLD)
    target = build_target(parsed, gt, pairs, table, TargetOptions())
    image = {"pixel_values": torch.zeros(4, 8), "image_grid_thw": torch.tensor([[1, 2, 2]])}
    return make_segment("sample", PROMPT, target, table, image)


def text_positions(input_ids: torch.Tensor, _: Any) -> torch.Tensor:
    return torch.arange(len(input_ids)).expand(4, -1)


def straightforward(answers: list[tuple[list[int], list[Object]]], scanner: Scanner) -> dict[str, torch.Tensor]:
    """Do the same with loops (benchmarks/baselines/token_scanner.py)."""
    made = []
    for ids, gt in answers:
        parsed = scanner.parse(ids)
        pairs = scanner.match([obj for obj, *_ in parsed[0]], gt, THRESHOLD)
        made.append(scanner.target(ids, parsed, gt, pairs))
    return pack(made, PROMPT, CAP)


def make_answer(table: TokenTable, num_objects: int, kind: str, seed: int) -> tuple[list[int], list[Object]]:
    """Make up an answer to a scene of random shapes: `(token ids, ground truth)`."""
    rng = random.Random(seed)
    gt = [random_shape(rng, kind) for _ in range(num_objects)]
    seen = found(gt, rng)
    pred = [Object(rng.choice(DESCS), obj.kind, obj.coords) if rng.random() < 0.1 else obj for obj in seen]
    pred += [random_shape(rng, kind) for _ in range(num_objects - len(pred))]
    return table.encode(format_objects(pred)), gt


def random_shape(rng: random.Random, kind: str) -> Object:
    """Return a box, or a polygon of 8 to 16 points around a centre; sides of 40 to 240 bins."""
    width, height = rng.randint(40, 240), rng.randint(40, 240)
    x, y = rng.randint(10, 989 - width), rng.randint(10, 989 - height)
    if kind == "bbox_2d":
        return Object(rng.choice(DESCS), kind, (x, y, x + width, y + height))
    angles = np.sort([rng.random() for _ in range(rng.randint(8, 16))]) * 2 * np.pi
    radius = np.array([rng.uniform(0.3, 0.5) for _ in angles])
    xs, ys = x + width * (0.5 + radius * np.cos(angles)), y + height * (0.5 + radius * np.sin(angles))
    return Object(rng.choice(DESCS), kind, tuple(np.stack([xs, ys], axis=1).round().astype(int).flatten().tolist()))


def linearity(table: TokenTable) -> Result:
    """Processor time per token of parsing and building the target at 16k tokens, over that at 4k.

    Matching is left out, as it depends on objects, not on tokens: the ground truth is the same 40 objects.
    """
    answers = {size: make_answer(table, size // 26, "bbox_2d", seed=1)[0] for size in (4_000, 16_000)}
    gt = make_answer(table, 40, "bbox_2d", seed=1)[1]

    def work(ids: list[int]) -> None:
        parsed = parse_answer(ids, table)
        make_segment("sample", PROMPT, build_target(parsed, gt, [], table, TargetOptions()), table)

    seconds = take_turns({n: cpu(lambda ids=ids: work(ids)) for n, ids in answers.items()}, rounds=15, warm_ups=2)
    per_token = {n: 1e6 * seconds[n] / len(answers[n]) for n in answers}
    name = "cpu: parse and target, per token of 16k over 4k (linear: 1)"
    return at_most(name, "us/token", per_token[16_000], per_token[4_000], 1.25)


def share_of_demo_step() -> Result:
    """This work for one optimizer step of the demo, over that step's forward, backward and update.

    Rollouts and sync are left out of the step; with them the share would be even smaller.
    """
    with tempfile.TemporaryDirectory() as folder:
        demo = Demo(Path(folder))
        num = len(demo.samples) // 2

        def prepare() -> None:
            buffer = CarryBuffer(demo.cfg.global_max_length, demo.cfg.training.packing_buffer)
            buffer.extend([demo.segment(index) for index in range(len(demo.samples))])
            buffer.pop_row()

        batches = [demo.packed([demo.segment(i) for i in range(a, a + num)]) for a in (0, num)]
        seconds = take_turns({"work": cpu(prepare), "step": cpu(lambda: demo.step(batches))}, rounds=7, warm_ups=2)
    return at_most("cpu: the same work, share of the demo's train step", "s", seconds["work"], seconds["step"], 0.02)


def vocabulary(size: int = 151_936) -> Result:
    """Time to build the byte table of a vocabulary of Qwen's size, over the second that it may take."""
    tokenizer = big_tokenizer(size)
    seconds = take_turns({"table": cpu(lambda: TokenTable.from_tokenizer(tokenizer))}, rounds=3)["table"]
    return at_most(f"cpu: byte table of {size:,} tokens, over one second", "s", seconds, 1.0, 1.0)


def big_tokenizer(size: int) -> PreTrainedTokenizerFast:
    """Return a tokenizer with `size` random byte-level tokens, coordinate tokens included."""
    small = build_tokenizer().backend_tokenizer.get_vocab(with_added_tokens=False)
    alphabet = [token for token in small if len(token) == 1]
    rng = random.Random(0)
    vocab = {token: index for index, token in enumerate(alphabet)}
    while len(vocab) < size - 1001:
        vocab.setdefault("".join(rng.choices(alphabet, k=rng.randint(3, 9))), len(vocab))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE(vocab, [])), eos_token="<|im_end|>")
    tokenizer.add_tokens([f"<|coord_{k}|>" for k in range(1000)])
    return tokenizer
