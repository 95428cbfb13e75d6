"""Bases from GGUF files: a file is converted once, into a checkpoint's folder in the cache.

transformers reads the file with the package `gguf` and unpacks its weights to float32. The folder is named after the
file's hash, this code and the versions of both packages. It appears complete or not at all, and its `conversion.json`
says what it was made from.
"""

import functools
import os
import shutil
import tempfile
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from rlhf.errors import UserError
from rlhf.files import cache_root, disk_is_full, sha256, sync_tree, write_json
from rlhf.models import records
from rlhf.process.libraries import quiet_libraries
from rlhf.run import reader
from rlhf.run.lock import waited_for
from rlhf.run.packages import package_version, require
from rlhf.run.reader import reading, why_unreadable
from rlhf.terminal.progress import working
from rlhf.terminal.wording import GB

RECORD = "conversion.json"
READERS = ("transformers", "gguf")  # packages that read a file
BYTES = 4.2  # on disk for each weight: float32, and the tokenizer

# Names in a file, as llama.cpp groups them, of rules that split texts before the merges: as GPT-2 does, and each digit
# alone before that. Old files state none, or "default".
AS_GPT2 = (None, "default", "gpt-2", "phi-2", "olmo", "mpt", "jais", "gigachat", "mellum")
DIGITS_ALONE = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone")

Make = Callable[[Path], None]  # fills an empty folder


class Header(NamedTuple):
    """What is read of a GGUF file before it is converted."""

    content: Any  # gguf's reader of the file
    weights: int
    licence: str
    pre_tokenizer: str | None


def folder_for(digest: str) -> Path:
    """Return where the conversion of the file with this SHA-256 is kept, made or not."""
    versions = "-".join(str(package_version(package)) for package in READERS)
    return cache_root() / "models" / f"{digest[:16]}-{versions}-{sha256(Path(__file__))[:8]}"


def converted(file: Path) -> Path:
    """Return the folder of a GGUF file's checkpoint, converted now if that was not done before. Raises UserError."""
    if not file.is_file():
        raise UserError(f"{file}: there is no such file")
    state = file.stat()
    digest = _hash(file, state.st_size, state.st_mtime_ns)
    return made_once(digest, lambda folder: convert(file, digest, folder, {"file": str(file.resolve())}))


@functools.cache
def _hash(file: Path, size: int, changed: int) -> str:
    """Return a file's SHA-256, computed once for the state that `size` and `changed` stand for."""
    return sha256(file)


def made_once(digest: str, make: Make) -> Path:
    """Return the folder for a file's hash. Where there is none, `make` fills a new one, which then takes its place.

    Processes that need it at once wait for the first; after an error nothing is left. Raises UserError, also for a full
    disk and for a folder whose files have changed.
    """
    target = folder_for(digest)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with waited_for(target.with_name(f".{target.name}.lock")):
            if record_of(target) is None:
                _make(target, make)
    except OSError as error:
        if not disk_is_full(error):
            raise
        raise UserError(_too_small(target.parent)) from error
    return target


def _make(target: Path, make: Make) -> None:
    """Fill a new folder and rename it to `target`; one there that no record describes is replaced."""
    with tempfile.TemporaryDirectory(prefix=".new-", dir=target.parent) as scratch:
        folder = Path(scratch) / "model"
        folder.mkdir()
        make(folder)
        sync_tree(folder)
        shutil.rmtree(target, ignore_errors=True)
        os.rename(folder, target)


def record_of(folder: Path) -> records.Conversion | None:
    """Return the record of a converted model; None for another folder. Raises UserError if its files have changed."""
    record = reader.read(folder / RECORD, records.Conversion)
    for name, size in record.bytes.items() if record else ():
        if not (folder / name).is_file() or (folder / name).stat().st_size != size:
            raise UserError(f"{folder / name} has changed since it was converted: delete {folder} to make it again")
    return record


def convert(file: Path, digest: str, folder: Path, origin: Mapping[str, object]) -> None:
    """Write a GGUF file's checkpoint and tokenizer into an empty folder, with the record of where it came from.

    Raises UserError for a file that cannot be read, a type of model or of weights that is not supported, and a disk
    without room.
    """
    require("gguf", f"{file.name}", "pip install gguf")
    header = _read_header(file)
    if header.weights * BYTES > shutil.disk_usage(folder).free:
        raise UserError(_too_small(folder.parents[1], header.weights * BYTES))
    with working(f"converting {file.name}"), reading(file):
        _convert(file, folder, header)
    files = sorted(path for path in folder.iterdir() if path.is_file())
    write_json(
        folder / RECORD,
        {
            **origin,
            "sha256": digest,
            "licence": header.licence,
            "packages": {package: package_version(package) for package in READERS},
            "bytes": {path.name: path.stat().st_size for path in files},
            "converted": {path.name: sha256(path) for path in files},
        },
    )


def _read_header(file: Path) -> Header:
    """Return what is needed of a file's header. Raises UserError for a file that cannot be read or unpacked."""
    from gguf import GGUFReader
    from gguf.quants import dequantize

    try:
        content = GGUFReader(file)
        values = {key: field.contents() for key, field in content.fields.items() if len(field.data) == 1}
    except Exception as error:  # the library raises whatever it meets
        raise UserError(f"{file} is no whole GGUF file ({why_unreadable(error)}): get it again") from error
    for tensor in {tensor.tensor_type: tensor for tensor in content.tensors}.values():
        try:
            dequantize(tensor.data[:1], tensor.tensor_type)
        except Exception as error:
            kind = f"{tensor.name} is quantised as {tensor.tensor_type.name}"
            way_out = "take a file with other weights, such as Q8_0 or F16"
            raise UserError(f"{file}: {kind}, which cannot be unpacked here: {way_out}") from error
    weights = sum(int(tensor.n_elements) for tensor in content.tensors)
    licence = str(values.get("general.license", "not stated"))
    return Header(content, weights, licence, values.get("tokenizer.ggml.pre"))


def _convert(file: Path, folder: Path, header: Header) -> None:
    """Write the checkpoint and the tokenizer of a GGUF file; whatever the libraries raise passes."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, modeling_gguf_pytorch_utils

    from rlhf.models.places import check_places, check_sources, whole_report

    places: set[str] = set()  # names of a GGUF file that the model has a weight for
    names_of = modeling_gguf_pytorch_utils.get_gguf_hf_weights_map

    def noted(*arguments: Any, **options: Any) -> dict[str, str]:
        found: dict[str, str] = names_of(*arguments, **options)
        places.update(found)
        return found

    named: dict[str, Any] = {"gguf_file": file.name}
    # Each step would parse the file again, which takes most of the time: a vocabulary has many entries.
    with quiet_libraries(), mock.patch("gguf.GGUFReader", lambda path: header.content):
        tokenizer = AutoTokenizer.from_pretrained(file.parent, **named)
        try:
            _split_as_trained(tokenizer, header.pre_tokenizer)
        except UserError as error:
            raise UserError(f"{file}: {error}") from None
        unpacked = GgufConfig(dequantize=True)
        with mock.patch.object(modeling_gguf_pytorch_utils, names_of.__name__, noted), whole_report():
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                file.parent, **named, quantization_config=unpacked, dtype=torch.float32, output_loading_info=True
            )
    model, report = loaded
    check_sources(report, str(file))
    check_places({"unexpected_keys": _without_place(header.content, places)}, str(file))
    # Its weights are plain numbers now: as a quantised model it could not be saved, nor loaded as one of full weights.
    for key in ("quantization_config", "_pre_quantization_dtype"):
        model.config.__dict__.pop(key, None)
    model.hf_quantizer, model.is_quantized = None, False
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _without_place(content: Any, places: Collection[str]) -> list[str]:
    """Return the names of a file's tensors that the model has no weight for.

    Factors of rotary frequencies count unless they are all 1: transformers reads no rope's scaling from these files.
    """
    return [
        tensor.name
        for tensor in content.tensors
        if not {tensor.name, tensor.name.removesuffix(".weight")} & {*places}
        and not (tensor.name == "rope_freqs.weight" and (tensor.data == 1).all())
    ]


def _split_as_trained(tokenizer: Any, pre_tokenizer: str | None) -> None:
    """Split texts as the vocabulary's merges were learned, where transformers does not know the name in the file.

    It then splits a byte-level vocabulary as GPT-2 does. Others meet merges that no text led to in training: numbers
    above all become other tokens. Raises UserError for a name that nothing here knows.
    """
    from tokenizers import pre_tokenizers

    if pre_tokenizer in DIGITS_ALONE:
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    elif pre_tokenizer not in AS_GPT2 and isinstance(
        tokenizer.backend_tokenizer.pre_tokenizer, pre_tokenizers.ByteLevel
    ):
        raise UserError(
            f"its tokenizer splits texts by the rule {pre_tokenizer!r:.40}, which is unknown here, and the model would "
            "read other tokens than in training: take the model's folder or its name on the hub instead of a GGUF file"
        )


def _too_small(folder: Path, needed: float | None = None) -> str:
    """Return the message for a disk without room."""
    amount = f"{needed / GB:.1f} GB of weights" if needed else "the weights"
    free = shutil.disk_usage(folder).free / GB
    return (
        f"{folder} has {free:.1f} GB free, too little for {amount}: make room, or set XDG_CACHE_HOME to a larger disk"
    )
