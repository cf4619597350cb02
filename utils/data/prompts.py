"""Turn messages into prompt tokens, for the learner and the rollout server alike.

Both must write the same prompt for the same messages, or the learner would train on a prompt that the engine never saw
(ROL-3). Images are only placeholders here; `utils.data.encoding.encode_prompt` and vLLM expand them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

IMAGE_MARKER = "<image>"
# Of a template that knows it, as Qwen3.5's, the prompt closes the thinking.
TEMPLATE_ARGUMENTS = {"enable_thinking": False}
CUT_TOKENS = 1024  # by so many at most, a cut text has more tokens than the same text inside a longer one
THINKS = (
    "its prompts open a thinking block, but answers must begin with an object; use the model's Instruct release, or "
    "take <think> out of the end of its chat template"
)
MAX_UUID = 256  # characters of a request's name, which only messages show; both sides of the wire
MAX_REASON = 200  # characters of a template's own error, which may repeat the messages


class TooLarge(ValueError):
    """A request has more text or pixels than its limits allow."""


def to_chat_messages(messages: Sequence[dict[str, Any]], num_images: int) -> list[dict[str, Any]]:
    """Return messages as a chat template takes them: each image one `{"type": "image"}` part, plain text a string.

    Content comes as a string with `<image>` markers or as a list of parts. As in ms-swift, images without a marker go
    to the front of the first user message. The function leaves its own result unchanged.

    Raises:
        ValueError: more markers than images, no user message to hold an image, an unknown part or role.
    """
    chat = []
    for message in messages:
        role = message.get("role")
        if role not in ("system", "user", "assistant", "tool"):
            raise ValueError(f"message role {str(role)[:100]!r} is not one of system, user, assistant, tool")
        chat.append({"role": role, "content": _parts(message.get("content"))})
    markers = sum(part["type"] == "image" for message in chat for part in message["content"])
    if markers > num_images:
        raise ValueError(f"{markers} {IMAGE_MARKER} markers in the messages but {num_images} images")
    if markers < num_images:
        first = next((message for message in chat if message["role"] == "user"), None)
        if first is None:
            raise ValueError("there are images but no user message to hold them")
        first["content"] = [{"type": "image"}] * (num_images - markers) + first["content"]
    for message in chat:  # chat templates of text-only models know no parts
        if all(part["type"] == "text" for part in message["content"]):
            message["content"] = "".join(part["text"] for part in message["content"])
    return chat


def render_prompt(
    processor_or_tokenizer: Any, chat_messages: Sequence[dict[str, Any]], max_tokens: int | None = None
) -> list[int]:
    """Return the token ids of the prompt by the model's own chat template, up to the assistant's first token.

    `chat_messages` are as `to_chat_messages` returns them. Each image is still one placeholder token.

    Raises:
        TooLarge: more than `max_tokens`. A long text is found out by its beginning: a tokenizer takes hundreds of
            times the text's memory.
        ValueError: the template refuses these messages, or fails on them.
    """
    chat, template = list(chat_messages), str(processor_or_tokenizer.chat_template)
    known = {name: value for name, value in TEMPLATE_ARGUMENTS.items() if name in template}  # others make it warn
    try:
        text = processor_or_tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True, **known)
    except Exception as error:  # a template is a program of the model's: besides jinja2's own errors it raises anything
        raise ValueError(f"the chat template does not take these messages: {str(error)[:MAX_REASON]}") from error
    tokenizer = getattr(processor_or_tokenizer, "tokenizer", processor_or_tokenizer)

    def ids_of(part: str) -> list[int]:
        ids = list(tokenizer(part, add_special_tokens=False)["input_ids"])
        if max_tokens is not None and len(ids) > max_tokens + (part is not text) * CUT_TOKENS:
            raise TooLarge(f"the prompt has more than {max_tokens} tokens, the longest that the model takes here")
        return ids

    length = len(text) if max_tokens is None else 4 * (max_tokens + CUT_TOKENS)
    while length < len(text):
        ids_of(text[:length])
        length *= 2
    return ids_of(text)


def leaves_thinking_open(processor: Any) -> bool:
    """Whether prompts end inside a thinking block, as those of models that always think do."""
    try:
        end = processor.decode(render_prompt(processor, [{"role": "user", "content": "x"}]))
    except ValueError:  # the template wants more than a question; the data tell whether they have it
        return False
    return end.rfind("<think>") > end.rfind("</think>")


def _parts(content: Any) -> list[dict[str, Any]]:
    """Return the content as parts `{"type": "text", "text": str}` and `{"type": "image"}`, without image payloads.

    Text is split at `<image>`: "a<image>b" becomes text a, image, text b.
    """
    if isinstance(content, str):
        content = [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise ValueError(f"message content must be a string or a list of parts, not {type(content).__name__}")
    parts: list[dict[str, Any]] = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind in ("image", "image_url"):
            parts.append({"type": "image"})
        elif kind == "text" and isinstance(part.get("text"), str):
            for piece in filter(None, re.split(f"({IMAGE_MARKER})", part["text"])):
                parts.append({"type": "image"} if piece == IMAGE_MARKER else {"type": "text", "text": piece})
        else:
            raise ValueError(f"message part {repr(part)[:200]} is neither text nor image")
    return parts
