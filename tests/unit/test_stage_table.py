"""The table of stages: complete, and the only place that names them."""

import ast
from pathlib import Path

import pytest

from rlhf.recipe.stages import EVALUATE, MERGE, STAGE_TABLE, STAGES, TRAINING_STAGES

PACKAGE = Path(__file__).parents[2] / "rlhf"
# Names that are also those of a phase or a YAML tag cannot be told from them.
NAMES = {*STAGES} - {EVALUATE, MERGE}
# A stage's own module and what only its kind uses may name it; so may the words of a value that is no stage.
OWN = {
    "recipe/stages.py": "the table",
    "recipe/schema_model.py": "model.source: pretrain",
    "recipe/schema_online.py": "loss_type: grpo",
    "data/fields.py": "a word of a column's name",
    "objectives/choices.py": "loss_type: grpo",
    "objectives/groups.py": "loss_type: grpo",
}


def _literals(file: Path) -> list[str]:
    """Return the names of stages that a file writes as strings outside of types, each with its line."""
    tree = ast.parse(file.read_text())
    types = {
        id(constant)
        for node in ast.walk(tree)
        if isinstance(node, ast.Subscript) and ast.unparse(node.value).endswith("Literal")
        for constant in ast.walk(node)
    }
    return [
        f"{file}:{node.lineno}: {node.value!r}"
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and node.value in NAMES and id(node) not in types
    ]


def test_stage_names_are_written_in_the_table_alone():
    files = [file for file in PACKAGE.rglob("*.py") if str(file.relative_to(PACKAGE)) not in OWN]
    found = [line for file in files if file.parent.name != "stages" for line in _literals(file)]
    assert not found, "\n".join(found)


def test_a_literal_would_be_found(tmp_path):
    file = tmp_path / "new.py"
    file.write_text('from typing import Literal\nName = Literal["sft"]\nif stage == "dpo":\n    ...\n')
    assert _literals(file) == [f"{file}:3: 'dpo'"]


def test_the_table_has_a_row_for_every_stage_in_their_order():
    assert tuple(STAGE_TABLE) == STAGES
    assert len({row.place for row in STAGE_TABLE.values()}) == len(STAGES), "two boxes in one place"
    for stage, row in STAGE_TABLE.items():
        assert all(STAGES.index(parent) < STAGES.index(stage) for parent in row.parents), stage


@pytest.mark.parametrize("stage", STAGES)
def test_every_stage_has_a_module_and_every_training_stage_curves_and_checks(stage):
    row = STAGE_TABLE[stage]
    assert (PACKAGE / "stages" / f"{row.module or stage}.py").is_file()
    if stage in TRAINING_STAGES:
        assert row.curves and "nan" in row.checks
