"""A base model's folder that is damaged, or means harm, is refused in one line before anything is built from it."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rlhf.errors import UserError
from rlhf.models.loading import load_base, load_merged, load_tokenizer
from rlhf.run.directory import StageRun
from tests.helpers import small
from tests.models import pretrained

CPU = torch.device("cpu")


@pytest.fixture
def folder(trained: Path, tmp_path: Path) -> Path:
    shutil.copytree(trained / "cpu-tiny/v1/pretrain/model", tmp_path / "model")
    return tmp_path / "model"


def change(file: Path, **keys: object) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | keys))


def config(**keys: object):
    return lambda folder: change(folder / "config.json", **keys)


class Harmful:
    def __reduce__(self):
        return (Path.touch, (Path("unpickled"),))


def as_pickle(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(weights | {"x": Harmful()}, folder / "pytorch_model.bin")


def with_nan(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][3, 5] = float("nan")
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def with_index(**keys: object):
    def write(folder: Path) -> None:
        names = list(load_file(folder / "model.safetensors"))
        (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
        index = {"weight_map": dict.fromkeys(names, "model-00001-of-00001.safetensors")} | keys
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))

    return write


def two_saves(folder: Path) -> None:
    with_index(weight_map={"x": "model-1.safetensors"}, metadata={})(folder)
    (folder / "model.safetensors").touch()


def new_eos(folder: Path) -> None:
    change(folder / "tokenizer_config.json", eos_token="<another end>")


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        pytest.param(as_pickle, "safetensors", id="pickle-bin"),
        pytest.param(config(vocab_size=10**12), "model", id="cfg-vocab"),
        pytest.param(config(hidden_size="x"), "hidden_size", id="cfg-hidden"),
        pytest.param(
            config(quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True}),
            "quantization_config: its weights are quantised already",
            id="cfg-quant",
        ),
        pytest.param(
            config(rope_parameters={"rope_type": "default", "rope_theta": 0}),
            "inv_freq holds NaN or infinity",
            id="cfg-theta",
        ),
        pytest.param(config(pad_token_id=10**6), "cannot load the base model", id="cfg-pad"),
        pytest.param(lambda f: (f / "config.json").write_text("[" * 10**5), "cannot load the tokenizer", id="cfg-deep"),
        pytest.param(new_eos, "has 401 entries, the base model's vocab_size is only 400", id="tok-eosnew"),
        pytest.param(
            with_index(metadata={}, weight_map={"x": "gone.safetensors"}), r"gone\.safetensors", id="index-gone"
        ),
        pytest.param(two_saves, r"model\.safetensors\.index\.json", id="two-saves"),
        pytest.param(with_nan, r"model\.layers\.1\.mlp\.up_proj\.weight holds NaN or infinity", id="nanw"),
    ],
)
def test_a_folder_that_cannot_be_used_is_one_line(folder, trained, tmp_path, monkeypatch, damage, said):
    monkeypatch.chdir(tmp_path)
    damage(folder)
    changes = {"model__name": str(folder), "tokenizer__name": str(folder)}
    run = StageRun(tmp_path, pretrained(trained, tmp_path, **changes), "sft")
    with pytest.raises(UserError, match=said) as caught:
        load_tokenizer(run.base)
        load_base(run.base, CPU)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 600
    assert not (tmp_path / "unpickled").exists()


def test_a_whole_index_is_read(folder, trained, tmp_path):
    with_index(metadata={"total_size": 1})(folder)
    run = StageRun(tmp_path, pretrained(trained, tmp_path, model__name=str(folder)), "sft")
    architecture = small().recipe.model.architecture
    assert architecture and load_base(run.base, CPU).config.hidden_size == architecture.hidden_size


def test_nan_in_weights_that_are_quantised_when_they_are_loaded(tmp_path, trained):
    pytest.importorskip("bitsandbytes", reason="bitsandbytes comes with the gpu extra")
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    model = LlamaForCausalLM(LlamaConfig(vocab_size=400, **sizes))
    options = {"model__name": str(tmp_path / "base"), "model__quantization": "nf4"}
    run = StageRun(tmp_path, pretrained(trained, tmp_path, **options), "sft")
    model.save_pretrained(tmp_path / "base")
    load_base(run.base, CPU)
    model.model.layers[0].mlp.up_proj.weight.data[3, 5] = float("nan")
    model.save_pretrained(tmp_path / "base")
    with pytest.raises(UserError, match=r"up_proj\.weight holds NaN or infinity"):
        load_base(run.base, CPU)


def test_a_merged_model_is_checked_like_a_base(folder):
    load_merged(folder, CPU)
    with_nan(folder)
    with pytest.raises(UserError, match="holds NaN or infinity"):
        load_merged(folder, CPU)
