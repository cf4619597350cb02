"""Two learner ranks under ZeRO-3 with DoRA on all linear layers: their sync, and gathering and merging alone.

Launched by bench_sync.py: `deepspeed --num_gpus 2 benchmarks/sync_learner.py MODEL_DIR BASE_URL GROUP_PORT ROUNDS OUT`;
rank 0 writes the median seconds to the JSON file OUT.
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import deepspeed
from peft import LoraConfig, get_peft_model

from benchmarks.bench_sync import load, open_sync
from benchmarks.harness import take_turns, wall
from utils.config.rollout import ServerAddress
from utils.dist import Ranks


def main() -> None:
    model_dir, base_url, group_port, rounds, out = [word for word in sys.argv[1:] if not word.startswith("--")]
    ranks = Ranks()
    ranks.open()
    config = LoraConfig(r=16, lora_alpha=32, use_dora=True, target_modules="all-linear")
    model = get_peft_model(load(Path(model_dir)), config, autocast_adapter_dtype=False)
    zero3 = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}, "bf16": {"enabled": True}}
    deepspeed.zero.Init(module=model, config_dict_or_path=zero3)
    sync = open_sync(ServerAddress(base_url=base_url, group_port=int(group_port)), model, ranks)

    def gather_and_merge() -> None:
        for _ in sync.weights.tensors(materialize=ranks.is_main):
            pass

    def sync_full() -> float:
        sync.open()  # a new communicator gets everything
        return wall(lambda: sync.sync("full"))()

    seconds = take_turns({"gather and merge": wall(gather_and_merge), "sync": sync_full}, int(rounds))
    sync.close()
    if ranks.is_main:
        Path(out).write_text(json.dumps(seconds))
    ranks.close()


if __name__ == "__main__":
    main()
