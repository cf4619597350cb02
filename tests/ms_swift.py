"""ms-swift's published forms for `/infer/`, as its client posts them (`asdict`) and reads them (`model_validate`).

Source: swift/infer_engine/protocol.py and swift/rlhf_trainers/vllm_client.py of modelscope/ms-swift (main, 2026): only
the fields with their types and defaults, none of the code.
"""

from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict


@dataclass
class RolloutInferRequest:
    messages: list[dict[str, Any]]
    images: list[str] = field(default_factory=list)
    audios: list[str] = field(default_factory=list)
    videos: list[str] = field(default_factory=list)
    tools: list[dict] | None = None
    objects: dict[str, Any] = field(default_factory=dict)
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    data_dict: dict = field(default_factory=dict)
    uuid: str | None = None


@dataclass
class RequestConfig:
    max_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    num_beams: int = 1
    stop: list[str] | None = field(default_factory=list)
    seed: int | None = None
    stream: bool = False
    logprobs: bool = False
    top_logprobs: int | None = None
    prompt_logprobs: int | None = None
    n: int = 1
    best_of: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    length_penalty: float = 1.0
    return_details: bool = False
    structured_outputs_regex: str | None = None


class Form(BaseModel):
    """A strict model: ms-swift's own models ignore unknown fields and convert values; here both are errors."""

    model_config = ConfigDict(extra="forbid", strict=True)


class ChatMessage(Form):
    role: Literal["system", "user", "assistant"]
    content: str | list[dict[str, Any]] | int | float | list[float]
    tool_calls: list[dict] | None = None
    reasoning_content: str | None = None


class Choice(Form):
    index: int
    message: ChatMessage
    finish_reason: Literal["stop", "length"] | None
    logprobs: dict[str, list[dict[str, Any]]] | None = None
    token_ids: list[int] | None = None
    routed_experts: Any = None


class UsageInfo(Form):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class ChatCompletionResponse(Form):
    model: str
    choices: list[Choice]
    usage: UsageInfo
    id: str
    object: Literal["chat.completion"]
    created: int
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list | None = None
    images_size: list[tuple[int, int]] | None = None


class RolloutOutput(Form):
    response: ChatCompletionResponse
    messages: list[dict[str, Any]] | None = None
    response_token_ids: list[list[int]] = []
    response_loss_mask: list[list[int]] = []
    rollout_infos: dict[str, Any] = {}
    rollout_logprobs: list[list[float]] = []
    prompt_logprobs: list | None = None
