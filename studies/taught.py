"""The arms of the study of a teacher: a weak start model, and another one that knows the old classes better.

`python -m studies.results` makes the runs. The teacher is `model.reference_path`, so the reference KL is to it: what
`RM.teacher` does with a second server, without one.
"""

from dataclasses import replace
from typing import Any

from studies.new_class import FORCED, OFFLINE, PSEUDO, SHIFTED, STAGE2
from studies.taught_data import MATERIAL, ROOT, prepare

NO_TEACHER: dict[str, Any] = FORCED | {"model.reference_path": None}
SFT = replace(PSEUDO, name="SFT + teacher's labels", overrides=NO_TEACHER, labels="teacher", scores_start=True)
DISTILLED = replace(OFFLINE, name="teacher's answers + KL to the teacher", labels="teacher")
ON_LABELS = replace(STAGE2, name="stage 2 + KL to the teacher + its labels", data=PSEUDO.data, labels="teacher")
ALONE = replace(STAGE2, name="stage 2 + KL to the teacher")
METHOD = """\
The earlier start model of *New class, weak start model, shifted images*, on other images of the same kind, and
a teacher: the earlier start model of *New class*, warmed up further on such images, without the new classes as well.

- *Teacher's labels* are the annotation merged with the teacher's answers, made once.
- *Teacher's answers + KL to the teacher* is stage 2 with the teacher's rollouts in place of the policy's: distillation
  off-policy.
- The KL is to the teacher here, not to the start model. The teacher is a second copy in the learner, over all tokens; a
  server as `RM.teacher` reports the 20 most likely ones.
- *Equal seconds* are those of *stage 2 + KL to the teacher + its labels*.

On the tuning images supervised training was best at the highest rate of the grid, stage 2 at the middle one.
"""
TAUGHT = replace(
    SHIFTED,
    name="taught",
    title="New class, weak start model with a teacher",
    config="studies/configs/taught.yaml",
    root=ROOT,
    material=MATERIAL.version,
    prepare=prepare,
    arms=(ON_LABELS, SFT, DISTILLED, ALONE),
    clock=ON_LABELS,
    method=METHOD,
    further=None,
    is_portable=False,
)
