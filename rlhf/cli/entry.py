"""The command `rlhf`: its commands, imported when they are asked for, and its entry point."""

import importlib

import click

from rlhf import __version__
from rlhf.cli.guard import guarded

# Commands in the order of use, under the headings of the help: each with its module and its name there.
SECTIONS = {
    "Prepare": {
        "recipes": "recipes.list_recipes",
        "doctor": "doctor.doctor",
        "new": "new.new",
        "data": "data.data_group",
        "reward": "reward.reward",
        "plan": "plan.plan",
        "fetch": "recipes.fetch",
    },
    "Train": {
        "rehearse": "rehearse.rehearse",
        "run": "train.run",
        "reproduce": "reproduce.reproduce",
    },
    "Judge the result": {
        "report": "report.report",
        "chat": "chat.chat",
        "sample": "sample.sample",
        "compare": "compare.compare_runs",
        "score": "score.score",
        "ab": "rate.rate",
        "judge": "rate.judge",
    },
    "Deploy": {"serve": "serve.serve"},
}
SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 120, "show_default": True}  # of contexts
COMMANDS = {name: place for places in SECTIONS.values() for name, place in places.items()}


class Rlhf(click.Group):
    """The group of all commands. One is imported when it is asked for: a mistake costs no library's import."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, _, name = COMMANDS[cmd_name].partition(".")
        command: click.Command = getattr(importlib.import_module(f"rlhf.cli.{module}"), name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write one list of commands for each heading."""
        width = formatter.width - 6 - max(map(len, COMMANDS))
        commands = {name: command for name in COMMANDS if (command := self.get_command(ctx, name))}
        for heading, names in SECTIONS.items():
            with formatter.section(heading):
                formatter.write_dl([(name, commands[name].get_short_help_str(width)) for name in names])


@click.group(cls=Rlhf, context_settings=SETTINGS)
@click.version_option(__version__)
def cli() -> None:
    """Reproducible RLHF on one GPU: SFT, reward model, PPO, RLOO, GRPO, DPO and KTO from a recipe.

    Start with `rlhf run ppo --hw cpu --with-parents`, which needs a CPU and a few minutes. `rlhf COMMAND --help`
    explains a command. RUN is a run directory, <out>/<recipe>/<version>, or a stage's folder in it: it has the settings
    of the run. Without it --hw or --recipe names the recipe, and so the run below --out.
    """


def main() -> None:
    """Run `rlhf`."""
    guarded(cli, "rlhf")
