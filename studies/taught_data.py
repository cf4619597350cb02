"""Images, teacher and its labels for the study of a weak start model that has a teacher. Each is made once and kept."""

import torch

from studies import new_class_data
from studies.new_class_data import MATERIALS, NEW_LABELS, SPLITS, Material, make_data, write_pseudo_labels
from tools.cached import cached
from tools.warmup_sft import load_warmup_config, warm_up

START, BASE = MATERIALS["shifted"], MATERIALS["new_class"]  # whose models are the student's and the teacher's start
MATERIAL = Material("taught", seed=108, warmup_steps=800, shift=START.shift)
ROOT = MATERIAL.root


def prepare() -> None:
    """Make `data`, `teacher` and its labels `pseudo/train.jsonl` below `ROOT`, and both start models, if missing."""
    for material in (START, BASE):
        new_class_data.prepare(material)
    torch.set_num_threads(1)
    made_with = [repr(MATERIAL), SPLITS, NEW_LABELS, START.version, BASE.version]
    cached(ROOT / "data", made_with, "synthetic scenes", lambda to: make_data(to, MATERIAL, MATERIAL.shift))
    cfg = load_warmup_config(new_class_data.WARMUP_CONFIG)
    data = cfg.train_jsonl[0].model_copy(update={"path": str(ROOT / "data/warmup.jsonl")})
    own = {"model": str(BASE.root / "model"), "train_jsonl": [data], "output_dir": str(ROOT / "teacher")}
    cfg = cfg.model_copy(update=own | {"seed": MATERIAL.seed, "steps": MATERIAL.warmup_steps})
    made_with = [made_with, cfg.model_dump()]
    cached(ROOT / "teacher", made_with, "teacher", lambda _: warm_up(cfg))
    cached(
        ROOT / "pseudo",
        made_with,
        "the teacher's labels",
        lambda to: write_pseudo_labels(ROOT / "teacher", ROOT / "data/train.jsonl", to),
    )
