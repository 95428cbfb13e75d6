"""docs/own-model.md: models that model.architecture cannot describe, and the adapter in plain Python."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import yaml
from transformers import PreTrainedTokenizerFast

from rlhf import recipe
from rlhf.data import tokenize
from rlhf.data.rows import Message
from rlhf.errors import UserError
from rlhf.files import read_lines
from rlhf.models.loading import load_base, load_codec
from rlhf.run.directory import Run
from tests.conftest import RECIPE, SMALL, beside, run_stages, small

PAGE = (Path(__file__).parents[2] / "docs" / "own-model.md").read_text(encoding="utf-8")
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 512,
}
KINDS = {
    "Qwen3": {"head_dim": 16},
    "Gemma3Text": {"head_dim": 16, "sliding_window": 256},
    "Phi3": {"pad_token_id": 0},
}


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.S)


def checkpoint(folder: Path, kind: str) -> str:
    """A model with random weights and a tokenizer without unknown token whose padding token is EOS."""
    raw = tokenize.train(["Which word is the opposite of full? A lemon is a kind of fruit."] * 20, 400)._tokenizer
    assert raw is not None
    raw.add_special_tokens(["<|im_start|>", "<|im_end|>", "<|fim_pad|>"])
    special = {"eos_token": "<|im_end|>", "pad_token": "<|im_end|>", "additional_special_tokens": ["<|fim_pad|>"]}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, chat_template=TEMPLATE, **special)
    tokenizer.save_pretrained(folder)
    sizes = SIZES | KINDS[kind] | {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id}
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**sizes)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return str(folder)


def of(folder: str, trained: Path, **changes):
    """The small recipe for a checkpoint: its architecture left out, its own chat template."""
    options = {
        "pretrain": None,
        "model__architecture": None,
        "model__source": "local",
        "model__name": folder,
        "tokenizer": {"source": "local", "name": folder, "template": "chat", "pad_token": "<|fim_pad|>"},
        "lora__target_modules": "all-linear",
        "data__source": "files",
        "data__files": [str(next((trained / "cpu-tiny/v1/data").rglob("pairs.jsonl")))],
        "ppo__steps": 2,
        "sft__max_steps": 4,
        "rm__max_steps": 4,
    }
    gone = ("tokenizer.", "model.architecture.", "pretrain.")
    kept = {key: value for key, value in SMALL.items() if not key.startswith(gone)}
    return recipe.load(RECIPE, kept | {key.replace("__", "."): value for key, value in (options | changes).items()})


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_that_the_architecture_cannot_describe_runs_without_it(trained, tmp_path, kind):
    loaded = of(checkpoint(tmp_path / "model", kind), trained)
    run_stages(loaded, tmp_path / "runs", "sft", "rm", "ppo")
    rows = read_lines(tmp_path / "runs/cpu-tiny/v1/ppo/metrics.jsonl")
    assert max(row["rollout/logprob_diff_max"] for row in rows) < 1e-4, "it is trained on what it sampled"
    codec = load_codec(Run(tmp_path / "runs", loaded, "ppo"))
    assert codec.tokenizer.pad_token == "<|fim_pad|>" and codec.pad_id != codec.eos_id


def test_what_is_in_the_way_is_said(trained, tmp_path):
    folder = checkpoint(tmp_path / "model", "Qwen3")
    tokenizer = {"source": "local", "name": folder, "template": "chat"}
    with pytest.raises(UserError, match=r"set tokenizer\.pad_token .*such as .*<\|fim_pad\|>"):
        run_stages(of(folder, trained, tokenizer=tokenizer), tmp_path / "runs", "sft")
    architecture = recipe.load(RECIPE).recipe.model.architecture
    assert architecture
    described = of(folder, trained, model__architecture=architecture.model_dump())
    with pytest.raises(UserError, match=r"is a qwen3 model: .*model\.architecture=null.*docs/own-model\.md"):
        load_base(Run(tmp_path / "other", described, "sft"), torch.device("cpu"))


def test_the_changes_on_the_page_make_a_valid_recipe(tmp_path):
    (changes,) = blocks("yaml")
    content = yaml.safe_load((recipe.default_root() / "4090-llama2-7b" / "v2" / "recipe.yaml").read_text())
    folder = tmp_path / "4090-qwen3-8b" / "v1"
    folder.mkdir(parents=True)
    (folder / "recipe.yaml").write_text(yaml.safe_dump(content | yaml.safe_load(changes)))
    loaded = recipe.load(folder).recipe
    assert loaded.model.architecture is None and loaded.tokenizer.pad_token == "<|fim_pad|>"


def test_the_snippets_on_the_page_give_the_models_own_answer(trained, tmp_path, monkeypatch, capsys):
    out = beside(trained, tmp_path / "runs", "pretrain", "sft", "rm")
    run_stages(small(ppo__steps=2), out, "ppo")
    monkeypatch.chdir(tmp_path)
    hh, chat = blocks("python")
    names: dict[str, Any] = {}
    exec(hh.replace("cpu-tiny/v2", "cpu-tiny/v1"), names)  # of the version that the tests train
    assert capsys.readouterr().out == names["text"] + "\n"
    codec = load_codec(Run(out, small(), "ppo"))
    said = (Message("user", "What kind of thing is a lemon?"),)
    assert names["ids"][0].tolist() == codec.encode_prompts([said], 512)[0][0]
    assert names["ids"][0].tolist().count(codec.tokenizer.bos_token_id) == 1

    model = checkpoint(tmp_path / "model", "Qwen3")
    codec = tokenize.load(model, None, "chat", "<|fim_pad|>")
    for bos, written in ((None, TEMPLATE), ("<bos>", TEMPLATE), ("<bos>", "{{ bos_token }}" + TEMPLATE)):
        codec.tokenizer.bos_token, codec.tokenizer.chat_template = bos, written
        names = {"tokenizer": codec.tokenizer}
        exec(chat, names)
        assert names["ids"] == codec.encode_prompts([said], 512)[0][0]
        assert names["ids"].count(codec.tokenizer.convert_tokens_to_ids("<bos>")) == (bos is not None)
