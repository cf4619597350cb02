"""A learner program for tests: the real stage-2 run, what it sent to the server, and whether its base weights changed.

Launched by `deepspeed` like train_stage2.py; prints `base weights unchanged: N tensors` on rank 0 and leaves every
request body of rank R in `sent_R.jsonl` in the run directory.
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
        if run.ranks.is_main:
            print(f"base weights unchanged: {count} tensors", flush=True)
        lines = [json.dumps(entry) + "\n" for entry in sent]
        (Path(cfg.training.output_dir) / f"sent_{run.ranks.rank}.jsonl").write_text("".join(lines))
    finally:
        run.close()


def record_requests() -> list[dict]:
    """From now on every call that leaves this process over HTTP is noted; returns the growing list."""
    sent, request = [], Link.request

    def noting(link: Link, method: str, path: str, timeout_s: float | None, **options):
        sent.append({"path": path, "body": options.get("json")})
        return request(link, method, path, timeout_s, **options)

    Link.request = noting
    return sent


def compare(run, checkpoint: Path) -> int:
    """All ranks walk the parameters (ZeRO-3 gathers are collective); raises on the first changed bit."""
    count = 0
    with safe_open(checkpoint, "pt") as file:
        on_disk = set(file.keys())
        for name, parameter in run.learner.model.get_base_model().named_parameters():
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
