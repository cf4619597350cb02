"""vLLM's side of `test_presets`, in a process of its own: vLLM opens process groups, which a test session has, too.

    python -m tests.config.engine_on_paper MODEL_DIR PRESET... < shapes.json > facts.json

Reads {tensor: shape} from stdin. Writes, for every preset, what vLLM makes of the server's arguments, and for every
tensor the parameters of vLLM's own model class that it is loaded into. Nothing has memory: all is on the meta device.
"""

import dataclasses
import json
import os
import sys
import tempfile
from typing import Any
from unittest import mock

import torch

from utils.config.load import Config, load_config
from utils.server import launch


def main() -> None:
    folder, *presets = sys.argv[1:]
    shapes = json.load(sys.stdin)
    with os.fdopen(os.dup(1), "w") as out:
        os.dup2(2, 1)  # vLLM logs to stdout
        engines = {preset: engine_of(at(folder, load_config(preset))) for preset in presets}
        facts = {preset: vars(facts_of(*engine)) for preset, engine in engines.items()}
        args, _ = next(iter(engines.values()))
        json.dump({"presets": facts, "parameters": parameters_of(args, shapes)}, out)


def at(folder: str, cfg: Config) -> Config:
    return cfg.model_copy(update={"model": cfg.model.model_copy(update={"path": folder})})


def engine_of(cfg: Config) -> tuple[Any, Any]:
    """vLLM's engine arguments as the server makes them on as many GPUs as the preset is for, and vLLM's own config."""
    with mock.patch.object(launch, "count_cuda_devices", lambda: cfg.rs.world_size):
        resolved = launch.resolve(cfg, 0)
    with mock.patch.object(launch, "checkpoint_problems", return_value=[]):  # there is a config.json alone
        assert launch.problems_of(resolved, token=None) == []
    args = launch.engine_args(resolved)
    return args, args.create_engine_config()


@dataclasses.dataclass
class Facts:
    """What vLLM understood."""

    devices: int
    dtype: str
    max_model_len: int
    memory_share: float
    transfer: str
    architecture: str
    max_pixels: int | None


def facts_of(args: Any, config: Any) -> Facts:
    parallel, model = config.parallel_config, config.model_config
    return Facts(
        devices=parallel.tensor_parallel_size * parallel.data_parallel_size,
        dtype=str(model.dtype),
        max_model_len=model.max_model_len,
        memory_share=config.cache_config.gpu_memory_utilization,
        transfer=config.weight_transfer_config.backend,
        architecture=model.architecture,
        max_pixels=(args.mm_processor_kwargs or {}).get("max_pixels"),
    )


def parameters_of(args: Any, shapes: dict[str, list[int]]) -> dict[str, list[str]]:
    """Load a tensor of each name and shape into vLLM's model, in one replica; raises where vLLM refuses one.

    Returns:
        Tensor -> vLLM's parameters. Under the key "" those that got nothing.
    """
    from vllm.config import set_current_vllm_config
    from vllm.distributed.parallel_state import init_distributed_environment, initialize_model_parallel
    from vllm.model_executor.model_loader.utils import initialize_model

    config = dataclasses.replace(args, data_parallel_size=1).create_engine_config()
    with set_current_vllm_config(config), tempfile.TemporaryDirectory() as folder:
        init_distributed_environment(1, 0, f"file://{folder}/store", 0, "gloo")
        initialize_model_parallel(1)
        with torch.device("meta"):
            model = initialize_model(vllm_config=config)
    parameters = {name: load(model, name, shape) for name, shape in shapes.items()}
    loaded = {parameter for own in parameters.values() for parameter in own}
    return parameters | {"": sorted({name for name, _ in model.named_parameters()} - loaded)}


def load(model: Any, name: str, shape: list[int]) -> list[str]:
    """The parameters that a tensor is loaded into. A few small ones of recurrent layers are in memory all the same."""
    try:
        return sorted(model.load_weights([(name, torch.empty(shape, device="meta"))]))
    except NotImplementedError:
        return sorted(model.load_weights([(name, torch.zeros(shape))]))


if __name__ == "__main__":
    main()
