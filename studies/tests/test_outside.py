"""The comparison with runs that others measured: its data, its lengths, and the page that is made from the record."""

from statistics import median
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from bench.reading import read
from peakmem.cards import SMALL_WORKSPACE
from peakmem.depth import NotAligned, deepen
from peakmem.events import PRODUCT, Event
from rlhf.errors import UserError
from rlhf.plan.fit import USABLE
from studies.kinds import OpenPredictions, OutsideRecord
from studies.outside import (
    adapter_page,
    adapter_runs,
    blind,
    collect,
    collect_fms,
    compare,
    lengths,
    loop,
    opened,
    page,
    plot,
    steps,
)
from studies.outside.__main__ import FOLDER
from studies.outside.loop import STEP
from studies.outside.others import __main__ as others
from studies.paths import OUTSIDE

RECORDS = sorted(FOLDER.glob("*.json"))
MIB = 1 << 20


def test_a_run_whose_two_depths_do_not_match_is_rehearsed_whole(monkeypatch):
    """More events with fewer layers cannot be aligned."""

    def rehearse(run, layers: int, tokens) -> SimpleNamespace:
        events = [Event(number, 1, (), "mm") for number in range(10 - layers if layers < 5 else layers)]
        return SimpleNamespace(events=events, trainable=layers, work=np.array([layers]))

    with pytest.raises(NotAligned):
        deepen(rehearse(None, 2, ()).events, rehearse(None, 4, ()).events, loop.LAYERS)
    monkeypatch.setattr(loop, "rehearse", rehearse)
    monkeypatch.setattr(steps, "recorded", lambda events, *_: len(events))
    run: Any = {}
    found: Any = compare._recorded(run, 0)
    assert found == (loop.LAYERS, loop.LAYERS, np.array([loop.LAYERS]))


def test_the_measured_figures_say_where_they_are_from():
    content = collect.runs()
    assert len(content["commit"]) == 40
    files = [run["file"] for run in content["runs"]]
    assert len(files) == len(set(files)) == 63
    assert lengths.CALIBRATED_ON in files
    for run in content["runs"]:
        measured = run["measured"]
        assert measured["allocated_average"] < measured["reserved_average"] < measured["reserved_max"] < 48 * 10**9
        assert run["versions"]["torch"] == "2.13.0+cu130"


def test_the_packed_figures_say_where_they_are_from():
    content = collect_fms.packed_runs()
    assert len(content["commit"]) == 40 and content["unit"].startswith("bytes")
    assert all(run["measured"]["allocated"] < run["measured"]["peak_allocated"] < 80e9 for run in content["runs"])


def test_lengths_have_the_published_mean_and_the_calibrated_longest():
    rows = lengths._rows()
    assert len(rows) == 20_000
    assert rows.mean() == pytest.approx(lengths.MEAN, rel=0.001)
    windows = lengths.windows()
    assert windows.shape == (500, 10)
    assert windows.max() == lengths.LONGEST
    for first, second in zip(windows[::2], windows[1::2], strict=True):
        bucket = [*first, *second]
        assert bucket == sorted(bucket, reverse=True), "a bucket goes from long to short"


def recording(tokens: tuple[int, ...]) -> list[Event]:
    """A weight; steps that make 1000 bytes for each token and keep them until the next step has made its own."""
    events = [Event(0, 3 * MIB, (), "weight"), Event(None, 0, (), PRODUCT)]
    kept, made = None, 1
    for length in tokens:
        events.append(Event(None, 0, (), STEP))
        events.append(Event(made, 1000 * length, (), "out"))
        events.append(Event(made + 1, 64 * length**2, (), "scores"))
        events.append(Event(made + 1, -64 * length**2, (), ""))
        if kept is not None:
            events.append(Event(kept[0], -kept[1], (), ""))
        kept, made = (made, 1000 * length), made + 2
    return [*events, Event(None, 0, (), STEP)]


TOKENS = (11, 11, 31, 53, 71, 97, 101)


def test_a_step_is_a_function_of_the_length():
    run = steps.recorded(recording(TOKENS), TOKENS, virtual=0)
    assert run.step.exact
    assert run.step.actions == [(0, 0), (0, 1), (1, 1), (2, 0)]
    assert run.step.sizes(1234) == [1_234_000, 64 * 1234**2]
    assert list(run.alive) == [(1, 0)], "the output of the step before the first steady one"


def test_steps_that_differ_are_an_error():
    events = recording(TOKENS)
    at = max(i for i, event in enumerate(events) if event.name == "scores")
    with pytest.raises(ValueError, match="the steps do not do the same"):
        steps.recorded([*events[:at], Event(99, 512, (), "more"), *events[at:]], TOKENS, virtual=0)
    with pytest.raises(ValueError, match="7 steps were recorded, not 6"):
        steps.recorded(events, TOKENS[:-1], virtual=0)


def test_bytes_of_a_simulated_run_by_hand():
    """3 MiB of weights, 8.1 of workspace and outputs of 4000 tokens, two at a time, in a segment of 20 MiB."""
    run = steps.recorded(recording(TOKENS), TOKENS, virtual=0)
    usage = steps.simulate(run, np.array([[4000, 4000]]), loaded=0, virtual=0)
    out = -(-4_000_000 // 512) * 512
    scores = -(-64 * 4000**2 // (2 * MIB)) * 2 * MIB
    fixed = 3 * MIB + SMALL_WORKSPACE
    assert usage.allocated[0].tolist() == [fixed + out, fixed + out]
    assert usage.reserved[0, 0] == (20 + 2) * MIB + scores, "one segment, the scores', a small one of the recording"
    assert usage.reserved_most[0].max() <= 40 * MIB + scores


@pytest.mark.parametrize("file", RECORDS[-1:], ids=lambda file: file.stem)
def test_the_page_is_made_from_the_newest_record(file):
    record = read(file, OutsideRecord)
    assert record["code"]["dirty"] is False
    assert page.PAGE.read_text() == page.page(record, str(file.relative_to(OUTSIDE)))
    assert plot.IMAGE.read_text() == plot.plot([r for r in record["rows"] if "error" in r])
    assert plot.ERRORS.read_text() == plot.errors(adapter_page.compared())
    files = {row["file"] for row in record["rows"]}
    assert files == {run["file"] for run in compare.runs()}, "every run is compared, or it is said why not"


def test_windows_are_replayed_after_those_before_them():
    chosen, sampled = compare._windows()
    longest = int(lengths.windows().max(1).argmax())
    assert {*range(longest - compare.BEFORE, longest + 1)} <= {*chosen.tolist()}
    assert chosen.tolist() == sorted({*chosen.tolist()})
    assert len(sampled) == 2 * compare.SAMPLED, "both halves of a bucket, so that the average is one"


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_a_run_of_lora_with_rank_64_is_predicted_within_half_a_percent():
    """LoRA with rank 64, which nothing was calibrated on."""
    (run,) = compare.runs("lora--rank64-rslora")
    row = compare.predict(run)
    assert row["trainable_parameters"]["predicted"] == row["trainable_parameters"]["measured"]
    assert row["sizes_exact"]
    assert abs(row["error"]["reserved_max"]) < 0.005
    assert abs(row["error"]["allocated_average"]) < 0.001


def test_a_step_does_not_hold_the_output_of_the_one_before_through_its_backward_pass():
    """The source's name for the output is given the new one after the forward pass, where the old one dies."""
    (run,) = (
        run
        for run in read(OUTSIDE / "canifinetune-rtx4080-blind.json", dict[str, Any])["runs"]
        if run["id"] == "Qwen__Qwen2.5-0.5B-Instruct_qlora_s1024_b1_r16_steps3"
    )
    setting = adapter_runs.rtx4080_setting(run)
    three, one = (adapter_runs.predict(setting._replace(steps=steps)) for steps in (3, 1))
    logits = 1024 * setting.shape["vocab_size"] * 4  # float32
    assert one.allocated <= three.allocated < one.allocated + logits
    corrected = {run["id"]: run for run in read(OUTSIDE / "blind-rtx4080-2.json", dict[str, Any])["runs"]}[run["id"]]
    assert three.allocated / 2**30 == pytest.approx(corrected["peak_allocated"], rel=0.001)
    assert three.reserved / 2**30 == pytest.approx(corrected["peak_reserved"], rel=0.03), "a skeleton takes nothing"


def test_blind_predictions_answer_every_run_of_their_settings():
    for file, settings in (
        ("blind-t4", "fitcheck-t4-blind"),
        ("blind-rtx4080", "canifinetune-rtx4080-blind"),
        ("blind-granite", "fms-granite-blind"),
        *((f"blind-{name}", f"{name}-settings") for name in others.SETS),
    ):
        predicted = read(OUTSIDE / f"{file}.json", dict[str, Any])
        content = read(OUTSIDE / f"{settings}.json", dict[str, Any])
        asked = content["runs"] if isinstance(content["runs"], list) else content["settings"]
        assert len(predicted["code"]["commit"]) == 40 and not predicted["code"].get("dirty")
        names = [run.get("id") or f"{run['base']}|{run['method']}|{run['rows']}" for run in asked]
        assert [run["id"] for run in predicted["runs"]] == names
        for run in predicted["runs"]:
            assert run.get("refused") or all(value > 0 for key, value in run.items() if key.startswith("peak_"))


def test_the_correction_is_kept_beside_the_blind_predictions_that_it_corrects():
    blind_errors, corrected = (opened.errors(name, "peak_allocated") for name in opened.FILES)
    assert len(blind_errors) == len(corrected) == 12
    assert min(blind_errors.values()) > -0.01 and median(blind_errors.values()) == pytest.approx(0.132, abs=0.001)
    assert max(map(abs, corrected.values())) < 0.002
    assert max(abs(error) for error in opened.errors("corrected", "peak_reserved").values()) < 0.09


def test_predictions_are_written_as_they_are_asked_for(monkeypatch):
    """The open ones, or blind ones, whose file is never written again."""
    opened: list[bool] = []
    monkeypatch.setattr(blind, "require_committed_code", lambda: None)
    monkeypatch.setattr(blind, "write_open", lambda: opened.append(True))
    shown = CliRunner().invoke(blind.main, ["--help"])
    assert shown.exit_code == 0 and "open-t4.json" in shown.output
    CliRunner().invoke(blind.main, ["--open"], catch_exceptions=False)
    assert opened == [True]
    with pytest.raises(UserError, match=r"blind-t4\.json exists: a prediction stays as it is"):
        CliRunner().invoke(blind.main, ["t4"], catch_exceptions=False)
    assert opened == [True]


def test_every_open_run_has_a_prediction_of_committed_code():
    content = read(adapter_page.OPEN, OpenPredictions)
    assert len(adapter_page.compared()) == len(read(OUTSIDE / "fitcheck-t4.json", dict[str, Any])["runs"])
    assert all(len(one["commit"]) == 40 and one["predicted"] for one in content["runs"].values())


def test_open_runs_on_the_t4_are_within_what_the_page_claims():
    runs = adapter_page.compared()
    errors = sorted(abs(run.error("peak_allocated") or 0.0) for run in runs)
    assert errors[len(errors) // 2] < 0.003 and errors[-1] < 0.02
    assert all(abs(run.error("peak_reserved") or 0.0) < 0.01 for run in runs if ", float16, " in run.name)


def test_the_margin_of_a_card_is_what_95_percent_of_the_open_runs_needed():
    assert adapter_page.above_prediction(adapter_page.compared()) <= 1 - USABLE
