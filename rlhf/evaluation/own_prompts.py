"""Answers of a run's policies to prompts of one's own, sampled and scored as an evaluation does with held-out ones."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rlhf.data import formats, raw
from rlhf.data.corpus import Prompt
from rlhf.data.parsing import parse_prompt
from rlhf.data.rows import Document
from rlhf.errors import UserError
from rlhf.files import JsonObject
from rlhf.process import environment
from rlhf.recipe.stages import PRETRAIN, REWARD_MODELS, SFT, PolicyLabel
from rlhf.run.directory import StageRun
from rlhf.run.layout import SUMMARY
from rlhf.terminal.progress import working


def read(file: Path) -> list[Prompt]:
    """Return the prompts, each once, of a text (`.txt`) with one on each line, or of a data file's rows.

    Raises UserError for a file without prompts.
    """
    if file.suffix == ".txt":
        found = [parse_prompt(line, source) for source, line in raw.lines(file)]
    else:
        try:
            data = formats.read([file])
        except UserError as error:
            raise UserError(f"{error}; of a .txt file each line is a prompt") from None
        found = [row.prompt for row in data.rows if not isinstance(row, Document)]
    if not found:
        raise UserError(f"{file}: no prompts; write one on each line of a .txt file, or rows with a 'prompt'")
    return list(dict.fromkeys(found))


def sample(
    run: StageRun,
    labels: Sequence[PolicyLabel],
    prompts: Sequence[Prompt],
    count: int,
    temperature: float | None = None,
) -> tuple[list[JsonObject], int]:
    """Sample `count` answers to each prompt from each policy, with its scores by the reward models that are finished.

    `labels`: these policies; without any the base, the start and every policy that was trained. Returns rows as in
    samples.jsonl, and the number of prompts that were cut. Raises ParentMissing, or UserError for what has changed.

    Sampling is that of `evaluate` in the recipe, and so is its stream of random numbers: the same prompts give the same
    answers. `temperature` replaces the recipe's.
    """
    recipe = run.loaded.recipe
    labels = labels or list(dict.fromkeys(("base", recipe.start, *run.trained_policies())))
    made = [label for label in labels if label != "base"]
    scoring = [name for name in REWARD_MODELS if recipe.section(name) and (run.folder(name) / SUMMARY).exists()]
    for stage in (*((PRETRAIN,) if recipe.pretrain else ()), *made, *scoring):
        run.require(stage)
    environment.prepare(recipe)
    from rlhf.evaluation.policies import heldout_sampling, load_roles, measure, role_of
    from rlhf.evaluation.samples import sample_rows
    from rlhf.models.loading import load_tokenizer
    from rlhf.process.torch_setup import set_up_torch

    device = set_up_torch(recipe)
    tokenizer = load_tokenizer(run.base)
    sampling = heldout_sampling(recipe.evaluate)
    if temperature is not None:
        sampling = replace(sampling, temperature=temperature)
    _, cut = tokenizer.encode_prompts(prompts, sampling.max_prompt_length)
    trained = [label for label in made if label != SFT]
    start = run.policy_start() if made else None  # the base needs no SFT
    with working("loading the policies"):
        shared = load_roles(run, device, start, trained)
    samples = {
        label: measure(
            shared,
            role_of(label, recipe),
            tokenizer,
            prompts,
            sampling,
            seed=recipe.seed,
            with_true_reward=False,
            samples_per_prompt=count,
        )
        for label in labels
    }
    return sample_rows(tokenizer, prompts, samples), cut
