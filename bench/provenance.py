"""What every program puts into a record about its origin, and the refusal to save one that could not be traced."""

import datetime
from pathlib import Path
from typing import TYPE_CHECKING, cast

from bench.kinds import Code, Device
from rlhf.errors import UserError
from rlhf.recipe import Recipe
from rlhf.run import reader, records
from rlhf.run.provenance import code_version

if TYPE_CHECKING:
    import torch


def today() -> str:
    """Return the date of a record, ISO 8601."""
    return datetime.date.today().isoformat()


def now() -> str:
    """Return date and time of a record, ISO 8601 to the second."""
    return datetime.datetime.now().isoformat(timespec="seconds")


def in_file_name(moment: str) -> str:
    """Return date and time as names of records begin with them: the last by name is the newest."""
    return moment.replace(":", "")


def code() -> Code:
    """Return the commit of the code that runs, and whether files differ from it, as a record has them."""
    return cast(Code, code_version().plain())


def describe(device: "torch.device") -> Device:
    """Return the facts about a device that a record names."""
    from rlhf.observe.device import device_facts

    return cast(Device, device_facts(device))


def describe_for(recipe: Recipe) -> Device:
    """Return the facts about a recipe's device, with the threads of its runs, which are processes of their own."""
    from rlhf.process.torch_setup import device_of

    facts = describe(device_of(recipe))
    if facts["type"] == "cpu" and recipe.hardware.threads:
        facts["threads"] = recipe.hardware.threads
    return facts


def require_committed_code(option: str = "--save") -> None:
    """Raise UserError if the code differs from its commit, or has none: a record must name the code that made it."""
    if code_version().dirty is not False:
        raise UserError(f"{option}: the code differs from its commit, or has none: commit first, or leave out {option}")


def require_new_file(file: Path, option: str = "--save") -> None:
    """Raise UserError where a file is in the place of a new record: what was measured is never replaced."""
    if file.exists():
        raise UserError(f"{option}: {file} exists, and a record replaces no other: name a new file, or remove that one")


def device_name(device: Device | str | None) -> str:
    """Return the name of a record's device, which some kinds have as a string alone; empty where there is none."""
    return device if isinstance(device, str) else device["name"] if device else ""


def device_text(device: object, source: str) -> str:
    """Return the processor with its threads, or the card; some kinds of records have this text alone.

    `source` names the record in the UserError that a damaged device raises.
    """
    return device if isinstance(device, str) else reader.check(device, records.Device, source).text() if device else ""


def device_folder(name: str) -> str:
    """Return the name of a device as folders below results/ have it."""
    return name.lower().replace(" ", "-")
