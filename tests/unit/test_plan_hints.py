"""What a plan adds to its tables."""

import json
import re
from pathlib import Path

import pytest
from rich.console import Console

from peakmem import cards
from rlhf import recipe
from rlhf.cli import chain
from rlhf.cli import plan_tables as tables
from rlhf.plan.fit import Fit
from rlhf.plan.plan import Plan, PlannedPhase, PlannedStage, StageTime, server_bytes
from rlhf.recipe import StageName
from rlhf.rollout.vllm_command import start_command
from rlhf.terminal import screen
from tests.unit.plans import SFT, Known, planned, planned_stage

ROOT = Path(__file__).parents[2]


def made(needed: float, price: float | None = None, rm: PlannedStage | None = None) -> Plan:
    stage = planned_stage(card_needed_bytes=round(needed * 1e9), time=StageTime(1.0, 2.0, (1.0, 3.0), None, None))
    on_host = planned_stage(fits=None, card_needed_bytes=90 * 10**9, in_memory_of="host")
    stages: dict[StageName, PlannedStage] = {"sft": stage, "merge": on_host}
    return planned(stages | ({"rm": rm} if rm else {}), price=price)


def test_a_card_that_is_far_from_full_is_said_to_have_room():
    hours = ". projected hours: 2.0 (1.0-3.0)"
    room = "; --fastest looks for settings that use the rest"
    assert tables.answer(made(11.0)) == f"fits the card: sft needs most, 11.00 of 25.00 GB{room}{hours}"
    assert tables.answer(made(20.0)) == f"fits the card: sft needs most, 20.00 of 25.00 GB{hours}"


def test_nothing_fits_where_one_stage_does_not():
    too_large = planned_stage(fits=False, card_needed_bytes=20 * 10**9)
    assert tables.answer(made(20.0, rm=too_large)).startswith("does not fit the card: sft needs most")


def test_the_price_is_asked_for_where_it_would_make_a_cost():
    assert tables.hints(made(20.0))[0].startswith("--price")
    assert not [line for line in tables.hints(made(20.0, price=2.5)) if "--price" in line]


def full(cost: float | None = None, fits: bool = False) -> Plan:
    """A plan with everything that the tables show: one stage with the longest of its cells."""
    sizes = dict.fromkeys(("peak_bytes", "card_needed_bytes", "card_reserved_bytes"), 20 * 10**9)
    phase = PlannedPhase(10**9, None, None, 0, {"base": 10**9})
    larger = PlannedPhase(2 * 10**9, None, None, 0, {"base": 10**9})
    phases = {"evaluate": larger, "evaluate/prefill": larger, "evaluate/decode": phase, "train": phase}
    time = StageTime(2.2, 14.8, (13.8, 17.6), cost, None)
    budget = [(22 * 10**9, 24 * 10**9)]
    stage = planned_stage(**sizes, time=time, fits=fits, verdict="missed", published_bytes=budget, phases=phases)
    return planned({"sft": stage}, card_bytes=10**9)


def test_80_columns_show_the_stage_table_whole(monkeypatch, capsys):
    monkeypatch.setattr(screen, "OUT", Console(width=80, highlight=False))
    tables.show(full(cost=123.45), as_json=False)
    lines = capsys.readouterr().out.splitlines()
    (row,) = [line for line in lines if "DOES NOT FIT" in line]
    cells = [cell.strip() for cell in row.strip("│").split("│")]
    assert cells == ["sft", "20.00", "20.00", "DOES NOT FIT, missed", "14.8 (13.8-17.6)", "$123.45"]
    assert max(map(len, lines)) <= 80
    assert [line.partition(":")[0] for line in lines[-7:-2]] == ["peak", "needs", "verdict", "hours projected", "hours"]


def test_a_wide_terminal_shows_all_columns_but_an_empty_one():
    columns, (row,) = tables.stage_table(full(), wide=True)
    assert columns == list(tables.STAGE_COLUMNS[:-1]) and len(row) == len(columns)
    assert tables.stage_table(full(cost=1.0), wide=True)[0] == list(tables.STAGE_COLUMNS)


def test_a_phase_with_the_numbers_of_its_part_is_named_once():
    names = [row[1] for row in tables.phase_rows(full())]
    assert names == ["evaluate/prefill", "evaluate/decode", "train"]
    assert tables.phase_rows(full())[0][0] == "sft"


def test_the_answer_is_the_first_line_and_the_stage_table_follows_the_phases(capsys):
    tables.show(full(fits=True), as_json=False)
    out = capsys.readouterr().out
    assert out.index("predicted peak of each phase") < out.index("predicted memory in GB")
    assert " fits the card: sft needs most, 20.00 of 1.00 GB" in out.splitlines()[0]


@pytest.mark.parametrize(("place", "mentioned"), [("cuda", True), ("cpu", False)])
def test_a_plan_for_a_cpu_does_not_mention_gpus(place, mentioned, capsys):
    tables.show(planned({"sft": planned_stage(in_memory_of=place)}), as_json=False)
    assert ("are predictions" in capsys.readouterr().out) == mentioned


def test_a_stage_without_hours_has_the_reason():
    timed = planned_stage(time=StageTime(1.0, 2.0, (1.0, 3.0), None, None))
    untimed = planned_stage(no_time="rows are missing")
    lines = tables.time_lines(planned({"sft": timed, "rm": untimed, "dpo": untimed, "merge": planned_stage()}))
    assert lines[0].startswith("hours: lengths of rows ") and lines[1:] == ["no hours for rm, dpo: rows are missing"]


@pytest.mark.parametrize("cards", [1, 2])
def test_settings_that_fit_have_their_cost(cards, capsys):
    loaded = recipe.load(ROOT / "recipes/4090-llama2-7b/v2", {"hardware.count": cards, "ppo.num_mini_batches": 1})
    slower = Fit({"sft.gradient_checkpointing": True}, {"sft": SFT}, ())
    tables.show_fits(loaded, slower, 10**12, False, hours=(2.0, 2.5), price=0.5)
    said = f"projected cost of training: ${cards:.2f} as the recipe is, ${1.25 * cards:.2f} with these settings"
    assert said in capsys.readouterr().out
    own = recipe.load(ROOT / "recipes/4090-llama2-7b/v2")
    tables.show_fits(own, slower._replace(changes={}), 10**12, False, hours=(2.0, 2.0), price=0.5)
    assert "there is nothing to change: $1.00, projected" in capsys.readouterr().out
    tables.show_fits(loaded, slower, 10**12, True, hours=(2.0, 2.5), price=0.5)
    assert json.loads(capsys.readouterr().out)["projected_cost"] == 1.25 * cards


def test_hours_of_a_small_file_are_not_rounded_to_nothing():
    stage = planned_stage(time=StageTime(0.011, 0.024, (0.019, 0.036), None, None))
    (row,) = tables.stage_rows(planned({"sft": stage}))
    assert row[-3:-1] == ("0.01", "0.02 (0.02-0.04)")


GSM8K = recipe.load(ROOT / "recipes/4090-llama31-8b-gsm8k/v1")


@pytest.mark.parametrize(
    ("changes", "beside"),
    [
        ({}, 0.0),
        ({"grpo.vllm_url": "http://elsewhere:8000"}, 0.0),
        ({"grpo.vllm_url": "http://127.0.0.1:8000"}, 1.0),  # of the share that the command names
    ],
)
def test_a_server_on_the_same_card_needs_its_share(changes, beside):
    changed = GSM8K.with_changes(changes)
    command = start_command(changed.recipe, changed.recipe.online()["grpo"], "base")
    share = float(command.partition("--gpu-memory-utilization ")[2].split()[0])
    assert server_bytes(changed.recipe, "grpo") == pytest.approx(beside * share * 25.7e9, rel=1e-9)
    assert server_bytes(changed.recipe, "sft") == 0


def test_a_stage_fits_with_its_server_or_not_at_all():
    stage = planned_stage(card_needed_bytes=10 * 10**9, server_bytes=9 * 10**9, fits=True)
    plan = planned({"grpo": stage})
    assert "grpo: its vLLM server takes 9.00 GB of the card beside this" in tables.hints(plan)
    assert "grpo needs most, 19" in tables.answer(plan)


@pytest.mark.parametrize(
    ("where", "rehearsed", "words"),
    [
        ("4090-llama2-7b/v2", False, r"projected [\d.e-]+ minutes \([\d.e-]+ to [\d.e-]+\)"),
        ("cpu-tiny-sums/v1", True, r"projected [\d.e-]+ minutes .*"),
        ("cpu-tiny-sums/v1", False, ""),  # a rehearsal for the time alone would take longer than it is worth
    ],
)
def test_a_run_is_told_its_time_where_the_stage_was_rehearsed(where, rehearsed, words, monkeypatch, tmp_path):
    monkeypatch.setattr(chain, "Predictor", lambda: Known(SFT))
    monkeypatch.setattr("rlhf.plan.plan.machine.rates", lambda recipe: cards.Rates(1e9, 1e9, "measured"))
    file = tmp_path / "answer.json"
    monkeypatch.setattr("rlhf.cli.chain.cache.file_of", lambda *_: file)
    if rehearsed:
        file.write_text("{}")
    assert re.fullmatch(words, chain.forecast(recipe.load(ROOT / "recipes" / where), "sft").time)
