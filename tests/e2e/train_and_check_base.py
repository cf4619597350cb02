"""A learner for tests: a real stage-2 run that records what it sends to the server and checks its base weights.

`deepspeed` launches it like train_stage2.py. It prints `base weights unchanged: N tensors` on rank 0 and writes every
request body of rank R to `sent_R.jsonl` in the run directory.
"""

import contextlib
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import deepspeed
import torch
from safetensors import safe_open

from train_stage2 import set_up, train
from utils.config.load import load_config_or_exit
from utils.rollout.link import Link
from utils.run.program import parse_args


def main() -> None:
    cfg = load_config_or_exit(parse_args(__doc__).config)
    sent = record_requests()
    run = set_up(cfg, resume=None)
    try:
        train(run)
        count = compare(run, Path(cfg.model.path) / "model.safetensors")
        if run.session.ranks.is_main:
            print(f"base weights unchanged: {count} tensors", flush=True)
        lines = [json.dumps(entry) + "\n" for entry in sent]
        (Path(cfg.training.output_dir) / f"sent_{run.session.ranks.rank}.jsonl").write_text("".join(lines))
    finally:
        run.session.close()


def record_requests() -> list[dict]:
    """Record every HTTP call that leaves this process from now on; return the growing list."""
    sent, request = [], Link.request

    def noting(link: Link, method: str, path: str, timeout_s: float | None, **options):
        sent.append({"path": path, "body": options.get("json")})
        return request(link, method, path, timeout_s, **options)

    Link.request = noting
    return sent


def compare(run, checkpoint: Path) -> int:
    """Compare all base parameters with the checkpoint on all ranks (ZeRO-3 gathers are collective)."""
    count = 0
    with safe_open(checkpoint, "pt") as file:
        on_disk = set(file.keys())
        for name, parameter in run.session.learner.model.get_base_model().named_parameters():
            name = name.replace(".base_layer.", ".").replace(".original_module.", ".")
            if name not in on_disk or parameter.requires_grad:
                continue
            sharded = hasattr(parameter, "ds_id")
            with deepspeed.zero.GatheredParameters([parameter]) if sharded else contextlib.nullcontext():
                assert torch.equal(parameter.data, file.get_tensor(name)), f"{name} changed"
            count += 1
    return count


if __name__ == "__main__":
    main()
