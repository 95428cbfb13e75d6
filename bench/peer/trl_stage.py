"""A few steps of TRL's trainer of SFT, reward model, DPO, RLOO or GRPO, on the rows and weights of a run of ours.

Rows are the token ids on which our stage trains; RLOO and GRPO get the text of their prompts, and the recipe's reward
functions. Tokens are those that the trainer counts, without padding, in the steps whose seconds count.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from datasets import Dataset
from trl import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    RewardConfig,
    RewardTrainer,
    RLOOConfig,
    RLOOTrainer,
    SFTConfig,
    SFTTrainer,
)

from bench.peer.timing import StepClock
from rlhf import recipe as recipes
from rlhf.data.corpus import Corpus
from rlhf.data.load import divide_rows
from rlhf.data.pairs import encode_pairs
from rlhf.data.source import read_source
from rlhf.data.tokenize import DialogueTokenizer
from rlhf.errors import UserError
from rlhf.models.adapters import lora_config
from rlhf.models.loading import load_base, load_tokenizer
from rlhf.process.torch_setup import set_up_torch
from rlhf.recipe import StageName
from rlhf.recipe.schema import Dialogues, Dpo, Rm, Sft
from rlhf.recipe.schema_online import GroupOptions, Grpo
from rlhf.run.directory import StageRun
from rlhf.stages.online.rewards import find
from rlhf.stages.supervised.forward import IGNORED

Rows = list[dict[str, Any]]
# Settings that have the same name on both sides: of RLOO and GRPO, and of GRPO alone.
SAME = (
    *("num_generations", "num_iterations", "max_completion_length", "temperature", "beta"),
    *("learning_rate", "lr_scheduler_type", "max_grad_norm"),
)
SAME_OF_GRPO = ("epsilon", "loss_type", "scale_rewards")


class TokenizedDPOTrainer(DPOTrainer):
    """TRL's trainer for rows that are token ids already, which its two others take as they are."""

    def _prepare_dataset(self, dataset: Any, *_: object, **__: object) -> Any:
        return dataset


TRAINERS: dict[str, tuple[Any, Any]] = {
    "sft": (SFTConfig, SFTTrainer),
    "rm": (RewardConfig, RewardTrainer),
    "dpo": (DPOConfig, TokenizedDPOTrainer),
    "rloo": (RLOOConfig, RLOOTrainer),
    "grpo": (GRPOConfig, GRPOTrainer),
}


def rows_of(run: StageRun, tokenizer: DialogueTokenizer) -> Rows:
    """Return the training rows of our run as TRL's trainer of the same stage takes them."""
    recipe = run.loaded.recipe
    corpus = divide_rows(read_source(recipe, run.run_directory / "data"), recipe)
    options = recipe.section(run.stage)
    if isinstance(options, GroupOptions):
        return prompt_rows(tokenizer, corpus, options, run.stage)
    if isinstance(options, Sft):
        texts = [(row.prompt, row.response) for row in corpus.demonstrations().train[: options.max_samples]]
        encoded, _ = tokenizer.encode(texts, options.max_prompt_length, options.max_length)
        return [
            {"input_ids": row.prompt + row.response, "labels": [IGNORED] * len(row.prompt) + row.response}
            for row in encoded
            if row
        ]
    assert isinstance(options, Rm | Dpo)
    pairs, *_ = encode_pairs(tokenizer, corpus.preferences(run.stage).train[: options.max_samples], options)
    if isinstance(options, Rm):
        return [{f"{name}_ids": side.prompt + side.response for name, side in pair._asdict().items()} for pair in pairs]
    responses = ({f"{name}_ids": side.response for name, side in pair._asdict().items()} for pair in pairs)
    return [{"prompt_ids": pair.chosen.prompt, **row} for pair, row in zip(pairs, responses, strict=True)]


def prompt_rows(tokenizer: DialogueTokenizer, corpus: Corpus, options: GroupOptions, stage: StageName) -> Rows:
    """Return the prompts as text, with their right answers; a BOS that the tokenizer leaves out stands in the text.

    Raises UserError where TRL would read other tokens.
    """
    answers = corpus.right_answers()
    prompts = corpus.prompts(stage).train[: options.max_samples]
    plain = [tokenizer.prompt_text(prompt) for prompt in prompts]
    ids, _ = tokenizer.encode_prompts(prompts, options.max_prompt_length)
    for bos in ("", f"{tokenizer.hf.bos_token} "):
        texts = [bos + text for text in plain]
        if tokenizer.hf(texts)["input_ids"] == ids:
            right = map(answers.get, prompts)
            return [{"prompt": text, "answer": answer} for text, answer in zip(texts, right, strict=True)]
    raise UserError(f"{stage}: TRL would read other prompts: they are cut, or need a BOS that no text has")


def rewards_of(options: GroupOptions, stage: StageName) -> list[Callable[..., Any]]:
    """Return the recipe's reward functions as TRL calls them. Raises UserError where a reward model is among them."""
    if options.model_scores:
        raise UserError(f"{stage}: a reward model is not compared with TRL: name functions alone in its reward_funcs")

    def for_trl(name: str) -> Callable[..., Any]:
        function = find(name, f"{stage}.reward_funcs")

        def reward(prompts: Any, completions: Any, completion_ids: Any, answer: Any, **_: object) -> Any:
            given = {"prompts": prompts, "completions": completions, "completion_ids": completion_ids, "answer": answer}
            return function(given)

        reward.__name__ = name
        return reward

    return [for_trl(name) for name in options.reward_funcs]


def same_settings(options: Dialogues | GroupOptions) -> dict[str, Any]:
    """Return the settings of ours that TRL's configuration has too: batches, lengths, and those in SAME.

    Raises UserError for several updates of a batch of responses, of which TRL makes steps.
    """
    if isinstance(options, Dialogues):
        names = ("per_device_train_batch_size", "gradient_accumulation_steps", "max_length", "max_steps")
        return {name: getattr(options, name) for name in names} | {"include_num_input_tokens_seen": "non_padding"}
    if options.num_iterations * options.num_mini_batches > 1:
        raise UserError("a step is compared that has one update: num_iterations and num_mini_batches must be 1")
    same = SAME + SAME_OF_GRPO if isinstance(options, Grpo) else SAME
    micro = options.per_device_train_batch_size
    batches = {"per_device_train_batch_size": micro, "gradient_accumulation_steps": options.batch_size // micro}
    return {name: getattr(options, name) for name in same} | batches | {"max_steps": options.steps}


def main() -> None:
    """Read what is asked from the first argument as JSON (bench/peer/__main__.py); print what the steps took."""
    asked = json.loads(sys.argv[1])
    loaded = recipes.load(Path(asked["recipe"]), asked["overrides"])
    stage, recipe = asked["stage"], loaded.recipe
    run = StageRun(Path(asked["out"]), loaded, stage)
    device, tokenizer = set_up_torch(recipe), load_tokenizer(run.base)
    options = recipe.section(stage)
    assert isinstance(options, Dialogues | GroupOptions)
    kind, trainer = TRAINERS[stage]
    settings = kind(
        output_dir=str(run.run_directory / "trl"),
        use_cpu=device.type == "cpu",
        bf16=recipe.model.dtype == "bfloat16",
        save_strategy="no",
        report_to="none",
        **same_settings(options),
        **asked["settings"],
    )
    clock = StepClock()
    task = "SEQ_CLS" if stage == "rm" else "CAUSAL_LM"
    base = load_base(run.base, device, head="score" if stage == "rm" else "lm")
    base.config.pad_token_id = tokenizer.pad_id
    built = trainer(
        model=base,
        args=settings,
        train_dataset=Dataset.from_list(rows_of(run, tokenizer)),
        processing_class=tokenizer.hf,
        peft_config=lora_config(recipe.lora, base, task),
        callbacks=[clock],
        **({"reward_funcs": rewards_of(options, stage)} if isinstance(options, GroupOptions) else {}),
    )
    clock.mark()
    built.train()
    print(json.dumps(clock.taken(device.type == "cuda", asked["warm_up"])))


if __name__ == "__main__":
    main()
