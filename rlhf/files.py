"""Files: JSON and JSON lines, hashes, writes that a crash leaves whole or undone."""

import hashlib
import json
import math
import os
import shutil
from pathlib import Path
from typing import Any


def read_json(file: Path) -> dict[str, Any] | None:
    """The file's object, or None where there is none that can be read."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def write_json(file: Path, content: Any) -> None:
    """Write beside and rename, so that a reader sees the old file or the new one."""
    temporary = file.with_name(f".{file.name}.tmp")
    temporary.write_text(json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8")
    sync(temporary)
    os.replace(temporary, file)
    sync(file.parent)


def read_lines(file: Path) -> list[dict[str, Any]]:
    """The objects of a JSONL file that this module wrote; a last line cut by a crash is left out."""
    if not file.exists():
        return []
    rows = []
    for line in file.read_bytes().split(b"\n"):  # text knows other ends of lines, which samples may hold
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):  # a character that was cut in two is a ValueError too
            break
        if not isinstance(row, dict):
            break
        rows.append(row)
    return rows


def append(file: Path, rows: list[dict[str, Any]]) -> None:
    with open(file, "a", encoding="utf-8") as handle:
        handle.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def write_output(file: Path, text: str) -> None:
    """Write beside and rename, so that an earlier output is replaced as a whole or stays as it is."""
    target = file.resolve()  # a symbolic link stays one
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{os.getpid()}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)


def sha256(file: Path) -> str:
    digest = hashlib.sha256()
    with open(file, "rb") as handle:
        while block := handle.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_tree(folder: Path) -> None:
    for path in (*folder.rglob("*"), folder):
        if path.exists():
            sync(path)


def remove(path: Path) -> None:
    """Delete a folder, or what is there in place of one; of a symbolic link the link alone."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def free_name(path: Path) -> Path:
    number = 1
    while os.path.lexists(candidate := path.with_name(f"{path.name}-{number}")):
        number += 1
    return candidate


def finite(value: float) -> float | None:
    """The number, or None for NaN and infinity, which JSON does not know."""
    return value if math.isfinite(value) else None
