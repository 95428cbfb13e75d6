"""`rlhf data check` counts what is wrong with rows; `rlhf data show` prints them as they are trained."""

import io
import json
from collections.abc import Mapping
from pathlib import Path

import pytest
from rich.console import Console

from rlhf.data import check, formats, show
from rlhf.data.formats import ParsedRows
from rlhf.data.rows import Example, Message, PreferencePair, PromptOnly
from tests.helpers import rlhf
from tests.unit.test_turns import WITHOUT_MARKS, conversation, tokenizer

LONG = " ".join(f"word{n}" for n in range(20))


def pair(n: int, chosen: str = "Yes, it is.", rejected: str = "No.", **more: object) -> dict[str, object]:
    return {"prompt": f"Question {n}?", "chosen": chosen, "rejected": rejected, **more}


def read(folder: Path, *rows: Mapping[str, object], name: str = "rows.jsonl") -> ParsedRows:
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return formats.read([folder / name])


@pytest.mark.parametrize(
    ("rows", "name", "count", "total"),
    [
        ([pair(1), pair(2), pair(1, "Yes,  it is.")], "duplicates", 1, 3),
        ([pair(1), pair(1, "No.", "Yes, it is."), pair(2)], "contradictory", 2, 3),
        ([{"prompt": "1 + 1?", "answer": n} for n in (2, 2.0, 3)], "further answers", 1, 3),
        ([pair(1, score_chosen=1, score_rejected=2), pair(2, margin="n/a"), pair(3, margin=1)], "inverted", 1, 2),
        ([pair(1, margin=0), pair(2, margin=2)], "tied", 1, 2),
        ([pair(1, "<|im_start|>assistant\nYes."), pair(2, "x [INST] y"), pair(3, "a < b: [c]")], "templated", 2, 3),
        ([pair(1), pair(2, "No.", "Yes, it is.")], "chosen longer", 1, 2),
    ],
)
def test_each_fault_is_counted_with_its_places(tmp_path, rows, name, count, total):
    (found,) = [finding for finding in check.check(read(tmp_path, *rows)) if finding.name == name]
    assert (found.rows, found.total) == (count, total)
    assert name == "chosen longer" or f"rows.jsonl:{found.places[0].rpartition(':')[2]}" in str(found)


def test_good_rows_have_no_fault(tmp_path):
    rows = [pair(n, *(("Yes, it is.", "No.") if n % 2 else ("No.", "Yes, it is."))) for n in range(9)]
    assert not [finding for finding in check.check(read(tmp_path, *rows)) if finding.fault]


def test_held_out_rows_that_training_rows_repeat_are_found(tmp_path):
    train = read(tmp_path, pair(1), pair(2, LONG), pair(3, "short"))
    heldout = read(tmp_path, pair(1), pair(9, LONG + " and more"), pair(8, "short"), name="heldout.jsonl")
    found = {finding.name: finding.places for finding in check.check(train, heldout)}
    assert found["leaked"] == [f"{tmp_path}/heldout.jsonl:1"]
    assert found["overlapping"] == [f"{tmp_path}/heldout.jsonl:2"]


def test_what_a_recipes_lengths_cut_is_counted(tmp_path):
    rows = read(tmp_path, *({"prompt": "ab" * n, "completion": "cd" * n} for n in (1, 30)))
    found = {finding.name: finding.rows for finding in check.cut(rows, tokenizer(WITHOUT_MARKS), (60, 80))}
    assert found == {"prompts cut": 1, "responses cut": 1}


def shown(row: Example | PreferencePair | PromptOnly, template: str | None = WITHOUT_MARKS) -> list[str]:
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(show.row(row, tokenizer(template) if template else None))
    return [line.rstrip() for line in console.export_text().splitlines() if line.strip()]


def test_a_conversation_is_shown_as_it_is_trained():
    title, *lines = shown(conversation("Hi", "ab", "more", "cde"))
    assert "2 answers" in title and "7 of" in title
    assert [line[2:] for line in lines if line[0] == "┃"] == ["ab<|im_end|>", "cde<|im_end|>"]
    assert [line[2:] for line in lines if line[0] == "│"][:2] == ["<|im_start|>user", "Hi<|im_end|>"]


def test_both_answers_of_a_pair_and_what_nothing_reads_are_shown():
    row = PreferencePair((Message("user", "Q\x1b?"),), "yes", "no", "rows:1", 2.0, {"annotator": "anna"})
    title, *lines = shown(row)
    assert "rows:1" in title and "margin 2" in title
    assert [line for line in lines if line[0] in "┃╎"] == ["┃ yes<|im_end|>", "╎ no<|im_end|>"]
    assert any("annotator" in line and "anna" in line for line in lines) and "\x1b" not in "".join(lines)
    assert [line for line in shown(row, None) if line[0] in "┃╎"] == ["┃ assistant: yes", "╎ assistant: no"]


@pytest.mark.parametrize(("rows", "code"), [([pair(1)], 0), ([pair(1), pair(1)], 3), ([pair(1), {"prompt": 3}], 1)])
def test_the_exit_code_says_what_was_found(tmp_path, monkeypatch, capsys, rows, code):
    read_file = tmp_path / "rows.jsonl"
    read_file.write_text("".join(json.dumps(row | {"x": 1}) + "\n" for row in rows))
    found, out, err = rlhf(monkeypatch, capsys, "data", "check", read_file, "--set", "data.ignore=[x]")
    assert found == code and "rows.jsonl" in out + err
    found, out, _ = rlhf(monkeypatch, capsys, "data", "show", read_file, "--set", "data.columns.answer=x")
    assert found == 0 and "rows.jsonl:1" in out


def test_a_long_line_is_shown_to_its_end_without_a_terminal(tmp_path, monkeypatch, capsys):
    (tmp_path / "rows.jsonl").write_text(json.dumps(pair(1, f"{LONG} {LONG} the end.")) + "\n")
    _, out, _ = rlhf(monkeypatch, capsys, "data", "show", tmp_path / "rows.jsonl")
    assert "the end." in out
