"""SFT on pseudo-labels that the model in training makes anew every `EVERY` steps.

    deepspeed --num_gpus 1 -m studies.refreshed_labels --config FILE

An arm of `studies/new_class.py` and of `studies/partial.py`: `train_stage2.py`, whose answers only complete the
annotation. They come from the weights of the last refresh, and only for the images that are drawn, which costs less
than labelling all of them at each refresh. The sequence that is trained is the completed ground truth, as in SFT.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

import train_stage2
from tools.export import additions
from train_stage2 import MicroStep, Responses
from utils.data.encoding import EncodedPrompt
from utils.data.samples import Sample
from utils.geometry import Object
from utils.parsing import parse_answer

EVERY = 10  # steps


class RefreshedLabels(train_stage2.Stage2):
    """Stage 2 that trains the ground truth, completed by the answers of an earlier policy. Not made to be resumed."""

    labeller: list[Tensor]

    def generate(
        self, encoded: tuple[Sequence[Sample], list[EncodedPrompt]], step: int, micro_step_idx: int
    ) -> Responses:
        model = self.session.learner.model
        if step % EVERY == 0 and micro_step_idx == 0:
            self.labeller = [parameter.detach().clone() for parameter in trained(model)]
        with weights(model, self.labeller):
            return super().generate(encoded, step, micro_step_idx)

    def judge(self, responses: Responses, step: int) -> MicroStep:
        table = self.session.data.table
        samples = list(responses.samples)
        # Replayed samples are complete: they have no answers.
        for index, result in responses.results.items():
            samples[index] = completed(samples[index], parse_answer(result.response_token_ids, table).pred_objects)
        return super().judge(Responses(samples, responses.prompts, {}), step)


def completed(sample: Sample, predictions: Sequence[Object]) -> Sample:
    """Add to the sample's objects the predictions that complete them, as the pseudo-labels have them.

    The sample says for which labels its annotation is complete.
    """
    assert sample.annotated is not None, "a complete sample has no answer"
    objects = [*sample.objects, *additions(sample.objects, predictions, sample.annotated)]
    return replace(sample, objects=sorted(objects, key=lambda obj: (obj.coords[1], obj.coords[0])))


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


@contextmanager
def weights(model: nn.Module, values: Sequence[Tensor]) -> Iterator[None]:
    """Give the trained parameters other values for a while."""
    own = [parameter.detach().clone() for parameter in trained(model)]
    copy(values, model)
    try:
        yield
    finally:
        copy(own, model)


@torch.no_grad()
def copy(values: Sequence[Tensor], model: nn.Module) -> None:
    for parameter, value in zip(trained(model), values, strict=True):
        parameter.copy_(value)


def main() -> None:
    stage2: Any = train_stage2
    stage2.Stage2 = RefreshedLabels
    train_stage2.main()


if __name__ == "__main__":
    main()
