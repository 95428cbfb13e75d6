"""TRL's RLOOTrainer or GRPOTrainer on the inputs that `python -m bench.peer` built; prints one JSON line.

Nothing of the trainer is replaced. A step is one batch of responses with its update. The reward counts words on both
sides, so that neither runs a reward model.
"""

import argparse
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import trl
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

from bench.peer.training import StepClock, timed
from rlhf.stages.online.reward_functions import length

# Settings that have the same name on both sides.
SAME = (
    *("num_generations", "num_iterations", "max_completion_length", "temperature", "beta"),
    *("learning_rate", "lr_scheduler_type", "max_grad_norm"),
)


def configuration(config: Any, options: argparse.Namespace, settings: Mapping[str, Any]) -> Any:
    """Return the trainer's settings, of the class `config`: those of ours, with or without checkpointing."""
    ours = settings["options"]
    return config(
        **{name: ours[name] for name in SAME},
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=options.micro,
        gradient_accumulation_steps=ours["batch_size"] // options.micro,
        max_steps=options.steps,
        use_cpu=settings["device"] != "cuda",
        gradient_checkpointing=options.checkpointing,
        bf16=False,
        report_to=[],
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
    )


def main() -> None:
    """Run the trainer; print what its steps took as one JSON line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("inputs", type=Path)
    parser.add_argument("--method", choices=["rloo", "grpo"], required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--micro", type=int, required=True)
    parser.add_argument("--checkpointing", action="store_true", help="recompute activations, TRL's default")
    options = parser.parse_args()
    settings = json.loads((options.inputs / "settings.json").read_text())
    cuda = settings["device"] == "cuda"
    if not cuda:
        torch.set_num_threads(1)
    base = str(options.inputs / "base")
    tokenizer = AutoTokenizer.from_pretrained(base, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(
        base, dtype=getattr(torch, settings["dtype"]), device_map={"": settings["device"]}
    )

    def reward(completions: list[str], **_: Any) -> list[float]:
        return length(completions, most=1)

    rows = [json.loads(line) for line in (options.inputs / "pairs.jsonl").read_text().splitlines()]
    prompts = [f"{tokenizer.bos_token} {row['prompt']}" for row in rows]  # as ours begin
    config, trainer = {"rloo": (RLOOConfig, RLOOTrainer), "grpo": (GRPOConfig, GRPOTrainer)}[options.method]
    clock = StepClock()
    built = trainer(
        model=model,
        args=configuration(config, options, settings),
        reward_funcs=reward,
        train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in prompts]),
        processing_class=tokenizer,
        peft_config=LoraConfig(task_type="CAUSAL_LM", **settings["lora"]),
        callbacks=[clock],
    )
    versions = {"trl": trl.__version__, "torch": torch.__version__}
    print(json.dumps({"versions": versions, **timed(built, clock, cuda, warm_up=1)}))


if __name__ == "__main__":
    main()
