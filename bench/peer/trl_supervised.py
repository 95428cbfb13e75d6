"""A few steps of TRL's SFTTrainer, RewardTrainer or DPOTrainer, on the rows and weights of a run of ours.

Tokens are those that the trainer counts, without padding, in the steps whose seconds count.
"""

import json
import sys
from pathlib import Path
from typing import Any

from datasets import Dataset
from trl import DPOConfig, DPOTrainer, RewardConfig, RewardTrainer, SFTConfig, SFTTrainer

from bench.kinds import StageSteps
from bench.peer.supervised import Asked
from bench.peer.training import StepClock, timed
from bench.steps import WARM_UP, spread
from rlhf import recipe as recipes
from rlhf.data import formats
from rlhf.data.tokenize import DialogueTokenizer
from rlhf.models.adapters import lora_config
from rlhf.models.loading import load_base, load_tokenizer
from rlhf.process.torch_setup import set_up_torch
from rlhf.run.directory import StageRun


def rows_of(run: StageRun, tokenizer: DialogueTokenizer) -> list[dict[str, str]]:
    """Return the rows of our run as TRL's trainer of the same stage takes them."""
    (file,) = (run.run_directory / "data").rglob("pairs.jsonl")
    pairs = formats.read([file], on_bad_row="stop").pairs
    rows = [{"prompt": tokenizer.prompt_text(p.prompt), "chosen": p.chosen, "rejected": p.rejected} for p in pairs]
    if run.stage == "sft":
        return [{"prompt": row["prompt"], "completion": row["chosen"]} for row in rows]
    return rows


def main() -> None:
    """Read `Asked` from the first argument as JSON; print the keys of `StageSteps` that TRL's trainer has."""
    asked: Asked = json.loads(sys.argv[1])
    loaded = recipes.load(Path(asked["recipe"]), asked["overrides"])
    stage, recipe = asked["stage"], loaded.recipe
    run = StageRun(Path(asked["out"]), loaded, stage)
    device, tokenizer = set_up_torch(recipe), load_tokenizer(run)
    options = getattr(recipe, stage)
    trainers: dict[str, tuple[Any, Any]] = {
        "sft": (SFTConfig, SFTTrainer),
        "rm": (RewardConfig, RewardTrainer),
        "dpo": (DPOConfig, DPOTrainer),
    }
    kind, trainer = trainers[stage]
    settings = kind(
        output_dir=str(run.run_directory / "trl"),
        per_device_train_batch_size=options.per_device_train_batch_size,
        gradient_accumulation_steps=options.gradient_accumulation_steps,
        max_length=options.max_length,
        max_steps=options.max_steps,
        use_cpu=device.type == "cpu",
        bf16=recipe.model.dtype == "bfloat16",
        include_num_input_tokens_seen="non_padding",
        save_strategy="no",
        report_to="none",
        **asked["settings"],
    )
    cuda = device.type == "cuda"
    clock = StepClock()
    task = "SEQ_CLS" if stage == "rm" else "CAUSAL_LM"
    base = load_base(run, device, head="score" if stage == "rm" else "lm")
    base.config.pad_token_id = tokenizer.pad_id
    built = trainer(
        model=base,
        args=settings,
        train_dataset=Dataset.from_list(rows_of(run, tokenizer)),
        processing_class=tokenizer.hf,
        peft_config=lora_config(recipe.lora, base, task),
        callbacks=[clock],
    )
    taken = timed(built, clock, cuda, WARM_UP)
    seconds = taken["wall"] if cuda else taken["cpu"]
    figures: StageSteps = {
        "clock": "wall" if cuda else "cpu",
        "step_seconds": spread(seconds),
        "tokens_per_second": clock.tokens_after(WARM_UP) / sum(seconds),
        "phase_peak_bytes": {"train": taken["peak"]} if cuda else None,
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
