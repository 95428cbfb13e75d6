"""`python -m studies.outside.others SET [--code CLONE]`: blind predictions for programs of other people.

Writes studies/outside/blind-SET.json once; a correction is a second file (--correction 2). `--code` is a clone of the
authors' repository, for the sets whose loops are litgpt's. Commit the code first: the file names its commit.
"""

import io
import json
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.metadata import version
from typing import Any, NamedTuple

import click

from bench.provenance import code, now, require_committed_code
from bench.reading import read
from rlhf.cli import guarded
from rlhf.errors import UserError
from rlhf.files import write_json
from studies.outside.others.measure import Peaks
from studies.paths import OUTSIDE

SECONDS = 300  # of a processor for one run, far above what most take
LIT_GPT = ("0f021f3a", "8641822b3249bb94f068c254aa5d13decbc9f0a0")  # of lit-gpt: for adapters, and for LoRA


class OtherSet(NamedTuple):
    """Programs of one source, and the figure that its authors published."""

    predict: str  # "module:function" of this package; "litgpt" runs for itself, with the authors' code
    figures: dict[str, str]  # published -> field of Peaks
    bytes: int  # of the unit
    unit: str
    loop: str
    packages: tuple[str, ...]


GB = 10**9
OURS = "the authors' models and libraries; the loop is our own code of theirs"
SETS = {
    "peft-imagegen-l40s": OtherSet(
        "imagegen:predict",
        {"peak_reserved": "reserved", "allocated_after_step": "alive"},
        1,
        "bytes",
        OURS,
        ("torch", "diffusers", "peft", "transformers"),
    ),
    "litgpt-resource-a100": OtherSet(
        "litgpt",
        {"peak_allocated": "allocated"},
        GB,
        "10^9 bytes",
        f"lit-gpt's model, adapters and loss; {OURS}",
        ("torch", "lightning", "bitsandbytes"),
    ),
    "litgpt-confighub-a10g": OtherSet(
        "litgpt",
        {"peak_allocated": "allocated"},
        GB,
        "10^9 bytes",
        f"litgpt's model, LoRA and loss at each row's commit; {OURS}",
        ("torch", "lightning", "bitsandbytes"),
    ),
    "rasbt-vit-memory": OtherSet(
        "images:rasbt", {"peak_reserved": "reserved"}, GB, "10^9 bytes", OURS, ("torch", "torchvision")
    ),
    "torchao-optim-4070tis": OtherSet(
        "images:torchao", {"peak_allocated": "allocated"}, GB, "10^9 bytes", OURS, ("torch", "timm", "bitsandbytes")
    ),
    "xmem-3060-4060-a100": OtherSet(
        "xmem:predict",
        {"process": "reserved"},
        1,
        "bytes, CUDA's context included",
        OURS,
        ("torch", "transformers", "torchvision"),
    ),
}


@click.command()
@click.argument("name", type=click.Choice([*SETS]))
@click.option(
    "--code", "clone", type=click.Path(exists=True, file_okay=False), help="Clone of the authors' repository."
)
@click.option("--correction", default=1, show_default=True, help="Number of the file; the first is never rewritten.")
@click.option("--only", default="", help="Only print runs whose name contains this.")
def main(name: str, clone: str | None, correction: int, only: str) -> None:
    """Predict the runs of a set, and keep the predictions."""
    file = OUTSIDE / (f"blind-{name}.json" if correction == 1 else f"blind-{name}-{correction}.json")
    if not only:
        require_committed_code()
        if file.exists():
            raise UserError(f"{file} exists: a prediction stays as it is; write a correction with --correction")
    one, settings = SETS[name], read(OUTSIDE / f"{name}-settings.json", dict[str, Any])
    runs = [run for run in settings["settings"] if only in run["id"]]
    found = {}
    for run_id, answer in _litgpt(runs, clone) if one.predict == "litgpt" else _here(runs, _function(one.predict)):
        found[run_id] = answer if "refused" in answer else _published(answer, one)
        click.echo(f"{run_id}: {found[run_id]}")
    if only:
        return
    write_json(
        file,
        {
            "predicted": now(),
            "code": code(),
            "source": settings["source"],
            "unit": one.unit,
            "loop": one.loop,
            "packages": {package: version(package) for package in one.packages},
            "runs": [{"id": run["id"], **found[run["id"]]} for run in runs],
        },
    )
    click.echo(f"wrote {file}")


def _published(answer: dict[str, Any], one: OtherSet) -> dict[str, Any]:
    """Return the figures that the source publishes, in its unit."""
    peaks = Peaks(**answer["peaks"])
    return {name: getattr(peaks, field) / one.bytes for name, field in one.figures.items()}


def _function(place: str) -> Callable[[dict[str, Any]], Peaks]:
    module, _, name = place.partition(":")
    function: Callable[[dict[str, Any]], Peaks] = getattr(import_module(f"studies.outside.others.{module}"), name)
    return function


def _here(
    runs: list[dict[str, Any]], predict: Callable[[dict[str, Any]], Peaks]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Predict runs in this process; one that takes too long is refused."""

    def stop(*_: object) -> None:
        raise TimeoutError(f"more than {SECONDS} s of a processor")

    signal.signal(signal.SIGPROF, stop)
    for run in runs:
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        began = time.process_time()
        try:
            answer: dict[str, Any] = {"peaks": predict(run)._asdict()}
        except Exception as error:
            answer = {"refused": str(error) or type(error).__name__}
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
        yield run["id"], answer
        click.echo(f"{time.process_time() - began:.0f} s of a processor", err=True)


def _litgpt(runs: list[dict[str, Any]], clone: str | None) -> Iterator[tuple[str, dict[str, Any]]]:
    """Predict runs in a process for each commit of the authors' code."""
    if not clone:
        raise UserError("--code: name a clone of litgpt's repository")
    commits = {run["id"]: run.get("config_commit") or LIT_GPT[run["method"] == "lora"] for run in runs}
    for commit in dict.fromkeys(commits.values()):
        with tempfile.TemporaryDirectory() as folder:
            archive = subprocess.run(["git", "-C", clone, "archive", commit], capture_output=True, check=True).stdout
            with tarfile.open(fileobj=io.BytesIO(archive)) as files:
                files.extractall(folder, filter="data")
            asked = [run for run in runs if commits[run["id"]] == commit]
            command = [sys.executable, "-W", "ignore", "-m", "studies.outside.others.litgpt", folder]
            done = subprocess.run(command, input=json.dumps(asked), capture_output=True, text=True, check=True)
        for line in done.stdout.splitlines():
            answer = json.loads(line)
            yield answer.pop("id"), answer


if __name__ == "__main__":
    guarded(main)
