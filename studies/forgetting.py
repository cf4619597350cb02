"""The arms of the study of forgetting: learn a narrow set, keep the rest, scored on both as the gain grows.

`python -m studies.results` makes the runs.
"""

from studies.arms import Arm, Study
from studies.forgetting_data import ROOT, SPLITS, VERSION, prepare
from studies.new_class import FORCED, grpo

GRPO_CONFIG = "studies/configs/forgetting_grpo.yaml"
SFT = Arm("SFT", overrides=FORCED, is_rival=True, scores_start=True)
STAGE2 = Arm("stage 2", is_on_policy=True)
BY_OBJECT, BY_ANSWER = (grpo(advantage, GRPO_CONFIG) for advantage in ("object", "answer"))
METHOD = """The start model is that of *Partial annotation*. The narrow set shows yellow shapes only, in images of less
contrast, with noise and other sizes, fully annotated; the rest is what the start model was warmed up on, without
yellow. Half of the tuning and test images are of either kind, and settings are chosen by F1 on both together. The curve
has the means over seeds after each quarter of the steps. *Equal seconds* are those of *GRPO by object*.
"""
FORGETTING = Study(
    "forgetting",
    "Forgetting",
    claim="Forgetting",
    config="studies/configs/forgetting.yaml",
    root=ROOT,
    material=VERSION,
    prepare=prepare,
    arms=(SFT, STAGE2, BY_OBJECT, BY_ANSWER),
    clock=BY_OBJECT,
    num_train=SPLITS["train"][0],
    learning_rates=(2.5e-4, 1e-3, 4e-3),
    kl_weights=(),
    columns={
        "f1": "F1",
        "f1_new": "F1, narrow set",
        "f1_old": "F1, rest",
        "duplicates_per_image": "duplicates / image",
        "parse_rate": "parse rate",
    },
    method=METHOD,
    num_evals=4,
)
