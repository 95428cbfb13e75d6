"""Which clock measured the seconds of a record: the process's on a CPU, the wall's on a GPU."""

from collections.abc import Iterable, Mapping


def clock_of(rows: Iterable[Mapping[str, object]]) -> str:
    """Return the name of the clock of a record's rows: CPU or wall; wall where nothing could be measured."""
    return "CPU" if next((row["clock"] for row in rows if "clock" in row), "wall") == "cpu" else "wall"
