"""Every key of a config file: type, range, default and meaning. Pure: reads nothing, holds no rules across keys.

`utils.config.load` loads files into these classes and holds the rules that span several keys; `docs/config.md` is
generated from the descriptions here. A new key needs a line here and nothing else.
"""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args
from urllib.parse import urlsplit

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    field_validator,
    model_serializer,
    model_validator,
)
from pydantic.fields import FieldInfo

from utils.answer_format import COORD_TOKENS, FORMATS, QWEN3VL, AnswerFormat

RM = "custom.extra.rollout_matching"
RS = "custom.extra.rollout_server"
SCRIPTS = {"rollout_matching_sft": "train_stage2.py", "grpo": "train_grpo.py"}

Share = Annotated[float, Field(ge=0, le=1)]
PositiveInt = Annotated[int, Field(ge=1)]
PositiveFloat = Annotated[float, Field(gt=0)]
Port = Annotated[int, Field(ge=1, le=65535)]


class Section(BaseModel):
    """A mapping in which an unknown key or another type than the declared one is an error."""

    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, allow_inf_nan=False, protected_namespaces=(), serialize_by_alias=True
    )


@dataclass(frozen=True)
class ServerAddress:
    """Where one rollout server answers (`base_url`) and where the learner opens its weight communicator."""

    base_url: str
    group_port: int

    @property
    def host(self) -> str:
        return urlsplit(self.base_url).hostname or ""

    @property
    def port(self) -> int:
        url = urlsplit(self.base_url)
        return url.port or (443 if url.scheme == "https" else 80)

    @property
    def path_prefix(self) -> str:
        """Path in front of every endpoint, without a trailing slash; empty for most servers."""
        return urlsplit(self.base_url).path.rstrip("/")


# ---------------------------------------------------------------------------------------------------------------------
# model, tuner, data


class Model(Section):
    """The checkpoint that is trained and served."""

    path: str = Field(examples=["path/to/model"], description="directory of the Hugging Face checkpoint")
    dtype: Literal["float32", "bfloat16", "float16"] = Field(
        "bfloat16", description="type of the training weights and of the served weights; float32 for exact comparisons"
    )
    attn_implementation: Literal["sdpa", "eager", "flash_attention_2"] = Field(
        "sdpa", description="attention of the learner; packed rows are isolated under each of them"
    )
    image_min_pixels: PositiveInt | None = Field(None, description="least pixels per image; null: the processor's")
    image_max_pixels: PositiveInt | None = Field(None, description="most pixels per image; null: the processor's")


class Tuner(Section):
    """Which weights learn, and through what."""

    type: Literal["full", "lora"] = Field("full", description="train the weights themselves, or low-rank adapters")
    use_dora: bool = Field(False, description="DoRA: LoRA with a learnt magnitude per output row; needs type lora")
    rank: PositiveInt = Field(16, description="rank of the adapters")
    alpha: PositiveFloat = Field(32, description="adapter scale is alpha / rank")
    dropout: float = Field(0.0, ge=0, lt=1, description="dropout in front of the adapters")
    target_modules: str | list[str] = Field(
        "all-linear",
        description='which modules get adapters: "all-linear", a list of name endings, or a regex',
    )
    modules_to_save: list[str] = Field([], description="modules trained in full beside the adapters, by name ending")
    freeze_llm: bool = Field(False, description="keep the language model as it is")
    freeze_vit: bool = Field(True, description="keep the vision tower as it is")
    freeze_aligner: bool = Field(True, description="keep the mergers between the two as they are")
    adapter_path: str | None = Field(None, description="existing PEFT adapter to go on from; needs type lora")


class Data(Section):
    """How samples are read."""

    prompt: str = Field(
        COORD_TOKENS.prompt,
        description="user text for samples that bring no messages of their own; with answer_format qwen3vl the "
        "default asks for boxes and labels in JSON",
    )
    object_order: Literal["file", "sorted"] = Field(
        "file", description="objects in file order, or sorted top to bottom then left to right"
    )
    on_bad_sample: Literal["stop", "skip"] = Field(
        "stop",
        description="a sample that cannot be used stops the run before training, or is left out, counted and listed in"
        " `skipped.jsonl` in the run directory",
    )


class DataFile(Section):
    """One JSONL file of a mixture."""

    path: str = Field(description="JSONL file")
    weight: PositiveFloat = Field(1.0, description="times each of its samples is used per epoch")


def _as_data_files(value: Any) -> Any:
    """`a.jsonl`, `[a.jsonl, ...]` and `[{path, weight}, ...]` all become the last form."""
    entries = [value] if isinstance(value, str) else value
    if not isinstance(entries, list):
        return value
    return [{"path": entry} if isinstance(entry, str) else entry for entry in entries]


DataFiles = Annotated[list[DataFile], BeforeValidator(_as_data_files)]


# ---------------------------------------------------------------------------------------------------------------------
# custom.extra.rollout_matching


class ServerEntry(Section):
    """One rollout server."""

    base_url: str = Field(description="http(s) url of the server, a path prefix allowed")
    group_port: Port = Field(description="port on the learner's side for the weight communicator of this server")


class Server(Section):
    """Where the rollout servers are: either `servers`, or `base_url` with `group_port`."""

    servers: list[ServerEntry] | None = Field(None, description="one entry per server")
    base_url: str | list[str] | None = Field(None, description="paired form: the url or urls of the servers")
    group_port: Port | list[Port] | None = Field(
        None, description="paired form: a list pairs by index; one port with several urls gives url i the port + i"
    )
    timeout_s: PositiveFloat = Field(
        240.0,
        description="limit for reachability checks and for opening the communicator, in seconds; "
        "a server whose engine is silent for half of it reports itself dead",
    )
    infer_timeout_s: float | None = Field(
        None, description="limit for one /infer/ request in seconds; null, zero or negative: none"
    )

    @field_validator("infer_timeout_s")
    @classmethod
    def _positive_or_none(cls, value: float | None) -> float | None:
        return value if value is not None and value > 0 else None

    def addresses(self) -> list[ServerAddress]:
        """The servers in order, urls without trailing slash. Raises ValueError when lists cannot be paired (CFG-7)."""
        if self.servers is not None:
            return [ServerAddress(entry.base_url.rstrip("/"), entry.group_port) for entry in self.servers]
        if isinstance(self.base_url, str):
            if not isinstance(self.group_port, int):
                raise ValueError("a single base_url takes a single group_port; give one number")
            return [ServerAddress(self.base_url.rstrip("/"), self.group_port)]
        urls, ports = self.base_url or [], self.group_port
        if isinstance(ports, int):
            ports = [ports + index for index in range(len(urls))]
        if ports is None or len(ports) != len(urls):
            raise ValueError(
                f"{len(urls)} base_urls cannot pair with {len(ports or [])} group_ports; give as many ports as urls, "
                "or a single port to count up from"
            )
        return [ServerAddress(url.rstrip("/"), port) for url, port in zip(urls, ports, strict=True)]


class Sync(Section):
    """How updated weights reach the engines."""

    mode: Literal["full", "adapter", "auto"] = Field(
        "full",
        description="merged weights, adapter tensors only, or auto: adapter with enable_lora, else full",
    )
    fallback_to_full: bool = Field(True, description="when adapter sync fails, warn once and go on with full")
    bucket_mib: PositiveInt = Field(256, description="size of one bucket in MiB; rank 0 needs two more of memory")
    timeout_s: PositiveFloat = Field(300.0, description="limit for one sync in seconds; then every rank stops")
    verify: Literal["off", "first", "always"] = Field(
        "first", description="prove after a sync that the engine holds the learner's weights (digests and a probe)"
    )


class Vllm(Section):
    """The vLLM engine that generates."""

    mode: Literal["colocate", "server"] = Field("colocate", description="inside the learner, or separate servers")
    gpu_memory_utilization: float = Field(0.45, gt=0, le=1, description="colocate: share of a device's memory for vLLM")
    tensor_parallel_size: PositiveInt = Field(4, description="colocate: learner devices one engine spans")
    enable_lora: bool = Field(False, description="the engine has LoRA slots; needed by adapter sync")
    server: Server | None = Field(None, description="connection settings of server mode")
    sync: Sync = Field(default_factory=Sync)


class Decoding(Section):
    """How tokens are sampled."""

    temperature: float = Field(0.0, ge=0, description="0 is greedy")
    top_p: float = Field(1.0, gt=0, le=1, description="nucleus sampling; 1 is off")
    top_k: int = Field(-1, ge=-1, description="sample from the k most likely tokens; -1 is off")
    repetition_penalty: PositiveFloat = Field(1.0, description="1 is off")


class Matching(Section):
    """Which predicted objects count as found."""

    iou_threshold: Share = Field(0.5, description="smallest IoU of a matched pair")
    label: Literal["correct", "ignore"] = Field(
        "correct",
        description="a matched object's desc learns the true one up to the first difference, or nothing",
    )


class Targets(Section):
    """How the training target is written; both options are off by default."""

    trim_trailing_unmatched: bool = Field(False, description="cut false positives at the end of the prefix")
    supervise_structure: bool = Field(False, description="format tokens around matched objects learn themselves")


class Losses(Section):
    """Weights of the loss parts."""

    text: float = Field(1.0, ge=0, description="cross-entropy of text tokens")
    desc: float = Field(1.0, ge=0, description="factor on text inside desc values")
    coord: float = Field(
        1.0, ge=0, description="soft cross-entropy of coordinate tokens; qwen3vl: factor on text that is a coordinate"
    )
    w1: float = Field(1.0, ge=0, description="1-Wasserstein distance of coordinate tokens; not with qwen3vl")
    gate: float = Field(1.0, ge=0, description="probability mass outside the coordinate tokens; not with qwen3vl")
    sigma: PositiveFloat = Field(12.0, description="width of the Gaussian coordinate target, in bins; not with qwen3vl")


class Async(Section):
    """Rollouts prepared ahead while the current rows train."""

    enabled: bool = Field(False, description="off: strictly on-policy")
    queue_limit: PositiveInt = Field(4, description="rows a rank prepares ahead at most")
    version_window: int = Field(0, ge=0, description="optimizer steps a rollout may be old; 0: as without")
    on_sync: Literal["wait", "abort", "keep"] = Field(
        "wait", description="requests that run when weights change: finish first, are made again, are held over it"
    )


class MonitorDump(Section):
    """Pictures and texts of a few samples under the run directory."""

    every_steps: int = Field(0, ge=0, description="optimizer steps between dumps; 0 is off")
    num_samples: PositiveInt = Field(4, description="samples per dump")


class Evaluation(Section):
    """How rollouts on `custom.val_jsonl` are scored."""

    iou_threshold: Share = Field(0.5, description="smallest IoU of a pair that counts as found")


class RolloutMatching(Section):
    """Stage-2 training: rollouts, their targets and their losses."""

    rollout_backend: Literal["vllm", "hf"] = Field("vllm", description="what generates")
    vllm: Vllm = Field(default_factory=Vllm)
    decode_batch_size: PositiveInt = Field(1, description="sequences one rollout device decodes at once, at most")
    decoding: Decoding = Field(default_factory=Decoding)
    max_new_tokens: PositiveInt = Field(1024, description="longest answer in tokens")
    max_failed_fraction: Share = Field(0.05, description="unreadable samples tolerated among the last 200")
    teacher_forced_ratio: Share = Field(0.0, description="share of samples that train on the plain ground truth")
    answer_format: Literal["coord_tokens", "qwen3vl"] = Field(
        "coord_tokens",
        description="one bare token per coordinate, or Qwen3-VL's own form (numbers 0..1000, label, boxes only), which "
        "needs no added tokens",
    )
    matching: Matching = Field(default_factory=Matching)
    targets: Targets = Field(default_factory=Targets)
    losses: Losses = Field(default_factory=Losses)
    async_: Async = Field(default_factory=Async, alias="async")
    monitor_dump: MonitorDump = Field(default_factory=MonitorDump)
    eval: Evaluation = Field(default_factory=Evaluation)

    @property
    def format(self) -> AnswerFormat:
        """The answer format by its name."""
        return FORMATS[self.answer_format]


# ---------------------------------------------------------------------------------------------------------------------
# custom.extra.rollout_server


class ServerSettings(Section):
    """What one rollout server is launched with; host and port come from the connection settings."""

    device: Literal["auto", "cuda", "cpu"] = Field("auto", description="auto: cuda where there is one, else cpu")
    vllm_tensor_parallel_size: PositiveInt = Field(1, description="devices one engine spans")
    vllm_data_parallel_size: PositiveInt | Literal["auto"] = Field(
        "auto", description="engines side by side; auto: visible devices / tensor_parallel_size, 1 on CPU"
    )
    vllm_gpu_memory_utilization: float = Field(0.9, gt=0, le=1, description="share of a device's memory for vLLM")
    vllm_max_model_len: PositiveInt = Field(examples=[32768], description="longest prompt + answer in tokens")
    vllm_max_num_seqs: PositiveInt | None = Field(None, description="sequences an engine runs at once; null: vLLM's")
    vllm_enable_lora: bool = Field(False, description="LoRA slots; must agree with rollout_matching.vllm.enable_lora")
    vllm_enable_prefix_caching: bool = Field(True, description="reuse cached prefixes; dropped at every weight change")
    vllm_engine_kwargs: dict[str, Any] = Field({}, description="further engine arguments of vLLM, passed through")
    allow_remote: bool = Field(
        False, description="listen beyond loopback; also needs a token in ROLLOUT_SERVER_TOKEN, sent with every request"
    )
    allowed_image_roots: list[str] | None = Field(
        None, description="directories image files may be read from; null: those of all configured data files"
    )
    allow_image_urls: bool = Field(False, description="fetch images from http(s) urls")
    cpu_kv_cache_gib: PositiveInt = Field(4, description="device cpu: memory for cached keys and values, in GiB")

    @property
    def world_size(self) -> int | None:
        """Devices of this server, TP x DP; None where that follows from the machine it is launched on."""
        replicas = self.vllm_data_parallel_size
        if replicas == "auto":
            replicas = 1 if self.device == "cpu" else None
        return replicas and self.vllm_tensor_parallel_size * replicas


class ServerOverride(ServerSettings):
    """Settings of one server that differ from the common ones; keys that are not given stay common."""

    vllm_max_model_len: PositiveInt = Field(1, description="longest prompt + answer in tokens")

    @model_serializer(mode="wrap")
    def _given_keys(self, handler: Any) -> dict[str, Any]:
        return {key: value for key, value in handler(self).items() if key in self.model_fields_set}


class RolloutServer(ServerSettings):
    """What the rollout servers are launched with; host and port come from the connection settings."""

    servers: list[ServerOverride] = Field([], description="entry i overrides any of the keys above for server i")


class Extra(Section):
    """Settings of the rollout programs."""

    rollout_matching: RolloutMatching = Field(default_factory=RolloutMatching)
    rollout_server: RolloutServer | None = Field(
        None, description="needed by rollout_server.py and for GRPO in server mode"
    )


class Custom(Section):
    """What is trained, and on which data."""

    trainer_variant: Literal["rollout_matching_sft", "grpo"] = Field(
        examples=["rollout_matching_sft"], description="stage-2 training (train_stage2.py) or GRPO (train_grpo.py)"
    )
    train_jsonl: DataFiles = Field(
        examples=["train.jsonl"], min_length=1, description="a file, a list of files, or a list of {path, weight}"
    )
    val_jsonl: DataFiles | None = Field(None, min_length=1, description="held-out data for evaluation, same forms")
    extra: Extra = Field(default_factory=Extra)

    def train_files(self) -> list[DataFile]:
        return self.train_jsonl

    def val_files(self) -> list[DataFile]:
        return self.val_jsonl or []


# ---------------------------------------------------------------------------------------------------------------------
# training, rlhf, top level


class Collapse(Section):
    """Bounds on a step's rollouts; a step beyond one of them is warned about."""

    min_parse_rate: Share = Field(0.5, description="smallest share of answers that parse")
    max_duplicate_rate: Share = Field(0.3, description="largest share of predicted objects that repeat another")
    max_truncated_rate: Share = Field(0.5, description="largest share of answers cut at max_new_tokens")


class Training(Section):
    """Batch geometry, optimization, evaluation and saving."""

    seed: int = Field(42, ge=0, description="seed of data order, rollouts and initialisation")
    output_dir: str = Field(examples=["runs/name"], description="run directory")
    num_train_epochs: PositiveFloat = Field(1.0, description="passes over the data, where max_steps is null")
    max_steps: PositiveInt | None = Field(None, description="optimizer steps; null: as num_train_epochs says")
    per_device_train_batch_size: PositiveInt = Field(
        1, description="samples (GRPO: prompts) a rank draws per micro-step"
    )
    gradient_accumulation_steps: PositiveInt = Field(1, description="micro-steps per optimizer step")
    packing: bool = Field(True, description="pack segments into rows of global_max_length; false: a padded batch")
    packing_drop_last: bool = Field(True, description="what is left in the buffer after the last step is not trained")
    packing_buffer: PositiveInt = Field(512, description="segments held back per rank, at most")
    packing_min_fill_ratio: Share = Field(0.5, description="a row filled less is warned about")
    learning_rate: PositiveFloat = Field(1e-5, description="peak learning rate of the language model")
    vit_lr: PositiveFloat | None = Field(None, description="of the vision tower; null: learning_rate")
    aligner_lr: PositiveFloat | None = Field(None, description="of the mergers; null: learning_rate")
    embed_lr: PositiveFloat | None = Field(None, description="of embeddings and output layer; null: learning_rate")
    lr_scheduler: Literal["cosine", "linear", "constant"] = Field("cosine", description="shape after the warm-up")
    warmup_steps: int = Field(0, ge=0, description="optimizer steps of linear warm-up")
    min_lr_ratio: Share = Field(0.0, description="learning rate at the end, relative to the peak")
    weight_decay: float = Field(0.0, ge=0, description="decoupled weight decay of matrices")
    adam_beta1: float = Field(0.9, ge=0, lt=1, description="decay of AdamW's first moment")
    adam_beta2: float = Field(0.999, ge=0, lt=1, description="decay of AdamW's second moment")
    adam_epsilon: PositiveFloat = Field(1e-8, description="AdamW's epsilon")
    max_grad_norm: float = Field(1.0, ge=0, description="gradients are clipped to this norm; 0 is off")
    on_nan_loss: Literal["stop", "skip"] = Field(
        "stop",
        description="a loss or gradient that is not finite ends the run, or its optimizer step is skipped (ten in a row"
        " end the run all the same); the samples are named",
    )
    rank_timeout_s: PositiveFloat = Field(
        1800.0,
        description="a rank that keeps the others waiting for so long (frozen, stuck) ends the run on all of them; set"
        " it above what one rollout, sync or save may take",
    )
    gradient_checkpointing: bool = Field(True, description="recompute activations in the backward pass to save memory")
    fused_kernels: bool = Field(False, description="liger-kernel's norms, rotary embedding and MLP; CUDA only")
    eval_steps: int = Field(0, ge=0, description="optimizer steps between evaluations; 0: only at the end")
    eval_at_start: bool = Field(False, description="evaluate before the first step too")
    eval_limit: PositiveInt | None = Field(None, description="evaluate on the first n samples; null: all")
    save_steps: int = Field(0, ge=0, description="optimizer steps between checkpoints; 0: only at the end")
    save_total_limit: PositiveInt | None = Field(None, description="complete checkpoints kept; null: all")
    resume_from_checkpoint: str | None = Field(None, description="checkpoint, or auto: the newest complete one")
    metric_for_best_model: Literal[
        "f1", "precision", "recall", "f1_no_label", "precision_no_label", "recall_no_label", "mean_iou", "parse_rate"
    ] = Field(
        "f1",
        description="stage 2: evaluation metric of the best step (GRPO: mean reward); *_no_label takes wrong labels",
    )
    logging_steps: PositiveInt = Field(1, description="optimizer steps between log lines")
    report_to: Literal["tensorboard", "none"] = Field("tensorboard", description="where curves are written")
    collapse: Collapse = Field(default_factory=Collapse)

    def num_steps(self, num_samples: int, world_size: int) -> int:
        """Optimizer steps of a run over `num_samples` samples per epoch; what does not fill a last step is left out."""
        if self.max_steps is not None:
            return self.max_steps
        per_step = self.per_device_train_batch_size * self.gradient_accumulation_steps * world_size
        return max(1, int(self.num_train_epochs * num_samples / per_step + 1e-9))


class Sampling(Decoding):
    """How answers are sampled. Never greedily: a group of equal answers would teach nothing."""

    temperature: PositiveFloat = Field(1.0, description="must be above 0, so that a group's answers differ")


class Rlhf(Section):
    """GRPO: connection, sampling, rewards and objective."""

    use_vllm: bool = Field(True, description="rollouts come from vLLM; false: transformers' generate on the learner")
    vllm_mode: Literal["server", "colocate"] = Field("server", description="separate server, or inside the learner")
    vllm_server_host: list[str] = Field(["127.0.0.1"], description="server mode: exactly one loopback host")
    vllm_server_port: list[Port] = Field([8080], description="server mode: exactly one port")
    vllm_server_group_port: Port = Field(51216, description="port of the weight communicator")
    vllm_server_timeout: PositiveFloat = Field(
        240.0,
        description="limit for reachability checks, in seconds; "
        "a server whose engine is silent for half of it reports itself dead",
    )
    vllm_gpu_memory_utilization: float = Field(
        0.45, gt=0, le=1, description="colocate: share of a device's memory for vLLM"
    )
    vllm_tensor_parallel_size: PositiveInt = Field(1, description="colocate: learner devices one engine spans")
    sync: Sync = Field(default_factory=Sync)
    decoding: Sampling = Field(default_factory=Sampling)
    decode_batch_size: PositiveInt = Field(1, description="sequences one rollout device decodes at once, at most")
    max_new_tokens: PositiveInt = Field(1024, description="longest answer in tokens")
    num_generations: int = Field(8, ge=2, description="answers to each prompt: the group they are compared in")
    num_iterations: PositiveInt = Field(
        1, description="optimizer steps over the same answers, which count as one in training"
    )
    reward_funcs: list[str] = Field(
        examples=[["detection_f1"]], min_length=1, description="names of reward functions, each in [0, 1]"
    )
    reward_weights: list[Annotated[float, Field(ge=0)]] | None = Field(
        None, description="one per function, for their weighted sum; null: all 1"
    )
    reward_files: list[str] = Field([], description="Python files with further functions (completion, sample) -> float")
    scale_rewards: Literal["group", "batch", "none"] = Field(
        "group", description="advantages are divided by the std of the group, of the whole step, or by nothing"
    )
    dynamic_sample: bool = Field(
        False, description="prompts whose answers all got the same reward make way for the next prompts of the data"
    )
    max_resample_times: PositiveInt = Field(3, description="dynamic_sample: rounds of further prompts, at most")
    overlong_filter: bool = Field(False, description="answers cut at max_new_tokens are left out")
    loss_type: Literal["grpo", "dapo", "dr_grpo"] = Field(
        "grpo",
        description="mean per answer, then over answers; mean over all tokens; or sum / max_new_tokens, then mean",
    )
    epsilon: float = Field(0.2, gt=0, le=1, description="ratios are clipped below at 1 - epsilon")
    epsilon_high: PositiveFloat | None = Field(None, description="and above at 1 + epsilon_high; null: epsilon")
    importance_sampling_level: Literal["token", "sequence"] = Field(
        "token", description="ratio of each token, or its geometric mean over the answer (GSPO)"
    )
    importance_correction_cap: PositiveFloat | None = Field(
        2.0, description="largest weight that corrects for the engine's own probabilities; null: no correction"
    )
    beta: float = Field(0.0, ge=0, description="weight of the KL penalty to the policy at the start; 0: no reference")

    @property
    def uses_server(self) -> bool:
        return self.use_vllm and self.vllm_mode == "server"

    def rollout_settings(self) -> dict[str, Any]:
        """The same settings in the form of stage 2, as keys of `RolloutMatching` (GRP-2, CFG-7)."""
        urls = [
            f"http://{host}:{port}" for host, port in zip(self.vllm_server_host, self.vllm_server_port, strict=False)
        ]
        server = Server(base_url=urls, group_port=self.vllm_server_group_port, timeout_s=self.vllm_server_timeout)
        vllm = Vllm(
            mode=self.vllm_mode,
            gpu_memory_utilization=self.vllm_gpu_memory_utilization,
            tensor_parallel_size=self.vllm_tensor_parallel_size,
            server=server,
            sync=self.sync,
        )
        return {
            "rollout_backend": "vllm" if self.use_vllm else "hf",
            "vllm": vllm,
            "decoding": self.decoding,
            "decode_batch_size": self.decode_batch_size,
            "max_new_tokens": self.max_new_tokens,
        }


# Where GRPO keeps what stage 2 calls otherwise.
_RLHF_KEYS = {
    "rollout_backend": "use_vllm",
    "vllm.mode": "vllm_mode",
    "vllm.server": "vllm_server_port",
    "vllm.sync.mode": "sync.mode",
    "vllm.tensor_parallel_size": "vllm_tensor_parallel_size",
}


class Config(Section):
    """A resolved and validated config. `cfg.rm` and `cfg.rs` are the two sections under `custom.extra`; for GRPO,
    `cfg.rm` has the settings of `rlhf` in place of its own, so that what makes rollouts reads one form."""

    global_max_length: PositiveInt | None = Field(
        None, description="tokens in one packed row; required for stage 2 and for packing"
    )
    model: Model
    tuner: Tuner = Field(default_factory=Tuner)
    data: Data = Field(default_factory=Data)
    custom: Custom
    training: Training
    deepspeed: str = Field("zero2", description="name of a file in ds_configs/, or path of a DeepSpeed JSON")
    rlhf: Rlhf | None = Field(None, description="GRPO only")

    _origin: Any = PrivateAttr(None)  # utils.config.load.Origin: which file set what

    @model_validator(mode="before")
    @classmethod
    def _prompt_of_the_format(cls, values: Any) -> Any:
        """Where no prompt is given the answer format's own becomes the value, and is printed with the rest."""
        name = values if isinstance(values, dict) else {}
        for key in ("custom", "extra", "rollout_matching", "answer_format"):
            name = name.get(key) if isinstance(name, dict) else None
        data = values.get("data", {}) if isinstance(values, dict) else None
        if name == QWEN3VL.name and isinstance(data, dict):
            return {**values, "data": {"prompt": QWEN3VL.prompt, **data}}
        return values

    @property
    def is_grpo(self) -> bool:
        return self.custom.trainer_variant == "grpo"

    @property
    def rm(self) -> RolloutMatching:
        own = self.custom.extra.rollout_matching
        return own.model_copy(update=self.rlhf.rollout_settings()) if self.is_grpo and self.rlhf else own

    def rollout_path(self, key: str) -> str:
        """Where the setting `cfg.rm.<key>` stands in the file, for messages."""
        return f"rlhf.{_RLHF_KEYS.get(key, key)}" if self.is_grpo else f"{RM}.{key}"

    @property
    def answers_per_sample(self) -> int:
        """Rollouts of each sample that is drawn."""
        return self.rlhf.num_generations if self.is_grpo and self.rlhf else 1

    @property
    def rs(self) -> RolloutServer | None:
        return self.custom.extra.rollout_server

    @property
    def connection(self) -> Server | None:
        """Connection settings in the form of CFG-7, whichever trainer they are for; None without servers."""
        uses_server = self.rm.rollout_backend == "vllm" and self.rm.vllm.mode == "server"
        return self.rm.vllm.server if uses_server else None

    def servers(self) -> list[ServerAddress]:
        """Rollout servers in order; empty when nothing is generated by a server."""
        return self.connection.addresses() if self.connection else []

    def server_settings(self, index: int = 0) -> ServerSettings:
        """Launch settings of server `index`: the common ones with that server's overrides."""
        settings = self.rs.model_dump(exclude={"servers"})
        if index < len(self.rs.servers):
            settings |= self.rs.servers[index].model_dump()
        return ServerSettings(**settings)

    def image_roots(self, index: int = 0) -> list[str]:
        """Absolute directories server `index` may read images from (SRV-5)."""
        roots = self.server_settings(index).allowed_image_roots if self.rs else None
        if roots is None:
            files = self.custom.train_files() + self.custom.val_files()
            roots = [os.path.dirname(os.path.abspath(file.path)) for file in files]
        return list(dict.fromkeys(os.path.abspath(root) for root in roots))

    def sync_mode(self) -> Literal["full", "adapter"]:
        """The sync mode in force at start: `auto` decided, DoRA adapters fallen back to full where that is allowed."""
        sync = self.rm.vllm.sync
        mode = sync.mode
        if mode == "auto":
            mode = "adapter" if self.rm.vllm.enable_lora else "full"
        # vLLM has no DoRA slots, so this failure is already known (SYN-10).
        return "full" if mode == "adapter" and self.tuner.use_dora and sync.fallback_to_full else mode

    def deepspeed_path(self) -> Path:
        """The DeepSpeed JSON: a bare name lies in `ds_configs/`, anything else is a path."""
        if self.deepspeed.endswith(".json"):
            return Path(self.deepspeed)
        return Path(__file__).parents[2] / "ds_configs" / f"{self.deepspeed}.json"


# ---------------------------------------------------------------------------------------------------------------------
# walking the schema


def section_of(annotation: Any) -> type[Section] | None:
    """The section class inside an annotation such as `list[DataFile] | None`; None for plain values."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation
    return next((found for arg in get_args(annotation) if (found := section_of(arg))), None)


def section_keys(section: type[Section]) -> dict[str, FieldInfo]:
    """Key as written in YAML -> field."""
    return {field.alias or name: field for name, field in section.model_fields.items()}


def iter_fields(section: type[Section] = Config, prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """`(dotted path, field)` of every key, sections before what they hold; entries of a list are `path[]`."""
    for key, field in section_keys(section).items():
        yield prefix + key, field
        if inner := section_of(field.annotation):
            is_list = "list[" in str(field.annotation)
            yield from iter_fields(inner, f"{prefix}{key}{'[].' if is_list else '.'}")


def brief(value: Any) -> str:
    """A value as it is shown in messages and docs: JSON, cut to 80 characters."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 80 else text[:77] + "..."
