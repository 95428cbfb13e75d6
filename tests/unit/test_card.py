"""The page of a result has what the records of its run say, and no other figure."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from rlhf.files import sha256
from rlhf.run import card
from rlhf.run.finished import check_result, read_summary
from tests.helpers import not_none
from tests.records import write_records

OWN = {
    "response_length_base": 9.0,
    "reward_numeric_answer": 0.5,
    "reward_numeric_answer_base": 0.047,
    "reward_numeric_answer_gain": 0.453,
}
EVALUATED = {
    "base/reward_numeric_answer": 0.0514,
    "grpo/reward_numeric_answer": 0.6047,
    "grpo/reward_numeric_answer_gain": 0.5533,
    "grpo/reward_numeric_answer_gain_low": 0.49,
    "grpo/reward_numeric_answer_gain_high": 0.617,
    "grpo/heldout_prompts": 253,
}
SETTINGS = {
    "model": {"source": "hub", "name": "org/Base-1B", "revision": "abc123"},
    "data": {"source": "hub", "name": "org/rows", "heldout_fraction": 0.1},
}
MANIFEST = {
    "settings": SETTINGS,
    "seed": 7,
    "packages": {"torch": "2.13.0"},
    "code": {"commit": "c0ffee", "dirty": False},
    "data": {"sha256": "1" * 64, "files": [{"name": "/home/ann/secret/rows.jsonl", "sha256": "2" * 64}]},
}


def stage(run: Path, name: str, folder: str | None = "adapter", manifest=MANIFEST, **summary) -> Path:
    if folder:
        (run / name / folder).mkdir(parents=True, exist_ok=True)
        (run / name / folder / "weights").write_text(name)
    write_records(run / name, manifest={**manifest, "stage": name}, summary=summary)
    return run / name


@pytest.fixture
def run(tmp_path: Path) -> Path:
    stage(tmp_path, "grpo", metrics=OWN)
    return tmp_path


def evaluate(run: Path, digest: str, metrics: dict[str, float]) -> None:
    stage(run, "evaluate", folder=None, manifest={**MANIFEST, "parents": {"grpo": digest}}, metrics=metrics)


def header(text: str) -> Any:
    return yaml.safe_load(text.split("---\n")[1])


def results(text: str) -> str:
    return text.partition("## Results\n\n")[2].partition("\n\n## How")[0]


def test_the_header_parses_and_names_what_is_known(run):
    text = card.page(run, "grpo")
    assert header(text) == {
        "base_model": "org/Base-1B",
        "datasets": "org/rows",
        "library_name": "peft",
        "pipeline_tag": "text-generation",
        "tags": ["rlhf", "grpo"],
    }
    for fact in ("cpu-tiny/v1", "0" * 64, "| seed | 7 |", "`c0ffee`", "rows.jsonl", "2" * 64, "torch 2.13.0"):
        assert fact in text
    assert "/home/ann" not in text and 'from_pretrained("org/Base-1B", revision="abc123")' in text


def test_figures_are_those_of_an_evaluation_of_these_weights_else_the_stage_s_own(run):
    own = results(card.page(run, "grpo"))
    assert "0.047 before, 0.5 after; +0.45: not known yet" in own
    evaluate(run, "9" * 64, EVALUATED)
    assert results(card.page(run, "grpo")) == own, "an evaluation of other weights"
    evaluate(run, sha256(run / "grpo/summary.json"), EVALUATED)
    measured = "0.0514 before, 0.6047 after; +0.55 (95 %: +0.49 to +0.62) on 253 held-out prompts: better"
    assert results(card.page(run, "grpo")) == f"- GRPO against the base, numeric answer: {measured}"
    stage(run, "merge", "model", manifest={**MANIFEST, "settings": {**SETTINGS, "merge": {"stage": "grpo"}}})
    merged = card.page(run, "merge")
    assert measured in results(merged) and header(merged)["library_name"] == "transformers"


def test_what_nobody_measured_has_no_figure(tmp_path):
    stage(tmp_path, "sft", metrics={"loss": 1.0})
    assert results(card.page(tmp_path, "sft")) == "No result was measured."


def test_a_reward_model_has_its_accuracy(tmp_path):
    stage(tmp_path, "rm", metrics={"accuracy": 0.73, "accuracy_low": 0.71, "accuracy_high": 0.75})
    text = card.page(tmp_path, "rm")
    assert results(text) == "- Accuracy on held-out pairs: 0.73, 95 %: (0.71 to 0.75)"
    assert header(text)["pipeline_tag"] == "text-classification" and "num_labels=1" in text


def test_pages_follow_the_records_and_belong_to_no_result(run):
    card.write(run)
    first = (run / "grpo/adapter/README.md").read_text()
    evaluate(run, sha256(run / "grpo/summary.json"), EVALUATED)
    (run / "sft").mkdir()
    (run / "sft/summary.json").write_text("{")  # a damaged stage keeps others from nothing
    card.write(run)
    assert "+0.55" not in first and "+0.55" in (run / "grpo/adapter/README.md").read_text()
    (run / "grpo/adapter/README.md").write_bytes(b"\xff, of an editor")
    check_result(run / "grpo", not_none(read_summary(run / "grpo")))
