"""A few steps of TRL's SFTTrainer or DPOTrainer at its defaults, on the rows and weights of a run of ours."""

import json
import sys
from pathlib import Path

from datasets import Dataset
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

from bench.peer.training import Clock, timed
from bench.steps import WARM_UP, spread
from rlhf import recipe as recipes
from rlhf.data import formats
from rlhf.models.adapters import lora_config
from rlhf.models.loading import load_base, load_codec, set_up_torch
from rlhf.run.directory import Run


def main() -> None:
    """Read {"recipe", "overrides", "stage", "out"} from the first argument; print what `bench.steps` would say."""
    asked = json.loads(sys.argv[1])
    loaded = recipes.load(Path(asked["recipe"]), asked["overrides"])
    stage, recipe = asked["stage"], loaded.recipe
    run = Run(Path(asked["out"]), loaded, stage)
    device, codec = set_up_torch(recipe), load_codec(run)
    options = getattr(recipe, stage)
    (file,) = (run.root / "data").rglob("pairs.jsonl")
    pairs = formats.read([file], on_bad_row="stop").pairs
    rows = [{"prompt": codec.prompt_text(p.prompt), "chosen": p.chosen, "rejected": p.rejected} for p in pairs]
    if stage == "sft":
        rows = [{"prompt": row["prompt"], "completion": row["chosen"]} for row in rows]
    kind, trainer = {"sft": (SFTConfig, SFTTrainer), "dpo": (DPOConfig, DPOTrainer)}[stage]
    settings = kind(
        output_dir=str(run.root / "trl"),
        per_device_train_batch_size=options.per_device_train_batch_size,
        gradient_accumulation_steps=options.gradient_accumulation_steps,
        max_length=options.max_length,
        max_steps=options.max_steps,
        use_cpu=device.type == "cpu",
        bf16=recipe.model.dtype == "bfloat16",
        include_num_input_tokens_seen="non_padding",
        save_strategy="no",
        report_to="none",
    )
    cuda = device.type == "cuda"
    clock = Clock()
    base = load_base(run, device)
    built = trainer(
        model=base,
        args=settings,
        train_dataset=Dataset.from_list(rows),
        processing_class=codec.tokenizer,
        peft_config=lora_config(run, base, "CAUSAL_LM"),
        callbacks=[clock],
    )
    taken = timed(built, clock, cuda, WARM_UP)
    seconds = taken["wall" if cuda else "cpu"]
    tokens = built.state.num_input_tokens_seen / built.state.global_step
    figures = {
        "clock": "wall" if cuda else "cpu",
        "step_seconds": spread(seconds),
        "tokens_per_second": tokens * len(seconds) / sum(seconds),
        "phase_peak_bytes": {"train": taken["peak"]} if cuda else None,
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
