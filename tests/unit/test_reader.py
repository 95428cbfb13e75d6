"""Records of files: values by attribute, the file's content unchanged, and errors that name file, line and key."""

import json
import pickle
from pathlib import Path

import pytest
from pydantic import ValidationError

from rlhf.errors import UserError
from rlhf.run import reader
from rlhf.run.outcomes import SampleLine
from rlhf.run.records import Comparison, MetricsLine, Summary
from tests.records import summary_of


def test_a_record_is_frozen_and_gives_the_content_of_its_file_back(tmp_path):
    content = {"new key": [1], **summary_of(wall_seconds=3, metrics={"b": 2, "a": 0.5}).plain()}
    file = tmp_path / "summary.json"
    file.write_text(json.dumps(content))
    summary = reader.read(file, Summary)
    assert summary is not None and summary.metrics == {"a": 0.5, "b": 2}
    assert json.dumps(summary.plain()) == json.dumps(content), "the same keys in the same order, integers as integers"
    assert pickle.loads(pickle.dumps(summary)).plain() == content, "as other processes of a run get it"
    with pytest.raises(ValidationError, match="frozen"):
        summary.seed = 1


def test_the_content_of_a_copy_has_its_changes():
    row = reader.check({"step": 1, "loss": 0.5}, MetricsLine, "here")
    assert row.model_copy(update={"step": 2}).plain() == {"step": 2, "loss": 0.5}
    assert row.model_copy().plain() == row.plain() == {"step": 1, "loss": 0.5}


def test_numbers_keep_their_kind_and_missing_values_are_none(tmp_path):
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 1, "count": 3, "loss": 0.5, "ratio": NaN}\n{"step": 2, "count": 4}\n{"step": 3, "co')
    first, second = reader.read_lines(file, MetricsLine)
    assert (first.step, second.step) == (1, 2)
    assert dict(first.values) == {"count": 3, "loss": 0.5, "ratio": None}
    assert isinstance(first.values["count"], int)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"step": 1, "loss": "low"}', "loss: input should be a valid number"),
        ('{"step": true}', "step: input should be a valid integer"),
        ('{"loss": 1}', "key 'step' is missing"),
        ("[1]", "not an object with keys"),
        ("{", "cannot be read"),
    ],
)
def test_a_wrong_line_is_named_with_its_key(tmp_path, line, message):
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 0}\n' + line + "\n")
    with pytest.raises(UserError) as caught:
        reader.read_lines(file, MetricsLine)
    assert str(caught.value).startswith(f"{file}:2: ") and message in str(caught.value)


def test_a_file_that_the_system_cannot_read_is_named():
    """The first page of a process's memory is such a file: EIO, an error without a name."""
    for read in (reader.read, reader.read_lines):
        with pytest.raises(UserError, match=r"^/proc/self/mem: cannot be read \(.*Input/output error\)$"):
            read(Path("/proc/self/mem"), MetricsLine)


def test_a_way_out_belongs_to_the_message_and_not_to_its_advice():
    with pytest.raises(UserError) as failure, reader.advising("repair it"):
        raise UserError("a.json: damaged", "the file is described in docs/data.md")
    assert failure.value.lines == ("a.json: damaged; repair it", "the file is described in docs/data.md")


def test_answers_of_an_evaluation_and_of_a_training_log_are_read_alike():
    evaluated = {"step": 0, "prompt": "p", "sft": {"response": "a", "score": 1}, "ppo": {"response": "b"}}
    answers = SampleLine.model_validate(evaluated).answers
    assert {name: (answer.response, answer.score) for name, answer in answers.items()} == {
        "sft": ("a", 1),
        "ppo": ("b", None),
    }
    logged = SampleLine.model_validate({"step": 7, "prompt": "p", "response": "c"}).answers
    assert {name: answer.response for name, answer in logged.items()} == {"response": "c"}


def test_a_comparison_computes_its_verdict_and_refuses_what_it_cannot_compare():
    entry = {"name": "f", "metric": "hours", "published": [None, 61], "unit": "h", "measured": 70, "verdict": "met"}
    entry |= {"stage": "sft", "range": [None, 61], "source": "ours"}
    comparison = Comparison.model_validate(entry)
    assert (comparison.figure.title, comparison.outcome.word) == ("f", "missed"), "the stored word does not count"
    with pytest.raises(ValidationError, match="published"):
        Comparison.model_validate(entry | {"published": [61]})
