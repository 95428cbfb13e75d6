"""Data that cannot train a chain are refused before its first stage."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from rlhf.data.corpus import Split
from rlhf.data.load import divide_rows
from rlhf.data.needs import check_rows, needs
from rlhf.data.source import read_source
from rlhf.errors import UserError
from rlhf.recipe import StageName
from tests.helpers import RECIPE, one_line_of, rlhf, small

ANSWERS = [{"prompt": f"Question {i}?", "completion": f"Answer {i}"} for i in range(60)]
PAIRS = [{"prompt": f"Question {i} b?", "chosen": f"Good {i}", "rejected": f"bad {i}"} for i in range(60)]
PROMPTS = [{"prompt": f"Question {i} c?"} for i in range(60)]
CHAIN: list[StageName] = ["pretrain", "sft", "rm", "ppo"]


@pytest.fixture
def recipe_of(tmp_path):
    """The recipe with files of these rows, one file for each list of rows."""

    def make(*kinds):
        files = []
        for number, rows in enumerate(kinds):
            file = tmp_path / f"{number}.jsonl"
            file.write_text("".join(json.dumps(row) + "\n" for row in rows))
            files.append(str(file))
        return small(data__source="files", data__files=files, data__format="auto").recipe

    return make


@pytest.mark.parametrize(
    "kinds",
    [
        (ANSWERS,),
        (PAIRS,),
        (PROMPTS,),
        (ANSWERS, PAIRS),
        (PROMPTS, PAIRS),
        (ANSWERS[:1],),
        (PAIRS[:1],),
        (ANSWERS, PAIRS[:1]),
    ],
)
def test_a_stage_needs_what_it_would_refuse_to_do_without(recipe_of, tmp_path, kinds):
    recipe = recipe_of(*kinds)
    corpus = divide_rows(read_source(recipe, tmp_path), recipe)
    splits: dict[StageName, Callable[[], Split[Any]]] = {
        "pretrain": lambda: corpus.texts("hh"),
        "sft": corpus.demonstrations,
        "rm": lambda: corpus.preferences("rm"),
        "dpo": lambda: corpus.preferences("dpo"),
        "ppo": lambda: corpus.prompts("ppo"),
    }
    for need in needs(corpus, ["pretrain", "sft", "rm", "dpo", "ppo"]):
        if need.met:
            split = splits[need.stage]()
            assert (need.train, need.heldout) == (len(split.train), len(split.test))
        else:
            with pytest.raises(UserError, match=f"^{need.stage} needs"):
                splits[need.stage]()


def test_rows_for_the_stages_that_are_left_suffice(recipe_of):
    check_rows(recipe_of(ANSWERS, PAIRS), CHAIN)
    check_rows(recipe_of(ANSWERS), ["pretrain", "sft"])
    check_rows(small().recipe, CHAIN)


def test_a_chain_without_pairs_starts_nothing(recipe_of, monkeypatch, capsys, tmp_path):
    file = recipe_of(ANSWERS).data.files[0]
    out = tmp_path / "runs"
    code, _, err = rlhf(
        monkeypatch, capsys, "run", "ppo", "--with-parents", "--recipe", RECIPE, "--data", file, "--out", out
    )
    assert code == 1 and f"{file}: rm needs preference pairs" in err and not out.exists()


def test_a_chain_without_rows_to_choose_checkpoints_by_is_refused(recipe_of, tmp_path):
    """The stages that would ask for them are those that are named."""
    recipe = recipe_of(ANSWERS, PAIRS)
    few = recipe.model_copy(
        update={"data": recipe.data.model_copy(update={"validation_fraction": 1e-9, "heldout_fraction": 0.3})}
    )
    corpus = divide_rows(read_source(few, tmp_path), few)
    with pytest.raises(UserError, match="no rows for validation"):
        _ = corpus.prompts("ppo").validation
    with pytest.raises(UserError) as caught:
        check_rows(few, [*CHAIN, "evaluate", "merge"])
    message = one_line_of(caught)
    for stage, kind in (("sft", corpus.examples), ("rm", corpus.pairs)):
        named = f"{stage} needs rows for validation, and there are none: all {len(kind.test)} held out are test rows"
        assert named in message
    assert "pretrain needs" not in message and "evaluate needs" not in message and "merge needs" not in message
    assert "change data.validation_fraction" in message and "data.heldout_fraction" not in message
    check_rows(recipe, CHAIN)
