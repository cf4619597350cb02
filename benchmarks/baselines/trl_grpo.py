"""TRL's GRPOTrainer on the GRPO demo's task; `benchmarks/grpo_peer.py` starts it under TRL's own Python.

    torchrun --nproc_per_node 2 -m benchmarks.baselines.trl_grpo JOB

JOB is a JSON file with the settings and `output`, a JSONL file that gets a line per optimizer step. TRL generates with
transformers, as it does without vLLM. From this project it uses only the reward functions.
"""

import json
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from datasets import Dataset, Image
from peft import LoraConfig
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from utils.rewards import Completion, load_rewards, score


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    os.environ["WANDB_DISABLED"] = "true"
    world_size = int(os.environ["WORLD_SIZE"])
    trainer = GRPOTrainer(
        model=job["model"],
        args=GRPOConfig(
            output_dir=job["output"] + ".trl",
            use_cpu=True,
            bf16=False,
            model_init_kwargs={"dtype": "float32"},
            max_steps=job["steps"],
            per_device_train_batch_size=job["prompts_per_step"] * job["num_generations"] // world_size,
            num_generations=job["num_generations"],
            max_completion_length=job["max_new_tokens"],
            learning_rate=job["learning_rate"],
            lr_scheduler_type="constant",
            max_grad_norm=job["max_grad_norm"],
            loss_type=job["loss_type"],
            temperature=job["temperature"],
            beta=0.0,
            gradient_checkpointing=False,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            seed=job["seed"],
        ),
        reward_funcs=reward_function(job),
        train_dataset=dataset(job),
        peft_config=LoraConfig(
            r=job["rank"], lora_alpha=job["alpha"], lora_dropout=0.0, target_modules=job["target_modules"]
        ),
        callbacks=[Recorder(Path(job["output"]))],
    )
    trainer.train()


def dataset(job: dict[str, Any]) -> Dataset:
    """Load the demo's training lines; the reward function gets `domain` and `summary` (as JSON) as columns."""
    path = Path(job["train_jsonl"])
    rows = [json.loads(line) for line in path.open()]
    columns = {
        "prompt": [[{"role": "user", "content": job["prompt"]}] for _ in rows],
        "image": [str(path.parent / row["images"][0]) for row in rows],
        "domain": [row["domain"] for row in rows],
        "summary": [json.dumps(row["summary"]) for row in rows],
    }
    return Dataset.from_dict(columns).cast_column("image", Image())


def reward_function(job: dict[str, Any]) -> Any:
    """Return this project's rewards, weighted and summed, in TRL's form."""
    rewards = load_rewards(job["reward_funcs"])

    def summary_reward(completions: list, domain: list[str], summary: list[str], **_: Any) -> list[float]:
        samples = [
            SimpleNamespace(id=str(index), source="", extra={"domain": name, "summary": json.loads(text)})
            for index, (name, text) in enumerate(zip(domain, summary, strict=True))
        ]
        texts = [Completion(completion[0]["content"]) for completion in completions]
        return [
            float(score(text, sample, rewards) @ job["reward_weights"])
            for text, sample in zip(texts, samples, strict=True)
        ]

    return summary_reward


class Recorder(TrainerCallback):
    """Write a line `{"step", "time", "reward", "new_tokens"}` per optimizer step."""

    def __init__(self, output: Path) -> None:
        self.output = output

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **_: Any) -> None:
        if state.is_world_process_zero and "reward" in logs:
            line = {"step": state.global_step, "time": time.time(), "reward": logs["reward"]}
            with self.output.open("a") as file:
                file.write(json.dumps(line | {"new_tokens": logs["completions/mean_length"]}) + "\n")


if __name__ == "__main__":
    main()
