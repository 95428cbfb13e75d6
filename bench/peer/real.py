"""`python -m bench.peer.real`: steps of a recipe's stages on its own model and rows, here and in TRL's trainers.

Both sides train adapters of the recipe's shape on the same checkpoint and the same token ids, with the recipe's
micro-batch, accumulation and lengths; GRPO has the recipe's reward functions. All else of TRL's is its default; once
more it keeps activations, and SFT puts rows of similar length into a batch. Ours is the real stage. Processes take
turns, and each stage takes a few steps. A peak is that of the process.
"""

from pathlib import Path

import click

from bench import options
from bench.kinds import SupervisedRecord
from bench.peer.supervised import compare, record_of, show
from rlhf.cli import guarded
from rlhf.cli.choice import Choice
from rlhf.cli.options import WholeNumber
from rlhf.files import sha256, write_json
from rlhf.recipe import Changes, Recipe, StageName

REAL_STAGES: tuple[StageName, ...] = ("sft", "rm", "dpo", "grpo")
WARM_UP = 1  # step that does not count: it creates the optimizer's states
EVALUATED = 8  # held-out rows of an evaluation: it is no part of a step


@options.command()
@options.HW
@options.RECIPE
@options.SET
@click.option("--data", multiple=True, metavar="FILE", help="Rows used instead of the recipe's. May be repeated.")
@options.stages(REAL_STAGES, "those that the recipe has")
@click.option("--steps", "count", default=2, show_default=True, type=WholeNumber(min=1), help="Steps after warm-up.")
@click.option("--repeats", default=3, show_default=True, type=WholeNumber(min=1), help="Runs of each, in turn.")
@options.SAVE
def main(
    hw: str,
    directory: Path | None,
    changes: tuple[str, ...],
    data: tuple[str, ...],
    stages: tuple[StageName, ...],
    count: int,
    repeats: int,
    save: Path | None,
) -> None:
    """Compare steps of a recipe's stages with TRL's trainers, on the recipe's own model and rows."""
    loaded = options.load(hw, directory, changes)
    own_rows = Choice(directory=loaded.directory, data=data, changes=changes).load()
    short = own_rows.with_changes(few_real_steps(own_rows.recipe, WARM_UP + count))
    figures = {
        stage: compare(short, stage, repeats, WARM_UP)
        for stage in options.stages_of(loaded, stages, measurable=REAL_STAGES)
    }
    show(loaded, figures)
    if save:
        record: SupervisedRecord = {**record_of(loaded, count, repeats, figures), "weights": "the recipe's"}
        if data:
            record["rows"] = [{"name": Path(file).name, "sha256": sha256(Path(file))} for file in data]
        write_json(save, record)


def few_real_steps(recipe: Recipe, count: int) -> Changes:
    """Return the overrides by which every stage takes `count` steps on its own rows, with little around them."""
    changes: Changes = {"evaluate.max_samples": EVALUATED}
    around: Changes = {"max_eval_samples": EVALUATED, "logging_steps": 1, "save_steps": count, "adapter": "last"}
    online: Changes = {"steps": count, "eval_steps": count} | around
    dialogues: Changes = {"max_steps": count, "eval_steps": None} | around
    for stage in (*recipe.online(), *recipe.dialogues()):
        section = online if stage in recipe.online() else dialogues
        changes |= {f"{stage}.{key}": value for key, value in section.items()}
    return changes


if __name__ == "__main__":
    guarded(main)
