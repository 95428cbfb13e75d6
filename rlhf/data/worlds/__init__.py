"""Worlds of generated rows, each a module with a function `write`.

It makes files of JSON lines in a folder, the same bytes for the same arguments, and returns them in the order in which
they are read.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path

from rlhf.files import json_lines


def write_files(directory: Path, contents: Mapping[str, Iterable[Mapping[str, object]]]) -> list[Path]:
    """Write rows by the name of their file, and return the files."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, rows in contents.items():
        (directory / name).write_text(json_lines(rows), encoding="utf-8")
    return [directory / name for name in contents]
