"""What identifies a local base and its tokenizer: a hash of each of their files.

Files of weights are told by their size, their beginning and 4 KiB in every 4 MiB, so that 14 GB take a fraction of a
second: training or converting weights anew changes these. Other files are hashed whole. What the hub has is pinned by
its commit, and a base of the run's own by the hash of its stage's result.
"""

import hashlib
from pathlib import Path

from rlhf.files import reading
from rlhf.recipe import Recipe
from rlhf.recipe.schema_model import is_gguf

SMALL = ("config.json", "generation_config.json", "*token*.json", "vocab*", "merges.txt", "*.model", "**/*.jinja")
BEGINNING = 2**24  # bytes; in a GGUF file all but the tensors, in safetensors the header
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
    """Return a hash of a file's size, of its beginning, and of a part in every stride behind it."""
    size = file.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with reading(file), open(file, "rb", buffering=0) as handle:
        digest.update(handle.read(BEGINNING))
        for start in range(BEGINNING, size, STRIDE):
            handle.seek(start)
            digest.update(handle.read(PART))
    return digest.hexdigest()
