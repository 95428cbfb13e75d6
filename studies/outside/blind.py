"""`python -m studies.outside.blind`: predictions for runs whose measured figures nobody here has seen.

Writes blind-t4.json, blind-rtx4080.json and blind-granite.json beside this file, each once: a later correction is a
second file (--correction 2). With --open it adds predictions for runs whose figures are known to open-t4.json.
Commit the code first; the files name its commit.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import click

from bench.provenance import code, now, require_committed_code
from bench.reading import read
from peakmem.cards import Rates
from rlhf.cli import guarded
from rlhf.errors import UserError
from rlhf.files import JsonObject, write_json
from rlhf.plan.projection import CALIBRATED, SPREAD, step_seconds
from studies.kinds import OpenPredictions
from studies.outside import adapter_page, packed
from studies.outside.adapter_runs import Predicted, predict, rtx4080_setting, t4_runs, t4_setting
from studies.paths import OUTSIDE

GRANITE = "ibm/PowerLM-3b"
A100 = Rates(312e12, 2.039e12, "NVIDIA A100 data sheet, 80 GB SXM")
# Where an NF4 base makes activations float32, products run outside the tensor cores.
T4_FLOAT32 = Rates(8.1e12, 320e9, "NVIDIA T4 data sheet, single precision")
RTX4080_FLOAT32 = Rates(48.7e12, 716.8e9, "NVIDIA Ada GPU architecture white paper, GeForce RTX 4080, FP32")
RTX4080_BFLOAT16 = Rates(97.5e12, 716.8e9, f"{RTX4080_FLOAT32.source.removesuffix('FP32')}bfloat16")
# Assumed: what a process holds of an A100 beside the allocator's segments, in bytes.
A100_CONTEXT = 500 << 20
FIRST_STEP = 2.0  # seconds, assumed: loading kernels in the first of two or three steps, whose mean is published


class Source(NamedTuple):
    """Whose settings a file of predictions is for."""

    settings: str
    unit: str
    bytes: int  # of the unit


SOURCES = {
    "t4": Source("fitcheck-t4-blind.json", "MiB; seconds", 1 << 20),
    "rtx4080": Source("canifinetune-rtx4080-blind.json", "GiB; seconds", 1 << 30),
    "granite": Source("fms-granite-blind.json", "bytes; seconds", 1),
}


@click.command()
@click.argument("names", nargs=-1, type=click.Choice([*SOURCES]))
@click.option(
    "--correction", default=1, show_default=True, help="Number of the file; the first one is never rewritten."
)
@click.option("--open", "opened", is_flag=True, help="Instead predict the settings that open-t4.json lacks.")
def main(names: tuple[str, ...], opened: bool, correction: int) -> None:
    """Predict the blind runs of the named sources, or of all, and keep the predictions."""
    require_committed_code()
    if opened:
        write_open()
        return
    for name in names or SOURCES:
        file = OUTSIDE / (f"blind-{name}.json" if correction == 1 else f"blind-{name}-{correction}.json")
        if file.exists():
            raise UserError(f"{file} exists: a prediction stays as it is; write a correction with --correction")
        source = SOURCES[name]
        content = read(OUTSIDE / source.settings, dict[str, Any])
        write_json(
            file,
            {
                "predicted": now(),
                "code": code(),
                "source": content["source"],
                "unit": source.unit,
                "runs": list(_PREDICTIONS[name](content)),
            },
        )
        click.echo(f"wrote {file}")


def write_open() -> None:
    """Add to open-t4.json what it lacks: figures in MiB by a setting's name, with their date and commit.

    The file is written after each setting, so that a stopped run keeps what it has predicted. To predict a setting
    again, remove it from the file first.
    """
    content = read(adapter_page.OPEN, OpenPredictions)
    source = Source("fitcheck-t4.json", content["unit"], 1 << 20)
    runs = {adapter_page.name(run): run for run in t4_runs()}
    for name, run in runs.items():
        if name in content["runs"]:
            continue
        figures = _adapter_figures(predict(t4_setting(run)), source)
        content["runs"][name] = {"predicted": now(), "commit": str(code()["commit"]), "figures": figures}
        write_json(adapter_page.OPEN, content)
        click.echo(name)


def _t4(content: dict[str, Any]) -> Iterator[JsonObject]:
    for run in content["runs"]:
        found = predict(t4_setting(run))
        context = content["sessions"][run["session"]]["cuda_context_mib"]
        yield {
            "id": run["id"],
            **_adapter_figures(found, SOURCES["t4"]),
            "process": found.reserved / (1 << 20) + context,
            "step_seconds": _interval(_seconds(found, T4_FLOAT32)),
        }


def _rtx4080(content: dict[str, Any]) -> Iterator[JsonObject]:
    for run in content["runs"]:
        found = predict(rtx4080_setting(run))
        four_bit = run["config"]["method"] == "qlora"
        seconds = _seconds(found, RTX4080_FLOAT32 if four_bit else RTX4080_BFLOAT16)
        low, high = _interval(seconds)
        yield {
            "id": run["id"],
            **_adapter_figures(found, SOURCES["rtx4080"]),
            "step_seconds": [low, high + FIRST_STEP / run["config"]["steps"]],
        }


def _granite(content: dict[str, Any]) -> Iterator[JsonObject]:
    for run in content["runs"]:
        found = packed.predicted_for(GRANITE, run["base"], run["method"], run["rows"])
        yield {
            "id": f"{run['base']}|{run['method']}|{run['rows']}",
            "peak_allocated": found.allocated,
            "peak_reserved": found.reserved,
            "allocated_after_step": found.after_step,
            "process": found.reserved + A100_CONTEXT,
            "step_seconds": _interval(step_seconds(found.work.flops, found.work.moved, found.work.launched, A100)),
        }


_PREDICTIONS = {"t4": _t4, "rtx4080": _rtx4080, "granite": _granite}


def _adapter_figures(found: Predicted, source: Source) -> dict[str, float]:
    return {
        "peak_allocated": found.allocated / source.bytes,
        "peak_reserved": found.reserved / source.bytes,
        **{phase: peak / source.bytes for phase, peak in found.phases.items()},
    }


def _seconds(found: Predicted, card: Rates) -> float:
    return step_seconds(found.work.flops, found.work.moved, found.work.launched, card, CALIBRATED)


def _interval(seconds: float) -> list[float]:
    """Return the interval in which projected seconds are expected."""
    return [seconds * factor for factor in SPREAD]


if __name__ == "__main__":
    guarded(main)
