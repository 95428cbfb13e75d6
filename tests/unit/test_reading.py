"""What the benchmarks write is checked where it is read, and comes back as it was."""

import json
from pathlib import Path
from typing import NotRequired

import pytest
import torch
from click.testing import CliRunner
from typing_extensions import TypedDict

from bench import ablation, kinds, provenance
from bench.memory import __main__ as memory
from bench.peer import __main__ as peer
from bench.reading import check, last_line, read
from rlhf import recipe
from rlhf.errors import UserError
from rlhf.run.records import Code
from tests.helpers import RECIPE

ROOT = Path(__file__).parents[2]
KINDS: dict[str, type[object]] = {
    "stages": kinds.StepsRecord,
    "phases": kinds.MemoryRecord,
    "figures": kinds.PeerRecord,
    "stages_beside": kinds.SupervisedRecord,
}


class Row(TypedDict):
    seconds: float
    peaks: dict[str, int]
    clock: NotRequired[kinds.Clock]


GOOD = {"seconds": 1, "peaks": {"train": 5}}


def test_a_content_comes_back_as_it_is_with_keys_that_are_not_known():
    content = GOOD | {"newer": None}
    assert check(content, Row, "a row") is content
    assert content == {"seconds": 1, "peaks": {"train": 5}, "newer": None}


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"seconds": "1"}, "seconds: input should be a valid number"),
        ({"seconds": None}, "seconds: input should be a valid number"),
        ({"peaks": {"train": 5.5}}, "peaks.train: input should be a valid integer"),
        ({"clock": "sun"}, "clock: input should be 'cpu' or 'wall'"),
    ],
)
def test_an_error_names_the_file_and_the_key(tmp_path, change, problem):
    file = tmp_path / "row.json"
    file.write_text(json.dumps(GOOD | change))
    with pytest.raises(UserError) as error:
        read(file, Row)
    assert str(error.value) == f"{file}: {problem}: damaged, or of another version"


def test_a_file_that_is_missing_or_no_json_is_named(tmp_path):
    with pytest.raises(UserError, match=r"none\.json: cannot be read"):
        read(tmp_path / "none.json", Row)
    (tmp_path / "half.json").write_text('{"seconds": ')
    with pytest.raises(UserError, match=r"half\.json: cannot be read"):
        read(tmp_path / "half.json", Row)


def test_what_a_process_prints_last_is_its_row():
    assert last_line(f"a warning\n{json.dumps(GOOD)}\n", Row, "a script") == GOOD
    with pytest.raises(UserError, match="a script: printed nothing"):
        last_line("", Row, "a script")
    with pytest.raises(UserError, match="a script: cannot be read"):
        last_line("Traceback\n", Row, "a script")
    with pytest.raises(UserError, match="a script: key 'peaks' is missing"):
        last_line('{"seconds": 1.0}', Row, "a script")


@pytest.mark.parametrize("key", KINDS)
def test_every_kind_has_a_stored_record_and_a_key_of_it_that_is_gone_is_named(key):
    stored = [json.loads(file.read_text()) for file in (ROOT / "results").rglob("*.json")]
    records = [content for content in stored if key in content]
    assert records
    for content in records:
        assert check(content, KINDS[key], "a record") is content
    for gone in ("code", key):
        with pytest.raises(UserError, match=f"a record: key '{gone}' is missing"):
            check({name: value for name, value in records[0].items() if name != gone}, KINDS[key], "a record")


@pytest.mark.parametrize(("dirty", "refused"), [(True, True), (None, True), (False, False)])
def test_code_that_is_not_committed_saves_no_record(monkeypatch, dirty, refused):
    """None: there is no git, and so no commit that the record could name."""
    monkeypatch.setattr(provenance, "code_version", lambda: Code(commit="0" * 40, dirty=dirty))
    if refused:
        with pytest.raises(UserError, match="--save: the code differs from its commit, or has none: commit first"):
            provenance.require_committed_code()
    else:
        provenance.require_committed_code()


def test_a_record_has_the_threads_of_the_recipe_s_runs_and_not_of_the_program_that_starts_them(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 7)
    assert provenance.describe_for(recipe.load(RECIPE).recipe)["threads"] == 1
    changed = recipe.load(RECIPE, {"hardware.threads": None})
    assert provenance.describe_for(changed.recipe)["threads"] == 7


@pytest.mark.parametrize(
    ("program", "work"),
    [
        (ablation.main, "bench.ablation._measure"),
        (peer.main, "bench.peer.__main__.Comparison"),
        (memory.measure, "bench.memory.measure.measure"),
    ],
)
def test_a_record_replaces_no_other_and_that_is_said_before_anything_is_measured(monkeypatch, tmp_path, program, work):
    monkeypatch.setattr(work, lambda *_: pytest.fail("it was measured"))
    monkeypatch.setattr(provenance, "code_version", lambda: Code(commit="0" * 40, dirty=False))
    file = tmp_path / "record.json"
    file.write_text("kept")
    result = CliRunner().invoke(program, ["--save", str(file)])
    assert isinstance(result.exception, UserError) and "exists, and a record replaces no other" in str(result.exception)
    assert file.read_text() == "kept"
    result = CliRunner().invoke(program, ["--save", str(tmp_path / "none" / "record.json")])
    assert result.exit_code == 2 and "there is no folder" in result.output
    monkeypatch.setattr(provenance, "code_version", lambda: Code(commit=None, dirty=None))
    result = CliRunner().invoke(program, ["--save", str(tmp_path / "new.json")])
    assert isinstance(result.exception, UserError) and "commit first" in str(result.exception)
