"""Which clock measured the seconds of a record: the process's on a CPU, the wall's on a GPU."""

from collections.abc import Iterable, Mapping
from typing import Any, Literal

Clock = Literal["cpu", "wall"]
NAMES: dict[Clock, str] = {"cpu": "CPU", "wall": "wall"}


def clock_of(rows: Iterable[Mapping[str, Any]]) -> str:
    """Return the name of the clock of a record's rows: CPU or wall; wall where nothing could be measured."""
    return NAMES[next((row["clock"] for row in rows if "clock" in row), "wall")]
