"""A command whose terminal or reader is gone: what makes lasting results goes on, what only prints ends."""

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import sys, click
from rlhf.cli import guard
from rlhf.terminal import screen, streams
from rlhf.terminal.progress import Bar

@click.command()
def work():
    if "{kind}" == "run":
        streams.outlast()
    print("begun", flush=True)
    sys.stdin.readline()
    with Bar("steps", 2) as bar:
        for step in (1, 2):
            bar.update(step)
            screen.OUT.print("a line", step)
            print("and one", file=sys.stderr, flush=True)
    click.echo("a table")
    open("result", "w").write("done")

sys.argv = ["rlhf"]
guard.guarded(work)
"""


def _descriptors(kind: str) -> tuple[int, int]:
    """Return the end that is read and the one that is written to."""
    return pty.openpty() if kind == "terminal" else os.pipe()


@pytest.mark.parametrize(
    ("out", "err"), [("terminal", "terminal"), ("pipe", "pipe"), ("file", "terminal"), ("pipe", "terminal")]
)
@pytest.mark.parametrize("kind", ["run", "plan"])
def test_what_is_behind_the_output_may_go(tmp_path, out, err, kind):
    log = os.open(tmp_path / "log", os.O_RDWR | os.O_CREAT)
    ends = [(log, log) if behind == "file" else _descriptors(behind) for behind in (out, err)]
    child = subprocess.Popen(
        [sys.executable, "-c", SCRIPT.format(kind=kind)],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
        stdin=subprocess.PIPE,
        stdout=ends[0][1],
        stderr=ends[1][1],
        text=True,
    )
    if out != "file":
        assert os.read(ends[0][0], 100).startswith(b"begun")
    for descriptor in {end for pair in ends for end in pair}:
        os.close(descriptor)
    child.communicate("go on\n")
    ends_with_reader = kind == "plan" and out == "pipe"
    assert child.returncode == int(ends_with_reader)
    assert (tmp_path / "result").exists() != ends_with_reader
