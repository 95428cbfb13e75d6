"""Types of command-line options that several commands share: what they cannot use, they refuse before any work."""

import stat
from pathlib import Path
from typing import Any

import click

LARGEST_SEED = 2**32 - 1  # as in a recipe
SEED = click.IntRange(0, LARGEST_SEED)


class OutputFile(click.Path):
    """A file that will be written: not a directory, a pipe or a device, and below a folder that can be one."""

    def __init__(self) -> None:
        super().__init__(path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        path = Path(str(super().convert(value, param, ctx)))
        try:
            mode = path.stat().st_mode
        except FileNotFoundError:
            folder = next(parent for parent in path.absolute().parents if parent.exists())
            if not folder.is_dir():
                self.fail(f"{path}: {folder} is no folder", param, ctx)
        except (OSError, ValueError) as error:
            self.fail(f"{path}: {getattr(error, 'strerror', None) or error}", param, ctx)
        else:
            if stat.S_ISDIR(mode):
                self.fail(f"{path}: is a directory; name a file in it", param, ctx)
            if not stat.S_ISREG(mode):
                self.fail(f"{path}: a pipe or a device; name a file", param, ctx)
        return path


OUTPUT = OutputFile()
