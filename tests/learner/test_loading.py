"""Loading under ZeRO-3 with two real ranks: no rank ever holds the whole model (this file as a program, a rank)."""

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import deepspeed
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForImageTextToText

from utils.config.load import build_config
from utils.dist import Ranks
from utils.learner.learner import Learner
from utils.learner.model import base_model

TUNERS = {  # that train little, because gradients and the optimizer's copies are no part of loading
    "lora": {"type": "lora", "rank": 4, "use_dora": False, "freeze_vit": False},
    "full": {"type": "full", "freeze_llm": True, "freeze_vit": True, "freeze_aligner": False},
}


@pytest.fixture(scope="module")
def large(start_model, tmp_path_factory) -> Path:
    """A checkpoint of 250 MiB: few wide layers, because DeepSpeed's own objects count by the layer."""
    folder = tmp_path_factory.mktemp("large") / "model"
    config = AutoConfig.from_pretrained(start_model)
    text = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 4, "head_dim": 128}
    config.text_config.update(text | {"num_attention_heads": 8, "num_key_value_heads": 4})
    config.vision_config.out_hidden_size = 1024
    AutoModelForImageTextToText.from_config(config).save_pretrained(folder)
    return folder


def learner_of(path: Path, tuner: str, ranks: Ranks) -> Learner:
    config = {
        "model": {"path": str(path), "dtype": "float32"},
        "global_max_length": 128,
        "tuner": TUNERS[tuner],
        "custom": {"trainer_variant": "grpo", "train_jsonl": "none"},
        "rlhf": {"reward_funcs": ["detection_f1"], "use_vllm": False, "max_new_tokens": 32},
        "training": {"output_dir": "none"},
        "deepspeed": "zero3",
    }
    return Learner(build_config(config), ranks, num_steps=4)


def own_memory() -> int:
    """Bytes of this process that belong to no file. Pages of the mapped checkpoint are the kernel's to drop."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("Anonymous:"))


def main(small: str, large: str, tuner: str, folder: str) -> None:
    ranks = Ranks(timeout_s=60)
    ranks.open()
    learner_of(Path(small), tuner, ranks)  # imports, and what libraries allocate once
    before = peak = own_memory()
    is_loaded = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not is_loaded.is_set():
            peak = max(peak, own_memory())
            time.sleep(0.005)

    watcher = threading.Thread(target=watch)
    watcher.start()
    learner = learner_of(Path(large), tuner, ranks)
    is_loaded.set()
    watcher.join()
    wrong, in_file = [], load_file(Path(large) / "model.safetensors")
    for name, parameter in base_model(learner.model).named_parameters():
        with deepspeed.zero.GatheredParameters([parameter]):
            name = name.replace("base_layer.", "")
            if "lora_" not in name and not torch.equal(parameter, in_file.pop(name)):
                wrong.append(name)
    seen = {"bytes": peak - before, "wrong": wrong, "left": sorted(in_file)}
    (Path(folder) / f"{ranks.rank}.json").write_text(json.dumps(seen))
    ranks.close()


@pytest.mark.e2e
@pytest.mark.parametrize("tuner", TUNERS)
def test_LRN_2_no_rank_holds_the_whole_model_while_it_loads_under_zero_3(start_model, large, tuner, tmp_path):
    """LRN-2: peak memory of each of two ranks stays below 0.7 of the model, DeepSpeed's start included, and the shards
    together are the checkpoint, bit for bit."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", __file__]
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PYTHONPATH": os.getcwd()}
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
    arguments = [str(start_model), str(large), tuner, str(tmp_path)]
    run = subprocess.run([*command, *arguments], env=environment, timeout=300, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-4000:]
    size = (large / "model.safetensors").stat().st_size
    for rank in range(2):
        seen = json.loads((tmp_path / f"{rank}.json").read_text())
        print(tuner, rank, seen["bytes"] / size)
        assert seen["wrong"] == [] and seen["left"] == []
        assert seen["bytes"] < 0.7 * size


if __name__ == "__main__":
    main(*sys.argv[1:])
