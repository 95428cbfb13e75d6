"""Metrics sent to TensorBoard, Trackio or W&B as well, when asked."""

import importlib
import importlib.util
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

TRACKERS = ("tensorboard", "trackio", "wandb")
Log = Callable[[int, Mapping[str, float]], None]


class TrackerMissing(RuntimeError):
    """A tracker was asked for that is not installed."""


def check(report_to: Sequence[str]) -> None:
    """Raises TrackerMissing, before any work is done, for a tracker that is not installed."""
    for name in report_to:
        if importlib.util.find_spec(name) is None:
            raise TrackerMissing(f"--report-to {name}: the package {name} is not installed; pip install {name}")


@contextmanager
def trackers(report_to: Sequence[str], folder: Path, project: str, config: Mapping[str, Any]) -> Iterator[list[Log]]:
    """Open each tracker for one stage; yields functions (step, values). `folder` is where local ones write."""
    logs: list[Log] = []
    closing: list[Callable[[], Any]] = []
    for name in report_to:
        if name == "tensorboard":
            from torch.utils.tensorboard import SummaryWriter

            writer = SummaryWriter(str(folder / "tensorboard"))
            logs.append(partial(_scalars, writer))
            closing.append(writer.close)
        else:
            tracker = importlib.import_module(name)  # wandb and trackio share these three functions
            tracker.init(project=project, name=folder.name, config=dict(config))
            logs.append(partial(_record, tracker))
            closing.append(tracker.finish)
    try:
        yield logs
    finally:
        for close in closing:
            close()


def _record(tracker: Any, step: int, values: Mapping[str, float]) -> None:
    tracker.log(dict(values), step=step)


def _scalars(writer: Any, step: int, values: Mapping[str, float]) -> None:
    for key, value in values.items():
        writer.add_scalar(key, value, step)
