"""docs/own-model.md says what the tests check."""

import importlib
import re
from pathlib import Path

import pytest

from rlhf.recipe.model_types import TESTED
from tests import models

FILE = Path(__file__).parents[2] / "docs" / "own-model.md"
PAGE = FILE.read_text(encoding="utf-8")


def test_the_table_is_that_of_the_tests():
    """`models.table()` writes it."""
    match = re.search(r"<!-- types -->\n(.*)\n<!-- /types -->", PAGE, re.S)
    assert match and match[1] == models.table()
    assert set(models.FEATURES) == set(models.KINDS) == set(TESTED)


@pytest.mark.parametrize("check", models.CHECKS)
def test_a_check_runs_over_all_types(check):
    assert f"- **{check}**" in PAGE
    module, name = models.CHECKS[check]
    test = getattr(importlib.import_module(module), name)
    marks = [mark.args for mark in getattr(test, "pytestmark", []) if mark.name == "parametrize"]
    over_kinds = any(args == ("kind", models.KINDS) for args in marks)
    assert over_kinds or "model" in test.__code__.co_varnames[: test.__code__.co_argcount]


def test_refused_types_are_named():
    for kind in models.REFUSED:
        assert f"`{kind}`" in PAGE
