"""The run directory as seen by the processes that do not write it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rlhf.run.directory import Run


class Follower(Run):
    """The directory as the other processes of a run see it: they read and never write."""

    is_main = False

    def _skip(self, *_: Any, **__: Any) -> Any:
        """Do nothing, in place of a method that writes."""

    start = describe = log = log_telemetry = log_samples = log_finding = _skip
    save_checkpoint = seal_checkpoint = drop_checkpoints = set_aside = finish = _skip

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Take no lock; the main process holds it."""
        yield
