"""The demo's model, samples and optimizer step in one process, for benchmarks that need a real step."""

import random
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tools.make_demo import build_start_model, make_dataset
from utils.config.load import load_config
from utils.config.schema import Losses, Training
from utils.data.encoding import EncodedPrompt, dummy_segment, encode_prompt, load_processor
from utils.data.samples import load_samples
from utils.geometry import Object, iou_matrix
from utils.learner.model import RowModel, apply_tuner, load_model, param_groups, position_ids_for
from utils.learner.objectives import MatchingObjective
from utils.losses import num_chunks_for
from utils.matching import match
from utils.packing import Batch, collate_packed, collate_padded, denominators
from utils.parsing import TokenTable, parse_answer
from utils.targets import Segment, TargetOptions, build_target, format_objects, make_segment

OBJECTIVE = MatchingObjective(Losses())
CONFIG = Path(__file__).parents[1] / "configs/demo/stage2.yaml"


class Demo:
    """One learner rank of `make demo` with default losses and targets, without DeepSpeed, server and launcher.

    The model is untrained.

    Attributes:
        samples, prompts: scenes and their encoded prompts.
        answers: token ids as from a half-trained model: most objects, slightly shifted.
    """

    def __init__(self, folder: Path, num_samples: int = 16) -> None:
        self.cfg = load_config(CONFIG)
        path = build_start_model(folder / "model")
        train_file, _, _ = make_dataset(folder / "data", num_train=num_samples, num_val=0, seed=3)
        self.processor = load_processor(path)
        self.table = TokenTable.from_tokenizer(self.processor.tokenizer)
        [self.samples] = load_samples([train_file], prompt=self.cfg.data.prompt)
        self.prompts: list[EncodedPrompt] = [encode_prompt(sample, self.processor) for sample in self.samples]
        rng = random.Random(0)
        self.answers = [self.table.encode(format_objects(found(sample.objects, rng))) for sample in self.samples]
        model = apply_tuner(load_model(str(path), "float32"), self.cfg.tuner)
        self.model = RowModel(model)
        self.layout: dict[str, Any] = {
            "position_ids_fn": position_ids_for(model),
            "coord_ids": self.table.coord_ids,
            "dummy": dummy_segment(self.processor),
        }
        self.optimizer = torch.optim.AdamW(param_groups(model, Training(output_dir="", learning_rate=1e-4)))

    def segment(self, index: int) -> Segment:
        """Turn an answer into a segment as train_stage2.py does with default targets."""
        sample, prompt = self.samples[index], self.prompts[index]
        parsed = parse_answer(self.answers[index], self.table)
        pairs = match(iou_matrix(parsed.pred_objects, sample.objects), self.cfg.rm.matching.iou_threshold)
        target = build_target(parsed, sample.objects, pairs, self.table, TargetOptions())
        return make_segment(sample.id, prompt.prompt_token_ids, target, self.table, prompt.vision)

    def packed(self, segments: Sequence[Segment]) -> Batch:
        return collate_packed(segments, **self.layout)

    def padded(self, segments: Sequence[Segment]) -> Batch:
        return collate_padded(segments, **self.layout)

    def forward_backward(self, batch: Batch, totals: dict[str, float] | None = None) -> None:
        totals = totals or denominators([batch])
        loss, _ = self.model(batch, partial(OBJECTIVE.loss, totals=totals, num_chunks=num_chunks_for(batch.num_labels)))
        loss.backward()

    def step(self, batches: Sequence[Batch]) -> None:
        """Take one optimizer step; `batches`: one per micro-step."""
        for batch in batches:
            self.forward_backward(batch, denominators(batches))
        self.optimizer.step()
        self.optimizer.zero_grad()


def found(objects: Sequence[Object], rng: random.Random, share: float = 0.7, shift: int = 8) -> list[Object]:
    """Return a `share` of the objects, with each coordinate up to `shift` bins off."""

    def moved(obj: Object) -> Object:
        coords = tuple(min(max(value + rng.randint(-shift, shift), 0), 999) for value in obj.coords)
        return Object(obj.desc, obj.kind, coords)

    return [moved(obj) for obj in objects if rng.random() < share]
