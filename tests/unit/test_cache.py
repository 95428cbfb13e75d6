"""What the answer of a rehearsal is kept under: all that it depends on, and nothing else."""

from importlib.metadata import version

import pytest

from rlhf import recipe
from rlhf.plan.cache import file_of
from tests.helpers import RECIPE


@pytest.mark.parametrize(
    "package",
    [
        *("torch", "transformers", "trl", "peft"),
        "bitsandbytes",
    ],
)
def test_another_version_of_a_package_is_predicted_anew(monkeypatch, package):
    before = file_of(recipe.load(RECIPE), "sft")
    assert file_of(recipe.load(RECIPE), "sft") == before
    monkeypatch.setattr("rlhf.packages.package_version", lambda name: "0" if name == package else version(name))
    assert file_of(recipe.load(RECIPE), "sft") != before


def test_seed_and_size_of_the_card_are_no_new_prediction():
    file = file_of(recipe.load(RECIPE), "sft")
    assert file_of(recipe.load(RECIPE, {"hardware.memory_gb": 9.0}, seed=5), "sft") == file
    assert file_of(recipe.load(RECIPE, {"hardware.device": "cuda"}), "sft") != file
