"""Rows of files that hold columns: Parquet, Arrow, and folders that `save_to_disk` of datasets wrote."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rlhf.errors import UserError
from rlhf.files import read_json
from rlhf.terminal import message_of

if TYPE_CHECKING:
    import pyarrow

PARQUET, ARROW_FILE, ARROW_STREAM = b"PAR1", b"ARROW1", b"\xff\xff\xff\xff"  # the first bytes of each
Batches = Iterator["pyarrow.RecordBatch"]


def is_columnar(first_bytes: bytes) -> bool:
    """Return whether a file that begins so holds columns."""
    return first_bytes.startswith((PARQUET, ARROW_FILE, ARROW_STREAM))


def columnar_rows(path: Path, first_bytes: bytes) -> Iterator[tuple[str, object]]:
    """Yield (source, row) of a Parquet or Arrow file. Raises UserError where it is damaged."""
    kind, batches = ("Parquet", _of_parquet) if first_bytes.startswith(PARQUET) else ("Arrow", _of_arrow)
    return _rows(path, kind, lambda: batches(path))


def folder_rows(folder: Path) -> Iterator[tuple[str, object]]:
    """Yield (source, row) of a folder that `save_to_disk` wrote. Raises UserError for any other."""
    splits = (read_json(folder / "dataset_dict.json") or {}).get("splits")
    if isinstance(splits, list) and splits:
        names = ", ".join(str(folder / str(split)) for split in splits)
        if len(splits) > 1:
            raise UserError(f"{folder}: splits of a set, as save_to_disk writes them: name one, {names}")
        return folder_rows(folder / str(splits[0]))
    files = (read_json(folder / "state.json") or {}).get("_data_files")
    if not isinstance(files, list) or not (folder / "dataset_info.json").is_file():
        raise UserError(f"{folder}: a directory, and none that save_to_disk wrote; name the files in it")
    paths = [folder / str(file.get("filename")) for file in files if isinstance(file, dict)]

    def batches() -> Batches:
        for path in paths:
            yield from _of_arrow(path)

    return _rows(folder, "Arrow", batches)


def _rows(path: Path, kind: str, batches: Callable[[], Batches]) -> Iterator[tuple[str, object]]:
    """Yield the rows of batches with their sources. Raises UserError for what cannot be read."""
    number = 0
    with _explained(path, kind, lambda: number):
        for batch in batches():
            names = batch.schema.names
            repeated = next((name for name in names if names.count(name) > 1), None)
            if repeated is not None:
                raise UserError(f"{path}: the column {repeated[:40]!r} is there twice; rename one of them")
            for row in batch.to_pylist():
                number += 1
                yield f"{path}:row {number}", row


def _of_parquet(path: Path) -> Batches:
    import pyarrow.parquet  # slow to import, and only needed here

    with pyarrow.parquet.ParquetFile(path) as file:
        if not file.metadata.num_rows:
            yield pyarrow.RecordBatch.from_pylist([], schema=file.schema_arrow)
        yield from file.iter_batches(batch_size=1024)


def _of_arrow(path: Path) -> Batches:
    """Yield the batches of an Arrow file, of either of its formats."""
    import pyarrow
    import pyarrow.ipc

    with pyarrow.OSFile(str(path)) as file:
        is_stream = file.read(len(ARROW_STREAM)) == ARROW_STREAM
        file.seek(0)
        if is_stream:
            yield from pyarrow.ipc.open_stream(file)
            return
        reader = pyarrow.ipc.open_file(file)
        yield from (reader.get_batch(number) for number in range(reader.num_record_batches))


@contextmanager
def _explained(path: Path, kind: str, rows: Callable[[], int]) -> Iterator[None]:
    """Turn what Arrow raises into a UserError; `rows` returns how many were read."""
    import pyarrow

    try:
        yield
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        reason = message_of(error)
        raise UserError(f"{path}: {kind} file damaged after {rows():,} rows ({reason}); download it again") from None
    except (ValueError, OverflowError) as error:  # years behind 9999, two fields of one name
        raise UserError(
            f"{path}: a row behind row {rows():,} has a value that Python cannot hold ({message_of(error)}); write the "
            "file again without that column"
        ) from None
