"""The search of `rlhf plan --fit`: what is refused before it, and which settings it finds."""

from pathlib import Path

from rlhf import recipe
from rlhf.plan import fit
from rlhf.plan.phases import PredictedPhase, PredictedStage, Work
from rlhf.plan.predict import Predictor
from rlhf.process.memory import CONTEXT_BYTES
from rlhf.recipe import PinnedRecipe
from rlhf.recipe.schema import Sft
from rlhf.recipe.schema_online import Ppo
from rlhf.recipe.stages import TRAINING_STAGES
from tests.helpers import RECIPE, rlhf
from tests.unit.plans import global_batch, phase

RECIPES = Path(__file__).parents[2] / "recipes"
LLAMA = RECIPES / "4090-llama2-7b/v3"


def test_less_memory_than_the_base_is_not_searched_for(monkeypatch, capsys):
    """Each stage is predicted once, with its base as it is and in 4 bits: 1,000 and 400 bytes."""
    asked = []

    def predict(_: Predictor, loaded: PinnedRecipe, stage: str) -> PredictedStage:
        asked.append((stage, loaded.recipe.model.quantization))
        return formula(loaded, stage)

    monkeypatch.setattr(Predictor, "predict", predict)
    fitting = ["plan", "--recipe", RECIPE, "--set", "model.dtype=bfloat16", "--stage", "sft", "--fit"]
    code, _, err = rlhf(monkeypatch, capsys, *fitting, "0.000000399GB")
    assert code == 1 and "--fit" in err and "sft" in err
    assert asked == [("sft", "none"), ("sft", "nf4")]


def test_each_phase_has_a_setting_of_its_own():
    """A row takes 10 bytes while it is sampled, evaluated or trained on, and 20 while it is scored: 210 are left."""

    def rows(size: int) -> PredictedPhase:
        return PredictedPhase(100 + size, {"base": 100, "activations": size}, 0, Work(), 100 + size)

    def predict(loaded, stage):
        options = loaded.recipe.options(Ppo)
        sampling = 10 * options.rollout_batch_size
        sizes = {"rollout": sampling, "score": 20 * options.score_rows, "evaluate": sampling}
        sizes["update"] = 10 * options.per_device_train_batch_size
        phases = {name: rows(size) for name, size in sizes.items()}
        return PredictedStage(max(phases.values(), key=lambda phase: phase.peak_bytes), phases)

    loaded = recipe.load(LLAMA)
    ppo = loaded.recipe.options(Ppo)
    assert ppo.score_batch_size == 20 == ppo.batch_size
    found = fit.fit(predict, loaded, ["ppo"], CONTEXT_BYTES + 100 + 210)
    assert not found.too_large
    options = loaded.with_changes(found.changes).recipe.options(Ppo)
    assert (options.score_batch_size, options.rollout_batch_size, options.gradient_checkpointing) == (10, 20, False)


def formula(loaded: PinnedRecipe, stage: str) -> PredictedStage:
    """A stage's memory as a sum that can be worked out by hand."""
    recipe = loaded.recipe
    base = {"none": 1000, "nf4": 400}[recipe.model.quantization]
    sampling = 10 * recipe.evaluate.batch_size * (3 if stage == "dpo" else 1)
    phases = {"load": phase(0, base=base), "evaluate": phase(0, base=base, activations=sampling)}
    if stage in TRAINING_STAGES:
        options = getattr(recipe, stage)
        row = 20 if options.gradient_checkpointing else 100
        optimizer = 0 if options.optim == "paged_adamw_8bit" else 50
        grown = row * options.per_device_train_batch_size
        phases["train"] = phase(0, base=base + optimizer, activations=grown)
    return PredictedStage(max(phases.values(), key=lambda p: p.peak_bytes), phases)


def test_a_chain_gets_one_set_of_settings_with_which_every_stage_fits():
    """By hand: SFT alone could decode 24 together, DPO only 6; so all do. Global batches stay 8, 8 and 8."""
    lengths = {"max_length": 64, "max_prompt_length": 40, "per_device_train_batch_size": 4}
    batches = {f"{stage}.{key}": value for stage in ("sft", "rm", "dpo") for key, value in lengths.items()}
    batches |= {f"{stage}.gradient_accumulation_steps": 2 for stage in ("sft", "rm", "dpo")}
    loaded = recipe.load(RECIPE, batches | {"evaluate.batch_size": 24})
    together = fit.fit(formula, loaded, ("sft", "rm", "dpo", "evaluate"), 1250)
    # 24, 12 and 1000 + 10 * 3 * 6 = 1180; 8, 4 and 1000 + 50 + 100 * 2 = 1250.
    assert not together.too_large
    changed = recipe.load(RECIPE, batches | {"evaluate.batch_size": 24} | together.changes)
    assert changed.recipe.evaluate.batch_size == 6
    for stage in ("sft", "rm", "dpo"):
        assert global_batch(changed, stage) == 8
        options = getattr(changed.recipe, stage)
        assert (options.gradient_checkpointing, options.per_device_train_batch_size) == (False, 2)
    assert "evaluate.batch_size" not in fit.fit(formula, loaded, ("sft", "evaluate"), 1250).changes
    assert together.stages["dpo"].whole.peak_bytes == formula(changed, "dpo").whole.peak_bytes <= 1250


def test_checkpointing_comes_last_and_begins_with_the_whole_batch_again():
    """1000 + 50 + 100 * 1 are too many for 1149, and 1000 + 50 + 20 * 4 = 1130 fit: the largest divisor of 16."""
    changes = {"sft.per_device_train_batch_size": 4, "sft.gradient_accumulation_steps": 4, "evaluate.batch_size": 4}
    loaded = recipe.load(RECIPE, changes)
    found = fit.fit(formula, loaded, ("sft",), 1149)
    options = loaded.with_changes(found.changes).recipe.options(Sft)
    assert (options.gradient_checkpointing, options.per_device_train_batch_size) == (True, 4)
    assert not found.too_large


def test_a_smaller_base_is_the_last_resort_of_all_stages_alike():
    loaded = recipe.load(RECIPE)
    fitting = fit.fit(formula, loaded, ("sft", "rm", "dpo"), 999)
    assert not fitting.too_large
    assert fitting.changes["model.quantization"] == "nf4"
    assert {key for key in fitting.changes if key.endswith("optim")} == {"sft.optim", "rm.optim", "dpo.optim"}
    assert "model.quantization" not in fit.fit(formula, loaded, ("sft", "rm", "dpo"), 1500).changes
    assert set(fit.fit(formula, loaded, ("sft", "rm", "dpo"), 415).too_large) == {"sft", "rm", "dpo"}
    assert set(fit.fit(formula, loaded, ("sft", "rm", "dpo"), 425).too_large) == {"dpo"}, "3 x 10 for a prompt"


def test_loading_must_fit_too():
    loaded = recipe.load(RECIPE)

    def heavy(changed: PinnedRecipe, stage: str) -> PredictedStage:
        largest = phase(0, base=9000)
        return PredictedStage(largest, formula(changed, stage).phases | {"load": largest})

    assert fit.fit(heavy, loaded, ("sft",), 8999, compress=False).too_large == ("sft",)
    assert not fit.fit(heavy, loaded, ("sft",), 9000, compress=False).too_large
