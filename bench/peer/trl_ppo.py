"""TRL's PPOTrainer on the files that bench/peer/inputs.py wrote; runs where TRL 1.12 is, prints one JSON line.

Nothing of the trainer is replaced. Seconds are taken between its own callbacks.
"""

import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from trl.experimental.ppo import (  # type: ignore[import-not-found]  # in TRL 1.12 only, with which this runs
    PPOConfig,
    PPOTrainer,
)

from bench.peer.training import StepClock, timed

# Settings that have the same name on both sides.
SAME = (
    *(
        "num_ppo_epochs",
        "num_mini_batches",
        "response_length",
        "temperature",
        "kl_coef",
        "kl_estimator",
        "gamma",
        "lam",
    ),
    *("cliprange", "cliprange_value", "vf_coef"),
    *("learning_rate", "lr_scheduler_type", "max_grad_norm", "gradient_checkpointing"),
)


def configuration(settings: Mapping[str, Any]) -> Any:
    """Return the trainer's settings: those of ours, for as many steps."""
    ours = settings["options"]
    micro = ours["per_device_train_batch_size"]
    return PPOConfig(
        **{name: ours[name] for name in SAME},
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=ours["batch_size"] // ours["num_mini_batches"] // micro,
        total_episodes=ours["batch_size"] * ours["steps"],
        local_rollout_forward_batch_size=ours["rollout_batch_size"],
        num_sample_generations=0,
        use_cpu=settings["device"] != "cuda",
        bf16=False,
        report_to=[],
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
    )


def main() -> None:
    """Run the trainer; print what its steps took as one JSON line."""
    asked: dict[str, Any] = json.loads(sys.argv[1])
    files = Path(asked["files"])
    settings = json.loads((files / "settings.json").read_text())
    if settings["threads"]:
        torch.set_num_threads(settings["threads"])

    load = {"dtype": getattr(torch, settings["dtype"]), "device_map": {"": settings["device"]}}
    base = str(files / "base")
    tokenizer = AutoTokenizer.from_pretrained(base, padding_side="left")
    policy = AutoModelForCausalLM.from_pretrained(base, **load)
    torch.manual_seed(0)
    reward = AutoModelForSequenceClassification.from_pretrained(base, num_labels=1, **load)
    value = AutoModelForSequenceClassification.from_pretrained(base, num_labels=1, **load)
    lora: dict[str, Any] = settings["lora"]
    if asked["settings"]["lora_value"]:
        names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
        value = get_peft_model(value, LoraConfig(task_type="SEQ_CLS", **{**lora, "target_modules": names}))
    prompts = json.loads((files / "prompts.json").read_text())
    clock = StepClock()
    trainer = PPOTrainer(
        args=configuration(settings),
        processing_class=tokenizer,
        model=policy,
        ref_model=None,
        reward_model=reward,
        value_model=value,
        train_dataset=Dataset.from_dict({"input_ids": prompts}),
        peft_config=LoraConfig(task_type="CAUSAL_LM", **lora),
        callbacks=[clock],
    )
    print(json.dumps(timed(trainer, clock, settings["device"] == "cuda", asked["warm_up"])))


if __name__ == "__main__":
    main()
