"""The arms of the study `dense`: crowds of trees in aerial photographs, fully annotated, another site to test on.

`python -m studies.results` makes the runs. The start model has learnt one half of the ground until that brought no more
(`studies/dense_data.py`); every arm goes on with the other half.
"""

from studies.arms import Arm, Study
from studies.dense_data import ROOT, SPLITS, VERSION, prepare
from studies.study import RM

GRPO_CONFIG = "studies/configs/dense_grpo.yaml"
TARGETS = RM + "targets."
SFT = Arm("SFT", overrides={RM + "teacher_forced_ratio": 1.0}, is_rival=True, scores_start=True)
STAGE2 = Arm("stage 2", is_on_policy=True)
REDIRECT = Arm(
    "stage 2, redirect",
    overrides={TARGETS + "unmatched": "redirect", TARGETS + "place": "end"},
    is_on_policy=True,
)
BY_OBJECT = Arm("GRPO by object", config=GRPO_CONFIG, program="train_grpo.py", is_on_policy=True)
BY_ANSWER = Arm(
    "GRPO by answer",
    overrides={"rlhf.advantage": "answer"},
    config=GRPO_CONFIG,
    program="train_grpo.py",
    is_on_policy=True,
)
METHOD = """The photographs of the package `deepforest` 2.1.0 (MIT): 951 boxed trees in four images of three sites.
Crops of 128 px with turns and flips, 3 to 12 trees each. The start model is that of *New class*, which then learnt one
half of the ground until that brought no more. All arms go on with the other half; another tile of the site is for
tuning (40 %) and testing (60 %). *Equal seconds* are those of *GRPO by object*. Changed on the way: with crops of 256
px (6 to 25 trees each) an untrained model of this size reached an F1 of 0.036 on 64 tuning images in 600 steps, so the
crops are easier. The start model has 0.230 on all of them, as the best of six rounds. GRPO by object first had 4
prompts of 8 answers a step; it ended at 0.224 and 0.125 with the two lower learning rates on the tuning images, and its
training reward did not rise (task `dense, 4 prompts a step` in `docs/results.json`; a run at the highest was stopped
unfinished, its reward was falling). It has 16 prompts now.
"""
DENSE = Study(
    "dense",
    "Dense, real images",
    claim="Dense, real images",
    config="studies/configs/dense.yaml",
    root=ROOT,
    material=VERSION,
    prepare=prepare,
    arms=(SFT, BY_OBJECT, REDIRECT, STAGE2, BY_ANSWER),
    clock=BY_OBJECT,
    num_train=SPLITS["train"][0],
    learning_rates=(2.5e-4, 1e-3, 4e-3),
    kl_weights=(),
    columns={
        "f1": "F1",
        "f1_mean": "F1, mean of IoU 0.5:0.95",
        "precision": "precision",
        "recall": "recall",
        "counting_error": "counting error",
        "duplicates_per_image": "duplicates / image",
        "parse_rate": "parse rate",
    },
    method=METHOD,
)
