"""The arithmetic behind projected hours and dollars: the work of a whole stage, padding, evaluations and rates."""

import json
from pathlib import Path
from typing import Any

import pytest

from peakmem import cards
from rlhf import recipe
from rlhf.cli import plan_tables as tables
from rlhf.plan import padding, plan, projection
from rlhf.plan.own_rows import Rows
from rlhf.plan.phases import PredictedStage
from rlhf.plan.rehearsal import short_runs
from rlhf.recipe.schema import Dpo, Sft
from rlhf.recipe.schema_online import Ppo
from tests.helpers import RECIPE
from tests.unit.plans import SFT, Known, phase, planned, planned_stage, sft_recipe

ROOT = Path(__file__).parents[2]


def test_work_of_sft_by_hand():
    """Rehearsed: a step of 2 micro-batches of 4, 100 operations a row. 80 rows, and 32 held-out ones of 10 each."""
    work = projection.stage_work(sft_recipe().recipe, "sft", SFT)
    assert work and (work.flops, work.moved, work.decoded_bytes) == (80 * 100 + 32 * 10, 0, 0)


def test_padding_lessens_what_is_computed_and_moved_but_no_launches(monkeypatch):
    """10 steps and 4 batches of held-out rows; half of each row's tokens are padding that the longest row lacks."""
    stage = SFT._replace(phases={"train": phase(800, 160, 20, base=1), "evaluate": phase(80, 16, 4, base=1)})
    monkeypatch.setattr(padding, "padded_share", lambda *_, **__: 0.5)
    work = projection.stage_work(sft_recipe().recipe, "sft", stage)
    training = projection.PhaseWork(8000 / 2, 10 * 160 / 2, 10 * 20, "library")
    assert work and work.phases[:2] == [training, projection.PhaseWork(320 / 2, 4 * 16 / 2, 4 * 4, "library")]


def test_the_phases_of_a_recipe_are_launched_by_its_trunk():
    loaded = recipe.load(ROOT / "recipes/h100-mistral-7b/v6")
    work = projection.stage_work(loaded.recipe, "sft", SFT)
    assert work and {phase.host for phase in work.phases} == {"lean"}


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
        "rollout/prefill": phase(10),
        "rollout/decode": phase(9989),
        "score": phase(20),
        "update": phase(50),
    }
    work = projection.stage_work(loaded.recipe, "ppo", PredictedStage(phases["rollout"], phases))
    assert work
    # Rehearsed: 10 + 20, and two of six minibatches, 50 x 3.
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
    rows = 2 * 8 * loaded.recipe.options(Dpo).max_length  # tokens; those of 16 samples have 30 each
    share = rows / (rows + 16 * (20 + 10))
    assert dpo and dpo.flops == pytest.approx((100 - 20 - 30) * (share * 64 / 8 + (1 - share) * 80 / 16) + 20 * 80 / 16)
    assert dpo.decoded_bytes == 2 * 5 * 9 * (weights + 16 * row)
    assert sft and sft.flops == (100 - 20 - 30) * 64 / 8 + 20
    assert sft.decoded_bytes == 2 * 1 * 9 * (weights + 8 * row)


def test_validation_is_as_much_work_as_of_held_out_rows(monkeypatch):
    """10 steps, measured at the 4th, 8th and 10th on 32 rows, of which 8 are rehearsed; SFT rehearses two times 8."""
    phases = {"evaluate": phase(100), "train": phase(0)}

    def flops(stage: recipe.TrainingName, of_rows: Rows | None = None, **changes) -> float:
        changes = {f"{stage}.{key}": value for key, value in {"max_eval_samples": 32, **changes}.items()}
        loaded = sft_recipe().with_changes(changes | {f"{stage}.per_device_train_batch_size": 4})
        work = projection.stage_work(loaded.recipe, stage, PredictedStage(phase(0), phases), of_rows)
        assert work
        return work.flops

    stages: dict[recipe.TrainingName, int] = {"sft": 2, "rm": 1}
    for stage, passes in stages.items():
        changes: dict[str, Any] = {"max_samples": 80, "gradient_accumulation_steps": 2, "num_train_epochs": 1}
        without = flops(stage, **changes)
        assert flops(stage, eval_steps=4, save_steps=4, logging_steps=4, **changes) - without == pytest.approx(
            3 * 100 * 4 / passes
        )
    few, more = (flops("sft", Rows(80, n, [(9, 9, 9)]), eval_steps=4, save_steps=4, logging_steps=4) for n in (8, 16))
    assert more == pytest.approx(2 * few), "of own files the rows for validation are known"
    v4 = recipe.load(ROOT / "recipes/h100-mistral-7b/v6").recipe
    of_hh: dict[recipe.TrainingName, int] = {"sft": 19 * 500, "rm": 7 * 804, "dpo": 38 * 804}
    assert {stage: projection._validated(v4, stage, None) for stage in of_hh} == of_hh, "a 200th of HH-RLHF's pairs"


def test_rows_of_sft_have_no_rejected_answer():
    tokens = {
        stage: padding.row_tokens(recipe.load(RECIPE.parents[1] / "4090-llama2-7b/v3").recipe, stage, 1)
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


CARD = cards.Rates(1000.0, 10.0, "")


def test_the_three_parts_of_a_step_add_up():
    rates = projection.TimeFactors(products=2.0, memory=3.0, launch=0.5)
    assert projection.step_seconds(5000.0, 200.0, 8, CARD, rates) == 2 * 5 + 3 * 20 + 0.5 * 8


def test_decoding_is_limited_by_bandwidth():
    work = projection.StageWork([], 200.0)
    assert work.limit(CARD) == 20
    seconds = 20 * projection.CALIBRATED.memory
    assert work.projected(CARD) == (seconds, *(pytest.approx(factor * seconds) for factor in projection.SPREAD))


def test_the_card_launches_what_a_decoding_step_has():
    """A rehearsal takes two steps of each batch of a rollout, or of the samples before and after training."""
    work = projection.StageWork([], 200.0, 7e6)
    launching = 7e6 * projection.CALIBRATED.launch
    assert work.projected(CARD).seconds == pytest.approx(20 * projection.CALIBRATED.memory + launching)
    changes: recipe.Changes = {"batch_size": 64, "num_mini_batches": 2, "rollout_batch_size": 32}
    loaded = recipe.load(RECIPE, {f"ppo.{key}": value for key, value in changes.items()}).recipe
    decoding = phase(0, 0, 1200)
    known = PredictedStage(decoding, {"rollout/decode": decoding, "evaluate/decode": decoding})
    assert projection.launches_of_a_decoding_step(loaded, "ppo", known) == 1200 / (2 * 2)
    assert projection.launches_of_a_decoding_step(loaded, "dpo", known) == 1200 / (2 * 2)


@pytest.mark.parametrize(
    ("variant", "operations"), [("as the stages run", 1217), ("merged weights", 865), ("no adapters", 865)]
)
def test_steps_that_an_h200_measured_lie_in_the_interval(variant, operations):
    """None of them was fitted to. Measured over projected: 0.92 to 0.99."""
    (file,) = (ROOT / "results/h100-mistral-7b/v2/nvidia-h200/gpu").glob("*_decoding.json")
    card = cards.CARDS["h200"].rates
    assert card
    for rows in json.loads(file.read_text())["measured"]["rows"].values():
        step = rows["variants"][variant]
        found = projection.StageWork([], step["bytes_read"], operations).projected(card)
        assert found.low < step["step_seconds"]["median"] < found.high


@pytest.mark.parametrize(("host", "seconds"), [("library", 26.0), ("lean", 38.0)])
def test_a_phase_takes_no_less_than_the_host_needs_to_launch_it(host, seconds):
    """Of two phases one waits for its million launches, which the other's products cannot hide."""
    products, launches = projection.PhaseWork(5000.0, 0.0, 0.0), projection.PhaseWork(1.0, 0.0, 1e6, host)
    work = projection.StageWork([products, launches], 0.0)
    expected = 5 * projection.CALIBRATED.products + seconds
    assert work.projected(CARD).seconds == pytest.approx(expected, rel=1e-3)


def test_an_interval_holds_what_is_projected_and_no_less_than_the_limit():
    interval = projection.StageWork([projection.PhaseWork(5000.0, 100.0, 4.0)], 200.0).projected(CARD)
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
    assert total == ("sft, rm, ppo", "", "", "", "", "1.5", "6.0 (4.5-9.0)", "$12.00")
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
    grouped, mixed = (padding.padded_share(hh(), longest, longest - 32, batch, way) for way in (batch, None))
    assert 0 < grouped <= mixed <= 1
    assert (grouped == mixed) == (batch == 1)


def test_padding_of_rows_whose_length_is_not_known():
    toy = recipe.load(RECIPE).recipe
    longest = recipe.load(RECIPE, HH | {"data.source": "lengths", "data.lengths": {"pairs": 9, "shape": "longest"}})
    unused = recipe.load(RECIPE, {"data.lengths": {"pairs": 9, "shape": "hh"}})
    for unknown in (toy, longest.recipe, unused.recipe):
        assert padding.padded_share(unknown, 512, 384, 8, 16) == 1.0
        assert padding.padded_share(unknown, 512, 384, 8, None) == 1.0


def test_padding_by_hand(monkeypatch):
    """Rows of 3 + 4 + 1 = 8 and 3 + 8 + 1 = 12 tokens, in equal numbers; nothing is longer than 10."""
    monkeypatch.setattr(padding, "lengths_of_hh", lambda: [(5, 4, 2), (3, 1, 8)])
    assert padding.padded_share(hh(), 10, 3, 1, None) == pytest.approx(0.9, abs=0.06)
    assert padding.padded_share(hh(), 8, 3, 4, None) == 1.0
    assert padding.padded_share(hh(), 10, 3, 64, None) == 1.0, "every batch has a long row"


def test_prompts_of_a_rollout_are_padded_to_the_longest_of_a_pass(monkeypatch):
    """Prompts of 4 and 8 tokens, 2 more in a response. A batch of 64 has both; four of them in order are alike."""
    monkeypatch.setattr(padding, "lengths_of_hh", lambda: [(4, 1, 1), (8, 1, 1)])
    changes = {"max_prompt_length": 8, "response_length": 2, "batch_size": 64, "rollout_batch_size": 64}
    changes |= {"num_mini_batches": 1, "per_device_train_batch_size": 4, "score_batch_size": 64}
    recipe_of = hh(**{f"ppo.{key}": value for key, value in changes.items()})
    shares = {
        name: padding.share_of_longest(recipe_of, "ppo", name, None) for name in ("rollout/prefill", "score", "update")
    }
    assert shares["rollout/prefill"] == shares["score"] == 1
    assert shares["update"] == pytest.approx((6 + 2) / 10, abs=0.04)


def test_joined_rows_have_no_padding(monkeypatch):
    """On a card in 16 bits with the lean trunk: prompts of 4 and 8 tokens, answers of 1, and of 5 where rejected."""
    monkeypatch.setattr(padding, "lengths_of_hh", lambda: [(4, 1, 5), (8, 1, 5)])
    on_card = {"hardware.device": "cuda", "hardware.name": "h100", "hardware.threads": None, "model.dtype": "bfloat16"}
    limits = {"ppo.max_prompt_length": 8, "ppo.response_length": 2, "ppo.score_batch_size": 64}
    limits |= {f"{stage}.max_length": 20 for stage in ("sft", "rm", "dpo")}
    limits |= {f"{stage}.max_prompt_length": 12 for stage in ("sft", "rm", "dpo")}
    settings = {"hardware.trunk": "lean", "lora.lora_dropout": 0.0} | on_card | limits
    joined = hh(**settings)
    for name in ("score", "update", "evaluate"):
        assert padding.share_of_longest(joined, "ppo", name, None) == pytest.approx((6 + 2) / 10, abs=0.01)
    assert padding.share_of_longest(joined, "ppo", "rollout/prefill", None) == pytest.approx(6 / 8, abs=0.01)
    assert padding.row_tokens(joined, "sft", 8) == pytest.approx(6 + 1 + 1)
    assert padding.row_tokens(joined, "dpo", 8) == pytest.approx(6 + 3 + 1)
    assert padding.row_tokens(joined, "dpo", 8, phase="evaluate") > 6 + 5, "by the library's layers"
    assert padding.row_tokens(joined, "rm", 1) == pytest.approx(6 + 5 + 1, abs=0.1), "its trainer wants whole rows"
    assert not padding.joins_rows(joined, "second_rm", "train"), "it has the same trainer"
    packed_base = joined.model_copy(update={"model": joined.model.model_copy(update={"quantization": "nf4"})})
    assert padding.joins_rows(packed_base, "ppo", "score") and not padding.joins_rows(packed_base, "ppo", "evaluate")
    for change in ({"hardware.trunk": "library"}, {"model.dtype": "float32"}):
        assert padding.joins_rows(joined, "ppo", "score"), "for this test"
        assert not padding.joins_rows(hh(**settings | change), "ppo", "score"), change


def test_a_short_run_of_real_lengths_takes_all_of_its_rows():
    """Batches have rows of similar length, so that a few of many would be shorter or longer than the stage's."""
    loaded = recipe.load(RECIPE)
    changed = loaded.with_changes(short_runs.few_steps(loaded.recipe, 4, "hh", supervised_steps=6)).recipe
    sft = changed.options(Sft)
    assert (sft.max_steps, changed.options(Ppo).steps) == (6, 4)
    assert sft.max_samples == 6 * sft.per_device_train_batch_size * sft.gradient_accumulation_steps
    assert short_runs.few_steps(loaded.recipe, 4, "longest")["sft.max_samples"] is None, "rows are alike"
