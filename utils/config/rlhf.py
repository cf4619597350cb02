"""The section of GRPO: connection, sampling, rewards and objective."""

from typing import Annotated, Any, Literal

from pydantic import Field

from utils.config.rollout import Decoding, Server, Sync, Vllm
from utils.config.section import Port, PositiveFloat, PositiveInt, Section


class Sampling(Decoding):
    """How responses are sampled. Never greedily: a group of equal responses would teach nothing."""

    temperature: PositiveFloat = Field(1.0, description="must be above 0, so that the responses of a group differ")


class Rlhf(Section):
    """GRPO: connection, sampling, rewards and objective."""

    use_vllm: bool = Field(True, description="vLLM makes the rollouts; false: transformers' generate on the learner")
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
        0.45, gt=0, le=1, description="colocate: fraction of a device's memory for vLLM"
    )
    vllm_tensor_parallel_size: PositiveInt = Field(1, description="colocate: learner devices that one engine spans")
    sync: Sync = Field(default_factory=Sync)
    decoding: Sampling = Field(default_factory=Sampling)
    decode_batch_size: PositiveInt = Field(1, description="sequences that one rollout device decodes at once, at most")
    max_new_tokens: PositiveInt = Field(1024, description="longest response in tokens")
    num_generations: int = Field(8, ge=2, description="responses to each prompt: the group they are compared in")
    num_iterations: PositiveInt = Field(
        1, description="optimizer steps on the same responses, which count as one in training"
    )
    reward_funcs: list[str] = Field(
        examples=[["detection_f1"]], min_length=1, description="names of reward functions, each in [0, 1]"
    )
    reward_weights: list[Annotated[float, Field(ge=0)]] | None = Field(
        None, description="one per function, for their weighted sum; null: all 1"
    )
    reward_files: list[str] = Field([], description="Python files with further functions (completion, sample) -> float")
    scale_rewards: Literal["group", "batch", "none"] = Field(
        "group", description="advantages are divided by the std of the group, of the whole step, or not at all"
    )
    dynamic_sample: bool = Field(
        False, description="replace prompts whose responses all got the same reward by the next prompts of the data"
    )
    max_resample_times: PositiveInt = Field(3, description="dynamic_sample: rounds of further prompts, at most")
    overlong_filter: bool = Field(False, description="leave out responses cut at max_new_tokens")
    loss_type: Literal["grpo", "dapo", "dr_grpo"] = Field(
        "grpo",
        description="mean per response, then over responses; over all tokens; or sum / max_new_tokens, then mean",
    )
    epsilon: float = Field(0.2, gt=0, le=1, description="ratios are clipped below at 1 - epsilon")
    epsilon_high: PositiveFloat | None = Field(None, description="and above at 1 + epsilon_high; null: epsilon")
    importance_sampling_level: Literal["token", "sequence"] = Field(
        "token", description="ratio of each token, or its geometric mean over the response (GSPO)"
    )
    importance_correction_cap: PositiveFloat | None = Field(
        2.0, description="largest weight that corrects for the engine's own probabilities; null: no correction"
    )
    beta: float = Field(0.0, ge=0, description="weight of the KL penalty to the starting policy; 0: no reference")

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
