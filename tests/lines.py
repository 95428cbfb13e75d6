"""Lines of JSONL files as plain objects, of a run's logs also while the run is writing them."""

import json
from pathlib import Path
from typing import Any


def read_all_lines(file: Path) -> list[Any]:
    """Return the objects of a whole JSONL file, of which no line may be damaged."""
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def read_intact_lines(file: Path) -> list[dict[str, Any]]:
    """Return the objects of a JSONL file, up to the first line that a crash cut off."""
    if not file.exists():
        return []
    rows = []
    for line in file.read_bytes().split(b"\n"):  # str.splitlines also splits at characters of samples
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):  # half of a character raises a ValueError too
            break
        if not isinstance(row, dict):
            break
        rows.append(row)
    return rows
