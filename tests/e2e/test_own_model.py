"""docs/own-model.md: what is in the way of another model, and the adapter in plain Python."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf import recipe
from rlhf.data.rows import Message
from rlhf.errors import UserError
from rlhf.models.loading import load_base, load_tokenizer
from rlhf.new import make as new
from rlhf.new.options import NewOptions
from rlhf.recipe.folders import root_for_new
from rlhf.run.directory import StageRun
from tests.helpers import RECIPE, beside, run_stages, small
from tests.models import TEMPLATE, checkpoint, recipe_for

PAGE = (Path(__file__).parents[2] / "docs" / "own-model.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.S)


def test_what_is_in_the_way_is_said(trained, tmp_path):
    folder = checkpoint(tmp_path / "model", "qwen3")
    tokenizer = {"source": "local", "name": folder, "template": "chat"}
    with pytest.raises(UserError, match=r"set tokenizer\.pad_token .*such as .*<\|fim_pad\|>"):
        run_stages(recipe_for(folder, trained, tokenizer=tokenizer), tmp_path / "runs", "sft")
    architecture = recipe.load(RECIPE).recipe.model.architecture
    assert architecture
    described = recipe_for(folder, trained, model__architecture=architecture.model_dump())
    with pytest.raises(UserError, match=r"is a qwen3 model: .*rlhf new.*model\.architecture=null.*docs/own-model\.md"):
        load_base(StageRun(tmp_path / "other", described, "sft").base, torch.device("cpu"))


def test_the_walk_on_the_page_names_the_folder_that_is_written():
    walk = PAGE.partition("```\n")[2].partition("```")[0]
    (line,) = [line.partition("  #")[0].split() for line in walk.splitlines() if line.startswith("rlhf new")]
    options = dict(zip(line[2::2], line[3::2], strict=True))
    folder = new.target_of(root_for_new(), NewOptions(options["--model"], new.card_of(options["--card"])))
    named = re.findall(r"[\w-]*recipes/[\w./-]+\w", walk)
    assert len(named) == 5 and {Path(name) for name in named} == {folder}


def test_the_snippets_on_the_page_give_the_models_own_answer(trained, tmp_path, monkeypatch, capsys):
    out = beside(trained, tmp_path / "runs", "pretrain", "sft", "rm")
    run_stages(small(ppo__steps=2), out, "ppo")
    monkeypatch.chdir(tmp_path)
    hh, chat = blocks("python")
    names: dict[str, Any] = {}
    exec(hh.replace("cpu-tiny/v2", "cpu-tiny/v1"), names)  # of the version that the tests train
    assert capsys.readouterr().out == names["text"] + "\n"
    tokenizer = load_tokenizer(StageRun(out, small(), "ppo").base)
    said = (Message("user", "What kind of thing is a lemon?"),)
    assert names["ids"][0].tolist() == tokenizer.encode_prompts([said], 512)[0][0]
    assert names["ids"][0].tolist().count(tokenizer.hf.bos_token_id) == 1

    tokenizer = load_tokenizer(StageRun(out, recipe_for(checkpoint(tmp_path / "model", "qwen3"), trained), "ppo").base)
    for bos, written in ((None, TEMPLATE), ("<bos>", TEMPLATE), ("<bos>", "{{ bos_token }}" + TEMPLATE)):
        tokenizer.hf.bos_token, tokenizer.hf.chat_template = bos, written
        names = {"tokenizer": tokenizer.hf}
        exec(chat, names)
        assert names["ids"] == tokenizer.encode_prompts([said], 512)[0][0]
        assert names["ids"].count(tokenizer.hf.convert_tokens_to_ids("<bos>")) == ("bos_token" in written)
