"""What pytest is asked to run: a file or a test that is not there is refused, with the nearest name."""

import difflib
import re
from collections.abc import Sequence
from pathlib import Path


def fault(arguments: Sequence[str], folder: Path) -> str | None:
    """Return what is wrong with the paths and names of tests; None where all are there.

    pytest-xdist runs nothing where one of several is missing, and says that no tests ran.
    """
    for argument in arguments:
        path, *names = argument.partition("[")[0].split("::")
        file = folder / path
        if not file.exists():
            beside = [other.name for other in file.parent.glob("*")] if file.parent.is_dir() else []
            return f"{path}: no such file{_nearest(file.name, beside)}"
        defined = re.findall(r"^ *(?:async )?(?:def|class) (\w+)", file.read_text(), re.M) if names else []
        for name in names:
            if name not in defined:
                return f"{path}: no test {name} in it{_nearest(name, defined)}"
    return None


def _nearest(name: str, names: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, names, n=1)
    return f"; did you mean {near[0]}?" if near else ""
