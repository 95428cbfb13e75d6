"""The search of `rlhf plan --fit`: what is refused before it, and which settings it tries."""

import re
from collections import Counter
from math import inf
from pathlib import Path

import pytest

from rlhf import recipe
from rlhf.errors import UserError
from rlhf.plan import fit, strategies
from rlhf.plan.phases import PredictedPhase, PredictedStage, Work
from rlhf.plan.predict import Predictor, card_needed_bytes
from rlhf.plan.strategies import divisors
from rlhf.process.cuda import CONTEXT_BYTES
from rlhf.recipe import PinnedRecipe
from rlhf.recipe.schema_online import Ppo
from rlhf.recipe.stages import TRAINING_STAGES, stage_name
from tests.helpers import RECIPE, content_of, rlhf
from tests.unit.plans import SFT, Known, global_batch, phase

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
    """A row takes 10 bytes while it is sampled, evaluated or trained on, and 20 while it is scored.

    The 4-bit base takes 200 more where an update unpacks it, which is done with what everything else has left.
    """

    def phase(size: int) -> PredictedPhase:
        return PredictedPhase(100 + size, {"base": 100, "activations": size}, 0, Work(), 100 + size, 100 + size)

    def predict(loaded, stage):
        options = loaded.recipe.options(Ppo)
        sampling, scoring = 10 * options.rollout_batch_size, 20 * options.score_rows
        sizes = {"rollout": sampling, "score": scoring, "evaluate": sampling}
        sizes["update"] = 10 * options.per_device_train_batch_size
        phases = {name: phase(size) for name, size in sizes.items()}
        return PredictedStage(max(phases.values(), key=lambda phase: phase.peak_bytes), phases)

    loaded = recipe.load(LLAMA)
    ppo = loaded.recipe.options(Ppo)
    assert ppo.score_batch_size == 20 == ppo.batch_size
    found = fit.fit(predict, loaded, ["ppo"], CONTEXT_BYTES + 100 + 210)
    assert not found.too_large
    assert found.changes == {
        "ppo.score_batch_size": 10,
        "ppo.gradient_checkpointing": False,
    }


def formula(loaded: PinnedRecipe, stage: str) -> PredictedStage:
    """A stage's memory as a sum that can be worked out by hand."""
    recipe = loaded.recipe
    base = {"none": 1000, "nf4": 400}[recipe.model.quantization]
    sampling = base + 10 * recipe.evaluate.batch_size * (3 if stage == "dpo" else 1)
    phases = {"load": phase(0, base=base), "evaluate": phase(0, base=sampling)}
    if stage in TRAINING_STAGES:
        options = getattr(recipe, stage)
        row = 20 if options.gradient_checkpointing else 100
        optimizer = 0 if options.optim == "paged_adamw_8bit" else 50
        phases["train"] = phase(0, base=base + optimizer + row * options.per_device_train_batch_size)
    return PredictedStage(max(phases.values(), key=lambda p: p.peak_bytes), phases)


def test_a_chain_gets_one_set_of_settings_with_which_every_stage_fits():
    """By hand: SFT alone could decode 24 together, DPO only 8; so all do. Global batches stay 8, 8 and 8."""
    lengths = {"max_length": 64, "max_prompt_length": 40, "per_device_train_batch_size": 4}
    batches = {f"{stage}.{key}": value for stage in ("sft", "rm", "dpo") for key, value in lengths.items()}
    batches |= {f"{stage}.gradient_accumulation_steps": 2 for stage in ("sft", "rm", "dpo")}
    loaded = recipe.load(RECIPE, batches | {"evaluate.batch_size": 24})
    together = fit.fit(formula, loaded, ("sft", "rm", "dpo", "evaluate"), 1250)
    # 1000 + 10 * 3 * 8 = 1240 and 1000 + 50 + 100 * 2 = 1250, or 1000 + 50 + 20 * 8 = 1210.
    assert not together.too_large
    changed = recipe.load(RECIPE, batches | {"evaluate.batch_size": 24} | together.changes)
    assert changed.recipe.evaluate.batch_size == 8
    for stage in ("sft", "rm", "dpo"):
        assert global_batch(changed, stage) == 8
        options = getattr(changed.recipe, stage)
        way = (options.gradient_checkpointing, options.per_device_train_batch_size)
        assert way == min([(False, 2), (True, 8)], key=lambda w: fit._row_seconds(loaded.recipe, stage, *w))
    alone = fit.fit(formula, loaded, ("sft", "evaluate"), 1250)
    assert "evaluate.batch_size" not in alone.changes
    assert together.stages["dpo"].whole.peak_bytes == formula(changed, "dpo").whole.peak_bytes <= 1250


def test_progress_names_each_candidate_of_the_search_and_each_strategy():
    loaded = recipe.load(RECIPE)
    lines: list[str] = []
    fit.fit(formula, loaded, ("sft", "evaluate"), 1250, lines.append)
    tried = {re.sub(r"\d+", "N", line) for line in lines}
    settings = "per_device_train_batch_size N, gradient_accumulation_steps N, evaluate.batch_size N"
    assert tried >= {
        f"looking for settings that fit: sft with gradient_checkpointing true, {settings}",
        f"looking for settings that fit: sft with gradient_checkpointing false, {settings}",
        "looking for settings that fit: evaluate with batch_size N",
    }
    lines.clear()
    fit.fit(formula, loaded, ("sft", "rm", "evaluate"), 999, lines.append)
    assert len(set(lines)) == len(lines) and any("a base in 4 bits, sft with" in line for line in lines)
    lines.clear()
    effects = strategies.costs_alone(Known(SFT).predict, loaded, "sft", lines.append)
    assert lines == [f"rehearsing sft with strategies: {name}" for name in effects]


def test_a_smaller_base_is_the_last_resort_of_all_stages_alike():
    loaded = recipe.load(RECIPE)
    fitting = fit.fit(formula, loaded, ("sft", "rm", "dpo"), 999)
    assert not fitting.too_large
    assert fitting.changes["model.quantization"] == "nf4"
    assert {key for key in fitting.changes if key.endswith("optim")} == {"sft.optim", "rm.optim", "dpo.optim"}
    assert "model.quantization" not in fit.fit(formula, loaded, ("sft", "rm", "dpo"), 1500).changes
    assert set(fit.fit(formula, loaded, ("sft", "rm", "dpo"), 415).too_large) == {"sft", "rm", "dpo"}
    assert set(fit.fit(formula, loaded, ("sft", "rm", "dpo"), 425).too_large) == {"dpo"}, "3 x 10 for a prompt"


@pytest.mark.parametrize(
    ("blur", "most"), [(lambda fraction: fraction, 5), (lambda fraction: inf if fraction >= 1 else 0.0, 8)]
)
@pytest.mark.parametrize("ratio", [0.01, 0.3, 1.0, 3.0, 30.0])
def test_the_search_finds_what_trying_everything_finds_with_fewer_predictions(ratio, blur, most):
    """Needs of 100 a row, or 20 with checkpointing, above 1000; `ratio`: reading the weights over computing a row.

    Fractions are estimates: where they point nowhere (`blur`), the search takes more predictions and finds the same.
    """
    sizes = (1, 2, 4, 8, 16)
    ways = [[fit.Candidate({"sft.n": n, "c": c}, (2 + c) * (1 + ratio / n), n) for n in sizes] for c in (False, True)]
    group = fit.SettingGroup((("sft", "train"),), ways, {})
    for limit in range(900, 2800, 10):
        tried: list[fit.Candidate] = []

        def fraction(candidate: fit.Candidate, limit: int = limit, tried: list[fit.Candidate] = tried) -> float:
            tried.append(candidate)
            growing = (20 if candidate.changes["c"] else 100) * candidate.rows
            estimate: float = blur(max(0.0, (limit - 1000) / growing))
            return estimate

        fastest = fit._fastest(group, fraction)
        count = len({id(candidate) for candidate in tried})
        fitting = [candidate for way in ways for candidate in way if fraction(candidate) >= 1]
        assert fastest == min(fitting, key=lambda candidate: candidate.seconds, default=ways[-1][0])
        assert count <= most
        if fitting and fastest == ways[1][-1]:
            assert count <= 4, "the largest candidate is tried first"


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("stage", ["sft", "rm", "dpo"])
def test_the_search_finds_what_trying_all_micro_batches_of_a_recipe_finds(stage, grouped):
    """Where rows of any length share a micro-batch, padding makes large ones slow: the fastest is not the largest."""
    directory = RECIPE.parents[1] / "4090-llama2-7b" / "v1"
    loaded = recipe.load(directory, {f"{stage}.group_by_length": grouped})
    ways = [(checkpointing, n) for checkpointing in (False, True) for n in (1, 2, 4, 8, 16)]
    seconds = {way: fit._row_seconds(loaded.recipe, stage, *way) for way in ways}
    assert grouped == (min(seconds, key=seconds.__getitem__) == (False, 16))
    group = fit._training_group(loaded, stage)
    for limit in (19, 20, 40, 79, 80, 100, 150, 200, 320, 400, 800, 1600):  # of 100 a row, or 20 with checkpointing

        def need(checkpointing: bool, n: int) -> int:
            return (20 if checkpointing else 100) * n

        def fraction(candidate: fit.Candidate, limit: int = limit) -> float:
            return limit / need(bool(candidate.changes[f"{stage}.gradient_checkpointing"]), candidate.rows)

        fastest = fit._fastest(group, fraction)
        fitting = [way for way in ways if need(*way) <= limit] or [(True, 1)]
        found = (fastest.changes[f"{stage}.gradient_checkpointing"], fastest.rows)
        assert found == min(fitting, key=seconds.__getitem__), limit


def test_the_fraction_of_its_rows_with_which_a_phase_fits_by_hand():
    """400 bytes that stay and 600 that grow with the rows, beside the driver's context."""
    grown = phase(0, base=400, activations=500, logits=100)
    held = card_needed_bytes(grown) - 1000
    assert fit._fraction_of_rows(grown, held + 1000) == 1
    assert fit._fraction_of_rows(grown, held + 700) == 0.5
    assert fit._fraction_of_rows(grown, held + 1600) == 2
    assert fit._fraction_of_rows(grown, held + 999) < 1
    assert fit._fraction_of_rows(grown, held) == 0
    assert [fit._fraction_of_rows(phase(0, base=1000), held + limit) for limit in (999, 1000)] == [0, inf]


def test_one_rehearsal_answers_for_all_settings_of_a_stage():
    """There is memory for all: the settings that are tried first are those that are chosen."""
    asked = set()

    def noted(changed: PinnedRecipe, stage: str) -> PredictedStage:
        asked.add((stage, repr(changed.recipe.section(stage_name(stage))), changed.recipe.evaluate.batch_size))
        return formula(changed, stage)

    loaded = recipe.load(RECIPE, {"model.architecture.num_hidden_layers": 4})
    fitting = fit.fit(noted, loaded, ("sft", "dpo", "evaluate"), 10**6)
    assert not fitting.too_large
    assert Counter(stage for stage, *_ in asked) == {"sft": 3, "dpo": 3, "evaluate": 1}, (
        "two of them without checkpointing"
    )


def test_loading_must_fit_too():
    loaded = recipe.load(RECIPE)

    def heavy(changed: PinnedRecipe, stage: str) -> PredictedStage:
        largest = phase(0, base=9000)
        return PredictedStage(largest, formula(changed, stage).phases | {"load": largest})

    assert fit.fit(heavy, loaded, ("sft",), 8999).too_large == ("sft",)
    assert not fit.fit(heavy, loaded, ("sft",), 9000).too_large


def test_faster_means_fewer_passes_unless_weights_are_read_more_often():
    """By hand, for an RTX 4090 and bfloat16, with rows of 100 tokens: 2 x 100 / 165.2e12 and 2 / (n x 1.008e12)."""
    lengths = {"sft.max_length": 100, "sft.max_prompt_length": 50}
    loaded = recipe.load(RECIPE, {"hardware.name": "4090", "model.dtype": "bfloat16", **lengths})
    seconds = {
        (checkpointing, n): fit._row_seconds(loaded.recipe, "sft", checkpointing, n)
        for checkpointing in (False, True)
        for n in (1, 2, 32)
    }
    assert seconds[False, 1] == pytest.approx(2 * (200 / 165.2e12 + 2 / 1.008e12))
    assert seconds[True, 32] == pytest.approx(3 * (200 / 165.2e12 + 2 / (32 * 1.008e12)))
    order = sorted(seconds, key=seconds.__getitem__)
    assert order == [(False, 32), (True, 32), (False, 2), (False, 1), (True, 2), (True, 1)]
