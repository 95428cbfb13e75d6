"""`python -m studies.tasks`: on which tasks of reasoning-gym a model begins to answer, before any training.

For each task, the base of a recipe answers the same questions once with its likeliest tokens and once sampled. Two
shares are counted of each: answers that the task's verifier scores 1 as a whole, and answers of which it does so for
the last word or number alone.
"""

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import click
import torch
from typing_extensions import TypedDict

from bench import options
from bench.kinds import Code
from bench.paths import ROOT
from bench.provenance import code, today
from rlhf import recipe as recipes
from rlhf.cli import guarded
from rlhf.cli.options import WholeNumber
from rlhf.data.corpus import Prompt
from rlhf.data.rows import PromptOnly, of_kind
from rlhf.data.source import read_source
from rlhf.data.tokenize import DialogueTokenizer
from rlhf.evaluation.policies import measure
from rlhf.files import JsonObject, write_json
from rlhf.models.loading import load_base, load_tokenizer
from rlhf.models.shared_base import SharedBase
from rlhf.observe.device import cpu_model
from rlhf.recipe import PinnedRecipe
from rlhf.recipe.base import BaseSpec
from rlhf.rollout.decoding import Sampling
from rlhf.run.packages import package_version, package_versions
from rlhf.stages.online.reward_functions import find
from rlhf.stats import wilson
from rlhf.terminal.screen import OUT

RECIPE = ROOT / "recipes" / "cpu-smollm2-sums" / "v1"
LAST = r"(-?[\w./:]*\w)\W*$"  # the last word or number
PROMPT_TOKENS, ROWS = 1024, 32  # of a prompt, and decoded together
TEMPERATURES = {"greedy": 0.0, "sampled": 1.0}


class TaskConfig(TypedDict):
    """A task of the package with its config."""

    task: str
    config: dict[str, int]


TASKS: dict[str, TaskConfig] = {  # easy settings: short questions and answers
    "sums, two digits": {"task": "chain_sum", "config": {"max_terms": 2, "min_digits": 2, "max_digits": 2}},
    "sums, three digits": {
        "task": "chain_sum",
        "config": {"max_terms": 2, "min_digits": 3, "max_digits": 3},
    },
    "products": {"task": "products", "config": {"max_terms": 2, "max_digits": 2}},
    "gcd": {"task": "gcd", "config": {"max_value": 50}},
    "lcm": {"task": "lcm", "config": {"max_value": 20}},
    "leg counting": {"task": "leg_counting", "config": {"min_animals": 1, "max_animals": 2, "max_instances": 3}},
    "letter counting": {"task": "letter_counting", "config": {"min_words": 3, "max_words": 5}},
    "count bits": {"task": "count_bits", "config": {"max_n": 1000}},
    "spell backward": {"task": "spell_backward", "config": {"max_word_len": 4}},
    "base conversion": {"task": "base_conversion", "config": {"max_value": 100}},
    "equations": {"task": "simple_equations", "config": {"max_terms": 2, "max_value": 20}},
    "sequences": {"task": "number_sequence", "config": {"max_complexity": 1, "max_value": 20}},
    "number sorting": {"task": "number_sorting", "config": {"max_numbers": 4}},
    "basic arithmetic": {"task": "basic_arithmetic", "config": {"max_terms": 2, "max_digits": 1}},
}


class Answers(TypedDict):
    """How many of a task's questions were answered right, by both counts, of how many."""

    whole: int
    last: int
    total: int
    mean_score: float  # of whole answers, by the verifier
    cpu_seconds: float  # of decoding and scoring
    first: list[str]  # question and answer


class TasksRecord(TypedDict):
    """A record: what was measured where, and the answers by task and kind of sampling."""

    date: str
    code: Code
    packages: dict[str, str]
    cpu: str
    threads: int
    recipe: str
    system: str | None
    tokens: int
    tasks: dict[str, TaskConfig]
    answers: dict[str, dict[str, Answers]]


def questions_of(pinned: PinnedRecipe, task: TaskConfig, count: int, folder: Path) -> list[tuple[Prompt, str]]:
    """Return questions of a task with their entries (rlhf/data/worlds/gym.py)."""
    version = package_version("reasoning-gym")
    section: JsonObject = {"version": version, "task": task["task"], "config": task["config"], "size": count}
    changed = pinned.with_changes({"data.source": "reasoning_gym", "data.reasoning_gym": section})
    rows = of_kind(read_source(changed.recipe, folder).rows, PromptOnly)
    return [(row.prompt, row.right_answer) for row in rows if row.right_answer is not None]


def answered(
    shared: SharedBase,
    tokenizer: DialogueTokenizer,
    questions: Sequence[tuple[Prompt, str]],
    tokens: int,
    temperature: float,
) -> Answers:
    """Return how the base answers questions, each once."""
    prompts, entries = [prompt for prompt, _ in questions], [entry for _, entry in questions]
    start = time.process_time()
    samples = measure(
        shared,
        "reference",
        tokenizer,
        prompts,
        Sampling(PROMPT_TOKENS, tokens, temperature, batch_size=ROWS),
        seed=0,
        with_true_reward=False,
    )
    seconds = time.process_time() - start
    texts = [prompt[-1].content for prompt in prompts]
    whole, last = (
        [score or 0.0 for score in find(name, "studies.tasks")(texts, samples.texts, entries)]
        for name in ("reasoning_gym", f"reasoning_gym(extract={LAST!r})")
    )
    return {
        "whole": sum(score >= 1 for score in whole),
        "last": sum(score >= 1 for score in last),
        "total": len(texts),
        "mean_score": round(sum(whole) / len(whole), 4),
        "cpu_seconds": round(seconds, 1),
        "first": [texts[0], samples.texts[0]],
    }


def table(record: TasksRecord) -> str:
    """Return the table of a record as README.md shows it."""
    kinds = "".join(f" {kind}: whole | last | mean score |" for kind in TEMPERATURES)
    lines = [f"| task |{kinds}", "|---|" + "---:|" * (3 * len(TEMPERATURES))]
    for name, by_kind in record["answers"].items():
        cells = [
            cell
            for found in by_kind.values()
            for cell in (
                f"{found['whole'] / found['total']:.0%}",
                "{:.0%} ({:.0%} to {:.0%})".format(*wilson(found["last"], found["total"])),
                f"{found['mean_score']:.2f}",
            )
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


@options.command()
@click.option("--recipe", "folder", default=RECIPE, type=click.Path(path_type=Path), help="Recipe with the base.")
@click.option("--system", metavar="TEXT", help="System message before each question.")
@click.option("--only", metavar="LIST", help="Names of tasks, separated by semicolons. [default: all]")
@click.option("--questions", type=WholeNumber(min=1), default=64, show_default=True, help="Questions of a task.")
@click.option("--tokens", type=WholeNumber(min=1), default=24, show_default=True, help="Longest answer, in tokens.")
@options.SAVE
def main(folder: Path, system: str | None, only: str | None, questions: int, tokens: int, save: Path | None) -> None:
    """Measure how a recipe's base answers tasks of reasoning-gym."""
    begun, ran = today(), code()  # of the files that are imported now
    pinned = recipes.load(folder, {} if system is None else {"tokenizer.system_prompt": system})
    threads = pinned.recipe.hardware.threads or 1
    torch.set_num_threads(threads)
    spec = BaseSpec(pinned.recipe.model, pinned.recipe.tokenizer, trunk=pinned.recipe.hardware.trunk)
    tokenizer = load_tokenizer(spec)
    shared = SharedBase(load_base(spec, torch.device("cpu")), {"reference": None}, lean=spec.trunk == "lean")
    chosen = {name: task for name, task in TASKS.items() if only is None or name in only.split(";")}
    answers: dict[str, dict[str, Answers]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for name, task in chosen.items():
            asked = questions_of(pinned, task, questions, Path(scratch))
            answers[name] = {}
            for kind, temperature in TEMPERATURES.items():
                found = answers[name][kind] = answered(shared, tokenizer, asked, tokens, temperature)
                OUT.print(f"{name}, {kind}: {found}", markup=False, highlight=False)
    record: TasksRecord = {
        "date": begun,
        "code": ran,
        "packages": {**package_versions(), "reasoning-gym": package_version("reasoning-gym") or ""},
        "cpu": cpu_model() or "unknown",
        "threads": threads,
        "recipe": f"{pinned.name}/{pinned.version}",
        "system": system,
        "tokens": tokens,
        "tasks": chosen,
        "answers": answers,
    }
    if save is not None:
        write_json(save, record)
    OUT.print(table(record), markup=False, highlight=False, soft_wrap=True)


if __name__ == "__main__":
    guarded(main)
