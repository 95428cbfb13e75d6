"""The command `rlhf`: its groups and its entry point."""

import click

from rlhf import __version__
from rlhf.cli import (
    chat,
    compare,
    doctor,
    new,
    plan,
    rate,
    recipes,
    rehearse,
    report,
    reproduce,
    reward,
    sample,
    score,
    serve,
    train,
)
from rlhf.cli.data import data_group
from rlhf.cli.guard import guarded
from rlhf.cli.options import HELP_SETTINGS
from rlhf.cli.overview import Overview, add_examples


@click.group(cls=Overview, context_settings=HELP_SETTINGS)
@click.version_option(__version__)
def cli() -> None:
    """Reproducible RLHF on one GPU: SFT, reward model, PPO, RLOO, GRPO, DPO and KTO from a recipe.

    Start with `rlhf run ppo --hw cpu --with-parents`, which needs a CPU and a few minutes. `rlhf COMMAND --help`
    explains a command and ends with examples.
    """


for command in (
    *(train.run, rehearse.rehearse, reproduce.reproduce, reproduce.results, recipes.list_recipes, recipes.fetch),
    *(doctor.doctor, new.new, plan.plan, data_group, reward.reward),
    *(chat.chat, sample.sample, score.score, serve.serve, report.report, compare.compare_runs),
    *(rate.rate, rate.judge),
):
    cli.add_command(command)
    add_examples(command, str(command.name))


def main() -> None:
    """Run `rlhf`."""
    guarded(cli, "rlhf")
