"""The search of `rlhf plan --fit`: what is refused before it, and which settings it tries."""

from pathlib import Path

import pytest

from rlhf import recipe
from rlhf.errors import UserError
from rlhf.memory import fit
from rlhf.memory.phases import PredictedPhase, PredictedStage, Work
from rlhf.memory.predict import Predictor
from rlhf.memory.strategies import divisors
from rlhf.process.cuda import CONTEXT_BYTES
from tests.helpers import content_of, rlhf

RECIPES = Path(__file__).parents[2] / "recipes"
LLAMA = RECIPES / "4090-llama2-7b/v2"
PINNED = [file.parent for file in sorted(RECIPES.glob("*/*/predicted.json"))]


def test_less_memory_than_the_base_is_refused_before_the_search(monkeypatch, capsys):
    """The 7B model has 3.87 GB in 4 bits, 0.26 GB of them the output layer that a reward model does not have."""
    monkeypatch.setattr(Predictor, "predict", lambda *_: pytest.fail("nothing is rehearsed"))
    code, out, err = rlhf(monkeypatch, capsys, "plan", "--recipe", LLAMA, "--stage", "ppo", "--fit", "2GB")
    assert (code, out) == (1, "")
    assert err.startswith("error: ppo: the base alone needs 3.87 GB in 4 bits, more than 2 GB; allow more memory with")
    with pytest.raises(UserError, match=r"^ppo: the base alone"):
        fit.refuse_less_than_the_base(recipe.load(LLAMA), ("rm", "ppo"), 3_700_000_000)


def test_divisors_are_found_without_trying_each_number():
    assert [divisors(n) for n in (1, 2, 12, 16)] == [[1], [1, 2], [1, 2, 3, 4, 6, 12], [1, 2, 4, 8, 16]]
    assert divisors(2**40) == [2**power for power in range(41)]


@pytest.mark.parametrize("pinned", PINNED, ids=lambda folder: "-".join(folder.parts[-2:]))
def test_the_base_is_not_refused_where_a_prediction_has_room_for_it(pinned):
    """No stage may have less of the base than the search is refused for; what is left out is small."""
    keys, stages = recipe.load(pinned).recipe, content_of(pinned / "predicted.json")["stages"]
    for stage in stages.keys() - {"merge"}:
        most = max(phase.get("base", 0) + phase.get("quantization", 0) for phase in stages[stage].values())
        assert 0.85 * most < fit.base_bytes(keys, stage) <= most, stage


@pytest.mark.parametrize("largest_first", [False, True])
@pytest.mark.parametrize("misled", [0.01, 0.99])
@pytest.mark.parametrize("fitting", range(9))
def test_the_largest_that_fits_is_found_wherever_the_first_try_points_to(
    fitting: int, misled: float, largest_first: bool
):
    """Of eight candidates, the first `fitting` fit; the fractions that are found are no measure of how many."""
    tries: list[int] = []

    def fraction(candidate: fit.Candidate) -> float:
        tries.append(candidate.rows)
        return 1.0 / misled if candidate.rows <= fitting else misled

    candidates = [fit.Candidate({}, 1.0, rows) for rows in range(1, 9)]
    found = fit._largest_that_fits(candidates, fraction, largest_first)
    assert found == (candidates[fitting - 1] if fitting else None)
    assert len(tries) == len(set(tries)) <= 5


def test_rows_that_are_scored_together_are_searched_apart_from_the_micro_batch():
    """A row takes 10 bytes while it is sampled, evaluated or trained on, and 20 while it is scored."""

    def phase(size: int) -> PredictedPhase:
        return PredictedPhase(100 + size, {"base": 100, "activations": size}, 0, Work(), 100 + size, 100 + size)

    def predict(loaded, stage):
        options = loaded.recipe.ppo
        sampling, scoring = 10 * options.rollout_batch_size, 20 * options.score_rows
        sizes = {"rollout": sampling, "score": scoring, "evaluate": sampling}
        phases = {
            name: phase(size) for name, size in (sizes | {"update": 10 * options.per_device_train_batch_size}).items()
        }
        return PredictedStage(max(phases.values(), key=lambda phase: phase.peak_bytes), phases)

    loaded = recipe.load(LLAMA)
    assert loaded.recipe.ppo.score_batch_size == 20 == loaded.recipe.ppo.batch_size
    found = fit.fit(predict, loaded, ["ppo"], CONTEXT_BYTES + 100 + 210)
    assert not found.too_large
    assert found.changes == {
        "ppo.score_batch_size": 10,
        "ppo.gradient_checkpointing": False,
    }
