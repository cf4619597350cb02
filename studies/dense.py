"""The arms of the studies of dense images, fully annotated: trees in aerial photographs, and crowds of drawn shapes.

`python -m studies.results` makes the runs. The start models have had rounds of supervised training until one brought
less than 0.01 of F1 (`studies/dense_data.py`, `studies/crowd_data.py`); every arm goes on with images that they have
not seen.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from studies import crowd_data, dense_data, partial_data
from studies.arms import Arm, Study
from studies.crowd_data import Crowds
from studies.new_class import grpo
from utils.config.schema import RM

SFT = Arm("SFT", overrides={f"{RM}.teacher_forced_ratio": 1.0}, is_rival=True, scores_start=True)
STAGE2 = Arm("stage 2", is_on_policy=True)
REDIRECT = Arm(
    "stage 2, redirect",
    overrides={f"{RM}.targets.unmatched": "redirect", f"{RM}.targets.place": "end"},
    is_on_policy=True,
)
METHOD = """\
The photographs of the package `deepforest` 2.1.0 (MIT): 951 boxed trees in four images of three sites. Crops
of 128 px with turns and flips, 3 to 12 trees each. The start model is that of *New class*, which then learnt one half
of the ground until a round brought less than 0.01 of F1: 0.230 on all tuning images, the best of six rounds. All arms
go on with the other half; another tile of the site is for tuning (40 %) and testing (60 %). *Equal seconds* are those
of *GRPO by object*.

Changed on the way:

- With crops of 256 px (6 to 25 trees each) an untrained model of this size reached an F1 of 0.036 on 64 tuning images
  in 600 steps, so the crops are easier.
- *GRPO by object* first had 4 prompts of 8 answers a step. It ended at 0.224 and 0.125 with the two lower learning
  rates on the tuning images, and its training reward did not rise (task `dense, 4 prompts a step`; a run at the highest
  was stopped unfinished, its reward was falling).
- With 16 prompts the reward rose a little, but F1 ended at 0.189 and 0.122 (task `dense, no KL`): with the higher rate
  9 % of the greedy answers to training images broke their syntax, of sampled ones 1 %. Where the model is unsure of a
  coordinate, learning what it should not say spreads its probability, until some other token is the likeliest. So GRPO
  has a KL penalty to the start model now, and a larger reward for syntax.
- In all of these runs the baselines of *GRPO by object* were by kind of decision, which favours short answers
  ([decisions](decisions.md)).
"""
CROWD_METHOD = """\
The trees are out of reach for a model of this size, so here is another dense task: 8 to 16 small shapes of
one to three classes in a picture of 128 px, which do not overlap, in so much noise that the smaller ones hardly show.
The start model is that of *New class*, then trained on 8,000 such pictures until a round brought less than 0.01 of F1.
All arms go on with others. *Equal seconds* are those of *GRPO by object*.

Changed on the way:

- Before any run: with 6 to 12 larger shapes the start model had an F1 of 0.970 on the tuning images after 16,000
  samples, and 0.977 after 24,000 with half the contrast and noise. With the shapes of now, but contrast 0.5 in place of
  0.3 and noise of 25 grey levels in place of 40, it had 0.931 after the first of its rounds. All of them leave too
  little to learn.
- With baselines by kind of decision *GRPO by object* ended at 0.789 on the tuning images, precision 0.88 and recall
  0.72 (task `crowd, baselines by kind`). They favour short answers, and are per true object now. It has 8 prompts a
  step since then, not 16, which gives all others half of the equal seconds.
- Two tuning runs were made before wrong objects lost the 1/n that other decisions lose to their baselines (task
  `crowd, wrong objects in full`).
- Sampling at a temperature of 0.4 in place of 0.8 was tried after two test runs, and not taken: on the tuning images it
  ended at 0.795 and 0.792 with the two lower rates (task `crowd, temperature 0.4`), and at 0.8 the lowest ends at
  0.802.
- Missed objects at the end of the model's own answer were not taken either: stage 2 with `unmatched: keep`, `place:
  end` and the middle rate had 0.709 after 50 steps on the tuning images, and a fifth of its answers had no end; the run
  was stopped there.
"""


FAINT_METHOD = """\
Fainter crowds: a contrast of 0.2 in place of 0.3, 6 to 10 shapes in a picture. The start model is that of
*Dense, crowds of shapes*, trained on 8,000 such pictures until a round brought less than 0.01 of F1, which is about as
much as *GRPO by object* gains here. *Equal seconds* are those of *GRPO by object*.

This version was added after two test runs of *GRPO by object* on the crowds (0.796 and 0.789, start model 0.780), to
see whether there is more to gain where F1 is low: one more object raises F1 if it is right with a probability above
F1 / 2, so that more of what a model hardly sees is worth saying. That answers close too early is not what the crowds
lack: with the closing token's logit lowered by 1, 2 and 3, greedy answers of their start model fell from 0.779 to
0.775, 0.767 and 0.756 on the tuning images, and recall stayed at 0.77, since answers go from top to bottom.
"""
AGAIN_METHOD = """\
*Dense, faint crowds* once more, declared before any run of it, to see whether its small gain comes again:
other pictures, and another start model. This one is that of *Partial annotation*, trained on 8,000 crowds of shapes and
then on 8,000 faint ones, each until a round brought less than 0.01 of F1 (of faint ones the first round had 0.549 on
the tuning images, the second 0.540; the first is the start model). Arms and settings are those that were chosen there;
nothing is tuned here. *Equal seconds* are those of *GRPO by object*. 4,096 further images decide. If this version does
not show the claim, the other one does not count either.
"""
CROWD_AGAIN = replace(crowd_data.CROWD, name="crowd_again", seed=116, prepare_base=partial_data.prepare_start)
FAINT_AGAIN = replace(
    crowd_data.FAINT, name="faint_again", seed=117, prepare_base=CROWD_AGAIN.prepare, num_further=4096
)


def dense_study(
    name: str,
    title: str,
    method: str,
    root: Path,
    version: int,
    prepare: Callable[[], None],
    num_train: int,
    further: Callable[[], Path] | None = None,
) -> Study:
    config = f"studies/configs/{name}_grpo.yaml"
    by_object, by_answer = grpo("object", config), grpo("answer", config)
    return Study(
        name,
        title,
        claim="Dense",
        config=f"studies/configs/{name}.yaml",
        root=root,
        material=version,
        prepare=prepare,
        arms=(SFT, by_object, REDIRECT, STAGE2, by_answer),
        clock=by_object,
        num_train=num_train,
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
        method=method,
        further=further,
    )


def of_crowds(crowds: Crowds, title: str, method: str) -> Study:
    return dense_study(
        crowds.name,
        title,
        method,
        crowds.root,
        crowds.version,
        crowds.prepare,
        num_train=crowds.splits["train"],
        further=crowds.prepare_further,
    )


def repeated(study: Study, crowds: Crowds, title: str, method: str) -> Study:
    """Return the study's rivals and its best arm, with the settings that were chosen there, from other crowds."""
    again = of_crowds(crowds, title, method)
    arms = tuple(arm for arm in again.arms if arm.is_rival or arm == again.clock)
    return replace(again, arms=arms, tuned_on=study, repeats=study)


DENSE = dense_study(
    "dense", "Dense, real images", METHOD, dense_data.ROOT, dense_data.VERSION, dense_data.prepare, dense_data.NUM_TRAIN
)
CROWD = of_crowds(crowd_data.CROWD, "Dense, crowds of shapes", CROWD_METHOD)
FAINT = of_crowds(crowd_data.FAINT, "Dense, faint crowds", FAINT_METHOD)
AGAIN = repeated(FAINT, FAINT_AGAIN, "Dense, faint crowds once more", AGAIN_METHOD)
