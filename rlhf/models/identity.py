"""What identifies a base and its tokenizer: a hash of each of their files.

A file of weights is told by its size, its safetensors header, and the first and last 2 KiB of each tensor: 14 GB take
a fraction of a second, and training changes all of a tensor. Other files are hashed whole. What the hub has is pinned
by its commit, and a base of this run by the hash of its stage's result.
"""

import hashlib
import json
from pathlib import Path

from rlhf.models.loading import base_name, local_name
from rlhf.recipe.base import BaseSpec
from rlhf.run.reader import reading

SMALL = ("config.json", "generation_config.json", "*token*.json", "vocab*", "merges.txt", "*.model", "**/*.jinja")
PART = 2048  # bytes of a tensor, at its start and at its end


def files_of(spec: BaseSpec) -> dict[str, str]:
    """Return the SHA-256 of each file of a local base and of a local tokenizer, by name; of a GGUF file's conversion.

    Raises UserError for weights that cannot be read.
    """
    found = {}
    if spec.model.source in ("local", "package"):
        found = _files(Path(base_name(spec)), weights=True)
    if spec.tokenizer.source == "local" and (folder := Path(local_name(spec.tokenizer))) != Path(base_name(spec)):
        found |= {f"tokenizer/{name}": digest for name, digest in _files(folder).items()}
    return found


def _files(folder: Path, weights: bool = False) -> dict[str, str]:
    """Return the hash of each file of a folder that loading reads, by name."""
    small = {file for pattern in SMALL for file in folder.glob(pattern) if file.is_file()}
    found = {str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest() for file in small}
    for file in folder.glob("*.safetensors") if weights else ():
        with reading(file):
            found[file.name] = _of_weights(file)
    return dict(sorted(found.items()))


def _of_weights(file: Path) -> str:
    """Return a hash of a safetensors file's size, header and parts of each tensor.

    Format: 8 bytes, the header's length; JSON with each tensor's `data_offsets`; the tensors.
    """
    digest = hashlib.sha256(str(file.stat().st_size).encode())
    with open(file, "rb", buffering=0) as handle:
        size = int.from_bytes(handle.read(8), "little")
        header = handle.read(size)
        digest.update(header)
        content = json.loads(header)
        content.pop("__metadata__", None)
        for start, end in sorted(tensor["data_offsets"] for tensor in content.values()):
            for place in (start, max(start, end - PART)):
                handle.seek(8 + size + place)
                digest.update(handle.read(min(PART, end - place)))
    return digest.hexdigest()
