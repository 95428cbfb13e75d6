"""The logs of a stage, one JSON object per line and step."""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from rlhf.files import append, finite, replacing, sync
from rlhf.run.layout import FINDINGS, METRICS, SAMPLES, TELEMETRY

LOGS = (METRICS, TELEMETRY, SAMPLES, FINDINGS)


class Logs:
    """The logs in a stage's directory. Only the main process of a run writes them (`writes`)."""

    def __init__(self, folder: Path, writes: bool = True):
        self.folder, self.writes = folder, writes
        self.on_metrics: list[Callable[[int, Mapping[str, float]], None]] = []  # called with each row of metrics

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Append one row to metrics.jsonl. Values that depend on the clock do not belong here."""
        self._append(METRICS, step, [{key: finite(value) for key, value in values.items()}])
        for receive in self.on_metrics if self.writes else ():
            receive(step, values)

    def telemetry(self, step: int, values: Mapping[str, float]) -> None:
        """Append one row of costs to telemetry.jsonl."""
        self._append(TELEMETRY, step, [values])

    def samples(self, step: int, rows: Iterable[Mapping[str, object]]) -> None:
        """Append prompts and answers to samples.jsonl."""
        self._append(SAMPLES, step, rows)

    def finding(self, step: int, values: Mapping[str, object]) -> None:
        """Append a finding of rlhf/observe/watch.py to findings.jsonl."""
        self._append(FINDINGS, step, [values])

    def sync(self) -> None:
        """Flush all logs to disk."""
        for log in self.folder.glob("*.jsonl"):
            sync(log)

    def line_counts(self) -> dict[str, int]:
        """Return the number of lines of each log that exists."""
        return {name: file.read_bytes().count(b"\n") for name in LOGS if (file := self.folder / name).exists()}

    def rewind(self, line_counts: Mapping[str, int]) -> None:
        """Drop the lines beyond the `line_counts` of a checkpoint. The resumed run writes them again."""
        for file in (self.folder / name for name in self.line_counts()):
            kept = file.read_bytes().split(b"\n")[: line_counts.get(file.name, 0)]
            with replacing(file) as temporary:
                temporary.write_bytes(b"".join(line + b"\n" for line in kept))
                sync(temporary)

    def _append(self, name: str, step: int, rows: Iterable[Mapping[str, object]]) -> None:
        if self.writes:
            append(self.folder / name, [{"step": step, **row} for row in rows])
