"""Every key of a config file: type, range, default and meaning. Pure: reads no file, holds no rules across keys.

`utils.config.rules` holds the rules, `utils.config.load` reads files into these classes, and `docs/config.md` is
generated from the descriptions. A new key needs a line here (`rollout` for engines, `rlhf` for GRPO) and nothing else.
"""

import os
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PrivateAttr, model_validator

from utils.answer_format import COORD_TOKENS, FORMATS, QWEN3VL, AnswerFormat
from utils.config.rlhf import Rlhf
from utils.config.rollout import Decoding, RolloutServer, Server, ServerAddress, ServerSettings, Vllm
from utils.config.section import PositiveFloat, PositiveInt, Ratio, Section

RM = "custom.extra.rollout_matching"
RS = "custom.extra.rollout_server"
SCRIPTS = {"rollout_matching_sft": "train_stage2.py", "grpo": "train_grpo.py"}

# ---------------------------------------------------------------------------------------------------------------------
# model, tuner, data


class Model(Section):
    """The checkpoint that is trained and served."""

    path: str = Field(examples=["path/to/model"], description="directory of the Hugging Face checkpoint")
    dtype: Literal["float32", "bfloat16", "float16"] = Field(
        "bfloat16", description="dtype of the trained and of the served weights; float32 for exact comparisons"
    )
    attn_implementation: Literal["sdpa", "eager", "flash_attention_2"] = Field(
        "sdpa", description="attention of the learner; each isolates the segments of packed rows"
    )
    image_min_pixels: PositiveInt | None = Field(
        None, description="minimum number of pixels per image; null: the processor's"
    )
    image_max_pixels: PositiveInt | None = Field(
        None, description="maximum number of pixels per image; null: the processor's"
    )


class Tuner(Section):
    """Which weights are trained: all of them, or adapters."""

    type: Literal["full", "lora"] = Field("full", description="train the weights themselves, or low-rank adapters")
    use_dora: bool = Field(False, description="DoRA: LoRA with a learned magnitude per output row; needs type lora")
    rank: PositiveInt = Field(16, description="rank of the adapters")
    alpha: PositiveFloat = Field(32, description="adapter scale is alpha / rank")
    dropout: float = Field(0.0, ge=0, lt=1, description="dropout on the input of the adapters")
    target_modules: str | list[str] = Field(
        "all-linear", description='modules that get adapters: "all-linear", a list of name endings, or a regex'
    )
    modules_to_save: list[str] = Field([], description="modules trained in full besides the adapters, by name ending")
    freeze_llm: bool = Field(False, description="do not train the language model")
    freeze_vit: bool = Field(True, description="do not train the vision tower")
    freeze_aligner: bool = Field(True, description="do not train the mergers between the two")
    adapter_path: str | None = Field(None, description="existing PEFT adapter to start from; needs type lora")


class Data(Section):
    """How samples are read."""

    prompt: str = Field(
        COORD_TOKENS.prompt,
        description="user text for samples without messages of their own; with answer_format qwen3vl the default "
        "requests boxes and labels in JSON",
    )
    object_order: Literal["file", "sorted"] = Field(
        "file", description="objects in file order, or sorted top to bottom then left to right"
    )
    on_bad_sample: Literal["stop", "skip"] = Field(
        "stop",
        description="a sample that cannot be used stops the run before training, or is skipped, counted and listed in"
        " `skipped.jsonl` in the run directory",
    )


class DataFile(Section):
    """One JSONL file of a mixture."""

    path: str = Field(description="JSONL file")
    weight: PositiveFloat = Field(1.0, description="how often each of its samples is used per epoch")


def _as_data_files(value: Any) -> Any:
    """Turn `a.jsonl` and `[a.jsonl, ...]` into `[{path, weight}, ...]`."""
    entries = [value] if isinstance(value, str) else value
    if not isinstance(entries, list):
        return value
    return [{"path": entry} if isinstance(entry, str) else entry for entry in entries]


DataFiles = Annotated[list[DataFile], BeforeValidator(_as_data_files)]


# ---------------------------------------------------------------------------------------------------------------------
# custom.extra.rollout_matching


class Matching(Section):
    """Which predicted objects match the ground truth."""

    iou_threshold: Ratio = Field(0.5, description="smallest IoU of a matched pair")
    label: Literal["correct", "ignore"] = Field(
        "correct", description="a matched object's desc is trained on the true one up to the first difference, or not"
    )


class Targets(Section):
    """How the training target is built; both options are off by default."""

    trim_trailing_unmatched: bool = Field(False, description="cut false positives at the end of the prefix")
    supervise_structure: bool = Field(False, description="also train the format tokens around matched objects")


class Losses(Section):
    """Weights of the loss parts."""

    text: float = Field(1.0, ge=0, description="cross-entropy of text tokens")
    desc: float = Field(1.0, ge=0, description="factor on text inside desc values")
    coord: float = Field(
        1.0, ge=0, description="soft cross-entropy of coordinate tokens; qwen3vl: factor on the text of coordinates"
    )
    w1: float = Field(1.0, ge=0, description="1-Wasserstein distance of coordinate tokens; not with qwen3vl")
    gate: float = Field(1.0, ge=0, description="probability mass outside the coordinate tokens; not with qwen3vl")
    sigma: PositiveFloat = Field(12.0, description="width of the Gaussian coordinate target, in bins; not with qwen3vl")


class Async(Section):
    """Prefetch: rollouts are prepared while the current rows train."""

    enabled: bool = Field(False, description="off: strictly on-policy")
    queue_limit: PositiveInt = Field(4, description="rows that a rank prepares ahead, at most")
    version_window: int = Field(
        0, ge=0, description="maximum age of a rollout in optimizer steps; 0: as without prefetch"
    )
    on_sync: Literal["wait", "abort", "keep"] = Field(
        "wait",
        description="requests running at a weight update: finish before it, are repeated after it, or are paused",
    )


class MonitorDump(Section):
    """Images and texts of a few samples, saved in the run directory."""

    every_steps: int = Field(0, ge=0, description="optimizer steps between dumps; 0 is off")
    num_samples: PositiveInt = Field(4, description="samples per dump")


class Evaluation(Section):
    """How rollouts on `custom.val_jsonl` are scored."""

    iou_threshold: Ratio = Field(0.5, description="smallest IoU of a pair that counts as a match")


class RolloutMatching(Section):
    """Stage-2 training: rollouts, their targets and their losses."""

    rollout_backend: Literal["vllm", "hf"] = Field("vllm", description="vLLM, or transformers' generate on the learner")
    vllm: Vllm = Field(default_factory=Vllm)
    decode_batch_size: PositiveInt = Field(1, description="sequences that one rollout device decodes at once, at most")
    decoding: Decoding = Field(default_factory=Decoding)
    max_new_tokens: PositiveInt = Field(1024, description="longest response in tokens")
    max_failed_fraction: Ratio = Field(0.05, description="fraction of unreadable samples tolerated among the last 200")
    teacher_forced_ratio: Ratio = Field(0.0, description="fraction of samples trained on the plain ground truth")
    answer_format: Literal["coord_tokens", "qwen3vl"] = Field(
        "coord_tokens",
        description="one token per coordinate, or Qwen3-VL's own format (numbers 0..1000, label, boxes only), which "
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
        """The answer format of that name."""
        return FORMATS[self.answer_format]


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
# training, top level


class Collapse(Section):
    """Bounds on the rollouts of a step; crossing one of them is a warning."""

    min_parse_rate: Ratio = Field(0.5, description="smallest fraction of responses that parse")
    max_duplicate_rate: Ratio = Field(0.3, description="largest fraction of predicted objects that repeat another")
    max_truncated_rate: Ratio = Field(0.5, description="largest fraction of responses cut at max_new_tokens")


class Training(Section):
    """Batch geometry, optimization, evaluation and saving."""

    seed: int = Field(42, ge=0, description="seed of data order, rollouts and initialisation")
    output_dir: str = Field(examples=["runs/name"], description="run directory")
    num_train_epochs: PositiveFloat = Field(1.0, description="passes over the data, where max_steps is null")
    max_steps: PositiveInt | None = Field(None, description="optimizer steps; null: from num_train_epochs")
    per_device_train_batch_size: PositiveInt = Field(1, description="samples (GRPO: prompts) per rank and micro-step")
    gradient_accumulation_steps: PositiveInt = Field(1, description="micro-steps per optimizer step")
    packing: bool = Field(True, description="pack segments into rows of global_max_length; false: a padded batch")
    packing_drop_last: bool = Field(True, description="segments left in the buffer after the last step are dropped")
    packing_buffer: PositiveInt = Field(512, description="segments kept for later rows per rank, at most")
    packing_min_fill_ratio: Ratio = Field(0.5, description="a row filled less is a warning")
    learning_rate: PositiveFloat = Field(1e-5, description="peak learning rate of the language model")
    vit_lr: PositiveFloat | None = Field(None, description="learning rate of the vision tower; null: learning_rate")
    aligner_lr: PositiveFloat | None = Field(None, description="learning rate of the mergers; null: learning_rate")
    embed_lr: PositiveFloat | None = Field(
        None, description="learning rate of embeddings and head; null: learning_rate"
    )
    lr_scheduler: Literal["cosine", "linear", "constant"] = Field("cosine", description="shape after the warm-up")
    warmup_steps: int = Field(0, ge=0, description="optimizer steps of linear warm-up")
    min_lr_ratio: Ratio = Field(0.0, description="final learning rate, relative to the peak")
    weight_decay: float = Field(0.0, ge=0, description="decoupled weight decay of matrices")
    adam_beta1: float = Field(0.9, ge=0, lt=1, description="decay of AdamW's first moment")
    adam_beta2: float = Field(0.999, ge=0, lt=1, description="decay of AdamW's second moment")
    adam_epsilon: PositiveFloat = Field(1e-8, description="AdamW's epsilon")
    max_grad_norm: float = Field(1.0, ge=0, description="gradients are clipped to this norm; 0 is off")
    on_nan_loss: Literal["stop", "skip"] = Field(
        "stop",
        description="a loss or gradient that is not finite stops the run, or its optimizer step is skipped (ten in a"
        " row stop the run anyway); the samples are logged",
    )
    rank_timeout_s: PositiveFloat = Field(
        1800.0,
        description="a rank that keeps the others waiting this long (frozen, stuck) ends the run on all ranks; set it"
        " above the time of one rollout, sync or save",
    )
    gradient_checkpointing: bool = Field(True, description="recompute activations in the backward pass to save memory")
    fused_kernels: bool = Field(False, description="liger-kernel's norms, rotary embedding and MLP; CUDA only")
    eval_steps: int = Field(0, ge=0, description="optimizer steps between evaluations; 0: only at the end")
    eval_at_start: bool = Field(False, description="also evaluate before the first step")
    eval_limit: PositiveInt | None = Field(None, description="evaluate on the first n samples; null: all")
    save_steps: int = Field(0, ge=0, description="optimizer steps between checkpoints; 0: only at the end")
    save_total_limit: PositiveInt | None = Field(None, description="complete checkpoints kept; null: all")
    resume_from_checkpoint: str | None = Field(None, description="checkpoint, or auto: the newest complete one")
    metric_for_best_model: Literal[
        "f1", "precision", "recall", "f1_no_label", "precision_no_label", "recall_no_label", "mean_iou", "parse_rate"
    ] = Field(
        "f1", description="stage 2: evaluation metric of the best step (GRPO: mean reward); *_no_label ignores labels"
    )
    logging_steps: PositiveInt = Field(1, description="optimizer steps between log lines")
    report_to: Literal["tensorboard", "none"] = Field("tensorboard", description="where metrics are written")
    collapse: Collapse = Field(default_factory=Collapse)

    def num_steps(self, num_samples: int, world_size: int) -> int:
        """Optimizer steps of a run over `num_samples` samples per epoch; an incomplete last step is left out."""
        if self.max_steps is not None:
            return self.max_steps
        per_step = self.per_device_train_batch_size * self.gradient_accumulation_steps * world_size
        return max(1, int(self.num_train_epochs * num_samples / per_step + 1e-9))


# The keys in `rlhf` of settings that stage 2 names otherwise.
_RLHF_KEYS = {
    "rollout_backend": "use_vllm",
    "vllm.mode": "vllm_mode",
    "vllm.server": "vllm_server_port",
    "vllm.sync.mode": "sync.mode",
    "vllm.tensor_parallel_size": "vllm_tensor_parallel_size",
}


class Config(Section):
    """A resolved and validated config. `cfg.rm` and `cfg.rs` are the two sections under `custom.extra`. For GRPO,
    `cfg.rm` holds the settings of `rlhf` in place of its own, so that rollout code reads one form."""

    global_max_length: PositiveInt | None = Field(
        None, description="length of one packed row in tokens; required for stage 2 and for packing"
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
        """If no prompt is given, make the answer format's own the value, which is then printed with the rest."""
        name = values
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
        """Path of the setting `cfg.rm.<key>` in the file, for messages."""
        return f"rlhf.{_RLHF_KEYS.get(key, key)}" if self.is_grpo else f"{RM}.{key}"

    @property
    def answers_per_sample(self) -> int:
        """Number of rollouts of each sample."""
        return self.rlhf.num_generations if self.is_grpo and self.rlhf else 1

    @property
    def rs(self) -> RolloutServer | None:
        return self.custom.extra.rollout_server

    @property
    def connection(self) -> Server | None:
        """Connection settings in the form of CFG-7, for either trainer; None without servers."""
        uses_server = self.rm.rollout_backend == "vllm" and self.rm.vllm.mode == "server"
        return self.rm.vllm.server if uses_server else None

    def servers(self) -> list[ServerAddress]:
        """Return the rollout servers in order; empty when no server generates."""
        return self.connection.addresses() if self.connection else []

    def server_settings(self, index: int = 0) -> ServerSettings:
        """Return the launch settings of server `index`: the common ones with its overrides."""
        settings = self.rs.model_dump(exclude={"servers"})
        if index < len(self.rs.servers):
            settings |= self.rs.servers[index].model_dump()
        return ServerSettings(**settings)

    def image_roots(self, index: int = 0) -> list[str]:
        """Return the absolute directories that server `index` may read images from (SRV-5)."""
        roots = self.server_settings(index).allowed_image_roots if self.rs else None
        if roots is None:
            files = self.custom.train_files() + self.custom.val_files()
            roots = [os.path.dirname(os.path.abspath(file.path)) for file in files]
        return list(dict.fromkeys(os.path.abspath(root) for root in roots))

    def sync_mode(self) -> Literal["full", "adapter"]:
        """Return the sync mode at the start: `auto` decided, and full for DoRA adapters where fallback is allowed."""
        sync = self.rm.vllm.sync
        mode = sync.mode
        if mode == "auto":
            mode = "adapter" if self.rm.vllm.enable_lora else "full"
        # vLLM has no DoRA slots, so adapter sync is known to fail (SYN-10).
        return "full" if mode == "adapter" and self.tuner.use_dora and sync.fallback_to_full else mode

    def deepspeed_path(self) -> Path:
        """Return the path of the DeepSpeed JSON; a bare name stands for a file in `ds_configs/`."""
        if self.deepspeed.endswith(".json"):
            return Path(self.deepspeed)
        return Path(__file__).parents[2] / "ds_configs" / f"{self.deepspeed}.json"
