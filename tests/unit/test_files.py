"""Files that cannot be written are named."""

import errno
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlhf import files

TOO_LARGE = OSError(errno.EFBIG, "File too large")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, size, age in (("small", 10, 0), ("old", 100, 999), ("state.pt", 95, 0)):
        (tmp_path / name).write_bytes(b"x" * size)
        os.utime(tmp_path / name, (time.time() - age,) * 2)
    return tmp_path


@pytest.mark.parametrize(
    ("error", "limit", "found"),
    [
        (TOO_LARGE, 100, "state.pt"),
        (RuntimeError("unexpected pos 64 vs 0"), 100, "state.pt"),  # as torch.save says it
        (RuntimeError("unexpected pos 64 vs 0"), 1000, None),
        (RuntimeError("unexpected pos 64 vs 0"), None, None),
        (TOO_LARGE, 1000, "."),  # it was deleted again
        (TOO_LARGE, None, "."),  # the volume's own limit
    ],
)
def test_a_file_that_reached_the_limit_is_found(folder, monkeypatch, error, limit, found):
    monkeypatch.setattr(files, "file_limit", lambda: limit)
    assert files.limited_file(folder, error) == (None if found is None else folder / found)


def test_an_error_of_writing_names_the_file(tmp_path):
    def rows() -> Iterator[dict[str, object]]:
        yield {}
        raise OSError(errno.EFBIG, "File too large")

    for write in (lambda file: files.append(file, rows()), _replaced):
        with pytest.raises(OSError) as caught:
            write(tmp_path / "a.json")
        assert files.limited_file(tmp_path, caught.value) == tmp_path / "a.json"


def _replaced(file: Path) -> None:
    with files.replacing(file):
        raise OSError(errno.EFBIG, "File too large")
