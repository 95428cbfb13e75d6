"""Metrics sent to TensorBoard, Trackio or W&B on request."""

import importlib
import importlib.util
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from rlhf.errors import UserError
from rlhf.run.packages import install_command
from rlhf.terminal import message_of, say

TRACKERS = ("tensorboard", "trackio", "wandb")
Log = Callable[[int, Mapping[str, float]], None]


def check(report_to: Sequence[str]) -> None:
    """Raise UserError for a tracker that is not installed, before any work is done."""
    for name in report_to:
        if importlib.util.find_spec(name) is None:
            extra = "tracking" if name == "tensorboard" else name
            raise UserError(f"--report-to {name}: {name} is not installed; {install_command(extra)}")


@contextmanager
def trackers(
    report_to: Sequence[str],
    folder: Path,
    project: str,
    name: str,
    config: Mapping[str, object],
    first_step: int | None = None,
) -> Iterator[list[Log]]:
    """Open each tracker for one stage. Yields functions (step, values).

    `project` and `name` are those of the run in W&B and Trackio. `first_step`: where a resumed run goes on; TensorBoard
    then hides what earlier files have from that step on. TensorBoard and W&B write their files into `folder`, Trackio
    into its own store in HF_HOME. Raises UserError if a tracker does not start, for example W&B without a key.
    """
    logs: list[Log] = []
    with ExitStack() as started:  # closes those that have started, also if another does not start or close
        for service in report_to:
            # wandb and trackio share these three functions
            tensorboard = service == "tensorboard"
            tracker = _TensorBoard(folder, first_step) if tensorboard else importlib.import_module(service)
            directory = {"dir": str(folder)} if service == "wandb" else {}  # the working directory may be read-only
            try:
                tracker.init(project=project, name=name, config=dict(config), **directory)
            except Exception as error:  # each service has its own errors
                raise UserError(f"--report-to {service}: {message_of(error)}") from error
            started.push(partial(_finish, tracker, service))
            logs.append(_Sender(tracker, service))
        yield logs


class _TensorBoard:
    """TensorBoard's writer with the functions of the other trackers."""

    def __init__(self, folder: Path, first_step: int | None):
        self.folder, self.first_step = folder / "tensorboard", first_step

    def init(self, **_: object) -> None:
        """Open the writer."""
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(self.folder), purge_step=self.first_step)
        say(f"tensorboard: metrics go to {self.folder}")

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Write a row."""
        for key, value in values.items():
            self.writer.add_scalar(key, value, step)

    def finish(self) -> None:
        """Close the writer."""
        self.writer.close()


def _finish(tracker: Any, name: str, error: type[BaseException] | None, *_: object) -> None:
    """Close a tracker. W&B is told of an error, or it would list the run as finished."""
    try:
        tracker.finish(**({"exit_code": 1} if error and name == "wandb" else {}))
    except Exception as problem:  # the stage's own files are complete
        say(f"{name} could not be closed: {message_of(problem)}")


class _Sender:
    """Sends rows to a tracker. After an error it sends no more: a tracker must not end a run."""

    def __init__(self, tracker: Any, name: str):
        self.tracker, self.name, self.failed = tracker, name, False

    def __call__(self, step: int, values: Mapping[str, float]) -> None:
        if self.failed:
            return
        try:
            self.tracker.log(dict(values), step=step)
        except Exception as problem:  # each service has its own errors
            self.failed = True
            say(f"{self.name} gets no more metrics: {message_of(problem)}")
