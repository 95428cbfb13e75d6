"""A few steps of TRL's RLOOTrainer or GRPOTrainer at its defaults, on the rows and weights of a run of ours.

One step is one batch of responses with all its updates, as here. The reward counts words, on both sides, so that no
reward model is run.
"""

import itertools
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

from bench.peer.trl_supervised import Clock
from bench.steps import WARM_UP, spread
from rlhf import recipe as recipes
from rlhf.data import formats
from rlhf.models.loading import load_base, load_codec, lora_config, set_up_torch
from rlhf.run.directory import Run
from rlhf.stages.online.rewards import find


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
    most = options.max_prompt_length - 1  # ours begin with BOS
    prompts = list(dict.fromkeys(_cut(codec.tokenizer, codec.prompt_text(pair.prompt), most) for pair in pairs))
    kind, trainer = {"rloo": (RLOOConfig, RLOOTrainer), "grpo": (GRPOConfig, GRPOTrainer)}[stage]
    micro = options.per_device_train_batch_size
    accumulated = options.batch_size // options.num_mini_batches // micro
    updates = options.num_mini_batches * options.num_iterations  # optimizer steps for one batch of responses
    settings = kind(
        output_dir=str(run.root / "trl"),
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=accumulated,
        steps_per_generation=options.num_mini_batches * accumulated,
        num_generations=options.num_generations,
        num_iterations=options.num_iterations,
        max_completion_length=options.max_completion_length,
        temperature=options.temperature,
        beta=options.beta,
        max_steps=options.steps * updates,
        use_cpu=device.type == "cpu",
        bf16=recipe.model.dtype == "bfloat16",
        save_strategy="no",
        report_to="none",
    )
    words = find("length(most=1)", "bench").function

    def reward(completions: list[str], **_: Any) -> list[float]:
        return list(words(completions))

    lengths: list[int] = []

    def counted(completion_ids: list[list[int]], prompts: list[str], **_: Any) -> list[float]:
        own = codec.tokenizer(prompts, add_special_tokens=False)["input_ids"]
        lengths.append(sum(map(len, completion_ids)) + sum(map(len, own)))
        return [0.0] * len(prompts)

    clock = Clock(time.process_time if device.type == "cpu" else time.monotonic)
    made = trainer(
        model=load_base(run, device),
        args=settings,
        reward_funcs=[reward, counted],
        train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in prompts]),
        processing_class=codec.tokenizer,
        peft_config=lora_config(run, "CAUSAL_LM"),
        callbacks=[clock],
    )
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    clock.ends = [clock.now()]
    made.train()
    ends = clock.ends[::updates]
    measured = [b - a for a, b in itertools.pairwise(ends)][WARM_UP:]
    found = {
        "clock": "cpu" if device.type == "cpu" else "wall",
        "step_seconds": spread(measured),
        "tokens_per_second": sum(lengths[WARM_UP:][: len(measured)]) / sum(measured),
        "phase_peak_bytes": {"train": torch.cuda.max_memory_allocated()} if device.type == "cuda" else None,
    }
    print(json.dumps(found))


def _cut(tokenizer: Any, text: str, most: int) -> str:
    """Return the last `most` tokens of a prompt as text: TRL cuts no prompts, and we cut their beginnings."""
    places = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    return text if len(places) <= most else text[places[-most][0] :]


if __name__ == "__main__":
    main()
