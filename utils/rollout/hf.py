"""Rollouts by transformers' own `generate` on the model in training: no server, no second engine, no weight sync.

The slowest engine and the one with the fewest parts. It works under every ZeRO stage. Under ZeRO-3 each forward gathers
one layer after the other, so all ranks run the same forwards, those without requests included.
"""

import copy
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, LogitsProcessor, StoppingCriteria
from transformers.generation.logits_process import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from utils.capacity import call_seed, rounds
from utils.data.encoding import dummy_segment
from utils.dist import Ranks
from utils.learner.model import base_model, has_multimodal_positions
from utils.packing import join_vision
from utils.rollout.backend import RolloutContext, RolloutRequest, RolloutResult, RolloutSampling, UnsyncedEngine

Row = tuple[Sequence[int], dict[str, Tensor]]  # prompt token ids and vision tensors


class HfEngine(UnsyncedEngine):
    """The training model as an `Engine` (ROL-6): the weights in training are those that generate.

    Args:
        learner: a `utils.learner.learner.Learner`: its DeepSpeed engine and its model.
        decode_batch_size: most sequences in one call of `generate`.
    """

    def __init__(self, learner: Any, ranks: Ranks, processor: Any, decode_batch_size: int) -> None:
        model = base_model(learner.model)
        self.ranks = ranks
        self.processor = processor
        self.decode_batch_size = decode_batch_size
        self.engine_forward = EngineForward(learner.engine, model)
        self.is_sharded = any(hasattr(parameter, "ds_id") for parameter in model.parameters())
        self.stop_ids = stop_token_ids(model, processor.tokenizer)

    def generate(
        self, requests: Sequence[RolloutRequest], sampling: RolloutSampling, context: RolloutContext
    ) -> list[RolloutResult]:
        """As `Engine.generate`. Under ZeRO-3 a collective: all ranks, with any number of requests each."""
        seed = context.seed(self.ranks.rank)
        batches = rounds(len(requests), self.decode_batch_size)
        num_calls = len(batches)
        if self.is_sharded:
            num_calls = max(self.ranks.gather_or_raise(num_calls, "generating"))
        results: list[RolloutResult] = []
        with self.engine_forward as model, torch.no_grad():
            for batch in [*batches, *[range(0)] * (num_calls - len(batches))]:
                part = [requests[index] for index in batch]
                seeds = [call_seed(seed, index) for index in batch]
                new_ids = self._generate_batch(model, part, seeds, sampling)
                results += map(partial(self._result, version=context.policy_version), part, new_ids)
        return results

    def _generate_batch(
        self, model: nn.Module, requests: Sequence[RolloutRequest], seeds: Sequence[int], sampling: RolloutSampling
    ) -> list[list[int]]:
        """New token ids per request, the stop token and padding after it included; one call of `generate`."""
        device = self.ranks.device
        rows: list[Row] = [(r.prompt_token_ids, r.vision) for r in requests]
        if self.is_sharded and not any(vision for _, vision in rows):
            dummy = dummy_segment(self.processor)  # other ranks run the vision tower
            rows.append((dummy.input_ids.tolist(), dummy.vision))
        image_token_id = model.config.image_token_id if has_multimodal_positions(model) else None
        inputs = {name: tensor.to(device) for name, tensor in left_pad(rows, image_token_id).items()}
        config = GenerationConfig(
            max_new_tokens=sampling.max_new_tokens,
            do_sample=False,  # see Sampler
            repetition_penalty=sampling.repetition_penalty,
            eos_token_id=self.stop_ids,
            pad_token_id=self.stop_ids[0],
            use_cache=True,
        )
        greedy = sampling.temperature == 0
        output = model.generate(
            **inputs,
            generation_config=config,
            logits_processor=[] if greedy else [Sampler(sampling, [*seeds, 0][: len(rows)], device)],
            stopping_criteria=[StopDummyRows(len(requests))],
            synced_gpus=self.is_sharded and self.ranks.world_size > 1,
        )
        return output[: len(requests), inputs["input_ids"].shape[1] :].tolist()

    def _result(self, request: RolloutRequest, new_ids: list[int], version: str | None) -> RolloutResult:
        end = next((index for index, token in enumerate(new_ids) if token in self.stop_ids), None)
        response = new_ids[:end]
        return RolloutResult(
            response_token_ids=response,
            prompt_token_ids=list(request.prompt_token_ids),
            text=self.processor.tokenizer.decode(response),
            finish_reason="length" if end is None else "stop",
            weight_version=version,
            stop_token_id=None if end is None else new_ids[end],
        )


class Sampler(LogitsProcessor):
    """Make the largest logit a sample: `argmax(logits + Gumbel noise)` is distributed as `softmax(logits)`.

    Each row draws from its own generator, so that a response depends on its request's seed (DIS-6) alone. With
    `generate`'s own sampling it would depend on the rows decoded beside it.

    Args:
        seeds: one per row.
    """

    def __init__(self, sampling: RolloutSampling, seeds: Sequence[int], device: torch.device) -> None:
        self.generators = [torch.Generator(device).manual_seed(seed) for seed in seeds]
        self.warpers: list[LogitsProcessor] = [TemperatureLogitsWarper(float(sampling.temperature))]
        if sampling.top_k > 0:
            self.warpers.append(TopKLogitsWarper(sampling.top_k))
        if sampling.top_p < 1:
            self.warpers.append(TopPLogitsWarper(sampling.top_p))

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Scores [B, vocabulary], float32."""
        for warper in self.warpers:
            scores = warper(input_ids, scores)
        rows = [torch.empty_like(scores[0]).exponential_(generator=generator) for generator in self.generators]
        return scores - torch.stack(rows).clamp_min(torch.finfo(scores.dtype).tiny).log()


class StopDummyRows(StoppingCriteria):
    """Stop rows from `num_real` on at once: the response to a dummy is not needed."""

    def __init__(self, num_real: int) -> None:
        self.num_real = num_real

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        return torch.arange(len(input_ids), device=input_ids.device) >= self.num_real


def left_pad(rows: Sequence[Row], image_token_id: int | None) -> dict[str, Tensor]:
    """`generate`'s inputs for prompts of different lengths, int64 `[B, longest]`, images of all rows in order.

    Padding repeats the row's first token: masked out everywhere, and unlike a padding token it is in the prompt anyway,
    so that a repetition penalty does not depend on the padding.

    Args:
        image_token_id: of models with multimodal positions, which want to know where images are; else None.
    """
    longest = max(len(ids) for ids, _ in rows)
    ids = [torch.tensor(list(ids)) for ids, _ in rows]
    input_ids = torch.stack([torch.cat([row[:1].expand(longest - len(row)), row]) for row in ids])
    is_real = torch.arange(longest) >= torch.tensor([longest - len(row) for row in ids])[:, None]
    inputs = {
        "input_ids": input_ids,
        "attention_mask": is_real.long(),
    }
    if image_token_id is not None:
        inputs["mm_token_type_ids"] = (is_real & (input_ids == image_token_id)).int()
    return inputs | join_vision([vision for _, vision in rows])


def stop_token_ids(model: nn.Module, tokenizer: Any) -> list[int]:
    """The tokens that end a response, as vLLM has them: the tokenizer's own and the generation config's."""
    given = model.generation_config.eos_token_id
    listed = given if isinstance(given, list) else [given]
    return list(dict.fromkeys(int(token) for token in [tokenizer.eos_token_id, *listed] if token is not None))


class EngineForward:
    """A context in which the DeepSpeed engine's forward is the transformers model's own, and the model for `generate`
    whose every forward goes through the engine.

    Only in an engine's forward ZeRO-3 gathers weights that one module reads from another, as DoRA reads those of the
    layer it adapts. One forward of the engine per token, not one around all of them: DeepSpeed records the order of
    modules from one forward of the engine to the next, and searches it at every module.
    """

    def __init__(self, engine: Any, model: nn.Module) -> None:
        self.engine, self.model = engine, model

        class Front(type(model)):
            def __call__(self, *args: Any, **kwargs: Any) -> Any:
                return engine(*args, **kwargs)

        self.front = copy.copy(model)  # the same modules and parameters
        self.front.__class__ = Front
        # `generate` would take from the checkpoint's own what ours leaves open: vLLM does not, and it is no sampling of
        # the policy (no_repeat_ngram_size, suppress_tokens, num_beams).
        self.front.generation_config = GenerationConfig()

    def __enter__(self) -> nn.Module:
        self.engine.eval()
        self.engine.module.forward = self.model.__call__  # hides the class's own
        return self.front

    def __exit__(self, *_: Any) -> None:
        del self.engine.module.forward
        self.engine.train()
