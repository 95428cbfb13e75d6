"""`rlhf plan` and the preflight: what they print, what they refuse, and the arithmetic behind hours and settings."""

import json
import re
import shlex
import shutil
from collections import Counter
from importlib.metadata import version
from math import inf
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import yaml

from rlhf import recipe
from rlhf.cli import plan_tables as tables
from rlhf.errors import UserError
from rlhf.memory import cache, fit, plan, projection, published_figures, strategies
from rlhf.memory.cache import file_of
from rlhf.memory.card import cards
from rlhf.memory.phases import (
    DECODING_STEP,
    STAGE_ANSWER,
    Parts,
    PredictedPhase,
    PredictedStage,
    PredictionError,
    RehearsalName,
    StepOperations,
    Work,
)
from rlhf.memory.predict import PREDICTED_STAGES, Predictor, card_needed_bytes, card_reserved_bytes
from rlhf.memory.preflight import require_fit
from rlhf.process.cuda import CONTEXT_BYTES, expandable_segments
from rlhf.process.sizes import size_in_bytes
from rlhf.recipe import TRAINING_STAGES, PinnedRecipe, stage_name
from rlhf.recipe.choices import StrategyName
from rlhf.recipe.plain_yaml import Yaml
from rlhf.recipe.strict import with_overrides
from rlhf.run.packages import hash_of_modules
from tests.helpers import RECIPE, grouped, rlhf
from tests.unit.plans import planned, planned_stage

LENGTHS = {"max_length": 64, "max_prompt_length": 40, "max_eval_samples": 4, "max_samples": 64, "logging_steps": 1}
SIZES = {
    "model.architecture.hidden_size": 64,
    "model.architecture.intermediate_size": 192,
    "model.architecture.num_hidden_layers": 2,
    "hardware.threads": 1,
    "lora.r": 2,
    **{f"{stage}.{key}": value for stage in ("sft", "rm", "dpo") for key, value in LENGTHS.items()},
    "sft.per_device_train_batch_size": 4,
    "sft.gradient_accumulation_steps": 2,
    "rm.per_device_train_batch_size": 1,
    "dpo.per_device_train_batch_size": 4,
    "ppo.max_prompt_length": 40,
    "ppo.response_length": 8,
    "ppo.batch_size": 8,
    "ppo.per_device_train_batch_size": 4,
    "ppo.rollout_batch_size": 8,
    "ppo.max_eval_samples": 4,
    "evaluate.max_prompt_length": 40,
    "evaluate.response_length": 8,
    "evaluate.batch_size": 4,
    "evaluate.max_samples": 4,
}


def write_recipe(folder: Path, name: str, vocab: int = 2000, **changes) -> Path:
    """The CPU recipe at small sizes with random weights, as a recipe of its own."""
    base = recipe.load(RECIPE, {"model.architecture.vocab_size": vocab}).recipe
    overrides = recipe.random_weights_changes(base, 40, "hh") | SIZES
    overrides |= {key.replace("__", "."): value for key, value in changes.items()}
    content = with_overrides(yaml.load((RECIPE / "recipe.yaml").read_text(), Yaml), overrides)
    target = folder / name / "v1"
    target.mkdir(parents=True)
    (target / "recipe.yaml").write_text(yaml.safe_dump(content))
    return target


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("recipes")


@pytest.fixture(scope="module")
def small(folder) -> Path:
    """For a CPU whose memory is not given."""
    return write_recipe(folder, "small")


@pytest.fixture(scope="module")
def narrow(folder) -> Path:
    """For a card of 2 GB, and larger than that. On a stand-in size costs nothing."""
    changes: dict[str, Any] = {"hardware__device": "cuda", "hardware__memory_gb": 2.0, "model__dtype": "bfloat16"}
    changes |= {"model__architecture__hidden_size": 4096, "model__architecture__intermediate_size": 16384}
    changes |= {"sft__per_device_train_batch_size": 32, "sft__gradient_accumulation_steps": 1}
    return write_recipe(folder, "narrow", **changes)


@pytest.fixture(scope="module", autouse=True)
def cache_folder(tmp_path_factory):
    """Predictions of this module: what one test has predicted, another one reads."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


class Known(Predictor):
    """Predicts the same for every stage, without a rehearsal."""

    def __init__(self, predicted: PredictedStage):
        super().__init__()
        self.predicted = predicted

    def predict(self, loaded: PinnedRecipe, stage: str) -> PredictedStage:
        return self.predicted


@pytest.fixture
def predictor(cache_folder):
    """Each test has a predictor of its own, so that the commands of the next one find its process idle."""
    with Predictor() as made:
        yield made


@pytest.fixture
def command(monkeypatch, capsys, tmp_path):
    """`rlhf <arguments>` in an empty directory: exit code, stdout, stderr."""
    monkeypatch.chdir(tmp_path)

    return lambda *arguments: rlhf(monkeypatch, capsys, *arguments)


# -- the plan ----------------------------------------------------------------------------------------------------------


def test_a_plan_as_json(command, predictor, small, tmp_path):
    for stage in PREDICTED_STAGES:
        predictor.predict(recipe.load(small), stage)  # with this module's processes: the command then starts none
    code, out, _ = command("plan", "--recipe", small, "--json")
    made = json.loads(out)
    assert code == 0
    assert (made["recipe"], made["version"], made["modified"], made["hardware"]) == ("small", "v1", False, "cpu")
    assert list(made["stages"]) == list(PREDICTED_STAGES)
    for stage, row in made["stages"].items():
        named = {"peak_bytes", "card_reserved_bytes", "card_needed_bytes", "fits", "published_bytes", "in_memory_of"}
        assert named | {"phases"} <= set(row)
        assert not {"reserved_bytes", "needed_bytes"} & set(row), "these are a phase's, of the allocator alone"
        assert (row["fits"], row["published_bytes"]) == (None, None)
        assert row["peak_bytes"] == max(phase["peak_bytes"] for phase in row["phases"].values())
        for name, phase in row["phases"].items():
            assert sum(phase["components"].values()) == phase["peak_bytes"] > 0, f"{stage}/{name}"
            outer = row["phases"].get(name.rpartition("/")[0])
            assert outer is None or outer["peak_bytes"] >= phase["peak_bytes"]
    assert "train" in made["stages"]["sft"]["phases"]
    assert {"rollout", "rollout/prefill", "score", "update"} <= set(made["stages"]["ppo"]["phases"])
    assert not [*tmp_path.iterdir()], "nothing is written"


def test_a_plan_as_tables(command, small, tmp_path):
    code, out, _ = command("plan", "--recipe", small, "--stage", "sft")
    assert code == 0
    assert "predicted peak of each phase" in out
    assert "train" in out and "rollout" not in out
    code, out, _ = command("plan", "--recipe", small, "--stage", "sft", "--set", "sft.max_steps=9", "--json")
    assert json.loads(out)["modified"] is True
    assert not [*tmp_path.iterdir()]


def test_a_recipe_without_an_architecture_cannot_be_planned(command, folder):
    directory = write_recipe(folder, "unknown", model__source="local", model__name="x", model__architecture=None)
    content = yaml.safe_load((directory / "recipe.yaml").read_text())
    content["tokenizer"] = {"source": "local", "name": "x", "template": "hh"}
    content["data"] |= {"source": "files", "files": ["a.jsonl"]}
    (directory / "recipe.yaml").write_text(yaml.safe_dump(content))
    code, _, err = command("plan", "--recipe", directory)
    assert code == 1
    assert "memory is predicted from model.architecture, which this recipe does not have" in " ".join(err.split())


def test_more_memory_than_the_card_has_is_exit_code_1(command, predictor, narrow):
    """Gaps between blocks and the driver count; merging leaves the card alone."""
    loaded = recipe.load(narrow)
    made = plan.make_plan(predictor, loaded, ("sft", "merge"))
    row = made.stages["sft"]
    assert made.card_bytes == 2_000_000_000
    sizes = [(phase.peak_bytes, phase.needed_bytes or 0, phase.reserved_bytes or 0) for phase in row.phases.values()]
    assert row.card_reserved_bytes == max(reserved for *_, reserved in sizes) + CONTEXT_BYTES
    assert row.card_needed_bytes == max(needed for _, needed, _ in sizes) + CONTEXT_BYTES
    assert all(peak <= needed <= reserved for peak, needed, reserved in sizes)
    assert row.fits is False
    assert (made.stages["merge"].fits, made.stages["merge"].in_memory_of) == (None, "host")
    code, out, err = command("plan", "--recipe", narrow, "--stage", "sft", "--json")
    assert (code, json.loads(out)["stages"]["sft"]) == (1, json.loads(json.dumps(made.as_json()))["stages"]["sft"])
    options = f"--recipe {narrow}"
    assert f"does not fit its card: `rlhf plan {options} --fastest`" in err
    code, _, _ = command("plan", "--recipe", narrow, "--stage", "merge")
    assert code == 0


def test_what_fits_to_the_byte_fits(predictor, narrow):
    predicted = predictor.predict(recipe.load(narrow), "sft")
    need = card_needed_bytes(predicted.whole)
    assert need < card_reserved_bytes(predicted.whole), "the cache that is given back on a full card is not needed"
    for size, fits in ((need, True), (need - 1, False)):
        loaded = recipe.load(narrow, {"hardware.memory_gb": size / 1e9})
        assert plan.make_plan(Known(predicted), loaded, ("sft",)).stages["sft"].fits is fits


def test_the_published_range_of_a_peak_is_read():
    loaded = sft_recipe()
    rows = [
        recipe.Figure(name=n, stage="sft", metric="peak_vram_gb", range=r, unit="GB", source="x")
        for n, r in (("a", (0.5, 1.5)), ("b", (None, 2.0)))
    ]
    made = plan.make_plan(Known(SFT), loaded._replace(figures=tuple(rows)), ("sft",))
    assert made.stages["sft"].published_bytes == (500_000_000, 2_000_000_000)
    assert made.stages["sft"].verdict == "met"  # the second allows it


def test_without_bitsandbytes_four_bits_are_refused_by_name(command, folder, tmp_path_factory, monkeypatch):
    """In a process of its own that cannot find the package."""
    blocked = tmp_path_factory.mktemp("blocked")
    (blocked / "sitecustomize.py").write_text(
        "from importlib.machinery import PathFinder\n"
        "find = PathFinder.find_spec\n"
        "PathFinder.find_spec = classmethod(\n"
        "    lambda cls, name, *rest: None if name.split('.')[0] == 'bitsandbytes' else find(name, *rest))\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(blocked))
    made = write_recipe(
        folder, "four-bits", model__quantization="nf4", hardware__device="cuda", model__dtype="bfloat16"
    )
    code, _, err = command("plan", "--recipe", made, "--stage", "sft")
    assert code == 1
    assert "pip install '.[gpu]'" in " ".join(err.split())


# -- settings that fit -------------------------------------------------------------------------------------------------


def global_batch(loaded: PinnedRecipe, stage: str) -> int:
    options = loaded.recipe.section(recipe.stage_name(stage))
    if isinstance(options, recipe.OnlineBase):
        return options.batch_size // options.num_mini_batches
    assert isinstance(options, recipe.Optimization)
    return options.per_device_train_batch_size * options.gradient_accumulation_steps


@pytest.mark.parametrize(("stage", "share"), [("sft", 1.0), ("sft", 0.6), ("ppo", 1.0)])
def test_settings_that_fit_do_fit_and_change_no_batch(command, predictor, small, stage, share):
    before = recipe.load(small)
    limit = round(share * predictor.predict(before, stage).whole.peak_bytes)
    fitting = fit.fit(predictor.predict, before, (stage,), limit)
    assert not fitting.too_large
    code, out, _ = command("plan", "--recipe", small, "--stage", stage, "--fit", f"{limit / 1e9:.9f}GB", "--json")
    answer = json.loads(out)
    need = fitting.stages[stage].whole.peak_bytes
    assert (code, answer["limit_bytes"], answer["set"]) == (0, limit, fitting.changes)
    assert answer["stages"] == {stage: {"peak_bytes": need, "card_needed_bytes": need, "fits": True}}
    loaded = recipe.load(small, fitting.changes)
    assert card_needed_bytes(predictor.predict(loaded, stage).whole) <= limit
    assert global_batch(loaded, stage) == global_batch(before, stage)
    assert loaded.recipe.model.quantization == "none"


def test_with_all_memory_the_fastest_settings_are_chosen(predictor, small):
    fitting = fit.fit(predictor.predict, recipe.load(small), ("sft",), 50 * 10**9)
    assert fitting.changes == {"sft.per_device_train_batch_size": 8, "sft.gradient_accumulation_steps": 1}


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


def test_what_was_given_is_part_of_the_settings_that_are_printed(command, predictor, small):
    loaded = recipe.load(small)
    code, out, _ = command("plan", "--recipe", small, "--stage", "rm", "--set", "rm.max_steps=3", "--fit", "9GB")
    line = next(line for line in out.splitlines() if "make: SET=" in line)
    keys = shlex.split(line.partition("SET=")[2])[0].split()
    assert (code, keys[0]) == (0, "rm.max_steps=3")
    assert recipe.parse_overrides(keys[1:]) == fit.fit(predictor.predict, loaded, ("rm",), 9 * 10**9).changes
    words = shlex.split(next(line for line in out.splitlines() if "rlhf: --set" in line))[1:]
    assert words == [word for key in keys for word in ("--set", key)]


def test_settings_that_cannot_pass_through_make_are_printed_for_rlhf_alone():
    changes: dict[str, Any] = {"lora.target_modules": ["q_proj", "v_proj"], "tokenizer.system_prompt": "Be kind, brief"}
    (line,) = tables._assignments(changes).splitlines()
    words = shlex.split(line.removeprefix("  rlhf: "))
    assert recipe.parse_overrides(words[1::2]) == changes and words[::2] == ["--set", "--set"]
    del changes["tokenizer.system_prompt"]
    assert tables._assignments(changes).splitlines()[0] == """  make: SET='lora.target_modules=["q_proj","v_proj"]'"""


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


def test_where_nothing_fits_the_answer_is_one_line_with_the_least_that_was_tried(command, predictor, small):
    pytest.importorskip("bitsandbytes")
    smallest = recipe.load(small).with_changes(strategies.four_bit_changes(["rm"])).recipe
    limit = fit.base_bytes(smallest, "rm")
    found = fit.fit(predictor.predict, recipe.load(small), ("rm",), limit)
    assert found.too_large == ("rm",)
    code, out, err = command("plan", "--recipe", small, "--stage", "rm", "--fit", f"{limit / 1e9:.9f}GB")
    assert code == 1
    assert "DOES NOT FIT" in out
    assert err == (
        f"error: rm: no settings fit {limit / 1e9:.2f} GB; the smallest settings tried need "
        f"{card_needed_bytes(found.stages['rm'].whole) / 1e9:.2f} GB: allow more memory, or shorten the rows: "
        "--set STAGE.max_length=N, or max_prompt_length and response_length (make: SET=…)\n"
    )


def test_a_phase_that_a_setting_decides_too_is_looked_at(predictor, folder):
    """A large vocabulary on a GPU: held-out logits, of as many rows as a micro-batch has, need most."""
    changes: dict[str, Any] = {"hardware__device": "cuda", "model__dtype": "bfloat16", "evaluate__batch_size": 1}
    changes |= {"sft__per_device_train_batch_size": 2, "sft__gradient_accumulation_steps": 1}
    made = write_recipe(folder, "logits", vocab=8000, **changes)
    one = recipe.load(made, {"sft.per_device_train_batch_size": 1, "sft.gradient_accumulation_steps": 2})
    peak = predictor.predict(one, "sft").whole
    limit = round(1.4 * card_needed_bytes(peak))
    assert not fit.fit(predictor.predict, recipe.load(made), ("sft",), limit).too_large


@pytest.mark.parametrize(
    ("text", "size"),
    [("12GB", 12_000_000_000), ("1.5 gb", 1_500_000_000), ("2GiB", 2 * 2**30)],
)
def test_a_size_is_read_with_its_unit(text, size):
    assert size_in_bytes(text) == size


def test_a_bad_size_is_a_mistake_in_the_command(command, small):
    code, out, err = command("plan", "--recipe", small, "--fit", "12XB")
    assert (code, out) == (2, "")
    assert "'--fit': '12XB': write a size with its unit, for example 12GB, or card" in err


@pytest.mark.parametrize("options", [["--fastest"], ["--fit", "card"]])
def test_the_limit_may_be_that_of_the_recipe_s_card(command, small, options):
    code, _, err = command("plan", "--recipe", small, *options)
    assert code == 1
    assert "hardware.memory_gb is not given" in err and "--fit 12GB (make: FIT=12GB)" in err


def test_a_stage_that_the_recipe_lacks_has_a_way_out(command, small):
    code, _, err = command("plan", "--recipe", small, "--stage", "grpo")
    assert code == 1 and f"grpo: {small} has no such stage; add a section grpo (docs/groups.md)" in err


# -- the preflight -----------------------------------------------------------------------------------------------------


def test_a_stage_that_does_not_fit_is_refused_before_it_loads(command, predictor, narrow, tmp_path, monkeypatch):
    """With what would help, best first; the keys work as they are printed."""
    pytest.importorskip("bitsandbytes")
    monkeypatch.setattr("rlhf.process.torch_setup.device_of", lambda recipe: torch.device("cpu"))
    with pytest.raises(UserError, match="nothing was started") as caught:
        require_fit(predictor.predict, recipe.load(narrow), "sft")
    code, out, err = command("run", "sft", "--recipe", narrow)
    assert (code, out, err) == (1, "", f"error: {caught.value}\n")
    first, second, *lines, last = err.strip().splitlines()
    assert "SET='KEY=VALUE …'" in second
    assert re.search(r"sft would need \d+\.\d\d GB .* and the card has 2\.00 GB; nothing was started", first)
    assert last == f"`rlhf plan --recipe {narrow} --fastest` looks for settings with which the chain fits"
    advice = [re.search(r"(\d+\.\d\d) GB  (.+): (.+)$", line) for line in lines]
    assert all(advice)
    sizes = [float(match[1]) for match in advice if match]
    assert sizes == sorted(sizes)
    assert len(sizes) == 4, "attention makes no matrix of scores already, and there is one card"
    before = recipe.load(narrow)
    for match in advice:
        assert match
        keys = match[3].split()
        assert ("another result" in match[2]) == any(k.startswith(("model.quant", "sft.max_l")) for k in keys)
        changed = recipe.load(narrow, recipe.parse_overrides(keys))
        names = sorted(key.partition("=")[0] for key in keys)
        assert recipe.differences(before.recipe.model_dump(), changed.recipe.model_dump()) == names
        assert global_batch(changed, "sft") == global_batch(before, "sft")
    assert not [*tmp_path.rglob("sft/*")]
    assert not list(tmp_path.iterdir())


def test_the_refusal_s_way_out_keeps_what_was_given(command, narrow, monkeypatch):
    monkeypatch.setattr("rlhf.process.torch_setup.device_of", lambda recipe: torch.device("cpu"))
    _, _, err = command("run", "sft", "--recipe", narrow, "--set", "lora.r=3")
    assert f"`rlhf plan --recipe {narrow} --set lora.r=3 --fastest`" in err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_nothing_is_predicted_first(command, narrow):
    code, _, err = command("run", "sft", "--recipe", narrow)
    assert code == 1
    assert err.startswith("error: the recipe needs CUDA")


@pytest.mark.skipif(torch.cuda.is_available(), reason="without a GPU the stage ends where it looks for one")
def test_the_refusal_can_be_switched_off(command, narrow):
    code, _, err = command("run", "sft", "--recipe", narrow, "--no-preflight")
    assert code == 1
    assert "the recipe needs CUDA" in err
    assert "would need" not in err


def test_what_fits_goes_on_with_its_predicted_peak(predictor, narrow):
    wide = recipe.load(narrow, {"hardware.memory_gb": 200.0})
    assert require_fit(predictor.predict, wide, "sft") == predictor.predict(wide, "sft").whole.peak_bytes


@pytest.mark.parametrize("stage", ["rloo", "grpo"])
def test_stages_that_only_some_recipes_have_are_checked_too(stage):
    loaded = grouped(stage, hardware__device="cuda", hardware__memory_gb=1.0, model__dtype="bfloat16")
    large = Known(PredictedStage(phase(1, base=2 * 10**9), {"update": phase(1, base=2 * 10**9)}))
    with pytest.raises(UserError, match=f"{stage} would need .* nothing was started"):
        require_fit(large.predict, loaded, stage)
    small = Known(PredictedStage(phase(1, base=10**6), {}))
    assert require_fit(small.predict, loaded, stage) == 10**6


def test_a_prediction_that_fails_does_not_stop_a_run(narrow, capsys):
    def fail(loaded, stage):
        raise PredictionError("memory of sft cannot be predicted: no")

    assert require_fit(fail, recipe.load(narrow), "sft") is None
    assert capsys.readouterr().err == "memory of sft cannot be predicted: no; going on without\n"


def test_nothing_is_predicted_where_nothing_can_be_compared(small, narrow):
    """No card named, a CPU, or a stage that leaves the card alone."""

    def fail(loaded, stage):
        raise AssertionError("predicted")

    assert require_fit(fail, recipe.load(small), "sft") is None
    assert require_fit(fail, recipe.load(small, {"hardware.memory_gb": 0.001}), "sft") is None
    assert require_fit(fail, recipe.load(narrow), "merge") is None
    assert require_fit(fail, recipe.load(narrow), "pretrain") is None


# -- hours and dollars -------------------------------------------------------------------------------------------------


def phase(flops: int, moved: int = 0, launched: int = 0, **components: int) -> PredictedPhase:
    work = Work(flops, moved=moved, launched=launched)
    return PredictedPhase(sum(components.values()), cast(Parts, components), 0, work)


def sft_recipe(**changes) -> PinnedRecipe:
    """Toy data, whose lengths are not known: every row counts as the longest."""
    base: recipe.Changes = {
        "sft.max_samples": 80,
        "sft.num_train_epochs": 1,
        "sft.per_device_train_batch_size": 4,
        "sft.gradient_accumulation_steps": 2,
        "sft.max_eval_samples": 32,
        "hardware.name": "4090",
    }
    return recipe.load(RECIPE, base | {f"sft.{key}": value for key, value in changes.items()})


SFT = PredictedStage(phase(0, base=1), {"train": phase(1600, base=1), "evaluate": phase(80, base=1)})


def test_work_of_sft_by_hand():
    """Rehearsed: 2 steps of 2 micro-batches of 4, 100 operations a row. 80 rows, and 32 held-out ones of 10 each."""
    assert projection.stage_work(sft_recipe().recipe, "sft", SFT) == (80 * 100 + 32 * 10, 0, 0, 0)


def test_padding_lessens_what_is_computed_and_moved_but_no_launches(monkeypatch):
    """10 steps and 4 batches of held-out rows; half of each row's tokens are padding that the longest row lacks."""
    stage = SFT._replace(phases={"train": phase(1600, 320, 40, base=1), "evaluate": phase(80, 16, 4, base=1)})
    monkeypatch.setattr(projection, "padded_share", lambda *_, **__: 0.5)
    work = projection.stage_work(sft_recipe().recipe, "sft", stage)
    assert work == ((8000 + 320) / 2, 0, (10 * 160 + 4 * 16) / 2, 10 * 20 + 4 * 4)


def test_training_work_doubles_with_the_rows():
    def flops(**changes) -> float:
        work = projection.stage_work(sft_recipe(**changes).recipe, "sft", SFT)
        assert work
        return work.flops

    held_out = 320
    assert flops(max_samples=160) - held_out == 2 * (flops() - held_out)
    assert flops(num_train_epochs=2) == flops(max_samples=160)
    assert flops(max_samples=160, max_steps=10) == flops()
    assert flops(max_samples=None, max_steps=10) == flops()
    assert flops(max_samples=81) == flops(max_samples=88), "a last step that is begun counts"
    assert projection.stage_work(sft_recipe(max_samples=None).recipe, "sft", SFT) is None
    assert projection.stage_work(sft_recipe().recipe, "merge", SFT) is None


def test_work_of_ppo_by_hand(monkeypatch):
    """4 rows a step in two batches of 2, 10 tokens answered: nine decoding steps a batch."""
    monkeypatch.setattr(projection, "decoding_step_bytes", lambda *_: 1160)
    loaded = recipe.load(
        RECIPE,
        {
            "hardware.name": "4090",
            "ppo.steps": 6,
            "ppo.batch_size": 4,
            "ppo.num_mini_batches": 2,
            "ppo.num_ppo_epochs": 3,
            "ppo.rollout_batch_size": 2,
            "ppo.response_length": 10,
            "ppo.eval_steps": 3,
            "ppo.save_steps": 3,
            "ppo.max_eval_samples": 4,
            "ppo.warmup_steps": 0,
            "ppo.normalize_scores": False,
        },
    )
    phases = {
        "rollout": phase(9999, base=1000),
        "rollout/prefill": phase(20),
        "rollout/decode": phase(9979),
        "score": phase(40),
        "update": phase(100),
    }
    work = projection.stage_work(loaded.recipe, "ppo", PredictedStage(phases["rollout"], phases))
    assert work
    # Two rehearsed steps: 10 + 20 a step, and two of six minibatches: 50 x 3.
    assert work.flops == 6 * (10 + 20 + 150)
    # Two batches a step; three evaluations (before, after steps 3 and 6) of two batches each.
    assert work.decoded_bytes == (6 * 2 + 3 * 2) * 9 * 1160


def test_the_evaluations_of_ppo_are_prefilled_and_scored():
    """Rehearsed: two of 2 rows, 30 operations in all and 10 of them decoding. Run: three of 4 rows."""
    changes = {"steps": 6, "eval_steps": 3, "save_steps": 3, "max_eval_samples": 4, "response_length": 2}
    changes |= {"batch_size": 4, "num_mini_batches": 1, "rollout_batch_size": 2, "normalize_scores": False}
    loaded = recipe.load(RECIPE, {f"ppo.{key}": value for key, value in changes.items()})
    phases = {"evaluate": phase(30), "evaluate/prefill": phase(5), "evaluate/decode": phase(10)}
    work = projection.stage_work(loaded.recipe, "ppo", PredictedStage(phase(0), phases))
    assert work and work.flops == (30 - 10) * 3 * 4 / (2 * 2)


def test_sft_and_dpo_sample_before_and_after():
    """80 prompts in batches of 16, of which one batch is rehearsed; each response has nine tokens after the first.

    In float32: 3 layers of 4 x 128² and 3 x 128 x 384 weights with LoRA of rank 8, an output layer of 800 x 128; keys
    and values of 20 tokens of a prompt and 5 of a response, in the mean, for 8 rows of SFT and 16 of DPO.
    """
    changes: recipe.Changes = {"evaluate.max_samples": 80, "evaluate.batch_size": 16, "evaluate.response_length": 10}
    changes["evaluate.max_prompt_length"] = 20
    changes |= {
        f"{s}.{key}": n for s in ("sft", "dpo") for key, n in {"max_samples": 8, "max_eval_samples": 64}.items()
    }
    changes |= {f"{s}.per_device_train_batch_size": 4 for s in ("sft", "dpo")}
    loaded = recipe.load(RECIPE, changes)
    phases = {
        "evaluate": phase(100),
        "evaluate/prefill": phase(20),
        "evaluate/decode": phase(30),
    }
    weights = 4 * (3 * (4 * 128 * 128 + 3 * 128 * 384) + 3 * 8 * (4 * 256 + 3 * 512) + 800 * 128)
    row = 4 * 2 * 3 * 128 * 25
    dpo, sft = (projection.stage_work(loaded.recipe, s, PredictedStage(phase(0), phases)) for s in ("dpo", "sft"))
    assert dpo and dpo.flops == (100 - 20 - 30) * 64 / 8 + 20 * 80 / 16
    assert dpo.decoded_bytes == 2 * 5 * 9 * (weights + 16 * row)
    assert sft and sft.flops == (100 - 20 - 30) * 64 / 8 + 20
    assert sft.decoded_bytes == 2 * 1 * 9 * (weights + 8 * row)
    from rlhf.stages.sft import SAMPLES

    assert SAMPLES == projection.SFT_PROMPTS


def test_rows_of_sft_have_no_rejected_answer():
    tokens = {
        stage: projection.row_tokens(recipe.load(RECIPE.parents[1] / "4090-llama2-7b/v2").recipe, stage, 1)
        for stage in ("sft", "rm")
    }
    assert tokens["sft"] < 0.95 * tokens["rm"]


@pytest.mark.parametrize(("version", "reported"), [("v1", 0), ("v2", 2)])
@pytest.mark.parametrize("normalised", [False, True])
def test_evaluations_are_those_of_a_run(monkeypatch, version: str, reported: int, normalised: bool):
    """Before the first step, and after steps 20, 30, 40 and 60: five of three batches each, one token after the first.

    Where validation is set apart, reference and policy are evaluated once more. Scores are normalised by three batches
    of two responses; a rehearsal has one of them, and evaluations of one batch before and after its two steps.
    """
    changes = {"steps": 60, "eval_steps": 20, "save_steps": 30, "max_eval_samples": 6, "response_length": 2}
    changes |= {"batch_size": 2, "num_mini_batches": 1, "rollout_batch_size": 2}
    changes |= {"normalize_scores": normalised, "norm_responses": 5}
    loaded = recipe.load(RECIPE.parent / version, {f"ppo.{key}": value for key, value in changes.items()})
    monkeypatch.setattr(projection, "decoding_step_bytes", lambda *_: 1)
    names = ("rollout", "rollout/prefill", "rollout/decode", "score", "update")
    phases = dict.fromkeys(names, phase(0, base=1)) | {"evaluate": phase(100), "evaluate/decode": phase(0)}
    work = projection.stage_work(loaded.recipe, "ppo", PredictedStage(phase(0, base=1), phases))
    norm = 3 if normalised else 0
    assert work and work.decoded_bytes == 60 + norm + 3 * (5 + reported)
    assert work.flops == pytest.approx(100 * (6 * (5 + reported) + 2 * norm) / (2 * (2 + reported) + 2 * (norm > 0)))


def projected(price: float | None = None) -> plan.StageTime | None:
    return plan.make_plan(Known(SFT), sft_recipe(), ("sft",), price).stages["sft"].time


def test_hours_fall_with_the_card_s_rate(monkeypatch):
    card = cards.CARDS["4090"]
    rates = card.rates
    assert rates
    once = projected()
    monkeypatch.setitem(cards.CARDS, "4090", card._replace(rates=rates._replace(flops=rates.flops / 4)))
    slower = projected()
    assert once and slower
    assert slower.limit_hours == pytest.approx(4 * once.limit_hours)
    assert slower.projected_hours == pytest.approx(4 * once.projected_hours)
    assert once.limit_hours == pytest.approx(8320 / rates.flops / 3600)
    assert once.projected_hours == pytest.approx(once.limit_hours * projection.CALIBRATED.products)
    monkeypatch.setitem(cards.CARDS, "4090", card._replace(rates=None))
    assert projected(1.0) is None


CARD = cards.NominalRates(1000.0, 10.0, "")


def test_the_three_parts_of_a_step_add_up():
    rates = projection.TimeFactors(products=2.0, memory=3.0, launch=0.5)
    assert projection.step_seconds(5000.0, 200.0, 8, CARD, rates) == 2 * 5 + 3 * 20 + 0.5 * 8


def test_decoding_is_limited_by_bandwidth():
    work = projection.StageWork(0.0, 200.0)
    assert work.limit(CARD) == 20
    shares = projection.DECODING
    assert work.projected(CARD) == (20 / shares.usual, 20 / shares.most, 20 / shares.least)


def test_an_interval_holds_what_is_projected_and_no_less_than_the_limit():
    interval = projection.StageWork(5000.0, 200.0, 100.0, 4.0).projected(CARD)
    assert 25 <= interval.low < interval.seconds < interval.high


def test_two_cards_wait_for_each_other_where_the_layers_of_the_model_are_known():
    """Memory of a rank is predicted for any model; what ranks send each other only for layers like a Llama's."""

    def two(model_type: str) -> plan.StageTime | None:
        overrides: recipe.Changes = {
            "hardware.name": "2x4090",
            "hardware.count": 2,
            "model.architecture.model_type": model_type,
        }
        loaded = recipe.load(RECIPE, sft_recipe().overrides | overrides)
        return plan.make_plan(Known(SFT), loaded, ("sft",), None).stages["sft"].time

    known, unknown = two("llama"), two("phi3")
    assert known and unknown and known.between_ranks and unknown.between_ranks is None
    waiting = known.between_ranks.seconds_per_step * known.between_ranks.steps / 3600
    assert known.projected_hours - unknown.projected_hours == pytest.approx(waiting)
    (low, high), (low_alone, high_alone) = known.projected_hours_range, unknown.projected_hours_range
    assert low == pytest.approx(max(low_alone, waiting)), "the lower end hides one behind the other"
    assert high - high_alone == pytest.approx(waiting)


def test_cost_is_hours_times_the_price():
    priced, unpriced = projected(1.5), projected()
    assert priced and unpriced
    assert priced.projected_cost == pytest.approx(1.5 * priced.projected_hours)
    assert unpriced.projected_cost is None


def test_hours_and_cost_of_the_chain_are_added_up():
    stage = planned_stage(time=plan.StageTime(0.5, 2.0, (1.5, 3.0), 4.0, None))
    *_, total = tables.stage_rows(planned({"sft": stage, "rm": stage, "ppo": stage, "dpo": stage}))
    assert total == ("sft, rm, ppo", "", "", "", "", "", "1.5", "6.0 (4.5-9.0)", "$12.00")
    *_, last = tables.stage_rows(planned({"sft": stage}))
    assert last[0] == "sft"


HH = {"tokenizer.source": "words", "pretrain": None, "model.source": "random", "model.architecture.vocab_size": 800}


def hh(**more) -> recipe.Recipe:
    """Rows as long as HH-RLHF's."""
    return recipe.load(
        RECIPE, HH | {"data.source": "lengths", "data.lengths": {"pairs": 9, "shape": "hh"}} | more
    ).recipe


@pytest.mark.parametrize("batch", [1, 4, 16])
@pytest.mark.parametrize("longest", [128, 512, 2048])
def test_padding_is_less_where_rows_are_grouped(batch, longest):
    grouped, mixed = (projection.padded_share(hh(), longest, longest - 32, batch, way) for way in (batch, None))
    assert 0 < grouped <= mixed <= 1
    assert (grouped == mixed) == (batch == 1)


def test_padding_of_rows_whose_length_is_not_known():
    toy = recipe.load(RECIPE).recipe
    longest = recipe.load(RECIPE, HH | {"data.source": "lengths", "data.lengths": {"pairs": 9, "shape": "longest"}})
    unused = recipe.load(RECIPE, {"data.lengths": {"pairs": 9, "shape": "hh"}})
    for unknown in (toy, longest.recipe, unused.recipe):
        assert projection.padded_share(unknown, 512, 384, 8, 16) == 1.0
        assert projection.padded_share(unknown, 512, 384, 8, None) == 1.0


def test_padding_by_hand(monkeypatch):
    """Rows of 3 + 4 + 1 = 8 and 3 + 8 + 1 = 12 tokens, in equal numbers; nothing is longer than 10."""
    monkeypatch.setattr(projection, "lengths_of_hh", lambda: [(5, 4, 2), (3, 1, 8)])
    assert projection.padded_share(hh(), 10, 3, 1, None) == pytest.approx(0.9, abs=0.06)
    assert projection.padded_share(hh(), 8, 3, 4, None) == 1.0
    assert projection.padded_share(hh(), 10, 3, 64, None) == 1.0, "every batch has a long row"


# -- questions that do not go together ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--fit", "1GB", "--fastest"], "--fit and --fastest answer different questions"),
        (["--strategies", "--published"], "--strategies and --published answer different questions"),
        (["--fit", "1GB", "--price", "1"], "--price goes with the plan itself, not with --fit"),
        (["--price", "nan"], "'nan' is not a finite number"),
        (["--price", "inf"], "'inf' is not a finite number"),
        (["--stage", "merge", "--fit", "1GB"], "there is nothing to fit"),
        (["--stage", "evaluate", "--strategies"], "evaluate does not train"),
        (["--fit", ""], "write a size with its unit"),
    ],
)
def test_options_that_cannot_be_answered_are_refused(command, small, options, message):
    code, out, err = command("plan", "--recipe", small, *options)
    assert code != 0
    assert out == ""
    assert message in " ".join(err.split())


def test_published_figures_as_json_and_of_one_stage(command, folder, small):
    about = {"unit": "GB", "source": "guide > page > line"}
    target = {"name": "peak", "stage": "sft", "metric": "peak_vram_gb", "range": [100, 200]} | about
    reason = {"name": "pace", "stage": "rm", "not_comparable": "no", "value": 1} | about
    counted = {"name": "effect", "stage": "sft", "metric": "effect.gradient_checkpointing.time_percent", "value": 2}
    (small / "published.yaml").write_text(
        yaml.safe_dump({"guide": "guide", "targets": [target, reason, counted | about]})
    )
    try:
        code, out, _ = command("plan", "--recipe", small, "--published", "--json")
        rows = json.loads(out)
        assert (code, [row["stage"] for row in rows]) == (0, ["sft", "rm", "sft"])
        assert rows[0]["predicted"] > 0 and (rows[0]["basis"], rows[0]["verdict"]) == ("predicted", "better")
        assert (rows[1]["predicted"], rows[1]["verdict"], rows[1]["detail"]) == (None, "not comparable", "no")
        assert rows[2]["predicted"] is None and "times the operations are counted" in rows[2]["detail"]
        _, out, _ = command("plan", "--recipe", small, "--published", "--stage", "rm")
        assert "pace" in out and "peak" not in out
        _, out, _ = command("plan", "--recipe", small, "--published", "--stage", "sft")
        assert "predicted: better (-" in " ".join(out.split())
    finally:
        (small / "published.yaml").unlink()


def test_a_narrow_terminal_gets_fewer_columns(command, small, monkeypatch):
    monkeypatch.setattr("rlhf.cli.plan_tables.screen.OUT._width", 80)
    _, out, _ = command("plan", "--recipe", small, "--stage", "sft")
    assert "most of it" in out and "activ" not in out.replace("activations", "")
    assert max(map(len, out.partition("peak: what")[0].splitlines())) <= 80


# -- what is kept ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "package",
    [
        *("torch", "transformers", "trl", "peft"),
        "bitsandbytes",
    ],
)
def test_another_version_of_a_package_is_predicted_anew(small, monkeypatch, package):
    before = file_of(recipe.load(small), "sft")
    assert file_of(recipe.load(small), "sft") == before
    monkeypatch.setattr("rlhf.memory.cache.package_version", lambda name: "0" if name == package else version(name))
    assert file_of(recipe.load(small), "sft") != before


SECTIONS: dict[str, recipe.Changes] = {  # a change in each section
    "model": {"model.architecture.hidden_size": 32},
    "tokenizer": {"tokenizer.vocab_size": 700},
    "data": {"data.heldout_fraction": 0.2},
    "lora": {"lora.r": 3},
    "evaluate": {"evaluate.response_length": 9},
    "pretrain": {"pretrain.learning_rate": 1e-4},
    "sft": {"sft.max_eval_samples": 63},
    "rm": {"rm.max_eval_samples": 63},
    "ppo": {"ppo.response_length": 9},
    "dpo": {"dpo.max_eval_samples": 63},
    "merge": {"merge.stage": "sft"},
    "hardware": {"hardware.trunk": "lean"},
}
EVERYWHERE = {"model", "tokenizer", "data", "lora", "evaluate", "hardware"}
OWN: dict[RehearsalName, set[str]] = {
    **{stage: {stage} for stage in ("sft", "rm", "ppo", "dpo")},
    "merge": {"merge", "sft"},
    "evaluate": {"rm"},
    DECODING_STEP: {"ppo"},
}


@pytest.mark.parametrize("name", OWN)
@pytest.mark.parametrize("section", SECTIONS)
def test_a_section_that_a_rehearsal_depends_on_is_predicted_anew_and_no_other(section, name):
    before, after = recipe.load(RECIPE), recipe.load(RECIPE, SECTIONS[section])
    assert before.recipe != after.recipe
    same = file_of(after, name) == file_of(before, name)
    assert same != (section in EVERYWHERE | OWN[name])


@pytest.mark.parametrize("key", ["hardware.name", "allocator"])
def test_card_and_allocator_decide_on_a_gpu_only(small, monkeypatch, key):
    cpu, cuda = recipe.load(small), recipe.load(small, {"hardware.device": "cuda"})
    before = [file_of(loaded, "sft") for loaded in (cpu, cuda)]
    if key == "allocator":
        monkeypatch.setattr("rlhf.memory.cache.expandable_segments", lambda: not expandable_segments())
        changed = [file_of(loaded, "sft") for loaded in (cpu, cuda)]
    else:
        named: recipe.Changes = {"hardware.name": "4090"}
        cpu, cuda = recipe.load(small, named), recipe.load(small, named | {"hardware.device": "cuda"})
        changed = [file_of(loaded, "sft") for loaded in (cpu, cuda)]
    assert [old == new for old, new in zip(before, changed, strict=True)] == [True, False]


def test_rehearsals_have_files_of_their_own(small):
    loaded = recipe.load(small)
    assert len({file_of(loaded, name) for name in OWN}) == len(OWN)


def test_another_code_of_any_module_is_predicted_anew(small, monkeypatch, tmp_path):
    package = Path(plan.__file__).parents[1]
    copied = shutil.copytree(package, tmp_path / "rlhf", ignore=shutil.ignore_patterns("__pycache__"))
    before = hash_of_modules(package)
    assert hash_of_modules(copied) == before
    modules = sorted((copied / "memory").rglob("*.py"))
    assert {"memory", "rehearsal", "card"} == {module.parent.name for module in modules}
    for module in modules:
        text = module.read_text()
        module.write_text(f"{text}\n")
        assert hash_of_modules(copied) != before, module
        module.write_text(text)
    modules[0].rename(modules[0].with_name(f"_{modules[0].name}"))
    assert hash_of_modules(copied) != before, "the same content in the same order, under another name"
    file = file_of(recipe.load(small), "sft")
    monkeypatch.setattr("rlhf.memory.cache._code_hash", lambda: "of other code")
    assert file_of(recipe.load(small), "sft") != file


def test_a_damaged_cache_is_predicted_anew(predictor, small):
    loaded = recipe.load(small)
    before = predictor.predict(loaded, "sft")
    file = file_of(loaded, "sft")
    assert file.is_file()
    answer = json.loads(file.read_text())
    for damage in (
        "{}",
        "[]",
        "nonsense",
        '{"depths": [], "reserved": null}',
        '{"depths": [{"": {"flops": "many"}}, {"": {}}], "reserved": null}',
        '{"roles": {"policy": {"per_layer": 1}}}',
        '{"roles": {"policy": {"per_layer": 1, "outside": 1, "unsafe": []}}}',
        json.dumps(answer)[:-1],
        json.dumps(answer).replace('"flops"', '"flop"', 1),
        json.dumps(answer | {"reserved": {"train": [1]}}),
        json.dumps(answer | {"depths": answer["depths"][:1]}),
    ):
        file.write_text(damage)
        assert cache.read(file, STAGE_ANSWER) is None, damage
    assert predictor.predict(loaded, "sft") == before


def test_seed_and_size_of_the_card_are_no_new_prediction(small):
    file = file_of(recipe.load(small), "sft")
    assert file_of(recipe.load(small, {"hardware.memory_gb": 9.0}, seed=5), "sft") == file
    assert file_of(recipe.load(small, {"hardware.device": "cuda"}), "sft") != file


# -- strategies --------------------------------------------------------------------------------------------------------

RECIPES = recipe.available(RECIPE.parents[1])


@pytest.mark.parametrize("directory", RECIPES, ids=lambda d: f"{d.parent.name}-{d.name}")
def test_a_strategy_is_switched_on_once_and_changes_no_batch(directory):
    """And with none of them, the batches are as before."""
    loaded = recipe.load(directory)
    for stage in (name for name in TRAINING_STAGES if getattr(loaded.recipe, name) is not None):
        off = loaded.with_changes(strategies.switched_off(loaded, stage))
        for start in (loaded, off):
            assert global_batch(start, stage) == global_batch(loaded, stage)
            for strategy in strategies.STRATEGIES:
                changes = strategies.switched_on(start, stage, strategy.name)
                if changes is None:
                    continue
                after = start.with_changes(changes)
                assert after.recipe != start.recipe, strategy.name
                assert global_batch(after, stage) == global_batch(loaded, stage), strategy.name
                if strategy.name not in ("batch_size", "context_length"):
                    assert strategies.switched_on(after, stage, strategy.name) is None


def test_what_is_on_already_is_not_switched_on():
    loaded = recipe.load(RECIPE, {"sft.gradient_checkpointing": True, "sft.per_device_train_batch_size": 1})
    names = {s.name for s in strategies.STRATEGIES if strategies.switched_on(loaded, "sft", s.name) is not None}
    assert names == {"quantization", "context_length"}
    eager = loaded.with_changes(strategies.switched_off(loaded, "sft"))
    assert strategies.switched_on(eager, "sft", "flash_attention") == {"model.attention": "auto"}
    assert strategies.switched_on(eager, "sft", "distributed") is None


def test_half_the_micro_batch_is_twice_the_accumulation():
    loaded = recipe.load(RECIPE, {"sft.per_device_train_batch_size": 8, "sft.gradient_accumulation_steps": 3})
    assert strategies.switched_on(loaded, "sft", "batch_size") == {
        "sft.per_device_train_batch_size": 4,
        "sft.gradient_accumulation_steps": 6,
    }


def test_an_odd_micro_batch_keeps_its_global_batch():
    loaded = recipe.load(RECIPE, {"sft.per_device_train_batch_size": 5, "sft.gradient_accumulation_steps": 1})
    assert strategies.switched_on(loaded, "sft", "batch_size") == {
        "sft.per_device_train_batch_size": 1,
        "sft.gradient_accumulation_steps": 5,
    }


def computed(predictor: Predictor, loaded: PinnedRecipe, strategy: StrategyName) -> float:
    """What SFT computes in a step with a strategy, over what it computes without."""
    changes = strategies.switched_on(loaded, "sft", strategy)
    assert changes
    changed = loaded.with_changes(changes)
    after, before = (strategies.flops_beside_decoding(r, "sft", predictor.predict(r, "sft")) for r in (changed, loaded))
    return after / before


def test_effects_come_best_first_and_those_that_are_on_last(predictor, small):
    pytest.importorskip("bitsandbytes")
    loaded = recipe.load(small, {"sft.gradient_checkpointing": True})
    effects = strategies.effects(predictor.predict, loaded, "sft")
    sizes = [effect.after for effect in effects if effect.after is not None]
    assert sizes == sorted(sizes)
    assert [effect.after is None for effect in effects] == [False] * len(sizes) + [True] * (6 - len(sizes))
    named = {effect.strategy.name: effect for effect in effects}
    assert named["gradient_checkpointing"].changes is None
    assert computed(predictor, loaded, "context_length") == pytest.approx(0.5, rel=0.1), "half the tokens"


def test_a_strategy_that_cannot_be_predicted_does_not_hide_the_refusal(narrow):
    """4 bits need a package that may be missing; the stage is too large in any case."""

    def predicted(loaded, stage):
        if loaded.recipe.model.quantization == "nf4":
            raise UserError("bitsandbytes is not installed")
        large = phase(1, base=200 * 10**9)
        return PredictedStage(large, {"train": large})

    with pytest.raises(UserError, match=r"sft would need 200.* nothing was started") as caught:
        require_fit(predicted, recipe.load(narrow), "sft")
    assert not any("nf4" in line for line in caught.value.lines)
    assert not any("alone" in line for line in caught.value.lines), "no change needs less here: none is advised"


def test_a_plan_says_which_stage_it_rehearses():
    lines: list[str] = []
    plan.make_plan(Known(SFT), sft_recipe(), ("sft", "merge"), say=lines.append)
    assert lines == ["rehearsing sft (1 of 2)", "rehearsing merge (2 of 2)"]


def test_operations_of_a_decoding_step_are_shown():
    def of(unsafe: list[str]) -> plan.Plan:
        role = StepOperations(per_layer=50, outside=40, total=1640, unsafe=unsafe)
        return planned({"sft": planned_stage(), "ppo": planned_stage(decoding_step={"policy": role, "base": role})})

    counts = (
        "operations of a decoding step, each at least one kernel: policy 1,640 (50 a layer), base 1,640 (50 a layer)"
    )
    assert tables.step_lines(of([])) == [counts]
    host_read = "aten::_local_scalar_dense reads a value on the host"
    assert tables.step_lines(of([host_read])) == [counts, f"a captured graph cannot hold {host_read}"]
    assert tables.step_lines(planned({"ppo": planned_stage()})) == tables.step_lines(planned({})) == []


def test_half_the_micro_batch_computes_as_much(predictor, small):
    """4 rows twice, or 2 rows four times."""
    loaded = recipe.load(small, {"sft.gradient_checkpointing": True})
    assert computed(predictor, loaded, "batch_size") == pytest.approx(1.0, rel=0.01)


def test_an_evaluation_of_other_policies_is_another_prediction():
    """It loads an adapter of each."""
    groups = RECIPE.parents[1] / "cpu-tiny-groups" / "v1"
    fewer = recipe.load(groups, {"grpo": None, "merge.stage": "ppo"})
    assert file_of(recipe.load(groups), "evaluate") != file_of(fewer, "evaluate")
    assert file_of(recipe.load(groups), "sft") == file_of(fewer, "sft")


def test_a_figure_of_a_stage_that_is_not_planned_has_no_prediction():
    made = planned({"sft": planned_stage()})
    for metric in ("peak_vram_gb", "hours", "cost_usd", "component_gb.base"):
        assert published_figures.predicted(made, {}, "pretrain", metric) is None
    assert published_figures.predicted(made, {}, "all", "hours") is None
    assert published_figures.predicted(made, {}, "sft", "peak_vram_gb") == 1.0
