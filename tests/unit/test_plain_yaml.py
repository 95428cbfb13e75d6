"""The reader of YAML: decimal numbers, plain kinds of values, and one line for everything else."""

import math

import pytest

from rlhf.errors import UserError
from rlhf.recipe.plain_yaml import parse, read_yaml


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ('a: 1\nb: "\\ud800"', None),
        ("a: !!binary aGVsbG8=", 1),
        ("a: 1\nb: !!set {x, y}", 2),
        ('a: !!python/object/apply:os.system ["id"]', 1),
        ("a: &a [*a]", 1),
        ("a: &a 1\nb: *a", 2),
        ("a: 1\nb: {<<: {x: 1}}", 2),
        ("? [1]\n: 2", 1),
        ("a: 1\non: x", 2),
        ("a: 1\nb: 2\na: 3", 3),
        ("a: " + "[" * 100_000, None),
        ("a: " + "9" * 5000, None),
        ("a: [1, 2", 1),
        ("a: 1\n---\nb: 2", 2),
    ],
    ids=lambda value: str(value)[:20],
)
def test_bad_yaml_is_one_line_with_its_place(text, line):
    with pytest.raises(UserError) as caught:
        parse(text, "file.yaml")
    message = str(caught.value)
    assert message.startswith(f"file.yaml:{line}: " if line else "file.yaml: ")
    assert "\n" not in message and len(message) < 500


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a: 2020-01-01", {"a": "2020-01-01"}),
        ("a: [0, 0.5, -0.1, 1_000, -7, 1e-4]", {"a": [0, 0.5, -0.1, 1000, -7, 1e-4]}),
        ("a: [1:30, -010, 0_7, 0x10, 0b1, 1:30.5]", {"a": ["1:30", "-010", "0_7", "0x10", "0b1", "1:30.5"]}),
        ("a: [.inf, -.INF, 1., 1e5, 1.5e+3]", {"a": [math.inf, -math.inf, 1.0, 1e5, 1500.0]}),
        ("a: [00.5, .5, -.5, +.5, .5e3, -.5E-1, 08]", {"a": [0.5, 0.5, -0.5, 0.5, 500.0, -0.05, "08"]}),
        ('a: "tab\\tand line\\n"', {"a": "tab\tand line\n"}),
    ],
)
def test_numbers_are_decimal_and_all_else_is_text(text, value):
    assert parse(text, "file.yaml") == value


@pytest.mark.parametrize("content", [b"a: \xe9", b"", b"- 1\n", None])
def test_a_file_without_keys_is_named(tmp_path, content):
    file = tmp_path / "recipe.yaml"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(UserError, match=str(file)):
        read_yaml(file)
