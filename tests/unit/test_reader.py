"""Records of files: values by attribute, the file's content unchanged, and errors that name file, line and key."""

import json
import pickle

import pytest

from rlhf.errors import UserError
from rlhf.run import reader
from rlhf.run.records import MetricsLine, Summary
from tests.records import summary_of


def test_a_record_gives_the_content_of_its_file_back(tmp_path):
    content = {"new key": [1], **summary_of(wall_seconds=3, metrics={"b": 2, "a": 0.5}).plain()}
    file = tmp_path / "summary.json"
    file.write_text(json.dumps(content))
    summary = reader.read(file, Summary)
    assert summary is not None and summary.metrics == {"a": 0.5, "b": 2}
    assert json.dumps(summary.plain(), sort_keys=True) == json.dumps(content, sort_keys=True), "integers as integers"
    assert pickle.loads(pickle.dumps(summary)).plain() == content, "as other processes of a run get it"


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
        ('{"step": 1, "loss": "low"}', "loss: "),
        ('{"loss": 1}', "step: "),
        ("[1]", "MetricsLine"),
        ("{", "cannot be read"),
    ],
)
def test_a_wrong_line_is_named_with_its_key(tmp_path, line, message):
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 0}\n' + line + "\n")
    with pytest.raises(UserError) as caught:
        reader.read_lines(file, MetricsLine)
    said = str(caught.value)
    assert said.startswith(f"{file}:2: ") and message in said and "delete this line" in said


def test_a_damaged_target_of_a_summary_is_named(tmp_path):
    file = tmp_path / "summary.json"
    file.write_text(json.dumps(summary_of().plain() | {"targets": [{"verdict": "met", "name": "accuracy"}]}))
    with pytest.raises(UserError) as caught:
        reader.read(file, Summary)
    assert str(caught.value).startswith(f"{file}: ") and "target" in str(caught.value)
