"""`rlhf doctor`: what this machine has and lacks for a recipe, a line each."""

import sys

import click
from rich.text import Text

from rlhf.cli.choice import RUN, Choice, chooses_recipe
from rlhf.plan import doctor as examining
from rlhf.process.libraries import quiet_libraries
from rlhf.terminal import screen

STYLES = {"ok": "green", "note": "yellow", "missing": "bold red"}


@click.command()
@RUN
@chooses_recipe
def doctor(choice: Choice) -> None:
    """Check what this machine lacks for a recipe, or for any.

    Looked at are driver, cards, packages, container runtime, memory and disk. Each line says what was found, and the
    way out where something is wrong. What the recipe needs is predicted. The exit code is 1 if something is missing
    without which it cannot run.
    """
    needs = examining.needs_of(choice.load()) if choice.names_a_recipe else None
    with quiet_libraries():
        host = examining.look(choice.root)
    if needs is None:
        needs = examining.Needs("a recipe", on_card=bool(host.gpus), cards=len(host.gpus))
    found = [*examining.checks(host, needs)]
    width = max(len(check.name) for check in found)
    for check in found:
        way_out = f": {check.way_out}" if check.way_out else ""
        line = f"{check.name:<{width}}  {check.found}{way_out}"
        screen.OUT.print(Text.assemble((f"{check.state:<7}", STYLES[check.state]), f"  {line}"), soft_wrap=True)
    missing = [check.name for check in found if check.state == "missing"]
    said = f"cannot run here yet: {', '.join(missing)}" if missing else "can run here"
    screen.OUT.print(f"{needs.recipe} {said}")
    sys.exit(1 if missing else 0)
