"""Rates of the recipes here beside the table from which `rlhf new` takes its own."""

from pathlib import Path

import pytest

from rlhf import recipe
from rlhf.new.learning_rates import adapter_rate
from rlhf.recipe.stages import TRAINING_STAGES

ROOT = Path(__file__).parents[2] / "recipes"
OURS = [directory for directory in recipe.available(ROOT) if not any(f.guide for f in recipe.load(directory).figures)]


@pytest.mark.parametrize("directory", OURS, ids=lambda directory: "-".join(directory.parts[-2:]))
def test_a_recipe_of_ours_differs_from_the_table_only_with_a_reason_on_its_page(directory):
    """A guide's version keeps the guide's rates; whoever rents a card for one of ours gets what the table says."""
    loaded = recipe.load(directory).recipe
    shape, chat = loaded.model.architecture, loaded.tokenizer.template == "chat"
    stages = [stage for stage in TRAINING_STAGES if shape and loaded.section(stage) is not None]
    usual = {stage: adapter_rate(stage, shape.hidden_size, chat) for stage in stages if shape}
    rates = {stage: loaded.training_section(stage).learning_rate for stage in stages}
    others = {stage: rate for stage, rate in rates.items() if rate != usual[stage]}
    page = (directory / "README.md").read_text(encoding="utf-8")
    reason = next((part for part in page.split("\n\n") if part.startswith("**Learning rates**")), "")
    for stage, rate in others.items():
        assert f"{rate:.1e}".replace(".0e", "e").replace("e-0", "e-") in reason, (stage, rate)
    assert loaded.hardware.device == "cpu" or not others


def test_what_follows_the_table_says_that_no_card_has_trained_with_it():
    on_cards = [directory for directory in OURS if recipe.load(directory).recipe.hardware.device == "cuda"]
    assert on_cards
    for directory in on_cards:
        assert "**extrapolated from widths 64 and 576**" in (directory / "README.md").read_text(encoding="utf-8")
