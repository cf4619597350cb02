"""The forms that cross the wire between the rollout server and its clients, of every endpoint. Pure.

`/infer/` speaks ms-swift's forms (`RolloutInferRequest`, `RequestConfig`, `RolloutOutput`), as its client posts and
reads them. Fields of theirs that this server cannot honour are accepted only at their neutral value: a setting that
would be ignored is an error that names the field.
"""

import time
import uuid
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, FailFast, Field, field_validator, model_validator

from utils.data.prompts import MAX_UUID, TooLarge

MAX_SEED = 2**31
MAX_INT = 2**31 - 1  # of counts and ids: the engine's own messages know no larger ones
# Far above what a run asks for, low enough that refusing costs next to nothing (SRV-10).
MAX_REQUESTS = 4096  # of a call
MAX_MESSAGES = 256  # of a request; also parts of a message
MAX_IMAGES = 256  # of a request
MAX_SOURCE = 90 << 20  # characters of an image: 64 MiB as base64
MAX_TEXT = 8 << 20  # characters of a message; what the model cannot take is refused before it is tokenized
MAX_ERROR = 2000  # characters of what a request's failure says
MAX_TENSORS = 1 << 17  # of an update
MAX_RANKS = 1 << 16  # of a communicator
Message = dict[str, Any]  # {"role": ..., "content": str with <image> markers | list of parts}
Name = Annotated[str, Field(min_length=1, max_length=512, pattern=r"^[^\x00-\x1f\x7f]+$")]  # it reaches logs

OneIsAList = BeforeValidator(lambda value: [value] if isinstance(value, str) else [] if value is None else value)
NullIsEmpty = BeforeValidator(lambda value: {} if value is None else value)
Empty = Field(max_length=0)


Shape = Annotated[list[Annotated[int, Field(ge=0, le=2**40)]], Field(max_length=8)]


class WireModel(BaseModel):
    """Unknown fields and values of another type are errors, never guesses."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _has_not_many_fields(cls, data: Any) -> Any:
        """Each unknown field would be an error of its own."""
        if isinstance(data, dict) and len(data) > 2 * len(cls.model_fields) + 8:
            raise ValueError(f"{len(data)} fields; {cls.__name__} has {len(cls.model_fields)}")
        return data


class RolloutInferRequest(WireModel):
    """One conversation to answer. `images`: local paths, URLs, base64 or data URIs, in order of appearance."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES), FailFast()]
    images: Annotated[
        list[Annotated[str, Field(max_length=MAX_SOURCE)]], Field(max_length=MAX_IMAGES), FailFast(), OneIsAList
    ] = []
    uuid: Annotated[str, Field(max_length=MAX_UUID)] | None = None
    data_dict: Annotated[dict[str, Any], Field(max_length=256), NullIsEmpty] = {}  # the caller's notes; not read here
    audios: Annotated[list[Any], Empty, OneIsAList] = []
    videos: Annotated[list[Any], Empty, OneIsAList] = []
    objects: Annotated[dict[str, Any], Empty, NullIsEmpty] = {}
    tools: None = None
    chat_template_kwargs: Annotated[dict[str, Any], Empty, NullIsEmpty] = {}
    add_eos: None = None

    @field_validator("messages")
    @classmethod
    def _messages_have_role_and_content(cls, messages: list[Message]) -> list[Message]:
        for i, message in enumerate(messages):
            if not isinstance(message.get("role"), str):
                raise ValueError(f"messages[{i}].role must be a string")
            content = message.get("content")
            if not isinstance(content, str | list):
                raise ValueError(f"messages[{i}].content must be a string or a list of parts")
            if isinstance(content, list) and len(content) > MAX_MESSAGES:
                raise ValueError(f"messages[{i}].content has {len(content)} parts; at most {MAX_MESSAGES}")
            parts = content if isinstance(content, list) else [{"text": content}]
            texts = [part["text"] for part in parts if isinstance(part, dict) and isinstance(part.get("text"), str)]
            if (length := sum(map(len, texts))) > MAX_TEXT:
                raise ValueError(f"messages[{i}].content has {length} characters; at most {MAX_TEXT}")
        return messages


class RequestConfig(WireModel):
    """Sampling settings. `None` takes the model's own default (generation_config.json); greedy at temperature 0."""

    max_tokens: Annotated[int, Field(ge=1, le=MAX_INT)] | None = None  # None: up to the engine's max model length
    temperature: Annotated[float, Field(ge=0)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=MAX_INT)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    stop: Annotated[
        list[Annotated[str, Field(min_length=1, max_length=256)]], Field(max_length=16), FailFast(), OneIsAList
    ] = []
    seed: Annotated[int, Field(ge=0)] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    prompt_logprobs: None = None
    return_details: bool = True  # token ids are always returned
    n: Literal[1] = 1
    num_beams: Literal[1] = 1
    best_of: Literal[1] | None = None
    stream: Literal[False] = False
    length_penalty: Annotated[float, Field(ge=1, le=1)] = 1.0
    structured_outputs_regex: None = None

    def seed_of(self, index: int) -> int | None:
        """Return the seed of request `index` of a call (SRV-4); None without a seed."""
        return None if self.seed is None else (self.seed + index) % MAX_SEED


class InferCall(WireModel):
    """Body of `/infer/`."""

    infer_requests: Annotated[list[RolloutInferRequest], Field(max_length=MAX_REQUESTS), FailFast()]
    request_config: Annotated[RequestConfig, NullIsEmpty] = RequestConfig()
    use_tqdm: bool | None = None  # sent by ms-swift's client; means nothing here
    metrics: None = None
    template: None = None
    adapter_request: None = None


class ChatMessage(BaseModel):
    role: str = "assistant"
    content: str = ""


class Choice(BaseModel):
    """`token_ids` are the generated tokens, cut before the stop token; `logprobs` has one entry for each of them."""

    index: int = 0
    message: ChatMessage = ChatMessage()
    finish_reason: Literal["stop", "length"] | None = None
    logprobs: dict[str, list[dict[str, Any]]] | None = None
    token_ids: list[int] = []


class Usage(BaseModel):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    total_tokens: int = 0


class ChatCompletionResponse(BaseModel):
    """OpenAI's chat-completion form, with `prompt_token_ids` as the engine saw them (image placeholders expanded)."""

    model: str
    choices: list[Choice]
    usage: Usage = Usage()
    id: str = Field(default_factory=lambda: f"chatcmpl-{uuid.uuid4().hex}")
    object: str = "chat.completion"
    created: int = Field(default_factory=lambda: int(time.time()))
    prompt_token_ids: list[int] | None = None
    images_size: list[tuple[int, int]] | None = None


class RolloutOutput(BaseModel):
    """One answer. Lists are per turn as in ms-swift, here always one turn (none if the request failed).

    `rollout_infos` holds `weight_version` (and `last_weight_version` if the weights changed meanwhile); if a token
    ended the answer, `stop_token_id`, and `stop_logprob` if requested; for a request that failed, `error`, with
    `refused: true` where the content was not allowed rather than unreadable, `too_large: true` beyond a limit.
    """

    response: ChatCompletionResponse
    messages: list[Message] | None = None
    response_token_ids: list[list[int]] = []
    response_loss_mask: list[list[int]] = []
    rollout_infos: dict[str, Any] = {}
    rollout_logprobs: list[list[float]] = []

    @classmethod
    def failed(cls, model: str, weight_version: str | None, error: str, kind: str | None = None) -> "RolloutOutput":
        """Return the answer to a request that failed alone; `kind`: `refused` or `too_large`."""
        infos = {"weight_version": weight_version, "error": error[:MAX_ERROR]} | ({kind: True} if kind else {})
        return cls(response=ChatCompletionResponse(model=model, choices=[Choice()]), rollout_infos=infos)


class OwnedCall(WireModel):
    """Weight-update calls name their run; a server belongs to the run that opened its communicator last."""

    run_id: Name


class InitCommunicator(OwnedCall):
    """The learner is rank 0 at `master_address:master_port`; engine workers take ranks from `rank_offset` on."""

    master_address: Name
    master_port: Annotated[int, Field(ge=1, le=65535)]
    world_size: Annotated[int, Field(ge=2, le=MAX_RANKS)]
    rank_offset: Annotated[int, Field(ge=1, le=MAX_RANKS)] = 1
    bucket_bytes: Annotated[int, Field(ge=1, le=2**50)]
    timeout_s: Annotated[float, Field(gt=0, le=86400)]
    open_timeout_s: Annotated[float, Field(gt=0, le=600)]


class FinishWeightUpdate(OwnedCall):
    version: Name


class StartWeightUpdate(FinishWeightUpdate):
    """`pause`: running requests finish first, are aborted and run again, or are held over the change (SYN-9)."""

    pause: Literal["wait", "abort", "keep"] = "wait"


class UpdateWeights(OwnedCall):
    """Tensors of this update in the order they are sent; `utils.sync.wire.bucket_layouts` gives the borders."""

    names: Annotated[list[Name], Field(min_length=1, max_length=MAX_TENSORS), FailFast()]
    dtype_names: Annotated[list[Name], Field(max_length=MAX_TENSORS), FailFast()]
    shapes: Annotated[list[Shape], Field(max_length=MAX_TENSORS), FailFast()]
    digest: bool = False

    @field_validator("dtype_names", "shapes")
    @classmethod
    def _same_length(cls, value: list, info: Any) -> list:
        if "names" in info.data and len(value) != len(info.data["names"]):
            raise ValueError(f"has {len(value)} entries for {len(info.data['names'])} names")
        return value


class ProbeCall(WireModel):
    """Log-probabilities of a fixed prompt, with `token_ids` after the rendered messages, from every replica."""

    infer_request: RolloutInferRequest
    token_ids: Annotated[list[Annotated[int, Field(ge=0, le=MAX_INT)]], Field(max_length=1 << 18), FailFast()] = []


class TeacherCall(WireModel):
    """The `top_k` most likely tokens at each of `token_ids`, which follow the rendered messages (TGT-16)."""

    infer_request: RolloutInferRequest
    token_ids: Annotated[
        list[Annotated[int, Field(ge=0, le=MAX_INT)]], Field(min_length=1, max_length=1 << 18), FailFast()
    ]
    top_k: Annotated[int, Field(ge=1, le=20)] = 20  # vLLM's own limit, unless max_logprobs is given


def collect_images(messages: list[Message], images: list[str]) -> list[str]:
    """Return image sources in the order of their placeholders.

    A content part that carries its own source (`{"type": "image", "image": src}` or OpenAI's `image_url`) keeps it;
    `<image>` markers and bare parts take the next of `images`; what is left of `images` comes first, where
    `utils.data.prompts.to_chat_messages` puts placeholders without a marker.
    """
    slots = [slot for message in messages for slot in _image_slots(message["content"])]
    if max(len(slots), len(images)) > MAX_IMAGES:
        raise TooLarge(f"a request has at most {MAX_IMAGES} images")
    left_over = max(0, len(images) - slots.count(None))
    taken = iter(images[left_over:])
    placed = [next(taken, None) if slot is None else slot for slot in slots]
    return images[:left_over] + [source for source in placed if source is not None]


def _image_slots(content: str | list[Any]) -> list[str | None]:
    """Return the source of each image placeholder of a message, None where the part carries none."""
    slots: list[str | None] = []
    for part in [{"type": "text", "text": content}] if isinstance(content, str) else content:
        if not isinstance(part, dict):
            continue
        if part.get("type") == "text" and isinstance(part.get("text"), str):
            slots += [None] * part["text"].count("<image>")
        elif part.get("type") in ("image", "image_url"):
            source = part.get("image", part.get("image_url"))
            source = source.get("url") if isinstance(source, dict) else source
            slots.append(source if isinstance(source, str) and source else None)
    return slots
