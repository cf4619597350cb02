"""The section of GRPO: connection, sampling, rewards and objective."""

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import Field

from utils.config.rollout import Decoding, Server, Sync, Vllm
from utils.config.section import NonNegative, Port, PositiveFloat, PositiveInt, Seconds, Section, key


class Sampling(Decoding):
    """How responses are sampled. Never greedily: a group of equal responses would teach nothing."""

    temperature: float = key(1.0, "at least 0.01, vLLM's least, so that the responses of a group differ", ge=0.01)


class Ramp(Section):
    """A number that changes with the optimizer step: from `start` to `end` over `steps`, then `end`."""

    start: NonNegative = key(..., "value in the first step", examples=[0.5])
    end: NonNegative = key(..., "value from step `steps` on", examples=[0.75])
    steps: PositiveInt = key(..., "steps over which it changes linearly", examples=[1000])


def rewards_detections(reward_funcs: Sequence[str]) -> bool:
    """Whether some reward reads the answer as objects, as those of `utils.detection_rewards` do."""
    return any(name.startswith("detection_") for name in reward_funcs)


def setting_at(setting: float | Ramp, step: float) -> float:
    """The value of a setting in optimizer step `step`, from 0."""
    if not isinstance(setting, Ramp):
        return float(setting)
    return setting.start + (setting.end - setting.start) * min(step / setting.steps, 1.0)


class Rlhf(Section):
    """GRPO: connection, sampling, rewards and objective."""

    use_vllm: bool = key(True, "vLLM makes the rollouts; false: transformers' generate on the learner")
    vllm_mode: Literal["server", "colocate"] = key("server", "separate server, or inside the learner")
    vllm_server_host: list[str] = key(["127.0.0.1"], "server mode: exactly one loopback host")
    vllm_server_port: list[Port] = key([8080], "server mode: exactly one port")
    vllm_server_group_port: Port = key(51216, "port of the weight communicator")
    vllm_server_timeout: Seconds = key(
        240.0, "seconds to reach the server; an engine silent for half of it is reported dead"
    )
    vllm_gpu_memory_utilization: float = key(0.45, "colocate: fraction of a device's memory for vLLM", gt=0, le=1)
    vllm_tensor_parallel_size: PositiveInt = key(1, "colocate: learner devices that one engine spans")
    sync: Sync = Field(default_factory=Sync)
    decoding: Sampling = Field(default_factory=Sampling)
    decode_batch_size: PositiveInt = key(1, "sequences that one rollout device decodes at once, at most")
    max_new_tokens: PositiveInt = key(1024, "longest response in tokens")
    num_generations: int = key(8, "responses to each prompt: the group they are compared in", ge=2)
    num_iterations: PositiveInt = key(1, "optimizer steps on the same responses, which count as one in training")
    reward_funcs: list[str] = key(..., "reward functions, each in [0, 1]", examples=[["detection_f1"]], min_length=1)
    reward_weights: list[NonNegative | Ramp] | None = key(
        None, "one per function, for a weighted sum, each a number or {start, end, steps}; null: all 1"
    )
    reward_iou: float | Ramp = key(0.5, "detection rewards: smallest IoU of a pair, a number or {start, end, steps}")
    reward_files: list[str] = key([], "Python files with further functions (completion, sample) -> float")
    advantage: Literal["answer", "object"] = key("answer", "one per answer, or one per object and decision in it")
    scale_rewards: Literal["group", "batch", "none"] = key("group", "advantages / std of the group, of the step, or 1")
    dynamic_sample: bool = key(
        False, "replace prompts whose responses teach nothing by further prompts, beyond those of the epochs"
    )
    max_resample_times: PositiveInt = key(3, "dynamic_sample: rounds of further prompts, at most")
    overlong_filter: bool = key(False, "leave out responses cut at max_new_tokens")
    loss_type: Literal["grpo", "dapo", "dr_grpo"] = key(
        "grpo", "mean per response, then over responses; over all tokens; or sum / max_new_tokens, then mean"
    )
    epsilon: float = key(0.2, "ratios are clipped below at 1 - epsilon", gt=0, le=1)
    epsilon_high: PositiveFloat | None = key(None, "and above at 1 + epsilon_high; null: epsilon")
    importance_sampling_level: Literal["token", "sequence"] = key("token", "ratio per token, or geometric mean (GSPO)")
    importance_correction_cap: float | None = key(2.0, "largest engine-mismatch correction; null: none", ge=1)
    beta: NonNegative = key(0.0, "weight of the KL penalty to the starting policy; 0: no reference")

    @property
    def uses_server(self) -> bool:
        return self.use_vllm and self.vllm_mode == "server"

    def rollout_settings(self) -> dict[str, Any]:
        """Return the same settings in the form of stage 2, as keys of `RolloutMatching` (GRP-2, CFG-7)."""
        places = zip(self.vllm_server_host, self.vllm_server_port, strict=False)
        urls = [f"http://{host}:{port}" for host, port in places]
        vllm = Vllm(
            mode=self.vllm_mode,
            gpu_memory_utilization=self.vllm_gpu_memory_utilization,
            tensor_parallel_size=self.vllm_tensor_parallel_size,
            server=Server(base_url=urls, group_port=self.vllm_server_group_port, timeout_s=self.vllm_server_timeout),
            sync=self.sync,
        )
        return {
            "rollout_backend": "vllm" if self.use_vllm else "hf",
            "vllm": vllm,
            "decoding": self.decoding,
            "decode_batch_size": self.decode_batch_size,
            "max_new_tokens": self.max_new_tokens,
        }
