"""The hf backend against transformers' own `generate`, one sample at a time, and its pieces."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import AutoModelForImageTextToText
from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor

from tools.make_demo import make_dataset
from utils.capacity import call_seed, request_seed
from utils.config.schema import Data, Tuner
from utils.data.encoding import encode_prompt, load_processor, prompt_chat
from utils.data.samples import load_samples
from utils.learner.model import apply_tuner, base_model, load_model
from utils.rollout.backend import RolloutContext, RolloutRequest, RolloutSampling
from utils.rollout.hf import HfEngine, Sampler, left_pad, stop_token_ids

pytestmark = pytest.mark.e2e
CONTEXT = RolloutContext(run_seed=5, global_step=3, micro_step_idx=1, policy_version="run:3")
NEW_TOKENS = 160  # most answers of the briefly trained model end by then, on any processor


class Engine(nn.Module):
    """What the backend uses of a DeepSpeed engine: it calls the module that it wraps. (Real ones: tests/e2e.)"""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.module = nn.Module()
        self.module.model = model

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)


def requests_of(folder: Path, processor) -> list[RolloutRequest]:
    """Prompts of different lengths: the texts grow, one has no image, one has two."""
    samples = load_samples([folder / "data" / "train.jsonl"], prompt=Data().prompt)[0][:5]
    requests = []
    for index, (sample, num_images) in enumerate(zip(samples, [1, 0, 1, 2, 1], strict=True)):
        text = "<image>" * num_images + "Find " + "every " * index + "object in the image."
        changes = {"images": sample.images * num_images, "image_sizes": sample.image_sizes * num_images}
        sample = replace(sample, messages=[{"role": "user", "content": text}], **changes)
        prompt = encode_prompt(sample, processor)
        requests.append(RolloutRequest(str(index), prompt_chat(sample), sample.images, **vars(prompt)))
    return requests


@pytest.fixture(scope="module")
def parts(warm_model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("hf")
    make_dataset(folder / "data", num_train=5, num_val=1)
    processor = load_processor(warm_model)
    requests = requests_of(folder, processor)
    model = apply_tuner(load_model(warm_model, "float32"), Tuner(type="lora", use_dora=True, rank=4))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_B." in name:  # adapters that do something
                parameter.normal_(std=0.02, generator=torch.Generator().manual_seed(1))
    learner = SimpleNamespace(model=model.train(), engine=Engine(model))
    ranks = SimpleNamespace(rank=1, world_size=1, device=torch.device("cpu"))
    make = partial(HfEngine, learner, ranks, processor)
    merged = AutoModelForImageTextToText.from_pretrained(warm_model, dtype=torch.float32)
    merged.load_state_dict(merged_state(model), strict=False)
    return SimpleNamespace(make=make, requests=requests, merged=merged.eval(), model=model)


def merged_state(model: nn.Module) -> dict[str, torch.Tensor]:
    from utils.sync.merged_weights import MergedWeights

    return dict(MergedWeights(model).tensors())


def plain_generate(model: nn.Module, request: RolloutRequest, **options) -> list[int]:
    """transformers' own answer to one prompt, under plain sdpa; the stop token, if any, last."""
    ids = torch.tensor([request.prompt_token_ids])
    with torch.no_grad():
        output = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            mm_token_type_ids=(ids == model.config.image_token_id).int(),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            **request.vision,
            **options,
        )
    return output[0, ids.shape[1] :].tolist()


def same_but_for_ties(
    model: nn.Module, request: RolloutRequest, got, expected, repetition_penalty: float = 1.0
) -> bool:
    """Equal up to a token, if any, between whose two choices only rounding decides: scores within 1e-4 in float32.
    Neighbouring coordinates are that close now and then. `got` is a result's ids and finish reason; `expected` brings
    its stop token."""
    response, reason = got
    stops = expected[-1:] if reason == "stop" else []
    at = next((i for i, (a, b) in enumerate(zip([*response, *stops], expected, strict=False)) if a != b), None)
    if at is None:
        return [*response, *stops] == expected
    ids = torch.tensor([[*request.prompt_token_ids, *expected[:at]]])
    is_image = (ids == model.config.image_token_id).int()
    with torch.no_grad():
        logits = model(input_ids=ids, mm_token_type_ids=is_image, **request.vision).logits[:, -1]
    scores = RepetitionPenaltyLogitsProcessor(repetition_penalty)(ids, logits)[0]
    return bool((scores[[*response, *stops][at]] - scores[expected[at]]).abs() < 1e-4)


@pytest.mark.parametrize("decode_batch_size", [1, 2, 5])
@pytest.mark.parametrize("repetition_penalty", [1.0, 1.3])
def test_greedy_answers_are_those_of_plain_generate_ROL_1_ROL_4_ROL_6(parts, decode_batch_size, repetition_penalty):
    """ROL-1, ROL-4, ROL-6: whatever is decoded beside a request, adapters in force, the stop token cut."""
    decoding = RolloutSampling(repetition_penalty=repetition_penalty, max_new_tokens=NEW_TOKENS)
    results = parts.make(decode_batch_size).generate(parts.requests, decoding, CONTEXT)
    reasons, stop_ids = set(), stop_token_ids(parts.merged, parts.make(1).processor.tokenizer)
    for request, result in zip(parts.requests, results, strict=True):
        expected = plain_generate(parts.merged, request, repetition_penalty=repetition_penalty)
        got = result.response_token_ids, result.finish_reason
        assert result.stop_token_id in (stop_ids if result.finish_reason == "stop" else [None])
        assert same_but_for_ties(parts.merged, request, got, expected, repetition_penalty)
        assert not set(stop_ids) & set(result.response_token_ids)
        assert result.finish_reason == "stop" or len(result.response_token_ids) == NEW_TOKENS
        assert result.prompt_token_ids == request.prompt_token_ids and result.weight_version == "run:3"
        assert result.text == parts.make(1).processor.tokenizer.decode(result.response_token_ids)
        reasons.add(result.finish_reason)
    assert parts.model.training
    assert repetition_penalty > 1 or "stop" in reasons


def test_a_sampled_answer_depends_on_its_seed_alone_DIS_6(parts):
    """DIS-6: request i samples with seed + i, whatever is decoded beside it."""
    sampled = RolloutSampling(temperature=1.2, top_k=50, top_p=0.95, max_new_tokens=40)
    ids = [[r.response_token_ids for r in parts.make(d).generate(parts.requests, sampled, CONTEXT)] for d in (1, 2, 5)]
    assert ids[0] == ids[1] == ids[2]
    twice = [parts.requests[1], parts.requests[1]]
    first, second = parts.make(2).generate(twice, sampled, CONTEXT)
    assert first.response_token_ids != second.response_token_ids
    other = parts.make(5).generate(parts.requests, sampled, replace(CONTEXT, global_step=4))
    assert [r.response_token_ids for r in other] != ids[0]


def test_seeds_are_those_of_the_contract_DIS_6(parts, monkeypatch):
    """DIS-6."""
    seen = []
    monkeypatch.setattr(
        HfEngine, "_generate_batch", lambda self, model, asked, seeds, decoding: seen.append(seeds) or [[]]
    )
    parts.make(2).generate(parts.requests, RolloutSampling(), CONTEXT)
    base = request_seed(5, 3, 1, 1)
    assert sum(seen, []) == [call_seed(base, index) for index in range(5)]
    assert list(map(len, seen)) == [2, 2, 1]


def test_no_requests_no_call_DIS_5(parts):
    """DIS-5."""
    assert parts.make(2).generate([], RolloutSampling(), CONTEXT) == []


def test_answers_are_the_policys_whatever_else_the_checkpoint_asks_of_generate_ROL_1(parts, monkeypatch):
    """ROL-1: the servers' engine knows nothing of these settings."""
    sampling = RolloutSampling(max_new_tokens=NEW_TOKENS)
    expected = parts.make(2).generate(parts.requests, sampling, CONTEXT)
    own = base_model(parts.model).generation_config
    monkeypatch.setattr(own, "no_repeat_ngram_size", 1)
    monkeypatch.setattr(own, "suppress_tokens", expected[0].response_token_ids[:1])
    assert parts.make(2).generate(parts.requests, sampling, CONTEXT) == expected
    assert base_model(parts.model).generation_config is own


def test_generate_leaves_the_engine_as_it_was_ROL_2(parts):
    """ROL-2: without gradients; the module's own forward is back even after a failure."""
    backend = parts.make(2)
    before = {name: parameter.clone() for name, parameter in parts.model.named_parameters()}
    broken = replace(parts.requests[0], prompt_token_ids=parts.requests[1].prompt_token_ids)  # an image without tokens
    with pytest.raises(ValueError):
        backend.generate([broken], RolloutSampling(max_new_tokens=2), CONTEXT)
    assert "forward" not in vars(backend.engine_forward.engine.module) and parts.model.training
    backend.generate(parts.requests[:1], RolloutSampling(max_new_tokens=2), CONTEXT)
    assert all(torch.equal(before[name], parameter) for name, parameter in parts.model.named_parameters())
    assert all(parameter.grad is None for parameter in parts.model.parameters())


@pytest.mark.parametrize(
    ("decoding", "allowed"),
    [
        (RolloutSampling(temperature=1.0), [0.5, 0.3, 0.15, 0.05]),
        (RolloutSampling(temperature=1.0, top_k=2), [0.625, 0.375, 0, 0]),
        (RolloutSampling(temperature=1.0, top_p=0.8), [0.625, 0.375, 0, 0]),
        (RolloutSampling(temperature=0.5), [0.25 / 0.365, 0.09 / 0.365, 0.0225 / 0.365, 0.0025 / 0.365]),
    ],
)
def test_the_sampler_draws_from_the_distribution_CFG_12(decoding, allowed):
    """CFG-12: 20,000 draws from four tokens, by hand."""
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()[None]
    sampler = Sampler(decoding, [7], torch.device("cpu"))
    draws = torch.stack([sampler(None, logits.clone()).argmax() for _ in range(20000)])
    share = torch.bincount(draws, minlength=4) / len(draws)
    torch.testing.assert_close(share, torch.tensor(allowed), atol=0.015, rtol=0)


def test_left_padding_by_hand_ROL_6():
    """ROL-6: padding is masked, of no image type, and repeats the row's first token even where that is an image's."""
    pixels, grid = torch.ones(4, 2), torch.tensor([[1, 2, 2]])
    one, two = ({"pixel_values": own, "image_grid_thw": grid} for own in (pixels, 2 * pixels))
    inputs = left_pad([([5, 9, 6], one), ([9], two), ([7, 8], {})], image_token_id=9)
    assert inputs["input_ids"].tolist() == [[5, 9, 6], [9, 9, 9], [7, 7, 8]]
    assert inputs["attention_mask"].tolist() == [[1, 1, 1], [0, 0, 1], [0, 1, 1]]
    assert inputs["mm_token_type_ids"].tolist() == [[0, 1, 0], [0, 0, 1], [0, 0, 0]]
    assert inputs["pixel_values"].shape == (8, 2) and inputs["image_grid_thw"].shape == (2, 3)
    assert "pixel_values" not in left_pad([([7], {})], image_token_id=9)
