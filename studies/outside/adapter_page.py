"""The part of the page about adapters on a T4, with the predictions that are kept blind."""

from collections.abc import Iterator, Sequence
from statistics import quantiles
from typing import Any, NamedTuple

from bench.reading import read
from rlhf.plan.fit import USABLE
from studies.kinds import OpenPredictions
from studies.outside import blind_page, opened
from studies.paths import OUTSIDE

OPEN = OUTSIDE / "open-t4.json"  # predictions for the open runs, by `python -m studies.outside.blind --open`
FIGURES = {
    "peak_allocated": "peak_allocated_mib",
    "peak_reserved": "peak_reserved_mib",
    "process": "process_mib",
    "forward": "peak_forward_mib",
    "backward": "peak_backward_mib",
    "optimizer": "peak_optimizer_mib",
}
PEER = {"peak_allocated": "tensors", "peak_reserved": "allocator", "process": "process"}
SECTION = """
## Adapters on a T4: open runs

{runs} runs on a Tesla T4 are in the data of fitcheck-llm 0.3.1 (PyPI, MIT): LoRA of rank 32 on a float16 or an NF4
base, AdamW, gradient checkpointing, eager or memory-efficient attention, random tokens of full length. Their script
(scripts/measure.py) runs one step to warm up, then measures one. Our own code of that loop runs on the stand-in device.
{done} of the runs are compared here, with {predictions} predictions ([open-t4.json](open-t4.json), with the date and
the commit of each): repeats of a setting share one, and are counted again.{missing} Nothing about memory is fitted; the
context, 140.9 MiB, is the source's own measured constant, so process memory tests nothing more than reserved memory.

These runs were open: faults were found on them and corrected.

- Softmax's backward pass on CUDA writes out gradient times output. The stand-in did not count it: up to -11.8 %.
- A float16 input goes to a float32 softmax in one kernel on CUDA. The stand-in copied the input first: +5.5 % in a
  forward pass.
- The memory-efficient kernel was counted with bfloat16's float32 sums where its inputs are float32, which has none.
- Transformers 5 allocates and releases what a packed model takes before it loads it, and four threads put weights on
  the card ahead of the one that packs them. What they leave behind decides which later blocks fit.
- The allocator's replay let the addresses of new segments rise, and torch takes the lowest of equal free blocks. With
  falling addresses the float16 runs, whose loading has one order, are reserved within {float16:.2%}. The record above
  was made with rising ones.

An error is predicted over measured, minus 1. The peer is fitcheck-llm, with its own published errors on the same runs,
where it published any.

![Errors of this project and of fitcheck-llm on the same runs](../../docs/images/outside-errors.svg)

| figure | runs | median error | mean error | worst | fitcheck-llm: median, mean, worst |
| --- | ---: | ---: | ---: | ---: | ---: |
{summary}

In 95 % of these runs, reserved memory was at most {short:.1%} above its prediction. `rlhf new` and `rlhf plan --fit
card` keep a margin of {margin:.0%}, which was set when fewer runs were compared.

What is left is the order in which threads load an NF4 model. The prediction has one order, with four weights ahead of
the one that is packed; but nothing makes the threads wait. After loading, runs of one model differ by up to 8 MiB.
The worst error of reserved memory, {worst}, is that of {worst_run}. Its allocated memory is
right, and the versions of transformers that the runs had (5.0.0, 5.17.0) give the same prediction. Replays of it with
weights up to 15 ahead, at random (7 draws), reserve 4,796 to 4,840 MiB in five cases, the measured 4,820 in two of
them, and 5,684 and 5,716 MiB in the others: it depends on the holes that loading left whether two buffers of the loss
fit into what attention has used. This was tried once, on 2026-11-26.

Such draws were made for every NF4 setting. They also reach what TinyLlama reserved with eager attention and 2 × 512
tokens. Other errors above 3 % are not explained: SmolLM2-135M (2 × 512), Qwen2.5-1.5B (sdpa, 1 × 2048) and TinyLlama
with sdpa (4 × 1024, and the first run of 2 × 512).

| run | allocated, measured, MiB | error | reserved, measured, MiB | error | peer: allocated | peer: process |
| --- | ---: | ---: | ---: | ---: | ---: | ---: |
{rows}
"""
HOLE = """
## The largest hole

No published run of PPO with a critic on one card has a peak of memory. Nothing on this page tests that loop.
"""


class Compared(NamedTuple):
    """A measured run with its predicted figures, in MiB."""

    name: str
    measured: dict[str, float | None]
    predicted: dict[str, float]
    peer: dict[str, float]  # published errors in percent

    def error(self, figure: str) -> float | None:
        """Return predicted over measured, minus 1; None where it was not measured."""
        measured = self.measured[FIGURES[figure]] if self.measured.get(FIGURES[figure]) else None
        return self.predicted[figure] / measured - 1 if measured else None


def compared() -> list[Compared]:
    """Return the open runs on the T4 that have predictions."""
    content = _measured()
    predictions = read(OPEN, OpenPredictions)["runs"]
    found = []
    for run in content["runs"]:
        if name(run) not in predictions:
            continue
        predicted = predictions[name(run)]["figures"]
        context = content["sessions"][run["session"]]["cuda_context_mib"]
        figures = {**predicted, "process": predicted["peak_reserved"] + context}
        found.append(Compared(name(run), run["measured"], figures, run["peer_error_pct"] or {}))
    return found


def _measured() -> dict[str, Any]:
    return read(OUTSIDE / "fitcheck-t4.json", dict[str, Any])


def name(run: dict[str, Any]) -> str:
    """Return what a run's prediction depends on, as a name; repeats of a run share it."""
    options = run["run"]
    base = "NF4" if options["quantization"] == "nf4" else "float16"
    model = run["model_id"].split("/")[1]
    return f"{model}, {base}, {options['attn_impl']}, {options['batch_size']} × {options['seq_len']}"


def section() -> str:
    """Return the part of the page."""
    return _t4() + blind_page.section() + opened.section() + HOLE


def _t4() -> str:
    runs = compared()
    every = [name(run) for run in _measured()["runs"]]
    done = {run.name for run in runs}
    worst, worst_run = max(((run.error("peak_reserved") or 0.0, run.name) for run in runs), key=lambda one: abs(one[0]))
    return SECTION.format(
        runs=len(every),
        done=len(runs),
        predictions=len(done),
        missing=f" {len(every) - len(runs)} runs have no prediction yet." if len(every) > len(runs) else "",
        summary="\n".join(_summary(runs)),
        rows="\n".join(_rows(runs)),
        short=above_prediction(runs),
        margin=1 - USABLE,
        float16=max(abs(run.error("peak_reserved") or 0.0) for run in runs if ", float16, " in run.name),
        worst=f"{worst:+.1%}",
        worst_run=worst_run,
    )


def above_prediction(runs: Sequence[Compared]) -> float:
    """Return how far above its prediction, as a share of it, reserved memory is at most in 95 % of the runs."""
    return max(0.0, quantiles([1 / (1 + (run.error("peak_reserved") or 0.0)) - 1 for run in runs], n=20)[-1])


def _summary(runs: Sequence[Compared]) -> Iterator[str]:
    for figure in FIGURES:
        errors = [error for run in runs if (error := run.error(figure)) is not None]
        key = PEER.get(figure)
        theirs = [run.peer[key] / 100 for run in runs if key and run.peer.get(key) is not None]
        cells = [figure.replace("peak_", ""), str(len(errors)), *opened.spread(errors)]
        yield f"| {' | '.join(cells)} | {', '.join(opened.spread(theirs)) if theirs else '–'} |"


def _rows(runs: Sequence[Compared]) -> Iterator[str]:
    for run in runs:
        cells = [run.name]
        for figure in ("peak_allocated", "peak_reserved"):
            error = run.error(figure)
            cells += [f"{run.measured[FIGURES[figure]]:,.0f}", f"{error:+.2%}" if error is not None else "–"]
        for key in ("tensors", "process"):
            cells.append(f"{run.peer[key]:+.1f}%" if run.peer.get(key) is not None else "–")
        yield f"| {' | '.join(cells)} |"
