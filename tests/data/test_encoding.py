"""`utils.data.encoding`: prompts as token ids and pixels, and what a model's digest covers (ROL-3, CON-4)."""

from __future__ import annotations

import json

import pytest
import torch

from tests.data.test_samples import load_one, png
from tools.make_demo import build_start_model
from utils.data import encoding
from utils.data.encoding import encode_prompt
from utils.data.images import open_image


@pytest.fixture(scope="module")
def processor(tmp_path_factory):
    return encoding.load_processor(build_start_model(tmp_path_factory.mktemp("model")))


def test_rol_3_encoded_prompt_equals_the_processors_own(tmp_path, processor):
    """ROL-3."""
    png(tmp_path / "b.png", 64, 200)
    messages = [
        {"role": "system", "content": "Be brief. 日本 é"},
        {"role": "user", "content": "<image> and\n<image>: list ]}]}"},
    ]
    sample = load_one(tmp_path, images=["a.png", "b.png"], messages=messages, objects=[])
    encoded = encode_prompt(sample, processor)
    text = processor.apply_chat_template(encoding.prompt_chat(sample), tokenize=False, add_generation_prompt=True)
    images = [open_image(image) for image in sample.images]
    own = processor(text=[text], images=images, return_tensors="pt")
    assert encoded.prompt_token_ids == own["input_ids"][0].tolist()
    assert encoded.vision.keys() == {"pixel_values", "image_grid_thw"}
    assert all(torch.equal(tensor, own[name]) for name, tensor in encoded.vision.items())
    assert encoding.num_prompt_tokens(sample, processor) == len(encoded.prompt_token_ids)


def test_pixels_are_cast_where_prompts_are_encoded(tmp_path, processor):
    """ROL-3: as the model would cast them, but in a thread of the data; counts stay whole."""
    sample = load_one(tmp_path)
    own, cast = (encode_prompt(sample, processor, dtype).vision for dtype in (torch.float32, torch.bfloat16))
    assert torch.equal(cast["pixel_values"], own["pixel_values"].to(torch.bfloat16))
    assert torch.equal(cast["image_grid_thw"], own["image_grid_thw"])


def test_encode_prompt_without_an_image(tmp_path, processor):
    encoded = encode_prompt(load_one(tmp_path, images=[], objects=[]), processor)
    assert encoded.vision == {} and processor.image_token_id not in encoded.prompt_token_ids


def test_rol_3_placeholder_spelled_in_the_text_is_refused(tmp_path, processor):
    """ROL-3."""
    sample = load_one(tmp_path, prompt="what is <|image_pad|>?")
    with pytest.raises(ValueError, match="d.jsonl:1: the prompt has 2 image placeholders for 1 images"):
        encode_prompt(sample, processor)


def test_a_chat_template_may_be_the_tokenizers_but_must_be_there(tmp_path):
    """Copies of some releases have it in tokenizer_config.json only, where a processor does not look."""
    path = build_start_model(tmp_path / "model")
    own, template, config = encoding.load_processor(path), path / "chat_template.jinja", path / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"chat_template": template.read_text()}))
    template.unlink()
    sample = load_one(tmp_path)
    prompts = [encode_prompt(sample, each).prompt_token_ids for each in (own, encoding.load_processor(path))]
    assert prompts[0] == prompts[1]
    config.write_text(
        json.dumps({key: value for key, value in json.loads(config.read_text()).items() if "chat" not in key})
    )
    with pytest.raises(ValueError, match="holds no chat template .* download it again"):
        encoding.load_processor(path)


def test_load_processor_with_another_pixel_budget(tmp_path, processor):
    path = build_start_model(tmp_path / "model")
    small = encoding.load_processor(path, min_pixels=32 * 32, max_pixels=64 * 64)
    sample = load_one(tmp_path)
    assert len(encode_prompt(sample, small).prompt_token_ids) < len(encode_prompt(sample, processor).prompt_token_ids)
    assert encoding.num_prompt_tokens(sample, small) == len(encode_prompt(sample, small).prompt_token_ids)


def test_one_limit_of_pixels_must_not_contradict_the_processors_other(tmp_path):
    """The demo's processor makes 16384 of every image: with a lower limit alone a small one would pass it."""
    path = build_start_model(tmp_path / "model")
    with pytest.raises(ValueError, match="at least 16384 pixels and at most 4096; set both image_min_pixels and"):
        encoding.load_processor(path, max_pixels=64 * 64)
    with pytest.raises(ValueError, match="at least 65536 pixels and at most 16384"):
        encoding.load_processor(path, min_pixels=256 * 256)


def test_the_digest_of_a_model_is_that_of_its_shape_and_vocabulary(start_model, tmp_path):
    """CON-4: saved again in another dtype it is the same model; with other layers or another token it is not."""
    own = encoding.model_digest(start_model)
    assert own is not None and encoding.model_digest(tmp_path) is None
    config = json.loads((start_model / "config.json").read_text())
    tokenizer = json.loads((start_model / "tokenizer.json").read_text())

    def digest_of(config: dict, tokenizer: dict) -> str | None:
        (tmp_path / "config.json").write_text(json.dumps(config, indent=1))
        (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
        return encoding.model_digest(tmp_path)

    text = config["text_config"]
    assert (
        digest_of(config | {"text_config": text | {"dtype": "bfloat16"}, "transformers_version": "9"}, tokenizer) == own
    )
    assert digest_of(config | {"text_config": text | {"num_hidden_layers": 99}}, tokenizer) != own
    assert digest_of(config, tokenizer | {"added_tokens": tokenizer["added_tokens"][1:]}) != own
