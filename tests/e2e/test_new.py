"""`rlhf new`: recipes for local checkpoints, with one's own rows; they fit, and they train."""

import json
from pathlib import Path
from typing import Any

import pytest

from rlhf import recipe
from rlhf.errors import UserError
from rlhf.new import make as new
from rlhf.new.learning_rates import adapter_rate
from rlhf.new.options import NewOptions, card_of
from rlhf.plan import machine
from rlhf.recipe.schema_model import Architecture
from tests import models
from tests.e2e.predictor import Predictor
from tests.helpers import one_line_of, run_stages

PAIRS = [{"prompt": f"Say {n}.", "chosen": f"It is {n}.", "rejected": "No."} for n in range(60)]
LABELLED = [{"prompt": f"Say {n}.", "completion": f"It is {n}.", "label": n % 3 > 0} for n in range(60)]
ANSWERED = [{"prompt": f"What is {n} + 1?", "answer": n + 1, "level": "easy"} for n in range(60)]
CHATS = [
    {"messages": [{"role": role, "content": f"{role} {n}"} for role in ("user", "assistant") * 2]} for n in range(60)
]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> Path:
    folder: Path = tmp_path_factory.mktemp("checkpoints")
    for kind in ("llama", "qwen3"):
        models.checkpoint(folder / f"Tiny_{kind}", kind)
    return folder


@pytest.fixture
def make(checkpoints, tmp_path, monkeypatch):
    """Make a recipe for a tiny checkpoint; `rows` become its file."""
    monkeypatch.setattr(machine, "SECONDS", 0.01)
    monkeypatch.setattr(machine, "threads", lambda: 1)

    def made(
        rows: Any = None, card: str = "cpu", model: str = "Tiny_qwen3", predict: Any = None, **options: Any
    ) -> new.NewRecipe:
        if rows is not None:
            (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
            options["data"] = (str(tmp_path / "rows.jsonl"),)
        predictor: Any = predict or Predictor(row=1_000_000)
        folder = str(checkpoints / model)
        return new.make(tmp_path / "recipes", NewOptions(folder, card_of(card), **options), predictor, lambda _: None)

    return made


@pytest.mark.parametrize(
    ("rows", "stages", "more", "trained"),
    [
        (CHATS, ("sft",), {}, ["sft"]),
        (PAIRS, ("dpo",), {}, ["sft", "dpo"]),
        (PAIRS, ("dpo",), {"start": "base"}, ["dpo"]),
        (LABELLED, ("kto",), {}, ["sft", "kto"]),
        (PAIRS, ("ppo", "dpo"), {}, ["sft", "rm", "ppo", "dpo"]),
        (ANSWERED, ("grpo",), {"rewards": ("exact_answer",)}, ["grpo"]),
    ],
)
def test_a_recipe_has_the_stages_that_are_asked_for_and_those_before_them(
    make, checkpoints, rows, stages, more, trained
):
    made = make(rows, stages=stages, **more)
    written, folder = made.loaded.recipe, str(checkpoints / "Tiny_qwen3")
    assert [stage for stage in written.sections() if stage not in ("evaluate", "merge")] == trained
    assert (written.model.source, written.model.name, written.model.dtype) == ("local", folder, "float32")
    assert written.model.architecture == Architecture.model_validate(models.described(folder))
    assert written.data.files == (str(Path(written.data.files[0])),) and written.data.second_rm_fraction is None
    for stage in trained:
        assert written.section(stage).learning_rate == adapter_rate(stage, 32, chat=True)
    assert (written.hardware.device, written.hardware.threads, written.hardware.trunk) == ("cpu", 1, "lean")
    assert written.longest() < 200, "as long as the rows"


def test_the_recipe_trains(make, tmp_path):
    made = make(PAIRS, stages=("ppo",), max_length=64)
    changes: dict[str, Any] = {"ppo.steps": 1, "ppo.max_eval_samples": 4, "ppo.response_length": 8}
    changes |= {"ppo.save_steps": 1, "ppo.eval_steps": 1}
    for stage in ("sft", "rm"):
        changes |= {f"{stage}.max_steps": 2, f"{stage}.max_eval_samples": 8}
    summary = run_stages(recipe.load(made.folder, changes), tmp_path / "runs", "sft", "rm", "ppo")
    assert summary["stage"] == "ppo"


def test_a_card_gets_the_fastest_settings_that_fit(make):
    """The stand-in needs 1 GB a row, four times as many without checkpointing."""
    made = make(PAIRS, card="24GB", predict=Predictor(row=1_000_000_000), stages=("dpo",))
    written = made.loaded.recipe
    assert (written.hardware.device, written.hardware.memory_gb, written.model.dtype) == ("cuda", 24.0, "bfloat16")
    for stage in ("sft", "dpo"):
        section: Any = written.section(stage)
        rows = section.per_device_train_batch_size
        assert rows * section.gradient_accumulation_steps == 16 and not made.fit.too_large
        assert rows * (1 if section.gradient_checkpointing else 4) <= 22
    with pytest.raises(UserError) as caught:
        make(PAIRS, card="6GB", predict=Predictor(row=9_000_000_000), stages=("sft",), name="other")
    assert "sft" in one_line_of(caught) and "GB" in str(caught.value)


def test_what_says_how_rows_are_read_is_in_the_recipe(make):
    rows = [{"ask": row["prompt"], "good": row["chosen"], "bad": row["rejected"]} for row in PAIRS]
    changes = {
        f"data.columns.{name}": old for name, old in (("prompt", "ask"), ("chosen", "good"), ("rejected", "bad"))
    }
    made = make(rows, stages=("dpo",), changes=changes)
    assert made.loaded.recipe.data.columns == {"prompt": "ask", "chosen": "good", "rejected": "bad"}
    assert made.loaded.recipe.data.heldout_fraction == 0.2, "a tenth of few rows may be one"


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"rows": PAIRS, "stages": ("dpo",), "rewards": ("exact_answer",)}, "--reward"),
        ({"rows": PAIRS, "stages": ("grpo",), "rewards": ("exakt_answer",)}, "--reward"),
        ({"data": ("absent.jsonl",)}, "absent.jsonl"),
        ({"data": ("hh",), "task": "chain_sum"}, "--task"),
        ({"rows": ANSWERED, "stages": ("dpo",)}, "rows.jsonl"),
        ({"rows": PAIRS, "name": "../x"}, "--name"),
        ({"rows": PAIRS, "max_length": 4096}, "--max-length"),  # beyond the model's context
        ({"rows": PAIRS, "revision": "0" * 40}, "--revision"),
        ({"model": "absent"}, "--model"),
    ],
)
def test_what_cannot_be_is_refused_by_its_option(make, tmp_path, options, named):
    with pytest.raises(UserError) as caught:
        make(**options)
    assert named in one_line_of(caught) and not [*tmp_path.glob("recipes/*/v1")]


def test_a_recipe_is_never_written_over_another(make):
    made = make(PAIRS, stages=("sft",))
    before = (made.folder / "recipe.yaml").read_bytes()
    with pytest.raises(UserError, match="--name"):
        make(PAIRS, stages=("dpo",))
    assert (made.folder / "recipe.yaml").read_bytes() == before
