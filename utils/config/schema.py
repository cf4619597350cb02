"""Every key of a config file: type, range, default and meaning. Pure: reads no file, holds no rules across keys.

`utils.config.rules` holds the rules, `utils.config.load` reads files into these classes, and `docs/config.md` is
generated from the descriptions. A new key needs a line here (`rollout` for engines, `rlhf` for GRPO) and nothing else.
"""

import os
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, NonNegativeInt, PrivateAttr, model_validator

from utils.answer_format import COORD_TOKENS, FORMATS, AnswerFormat
from utils.config.rlhf import Rlhf, rewards_detections
from utils.config.rollout import Decoding, RolloutServer, Server, ServerAddress, ServerSettings, Vllm
from utils.config.section import (
    NonNegative,
    PositiveFloat,
    PositiveInt,
    Ratio,
    Seconds,
    Section,
    key,
    parse_path,
    value_at,
)

RM = "custom.extra.rollout_matching"
RS = "custom.extra.rollout_server"
SCRIPTS = {"rollout_matching_sft": "train_stage2.py", "grpo": "train_grpo.py"}


class Model(Section):
    """The checkpoint that is trained and served."""

    path: str = key(..., "directory of the Hugging Face checkpoint", examples=["path/to/model"])
    dtype: Literal["float32", "bfloat16", "float16"] = key(
        "bfloat16", "dtype of the trained and of the served weights; float32 for exact comparisons"
    )
    attn_implementation: Literal["sdpa", "eager", "flash_attention_2"] = key(
        "sdpa", "attention of the learner; each isolates the segments of packed rows"
    )
    reference_path: str | None = key(
        None, "frozen checkpoint that is the start policy of reference_kl and rlhf.beta; null: model, adapters disabled"
    )
    image_min_pixels: PositiveInt | None = key(None, "minimum number of pixels per image; null: the processor's")
    image_max_pixels: PositiveInt | None = key(None, "maximum number of pixels per image; null: the processor's")

    @property
    def processor_kwargs(self) -> dict[str, int]:
        """The limits on pixels that are set, by the names that processors give them."""
        pixels = {"min_pixels": self.image_min_pixels, "max_pixels": self.image_max_pixels}
        return {name: value for name, value in pixels.items() if value is not None}


class Tuner(Section):
    """Which weights are trained: all of them, or adapters."""

    type: Literal["full", "lora"] = key("full", "train the weights themselves, or low-rank adapters")
    use_dora: bool = key(False, "DoRA: LoRA with a learned magnitude per output row; needs type lora")
    rank: PositiveInt = key(16, "rank of the adapters")
    alpha: PositiveFloat = key(32, "adapter scale is alpha / rank")
    dropout: float = key(0.0, "dropout on the input of the adapters", ge=0, lt=1)
    target_modules: str | list[str] = key("all-linear", 'modules with adapters: "all-linear", name endings, or a regex')
    modules_to_save: list[str] = key([], "modules trained in full beside adapters, by name ending; needs type lora")
    freeze_llm: bool = key(False, "do not train the language model")
    freeze_vit: bool = key(True, "do not train the vision tower")
    freeze_aligner: bool = key(True, "do not train the mergers between the two")
    adapter_path: str | None = key(None, "existing PEFT adapter to start from; needs type lora")


class Data(Section):
    """How samples are read."""

    prompt: str = key(
        COORD_TOKENS.prompt, "user text of samples without messages; the other formats' default requests JSON boxes"
    )
    object_order: Literal["file", "sorted"] = key("file", "file order, or sorted top to bottom, then left to right")
    on_bad_sample: Literal["stop", "skip"] = key(
        "stop", "an unusable sample stops the run before training, or is skipped, counted and listed in skipped.jsonl"
    )


class DataFile(Section):
    """One JSONL file of a mixture."""

    path: str = key(..., "JSONL file")
    weight: PositiveFloat = key(1.0, "training: how often each of its samples is used per epoch")
    teacher_forced_ratio: Ratio | None = key(
        None, "training, stage 2: this file's own share of RM.teacher_forced_ratio"
    )
    annotated: list[str] | None = key(
        None,
        "labels for which its annotation is complete; of a line with its own `annotated`, those in both; null: all",
    )


def _as_data_files(value: Any) -> Any:
    """Turn `a.jsonl` and `[a.jsonl, ...]` into `[{path, weight}, ...]`."""
    entries = [value] if isinstance(value, str) else value
    if not isinstance(entries, list):
        return value
    return [{"path": entry} if isinstance(entry, str) else entry for entry in entries]


def _as_tracker_names(value: Any) -> Any:
    """One name is a list of it; `none` is an empty one."""
    return ([] if value == "none" else [value]) if isinstance(value, str) else value


TrackerNames = Annotated[list[Literal["tensorboard", "wandb", "trackio", "mlflow"]], BeforeValidator(_as_tracker_names)]
DataFiles = Annotated[list[DataFile], BeforeValidator(_as_data_files)]


class Matching(Section):
    """Which predicted objects match the ground truth."""

    iou_threshold: Annotated[float, Field(gt=0, le=1)] = key(0.5, "smallest IoU of a matched pair")
    label: Literal["correct", "ignore"] = key(
        "correct", "a matched object's desc is trained on the true one up to the first difference, or not"
    )


class Targets(Section):
    """How the training target is built."""

    unmatched: Literal["keep", "drop_duplicates", "trim", "redirect"] = key(
        "keep",
        "predictions that match nothing: stay without loss; leave if they repeat an object; are cut off at the end "
        "(only where annotation is complete, or with `annotated`); or learn what to write in their place",
    )
    duplicate_iou: Ratio = key(0.5, "drop_duplicates: smallest IoU with an earlier object of the same label")
    place: Literal["end", "order"] = key(
        "end", "missed objects stand at the end, or where the order of the data puts them"
    )
    label_context: Literal["own", "truth"] = key(
        "own", "the label written for a matched object: the model's own, or the true one, which then is learnt whole"
    )
    supervise_structure: bool = key(False, "also train the format tokens around matched objects")
    supervise_closing: Literal["always", "complete"] = key(
        "always",
        "train when to stop: always, or only where annotation is complete (elsewhere losses.reference_kl or a teacher "
        "holds it)",
    )


class Losses(Section):
    """Weights of the loss parts."""

    text: NonNegative = key(1.0, "cross-entropy of text tokens")
    desc: NonNegative = key(1.0, "factor on text inside desc values, but for tokens that redirect changes")
    coord: NonNegative = key(
        1.0, "soft cross-entropy of coordinate tokens; without them: factor on the text of coordinates"
    )
    w1: NonNegative = key(1.0, "1-Wasserstein distance of coordinate tokens; needs coordinate tokens")
    gate: NonNegative = key(1.0, "probability mass outside the coordinate tokens; needs coordinate tokens")
    sigma: PositiveFloat = key(12.0, "width of the Gaussian coordinate target, in bins; needs coordinate tokens")
    reference_kl: NonNegative = key(
        0.0,
        "KL divergence from the start policy to the current one, where the answer has no label (one of weight 0 is a "
        "label); 0: no reference",
    )


class Teacher(Section):
    """On-policy distillation from another rollout server's model, whose weights nobody changes."""

    base_url: str = key(..., "http(s) url of the teacher's server", examples=["http://127.0.0.1:8100"])
    weight: PositiveFloat = key(
        1.0, "of the KL divergence from the teacher to the policy, where the answer has no label"
    )


class Async(Section):
    """Prefetch: rollouts are prepared while the current rows train."""

    enabled: bool = key(False, "off: strictly on-policy")
    queue_limit: PositiveInt = key(4, "rows that a rank prepares ahead, at most")
    version_window: int = key(0, "maximum age of a rollout in optimizer steps; 0: as without prefetch", ge=0)
    on_sync: Literal["wait", "abort", "keep"] = key(
        "wait", "requests running at a weight update: finish before it, are repeated after it, or are paused"
    )


class MonitorDump(Section):
    """Images and texts of a few samples, saved in the run directory; with GRPO texts, rewards and advantages."""

    every_steps: int = key(0, "optimizer steps between dumps; 0 is off", ge=0)
    num_samples: PositiveInt = key(4, "samples per dump")


class Evaluation(Section):
    """How rollouts on `custom.val_jsonl` are scored."""

    iou_threshold: Annotated[float, Field(gt=0, le=1)] = key(0.5, "smallest IoU of a pair that counts as a match")
    new_labels: list[str] = key([], "labels that training teaches; scored apart from all others as f1_new and f1_old")


class RolloutMatching(Section):
    """Stage-2 training: rollouts, their targets and their losses."""

    rollout_backend: Literal["vllm", "hf"] = key("vllm", "vLLM, or transformers' generate on the learner")
    vllm: Vllm = Field(default_factory=Vllm)
    decode_batch_size: PositiveInt = key(1, "sequences that one rollout device decodes at once, at most")
    decoding: Decoding = Field(default_factory=Decoding)
    max_new_tokens: PositiveInt = key(1024, "longest response in tokens")
    max_failed_fraction: Ratio = key(0.05, "fraction of unreadable samples tolerated among the last 200")
    teacher_forced_ratio: Ratio = key(
        0.0, "fraction of samples trained on the plain ground truth; 1: supervised training, no engine but to evaluate"
    )
    answer_format: Literal["coord_tokens", "qwen3vl", "qwen2_5vl", "internvl"] = key(
        "coord_tokens", "one token per coordinate, or the family's own format: numbers in text, no added tokens"
    )
    matching: Matching = Field(default_factory=Matching)
    targets: Targets = Field(default_factory=Targets)
    losses: Losses = Field(default_factory=Losses)
    teacher: Teacher | None = key(None, "a second server to distil from, beside the targets; null: none")
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
    rollout_server: RolloutServer | None = key(None, "needed by rollout_server.py and for GRPO in server mode")


class Custom(Section):
    """What is trained, and on which data."""

    trainer_variant: Literal["rollout_matching_sft", "grpo"] = key(
        ..., "stage-2 training (train_stage2.py) or GRPO (train_grpo.py)", examples=["rollout_matching_sft"]
    )
    train_jsonl: DataFiles = key(
        ..., "a file, a list of files, or a list of {path, weight}", examples=["train.jsonl"], min_length=1
    )
    val_jsonl: DataFiles | None = key(None, "held-out data for evaluation, same forms", min_length=1)
    extra: Extra = Field(default_factory=Extra)


class Collapse(Section):
    """Bounds on the rollouts of a step; crossing one of them is a warning."""

    min_parse_rate: Ratio = key(0.5, "smallest fraction of responses that parse (GRPO: with reward detection_parse)")
    max_duplicate_rate: Ratio = key(0.3, "stage 2: largest share of objects that repeat another (same label, IoU 0.9)")
    max_truncated_rate: Ratio = key(0.5, "largest fraction of responses cut at max_new_tokens")


class Training(Section):
    """Batch geometry, optimization, evaluation and saving."""

    # numpy's seeds are below 2**32, and a rank adds its number.
    seed: int = key(42, "seed of data order, rollouts and initialisation", ge=0, le=2**32 - 2**16 - 1)
    output_dir: str = key(..., "run directory", examples=["runs/name"])
    num_train_epochs: PositiveFloat = key(1.0, "passes over the data, where max_steps is null")
    max_steps: PositiveInt | None = key(None, "optimizer steps; null: from num_train_epochs")
    per_device_train_batch_size: PositiveInt = key(1, "samples (GRPO: prompts) per rank and micro-step")
    gradient_accumulation_steps: PositiveInt = key(1, "micro-steps per optimizer step")
    packing: bool = key(True, "pack segments into rows of global_max_length; false: a padded batch")
    packing_drop_last: bool = key(True, "segments left in the buffer after the last step are dropped")
    packing_buffer: PositiveInt = key(512, "stage 2: segments kept for later rows per rank, at most")
    packing_min_fill_ratio: Ratio = key(0.5, "stage 2: a row filled less is a warning")
    learning_rate: PositiveFloat = key(1e-5, "peak learning rate of the language model")
    vit_lr: PositiveFloat | None = key(None, "learning rate of the vision tower; null: learning_rate")
    aligner_lr: PositiveFloat | None = key(None, "learning rate of the mergers; null: learning_rate")
    embed_lr: PositiveFloat | None = key(None, "learning rate of embeddings and head; null: learning_rate")
    lr_scheduler: Literal["cosine", "linear", "constant"] = key("cosine", "shape after the warm-up")
    warmup_steps: int = key(0, "optimizer steps of linear warm-up", ge=0)
    min_lr_ratio: Ratio = key(0.0, "final learning rate, relative to the peak")
    weight_decay: NonNegative = key(0.0, "decoupled weight decay of matrices")
    adam_beta1: float = key(0.9, "decay of AdamW's first moment", ge=0, lt=1)
    adam_beta2: float = key(0.999, "decay of AdamW's second moment", ge=0, lt=1)
    adam_epsilon: PositiveFloat = key(1e-8, "AdamW's epsilon")
    max_grad_norm: NonNegative = key(1.0, "gradients are clipped to this norm; 0 is off")
    on_nan_loss: Literal["stop", "skip"] = key(
        "stop", "a non-finite loss or gradient stops the run, or skips the step (ten in a row stop it) and is logged"
    )
    rank_timeout_s: Seconds = key(
        1800.0, "a rank that stalls the others this long ends the run; set it above one rollout, sync or save"
    )
    gradient_checkpointing: Literal["auto"] | bool | NonNegativeInt = key(
        "auto", "layers that backward recomputes to save memory: all, n of the language model, or as few as fit the GPU"
    )
    fused_kernels: bool = key(False, "liger-kernel's norms and rotary embedding; CUDA only")
    eval_steps: int = key(0, "optimizer steps between evaluations, the last step included; 0: none", ge=0)
    eval_at_start: bool = key(False, "also evaluate before the first step")
    eval_limit: PositiveInt | None = key(None, "evaluate on the first n samples; null: all")
    save_steps: int = key(0, "optimizer steps between checkpoints; 0: only at the end", ge=0)
    save_total_limit: PositiveInt | None = key(None, "newest complete checkpoints kept, beside the best one; null: all")
    resume_from_checkpoint: str | None = key(None, "checkpoint, or auto: the newest complete one")
    metric_for_best_model: Literal[
        "f1", "precision", "recall", "f1_no_label", "precision_no_label", "recall_no_label", "mean_iou", "parse_rate"
    ] = key("f1", "stage 2: evaluation metric of the best step (GRPO: mean reward); *_no_label ignores labels")
    logging_steps: PositiveInt = key(1, "optimizer steps between log lines")
    report_to: TrackerNames = key(["tensorboard"], "where curves, pictures and tables go; none: nowhere")
    collapse: Collapse = Field(default_factory=Collapse)

    @property
    def samples_per_rank(self) -> int:
        """Samples of one rank per optimizer step."""
        return self.per_device_train_batch_size * self.gradient_accumulation_steps

    def num_steps(self, num_samples: int, world_size: int) -> int:
        """Optimizer steps of a run over `num_samples` samples per epoch; an incomplete last step is left out."""
        if self.max_steps is not None:
            return self.max_steps
        return max(1, int(self.num_train_epochs * num_samples / (self.samples_per_rank * world_size) + 1e-9))


# The keys that a GRPO file sets in the section of stage 2; all others are in `rlhf`.
SHARED_WITH_STAGE2 = ("answer_format", "max_failed_fraction", "monitor_dump", "eval", "async_")
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

    global_max_length: PositiveInt | None = key(
        None, "tokens in one packed row; required for stage 2, packing and colocated GRPO (the engine's length)"
    )
    model: Model
    tuner: Tuner = Field(default_factory=Tuner)
    data: Data = Field(default_factory=Data)
    custom: Custom
    training: Training
    deepspeed: str = key("zero2", "name of a file in ds_configs/, or path of a DeepSpeed JSON")
    rlhf: Rlhf | None = key(None, "GRPO only")

    _origin: Any = PrivateAttr(None)  # utils.config.report.Origin: which file set what

    @model_validator(mode="before")
    @classmethod
    def _prompt_of_the_format(cls, values: Any) -> Any:
        """If no prompt is given, make the answer format's own the value, which is then printed with the rest."""
        name, data = value_at(values, parse_path(f"{RM}.answer_format")), value_at(values, ("data",), {})
        if isinstance(name, str) and name in FORMATS and isinstance(data, dict):
            return {**values, "data": {"prompt": FORMATS[name].prompt, **data}}
        return values

    @property
    def is_grpo(self) -> bool:
        return self.custom.trainer_variant == "grpo"

    @property
    def is_detection(self) -> bool:
        """True if the answers are objects, which `tools.evaluate` can score."""
        return not (self.is_grpo and self.rlhf) or rewards_detections(self.rlhf.reward_funcs)

    @property
    def has_reference(self) -> bool:
        """True if the loss compares the policy with the one that training started from."""
        return bool(self.rlhf.beta if self.is_grpo and self.rlhf else self.rm.losses.reference_kl)

    @property
    def trains_on_rollouts(self) -> bool:
        """False where every training sample is teacher-forced (stage 1)."""
        return min(self.forced_ratio(file.teacher_forced_ratio) for file in self.custom.train_jsonl) < 1

    def forced_ratio(self, own: float | None) -> float:
        """The share of teacher-forced samples of a data file whose own `teacher_forced_ratio` is given (DAT-5)."""
        return self.rm.teacher_forced_ratio if own is None else own

    @property
    def generates(self) -> bool:
        """False where no sample asks for a rollout and nothing is evaluated: no engine is needed (LRN-10)."""
        return self.trains_on_rollouts or bool(self.training.eval_steps) or self.training.eval_at_start

    @property
    def uses_vllm(self) -> bool:
        return self.generates and self.rm.rollout_backend == "vllm"

    @property
    def is_colocate(self) -> bool:
        return self.uses_vllm and self.rm.vllm.mode == "colocate"

    @property
    def rm(self) -> RolloutMatching:
        own = self.custom.extra.rollout_matching
        return own.model_copy(update=self.rlhf.rollout_settings()) if self.is_grpo and self.rlhf else own

    def rollout_path(self, key: str) -> str:
        """Path of the setting `cfg.rm.<key>` in the file, for messages."""
        is_shared = key.split(".")[0] in SHARED_WITH_STAGE2
        return f"rlhf.{_RLHF_KEYS.get(key, key)}" if self.is_grpo and not is_shared else f"{RM}.{key}"

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
        return self.rm.vllm.server if self.uses_vllm and self.rm.vllm.mode == "server" else None

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
            files = self.custom.train_jsonl + (self.custom.val_jsonl or [])
            roots = [os.path.dirname(os.path.abspath(file.path)) for file in files]
        return list(dict.fromkeys(os.path.abspath(root) for root in roots))

    def sync_mode(self) -> Literal["full", "adapter"]:
        """Return the sync mode asked for, with `auto` decided."""
        asked = self.rm.vllm.sync.mode
        return asked if asked != "auto" else "adapter" if self.rm.vllm.enable_lora else "full"

    def adapter_obstacle(self) -> str | None:
        """Return why the adapter sync asked for is known to fail (SYN-10); None where it may work."""
        if self.sync_mode() != "adapter":
            return None
        if self.tuner.type == "full":
            return "there are no adapters to send (tuner.type: full)"
        if self.tuner.use_dora:
            return "vLLM has no LoRA slots for DoRA (tuner.use_dora)"
        if self.tuner.modules_to_save:
            return "vLLM has no LoRA slots for whole modules (tuner.modules_to_save)"
        return None
