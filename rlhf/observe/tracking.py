"""Metrics sent to TensorBoard, Trackio or W&B on request, by accelerate's trackers."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rlhf.errors import UserError
from rlhf.packages import install_command, require
from rlhf.terminal import message_of, say

TRACKERS = ("tensorboard", "trackio", "wandb")
Log = Callable[[int, Mapping[str, float]], None]


def check(report_to: Sequence[str]) -> None:
    """Raise UserError for a tracker that is not installed, before any work is done."""
    for name in report_to:
        require([name], f"--report-to {name}", install_command("tracking" if name == "tensorboard" else name))


@contextmanager
def trackers(
    report_to: Sequence[str], folder: Path, project: str, name: str, first_step: int | None = None
) -> Iterator[list[Log]]:
    """Open each tracker for one stage. Yields functions (step, values); one that fails is said once, and sends no more.

    `project` and `name` are those of the run in W&B and Trackio. `first_step`: where a resumed run goes on; TensorBoard
    then hides what earlier files have from that step on. Raises UserError if a tracker does not start.
    """
    from accelerate import PartialState  # imports torch
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS

    PartialState()  # its trackers ask it which process is the main one
    options: dict[str, dict[str, Any]] = {
        "tensorboard": {"run_name": "tensorboard", "logging_dir": folder, "purge_step": first_step},
        "trackio": {"run_name": project, "name": name},
        "wandb": {"run_name": project, "name": name, "dir": str(folder)},  # the working directory may be read-only
    }
    opened: dict[str, Any] = {}
    try:
        for service in report_to:
            opened[service] = LOGGER_TYPE_TO_CLASS[service](**options[service])
            try:
                opened[service].start()
            except Exception as error:  # each service has its own errors
                del opened[service]
                raise UserError(f"--report-to {service}: {message_of(error)}") from error

        def log(step: int, values: Mapping[str, float]) -> None:
            for service, tracker in [*opened.items()]:
                try:
                    tracker.log(dict(values), step=step)
                except Exception as problem:  # a tracker must not end a run
                    del opened[service]
                    say(f"{service} gets no more metrics: {message_of(problem)}")

        yield [log] if opened else []
    finally:
        for service, tracker in opened.items():
            try:
                tracker.finish()
            except Exception as problem:  # the stage's own files are complete
                say(f"{service} could not be closed: {message_of(problem)}")
