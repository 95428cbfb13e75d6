"""Files that cannot be written are named."""

import errno
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlhf import files


def test_an_error_of_writing_names_the_file(tmp_path):
    def rows() -> Iterator[dict[str, object]]:
        yield {}
        raise OSError(errno.EFBIG, "File too large")

    for write in (lambda file: files.append(file, rows()), _replaced):
        with pytest.raises(OSError) as caught:
            write(tmp_path / "a.json")
        assert caught.value.filename == str(tmp_path / "a.json")


def _replaced(file: Path) -> None:
    with files.replacing(file):
        raise OSError(errno.EFBIG, "File too large")
