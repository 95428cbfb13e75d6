"""What docs/code.md shows: its blocks of code, and its changes applied to a copy of the project."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/code.md").read_text()


def example(name: str) -> str:
    """The block of code behind a mark of the page."""
    (block,) = re.findall(rf"<!-- howto: {name} -->\n```\w+\n(.*?)```", PAGE, re.S)
    return str(block)


def applied(change: str, root: Path) -> None:
    """Apply a change of the page below `root`. The lines without a + must be there once, up to an ellipsis."""
    for part in re.split(r"^# ", change, flags=re.M)[1:]:
        name, _, body = part.partition("\n")
        for hunk in re.split(r"^@@\n", body, flags=re.M):
            old, new = (
                "".join(line[1:] for line in hunk.splitlines(keepends=True) if line[0] in (" ", sign)) for sign in "-+"
            )
            old, new = (f"\n{lines}".removesuffix("…\n") for lines in (old, new))
            text = (root / name).read_text()
            assert text.count(old) == 1, f"{name} does not have this once: {old}"
            (root / name).write_text(text.replace(old, new))
