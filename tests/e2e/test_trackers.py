"""`train_stage2.py` with every tracker, offline (LOG-3)."""

import json

import pytest

from tests.e2e import processes
from tests.e2e.processes import ROOT, run_learner, write_yaml
from tests.packages import folder_with
from tests.run.test_trackers import OFFLINE, PACKAGES, READERS, python
from tools.make_demo import make_dataset

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


def test_every_tracker_has_every_step_of_a_resumed_run_LOG_3(start_model, tmp_path):
    """LOG-3, LRN-5: two learners, supervised; the second process continues from the first one's checkpoint."""
    folders = [str(folder_with(*own)) for own in PACKAGES.values()]
    (tmp_path / "sitecustomize.py").write_text(f"import sys\nsys.path += {folders}\n")
    make_dataset(tmp_path / "data", num_train=16, num_val=1)
    config = processes.config_of(tmp_path, start_model, "http://127.0.0.1:1", 2, {})
    config["custom"]["extra"]["rollout_matching"]["teacher_forced_ratio"] = 1
    config["training"] |= {"per_device_train_batch_size": 2, "report_to": ["tensorboard", *PACKAGES]}
    offline = {key: value.format(folder=tmp_path) for key, value in OFFLINE.items()}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"PYTHONPATH": f"{tmp_path}:{ROOT}", **offline}.items():
            patch.setitem(processes.ENVIRONMENT, name, value)
        for steps, resume in ((2, ()), (3, ("--resume", "auto"))):
            config["training"]["max_steps"] = steps
            result = run_learner("train_stage2.py", write_yaml(tmp_path / "c.yaml", config), 2, arguments=resume)
            assert result.returncode == 0, result.stdout[-6000:]
            assert "is dropped, the run continues" not in result.stdout
    for (name, reader), folder in zip(READERS.items(), folders, strict=True):
        found = json.loads(python(reader, folder, config["training"]["output_dir"], folder=tmp_path))
        assert sorted(step for step, _ in found["points"]) == [1, 2, 3], name
