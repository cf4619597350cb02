"""Messages to prompt tokens, the same on both sides of the wire: ROL-3, SRV-4."""

from __future__ import annotations

import pytest
from transformers import AutoProcessor, processing_utils

from utils.data.prompts import leaves_thinking_open, render_prompt, to_chat_messages


def test_srv_4_chat_messages_put_unmarked_images_first_and_are_stable():
    """SRV-4."""
    messages = [{"role": "user", "content": "a<image>b"}]
    chat = to_chat_messages(messages, 2)
    image, text = {"type": "image"}, lambda t: {"type": "text", "text": t}
    assert chat == [{"role": "user", "content": [image, text("a"), image, text("b")]}]
    assert to_chat_messages(chat, 2) == chat
    assert to_chat_messages([{"role": "user", "content": [text("a"), text("b")]}], 0)[0]["content"] == "ab"


def test_srv_4_chat_messages_refuse_more_markers_than_images():
    """SRV-4."""
    with pytest.raises(ValueError, match="2 <image> markers in the messages but 1 images"):
        to_chat_messages([{"role": "user", "content": "<image><image>"}], 1)


def test_rol_3_render_prompt_takes_processor_or_tokenizer(start_model):
    """ROL-3."""
    processor = AutoProcessor.from_pretrained(start_model)
    chat = to_chat_messages([{"role": "user", "content": "hi"}], 1)
    ids_ = render_prompt(processor, chat)
    assert ids_ == render_prompt(processor.tokenizer, chat)
    assert processor.decode(ids_).endswith("<|im_start|>assistant\n") and ids_.count(processor.image_token_id) == 1


def test_rol_3_a_template_gets_the_arguments_that_it_knows(start_model, monkeypatch):
    """ROL-3: transformers warns of others, once a prompt."""
    monkeypatch.setattr(processing_utils.logger, "warning", lambda text, *_: pytest.fail(text))
    processor, chat = AutoProcessor.from_pretrained(start_model), [{"role": "user", "content": "hi"}]
    plain = render_prompt(processor, chat)
    processor.chat_template += "{% if enable_thinking is false %}no thinking{% endif %}"
    own = processor.tokenizer("no thinking", add_special_tokens=False)["input_ids"]
    assert render_prompt(processor, chat) == plain + own


def test_fam_2_a_prompt_that_opens_a_thinking_block_is_known(start_model):
    """FAM-2: one that is closed again, as Qwen3.5's without thinking, is none; a template that fails tells nothing."""
    processor = AutoProcessor.from_pretrained(start_model)
    plain = processor.chat_template
    ends = {"": False, "<think>\\n": True, "<think>\\n\\n</think>\\n\\n": False}
    for end, is_open in ends.items():
        processor.chat_template = plain + f"{{{{ '{end}' }}}}"
        assert leaves_thinking_open(processor) == is_open
    processor.chat_template = "{{ raise_exception('no system message') }}<think>"
    assert not leaves_thinking_open(processor)


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ({"role": "robot", "content": "x"}, "role 'robot' is not one of"),
        ({"role": "user", "content": None}, "must be a string or a list of parts, not NoneType"),
        ({"role": "user", "content": [{"type": "video"}]}, "is neither text nor image"),
        ({"role": "system", "content": "x"}, "no user message to hold them"),
    ],
)
def test_srv_4_unusable_messages_are_named(message, reason):
    """SRV-4."""
    with pytest.raises(ValueError, match=reason):
        to_chat_messages([message], 1)
