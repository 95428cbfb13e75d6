"""Which clock measures seconds: the process's on a CPU, the wall's on a GPU, which works while its process waits."""

import time
from collections.abc import Callable, Iterable, Mapping


def clock_of(rows: Iterable[Mapping[str, object]]) -> str:
    """Return the name of the clock of a record's rows: CPU or wall; wall where nothing could be measured."""
    return "CPU" if next((row["clock"] for row in rows if "clock" in row), "wall") == "cpu" else "wall"


def timer_of(device: str) -> Callable[[], float]:
    """Return the function that gives the seconds of the clock for a type of device."""
    return time.process_time if device == "cpu" else time.perf_counter
