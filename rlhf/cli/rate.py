"""`rlhf ab` and `rlhf judge`: people and a model rate two policies' answers."""

import click

from rlhf.cli.choice import RUN, Choice, Command, chooses_recipe
from rlhf.rating import judge as judging
from rlhf.rating import server
from rlhf.rating.pairs import pair_answers
from rlhf.rating.ratings import show_summary
from rlhf.recipe.stages import POLICIES


def _of_two_policies(command: Command) -> Command:
    """Add what names a finished evaluation and two of its policies."""
    trained = f"Policy whose wins are counted. [default: the first of {', '.join(POLICIES)} that was trained]"
    for option in (
        click.option("--b", metavar="POLICY", help=trained),
        click.option("--a", metavar="POLICY", help="Policy to compare against. [default: sft, or base]"),
        chooses_recipe,
        RUN,
    ):
        command = option(command)
    return command


@click.command("ab")
@_of_two_policies
@click.option("--port", default=server.PORT, type=click.IntRange(0, 65535), help="Port of the page; 0: a free one.")
@click.option("--summary", is_flag=True, help="Print win rates so far, and serve no page.")
def rate(choice: Choice, a: str | None, b: str | None, port: int, summary: bool) -> None:
    """Rate answers of two policies blind, on a local page. Only this machine can open it."""
    paired = pair_answers(choice.run_directory(), a, b)
    if summary:
        show_summary(paired)
    else:
        server.serve(server.Server(paired, port))


@click.command()
@_of_two_policies
@click.option(
    "--url", required=True, help="Address of an OpenAI-compatible endpoint, up to /v1; its key is in OPENAI_API_KEY."
)
@click.option("--model", required=True, metavar="NAME", help="Name of the model at the endpoint.")
def judge(choice: Choice, a: str | None, b: str | None, url: str, model: str) -> None:
    """Let a model rate answers of two policies, in both orders.

    It rates the pairs that `rlhf ab` shows to people; a choice counts if it is the same in both orders.
    """
    paired = pair_answers(choice.run_directory(), a, b)
    judging.run(paired, url, model)
    show_summary(paired)
