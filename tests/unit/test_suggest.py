"""Columns that show no kind are answered with the complete command that rewrites the file."""

import csv
import re
import shlex

import pytest

from rlhf.data import formats
from rlhf.data.rows import Example, PreferencePair, PromptOnly
from rlhf.errors import UserError
from tests.helpers import rlhf

ODD = {
    "question,good,bad,agent": ("preference", "question=prompt good=chosen bad=rejected", "(without 'agent')"),
    "user_question,agent,worse": ("preference", "user_question=prompt agent=chosen worse=rejected", ""),
    "loser,winner,task": ("preference", "task=prompt winner=chosen loser=rejected", ""),
    "unpreferred_answer,question,preferred": (
        "preference",
        "question=prompt preferred=chosen unpreferred_answer=rejected",
        "",
    ),
    "id,instruction_text,model_answer,note": (
        "completion",
        "instruction_text=prompt model_answer=completion",
        "(without 'note')",
    ),
    "frage,antwort": ("completion", "frage=prompt antwort=completion", ""),
    "riddle,answer": ("question", "riddle=question", ""),
    "id,task name": ("prompt", "'task name=prompt'", ""),
}


@pytest.mark.parametrize("columns", ODD)
def test_the_command_in_the_message_rewrites_the_file(tmp_path, monkeypatch, capsys, columns):
    kind, names, left_out = ODD[columns]
    monkeypatch.chdir(tmp_path)
    header = columns.split(",")
    with open("odd rows.csv", "w", newline="") as file:
        csv.writer(file).writerows(
            [header, *([i if name == "id" else f"This is {name} {i}." for name in header] for i in range(3))]
        )
    with pytest.raises(UserError, match="unknown columns") as error:
        formats.read(["odd rows.csv"])
    found = re.search(r"`(rlhf data convert .*?)`( \(without .*?\))?", str(error.value))
    assert found and (found[2] or "").strip() == left_out
    assert shlex.split(found[1])[4:-2] == [
        *(word for name in shlex.split(names) for word in ("--rename", name)),
        *(["--format", kind] if left_out else []),
    ]
    code, _, err = rlhf(monkeypatch, capsys, *shlex.split(found[1])[1:])
    assert code == 0, err
    rows = formats.read(["new.jsonl"])
    assert rows.report.files[0].rows == 3 and len(rows.rows) == 3
    assert isinstance(rows.rows[0], {"preference": PreferencePair, "prompt": PromptOnly}.get(kind, Example))


def test_columns_without_a_text_have_no_command(tmp_path):
    (tmp_path / "numbers.csv").write_text("a,b\n1,2\n3,4\n")
    with pytest.raises(UserError, match=r"unknown columns: 'a', 'b'\. Rename them .* --rename problem=prompt"):
        formats.read([tmp_path / "numbers.csv"])


PAIRS = (
    "besser,schlechter",
    "not_chosen,dislike",
    "unaccepted,closed",
    "win_rate,goodbye",
    "least_preferred,bad_faith",
)


@pytest.mark.parametrize(
    "columns", [",".join(names) for pair in PAIRS for a, b in [pair.split(",")] for names in ((a, b), (b, a))]
)
def test_no_order_of_columns_and_no_part_of_a_name_says_which_answer_is_better(tmp_path, columns):
    (tmp_path / "rows.csv").write_text(f"frage,{columns}\n" + "What is it?,It is this.,It is that.\n" * 2)
    with pytest.raises(UserError) as error:
        formats.read([tmp_path / "rows.csv"])
    assert "is chosen" not in str(error.value) and "=rejected" not in str(error.value)


@pytest.mark.parametrize("verdicts", [(1, 2), ("x", "y"), ("a1", "a2")])
def test_no_command_makes_pairs_of_answers_that_another_column_may_judge(tmp_path, verdicts):
    rows = [f"What is {i}?,It is {i} here.,It is not {i}.,{verdicts[i % 2]}" for i in range(4)]
    (tmp_path / "rows.csv").write_text("\n".join(["q,a1,a2,better_one", *rows]))
    with pytest.raises(UserError) as error:
        formats.read([tmp_path / "rows.csv"])
    assert "is chosen" not in str(error.value) and "=rejected" not in str(error.value)
