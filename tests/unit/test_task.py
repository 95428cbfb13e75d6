"""A task, what one process gets of another's choices: read back as it was written, whatever the values are."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf.process import task as tasks
from tests.helpers import RECIPE, rlhf, small

LOADED = small()
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=5,
)


@settings(max_examples=25, deadline=None)
@given(st.dictionaries(st.text(min_size=1), VALUES, max_size=3), st.integers(0, 2**32 - 1), st.text(min_size=1))
def test_a_task_is_read_back_as_it_was_written(overrides, seed, out):
    """No value becomes a word that has to be quoted."""
    changed = LOADED._replace(overrides=overrides)
    task = tasks.task_of(changed, "sft", Path(out), resume=False, report_to=["wandb"]).of("rm", seed=seed)
    with tasks.arguments(task) as words:
        read = tasks.read(Path(words[-1]))
    assert read.model_dump() == task.model_dump() and not Path(words[-1]).exists()
    assert (read.stage, read.overrides, read.seed, read.out, read.resume) == (
        "rm",
        overrides,
        seed,
        str(Path(out)),
        False,
    )


def test_a_task_is_the_recipe_that_was_resolved():
    loaded = small(seed=7)
    task = tasks.task_of(loaded, "sft", Path("runs"))
    assert task.load() == loaded and task.load().recipe.seed == 7


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "no such file"), ("{", "task.json"), ('{"stage": "sftt"}', "stage"), ("[]", "task.json")],
)
def test_what_is_no_task_is_refused_in_one_line(tmp_path, monkeypatch, capsys, content, message):
    if content is not None:
        (tmp_path / "task.json").write_text(content)
    code, out, err = rlhf(monkeypatch, capsys, "run", "--resolved", tmp_path / "task.json")
    assert (code, out, err.count("\n")) == (1, "", 1) and message in err


def test_a_task_needs_no_other_argument(tmp_path, monkeypatch, capsys):
    fields = {"stage": "kto", "recipe": str(RECIPE), "overrides": {}, "seed": 3, "argv": ["rlhf"], "out": str(tmp_path)}
    (tmp_path / "task.json").write_text(json.dumps(fields | {"if_needed": True}))
    code, out, err = rlhf(monkeypatch, capsys, "run", "--resolved", tmp_path / "task.json")
    assert (code, out, err) == (0, "kto: not part of cpu-tiny v1\n", "")
