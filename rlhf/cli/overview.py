"""The help of `rlhf`: its commands in the order in which one uses them, and examples at the end of each help text."""

import difflib

import click

from rlhf.recipe.stages import STAGES

SECTIONS: dict[str, tuple[str, ...]] = {
    "Prepare": ("recipes", "doctor", "new", "data", "reward", "plan", "fetch"),
    "Train": ("rehearse", "run", "reproduce", "results"),
    "Judge the result": ("report", "chat", "sample", "compare", "score", "ab", "judge"),
    "Deploy": ("serve",),
}

EXAMPLES: dict[str, tuple[str, ...]] = {
    "recipes": ("rlhf recipes",),
    "doctor": ("rlhf doctor --hw 4090",),
    "new": (
        "rlhf new --model Qwen/Qwen3-8B --card 24GB",
        "rlhf new --model models/mine --card 4090 --data my-pairs.jsonl --stages grpo",
    ),
    "data check": ("rlhf data check my-pairs.jsonl", "rlhf data check train.jsonl --heldout test.jsonl --json"),
    "data show": ("rlhf data show my-pairs.jsonl --rows 3", "rlhf data show my-pairs.jsonl --only unfinished"),
    "data convert": ("rlhf data convert old.csv --rename question=prompt --to new.jsonl",),
    "reward": ("rlhf reward my_rewards:polite --data my-prompts.jsonl", "rlhf reward --recipe my-recipes/cpu-mine/v1"),
    "plan": ("rlhf plan --hw 4090 --price 0.40 --buy 1800", "rlhf plan --hw 4090 --fit 12GB"),
    "fetch": ("rlhf fetch --hw 4090",),
    "run": (
        "rlhf run ppo --hw cpu --with-parents",
        "rlhf run ppo --hw cpu --set ppo.kl_coef=0.1 --out runs/kl --reuse runs",
    ),
    "rehearse": ("rlhf rehearse --hw 4090",),
    "reproduce": ("rlhf reproduce --hw cpu --seeds 0,1,2 --out runs/seeds",),
    "results": ("rlhf results runs/seeds/cpu-tiny-v2.json",),
    "report": ("rlhf report --hw cpu",),
    "chat": ("rlhf chat --hw cpu --stage dpo",),
    "sample": (
        'rlhf sample --hw cpu --prompts my-prompts.txt --stages "base sft ppo" --n 2',
        "rlhf sample runs/cpu-tiny/v2 --prompts my-prompts.txt --to answers.jsonl --page answers.html",
    ),
    "compare": (
        "rlhf compare runs/cpu-tiny/v2/dpo runs/cpu-tiny/v2/ppo",
        "rlhf compare runs/cpu-tiny/v2 runs/kl/cpu-tiny/v2",
    ),
    "score": (
        "rlhf score --hw cpu my-pairs.jsonl --to scores.jsonl",
        'rlhf score --hw cpu --prompt "What is the capital of France?" --response "It is Paris."',
    ),
    "ab": ("rlhf ab --hw cpu", "rlhf ab --hw cpu --a sft --b dpo --summary"),
    "judge": ("rlhf judge --hw cpu --url http://127.0.0.1:8000/v1 --model judge-model --limit 100",),
    "serve": ("rlhf serve --hw cpu --port 8000", "rlhf serve runs/cpu-tiny/v2 -- --max-model-len 2048"),
}

# Words that one may try first, and the commands that do what they mean. Stages and targets of make are among them.
OTHER_WORDS: dict[str, str] = {
    **{stage: f"run {stage}" for stage in STAGES},
    "train": "run STAGE",
    "evaluation": "run evaluate",
    "data-check": "data check",
    "data-show": "data show",
}


class Overview(click.Group):
    """A group whose help lists the commands under headings, in the order of SECTIONS."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command that the first word names. Raises UsageError with the nearest command."""
        if args[0] not in self.commands:
            if args[0] == "help":
                raise click.UsageError(f"No such command 'help'; `{ctx.command_path} --help` lists the commands")
            nearest = difflib.get_close_matches(args[0], [*self.commands, *OTHER_WORDS], n=1)
            if nearest and nearest[0] in OTHER_WORDS:
                ctx.fail(f"No such command {args[0]!r}. Did you mean 'rlhf {OTHER_WORDS[nearest[0]]}'?")
        return super().resolve_command(ctx, args)

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of the commands in the order of use."""
        return [name for names in SECTIONS.values() for name in names]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write one list of commands for each heading."""
        width = formatter.width - 6 - max(map(len, self.commands))
        for heading, names in SECTIONS.items():
            with formatter.section(heading):
                formatter.write_dl([(name, self.commands[name].get_short_help_str(width)) for name in names])


def add_examples(command: click.Command, name: str) -> None:
    """Put the examples of a command, and of the commands of a group, at the end of their help texts."""
    if isinstance(command, click.Group):
        for inner_name, inner in command.commands.items():
            add_examples(inner, f"{name} {inner_name}")
        return
    lines = EXAMPLES[name]
    heading = "Examples:" if len(lines) > 1 else "Example:"
    command.epilog = "\n".join(("\b", heading, *(f"  {line}" for line in lines)))  # \b keeps the lines apart
