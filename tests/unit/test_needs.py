"""Data that cannot train a chain are refused before its first stage."""

import json

import pytest

from rlhf.data.load import check_rows, divide_rows
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
    """By the stages that would ask for them, and by no others."""
    recipe = recipe_of(ANSWERS, PAIRS)
    few = recipe.model_copy(
        update={"data": recipe.data.model_copy(update={"validation_fraction": 1e-9, "heldout_fraction": 0.3})}
    )
    corpus = divide_rows(read_source(few, tmp_path), few)
    with pytest.raises(UserError, match="no rows for validation"):
        _ = corpus.prompts("ppo").validation
    with pytest.raises(UserError) as caught:
        check_rows(few, [*CHAIN, "evaluate", "merge"])
    assert "data.validation_fraction" in one_line_of(caught)
    check_rows(few, ["pretrain", "evaluate", "merge"])
    check_rows(recipe, CHAIN)
