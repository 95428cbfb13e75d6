"""Projected hours of a recipe's own files: their rows are counted as a run counts them, their lengths in tokens."""

import json

import pytest

from rlhf import recipe
from rlhf.data import tokenize
from rlhf.plan import own_rows, plan, projection
from rlhf.plan.own_rows import OwnRows, Rows, read_rows
from rlhf.recipe import PinnedRecipe, StageName
from tests.helpers import RECIPE
from tests.unit.plans import SFT, Known

PAIRS = [
    {"prompt": f"What is {i} and one?", "chosen": "It is one more" + " indeed" * (i % 5), "rejected": "no"}
    for i in range(200)
]
TRAINING: list[StageName] = ["sft", "rm", "ppo", "dpo", "kto"]


@pytest.fixture
def of_rows(tmp_path):
    """The recipe of a 4090 on a file of these rows, with further changes."""

    def make(rows, **changes) -> PinnedRecipe:
        file = tmp_path / "rows.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        own: recipe.Changes = {"data.source": "files", "data.files": [str(file)], "hardware.name": "4090"}
        own |= {f"{stage}.max_samples": None for stage in ("sft", "rm", "dpo")}
        return recipe.load(RECIPE, own | {key.replace("__", "."): value for key, value in changes.items()})

    return make


def read(loaded: PinnedRecipe) -> OwnRows:
    own = read_rows(loaded.recipe, TRAINING)
    assert own
    return own


def test_rows_are_counted_by_stage_and_measured_in_words_without_a_tokenizer(of_rows):
    own = read(of_rows(PAIRS))
    sft, rm, ppo = (own.stages[stage] for stage in ("sft", "rm", "ppo"))
    assert sft.train == rm.train == ppo.train and sft.train + sft.heldout == 200 and own.unit == "words"
    words = {(prompt, chosen, rejected) for prompt, chosen, rejected in rm.lengths}
    assert {chosen for _, chosen, _ in words} == {4, 5, 6, 7, 8} and {rejected for _, _, rejected in words} == {1}
    assert {chosen == other for _, chosen, other in sft.lengths} == {True}, "SFT imitates one answer"
    assert {answers for _, *answers in map(tuple, ppo.lengths) if answers != [0, 0]} == set(), "answers are sampled"


def test_lengths_are_those_of_the_tokenizer_that_is_here(of_rows, tmp_path):
    """One token for each word that the stand-in knows, BOS, and the two marks of a turn."""
    tokenize.words(100).save_pretrained(tmp_path / "tokenizer")
    changes: recipe.Changes = {"tokenizer.source": "local", "tokenizer.name": str(tmp_path / "tokenizer")}
    changes |= {"tokenizer.vocab_size": None, "pretrain": None, "model.source": "local", "model.name": "/nowhere"}
    loaded = of_rows([{"prompt": f"{i} 2 3", "completion": "4 5"} for i in range(50)])
    loaded = recipe.load(RECIPE, loaded.overrides | changes)
    own = read(loaded)
    assert own.unit == "tokens" and set(own.stages["sft"].lengths) == {(6, 2, 2)}


def test_steps_are_those_of_the_rows_up_to_the_recipes_own_number():
    options: dict[str, int | None] = {"max_samples": 80, "num_train_epochs": 1, "max_steps": None}
    options |= {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}

    def steps(rows: int | None, **changes) -> int | None:
        loaded = recipe.load(RECIPE, {f"sft.{key}": value for key, value in (options | changes).items()})
        own = None if rows is None else Rows(rows, 9, [(1, 1, 1)])
        return projection.optimizer_steps(loaded.recipe, "sft", own)

    assert (steps(None), steps(40), steps(41), steps(4000)) == (10, 5, 6, 10)
    assert steps(40, max_samples=None) == 5 and steps(None, max_samples=None) is None
    assert steps(40, num_train_epochs=2) == 10 and steps(40, max_steps=3) == 3
    assert Rows(9, 3, []).of_rank(2)[:2] == (5, 2)


def test_hours_grow_with_the_rows_and_with_their_lengths_and_peaks_do_not(of_rows):
    def sft(rows, **changes) -> plan.PlannedStage:
        return plan.make_plan(Known(SFT), of_rows(rows, **changes), ("sft",)).stages["sft"]

    def hours(stage: plan.PlannedStage) -> float:
        assert stage.time
        return stage.time.projected_hours

    few, many = sft(PAIRS[:100]), sft(PAIRS)
    longer = sft([row | {"chosen": f"{row['chosen']} {'word ' * 20}"} for row in PAIRS])
    assert hours(few) < hours(many) < hours(longer)
    assert few.peak_bytes == many.peak_bytes == longer.peak_bytes


def test_a_sample_of_the_rows_is_measured_and_all_are_counted(of_rows, monkeypatch):
    monkeypatch.setattr(own_rows, "SAMPLE", 10)
    rows = read(of_rows(PAIRS)).stages["rm"]
    assert len(rows.lengths) == 10 and rows.train > 100
