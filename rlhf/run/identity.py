"""What identifies a local base and its tokenizer: a hash of each of their files.

Files of weights are told by their size and by parts of them, so that 14 GB take a fraction of a second: of safetensors
the header, and the first and last 2 KiB of each tensor; of a GGUF file its beginning, which has all but the tensors,
and 4 KiB in every 4 MiB. Training or converting weights anew changes each of these. Other files are hashed whole. What
the hub has is pinned by its commit, and a base of the run's own by the hash of its stage's result.
"""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

from rlhf.recipe import Recipe
from rlhf.recipe.schema_model import is_gguf
from rlhf.run.reader import reading

SMALL = ("config.json", "generation_config.json", "*token*.json", "vocab*", "merges.txt", "*.model", "**/*.jinja")
BEGINNING = 2**24  # bytes of a GGUF file: vocabularies take up to 10 MB
STRIDE = 2**22
PART = 2**12


def files_of(recipe: Recipe) -> dict[str, str]:
    """Return the SHA-256 of each file of a local base and of a local tokenizer, by name.

    Raises UserError for weights that cannot be read.
    """
    model, tokenizer = recipe.model, recipe.tokenizer
    found = _files(Path(str(model.name)), weights=True) if model.source == "local" else {}
    if tokenizer.source == "local" and (tokenizer.source, tokenizer.name) != (model.source, model.name):
        found |= {f"tokenizer/{name}": digest for name, digest in _files(Path(str(tokenizer.name))).items()}
    return found


def _files(path: Path, weights: bool = False) -> dict[str, str]:
    """Return the hash of each file of a folder that loading reads, by name, or of a GGUF file."""
    if is_gguf(str(path)):
        return {path.name: _of_weights(path)} if path.is_file() else {}
    small = {file for pattern in SMALL for file in path.glob(pattern) if file.is_file()}
    found = {str(file.relative_to(path)): hashlib.sha256(file.read_bytes()).hexdigest() for file in small}
    found |= {file.name: _of_weights(file) for file in path.glob("*.safetensors")} if weights else {}
    return dict(sorted(found.items()))


def _of_weights(file: Path) -> str:
    """Return a hash of a file's size and of parts of it."""
    size = file.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with reading(file), open(file, "rb", buffering=0) as handle:
        for start, length in _parts_of_gguf(size) if is_gguf(file.name) else _parts_of_tensors(file):
            handle.seek(start)
            digest.update(handle.read(length))
    return digest.hexdigest()


def _parts_of_gguf(size: int) -> Iterator[tuple[int, int]]:
    yield 0, BEGINNING
    yield from ((start, PART) for start in range(BEGINNING, size, STRIDE))


def _parts_of_tensors(file: Path) -> Iterator[tuple[int, int]]:
    """Yield places and lengths of the header, and of both ends of each tensor, of a safetensors file.

    Format: 8 bytes, the header's length; JSON with each tensor's `data_offsets`; the tensors.
    """
    with open(file, "rb") as handle:
        first = 8 + int.from_bytes(handle.read(8), "little")
        header = json.loads(handle.read(first - 8))
    yield 0, first
    header.pop("__metadata__", None)
    for start, end in sorted(tensor["data_offsets"] for tensor in header.values()):
        part = min(PART // 2, end - start)
        yield first + start, part
        yield first + end - part, part
