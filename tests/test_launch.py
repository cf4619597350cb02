"""What the launcher says where a rank was killed."""

import json
import signal
from pathlib import Path

import yaml

from tests.test_resume import ranks, save  # noqa: F401
from tools.launch import words_for_the_killed


def test_the_launcher_has_last_words_for_ranks_that_were_killed_LRN_5(tmp_path, ranks):  # noqa: F811
    """LRN-5: step and version on record, newest complete checkpoint, command; as far as there are any."""
    config, run = tmp_path / "a.yaml", tmp_path / "run"
    content = {
        "model": {"path": "m"},
        "global_max_length": 2048,
        "custom": {
            "trainer_variant": "rollout_matching_sft",
            "train_jsonl": "t.jsonl",
            "extra": {"rollout_matching": {"rollout_backend": "hf"}},
        },
        "training": {"output_dir": str(run)},
    }
    config.write_text(yaml.safe_dump(content))
    arguments = ["--num_gpus", "2", "train_stage2.py", "--config", str(config)]
    command = f"python -m tools.launch {' '.join(arguments)} --resume auto"
    assert words_for_the_killed(signal.SIGTERM, arguments) == [
        f"run {run}: a rank was ended by SIGTERM",
        "  no checkpoint is complete",
        f"  start again with: {command}",
    ]
    save(run, 4, ranks)
    with Path(run / "rollouts.jsonl").open("w") as file:
        file.writelines(json.dumps({"step": step, "weight_version": f"r:{step - 1}"}) + "\n" for step in (4, 5))
    words = words_for_the_killed(signal.SIGKILL, [*arguments, "--resume", "auto"])
    assert words[0].startswith(f"run {run}: a rank was ended by SIGKILL; where memory runs out")
    assert words[1:] == [
        "  last step on record: 5, with weights r:4",
        f"  newest complete checkpoint: {run / 'checkpoint-4'}",
        f"  go on from it with: {command}",
    ]
