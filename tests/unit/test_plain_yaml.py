"""YAML that is circular, tagged, too large or too deep is one line with file and line, soon and in little memory."""

import json
import math
import os
import time

import pytest

from rlhf.errors import UserError
from rlhf.process import launching
from rlhf.recipe import load, parse_overrides
from rlhf.recipe.plain_yaml import MAX_BYTES, MAX_DEPTH, MAX_NODES, parse, read_yaml
from tests.helpers import RECIPE

BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n"
BOMB += "\n".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 10))
MAPS = "a0: &a0 {x: 1, y: 2}\n"
MAPS += "\n".join(f"a{i}: &a{i} {{{', '.join(f'k{j}: *a{i - 1}' for j in range(9))}}}" for i in range(1, 10))
CHAIN = "a0: &a0 [x]\n" + "\n".join(f"a{i}: &a{i} [*a{i - 1}]" for i in range(1, 99))
BAD = {  # case -> text, line, part of the message
    "nul-bytes": ("a: 1\nb: \0", 2, "U+0000"),
    "escaped-nul": ('a: "\\0"', 1, "U+0000"),
    "surrogate": ('a: 1\nb: "\\ud800"', 2, "U+D800"),
    "escape": ('a: "\\e[31m"', 1, "U+001B"),
    "esckey": ('"\\e": 1', 1, "U+001B"),
    "binarytag": ("a: !!binary aGVsbG8=", 1, "tag !!binary"),
    "settag": ("a: 1\nb: !!set {x, y}", 2, "tag !!set"),
    "omap": ("a: !!omap [x: 1]", 1, "tag !!omap"),
    "timestamp-tag": ("a: !!timestamp 2020-01-01", 1, "tag !!timestamp"),
    "python-tag": ('a: !!python/object/apply:os.system ["id"]', 1, "tag !!python"),
    "own-tag": ("a: !mine x", 1, "tag !mine"),
    "tag-before-another-kind": ("a: !!map [1]", 1, "tag !!map"),
    "circular": ("a: &a [*a]", 1, "*a stands inside of what it names"),
    "circular-map": ("a: &a\n  b: *a", 2, "*a stands inside of what it names"),
    "unknown-alias": ("a: *x", 1, "undefined alias"),
    "unhashable-key": ("? [1]\n: 2", 1, "a key is not text"),
    "unhashable-key2": ("? {a: 1}\n: 2", 1, "a key is not text"),
    "floatkey": ("1.5: x", 1, "key 1.5 is not text"),
    "boolkey": ("a: 1\non: x", 2, "key on is not text"),
    "nullkey": ("~: x", 1, "key ~ is not text"),
    "twice": ("a: 1\nb: 2\na: 3", 3, "key 'a' is given twice"),
    "deep-flow": ("a: " + "[" * 100_000, 1, "levels"),
    "deep-flow2": ("a: " + "{a: " * 10_000, 1, "levels"),
    "deep-map": ("\n".join(" " * i + "a:" for i in range(700)), MAX_DEPTH + 1, "levels"),
    "deep-aliases": (
        "a0: &a0 [x]\n" + "\n".join(f"a{i}: &a{i} [*a{i - 1}]" for i in range(1, 99)),
        MAX_DEPTH,
        "levels",
    ),
    "bomb9": (BOMB, 5, "values"),
    "bomb-list-value": (f"a:\n  b: [{'1, ' * 30_000}]", 2, "values"),
    "bomb-map": (MAPS, 5, "values"),
    "bomb-text": ('a: &a "' + "x" * 100_000 + '"\nb: [' + ", ".join(["*a"] * 1000) + "]", 2, "characters of text"),
    "long-number": ("a: " + "9" * 5000, 1, "a number of 5,000 characters"),
    "unfinished": ("a: [1, 2", 1, "not valid YAML"),
    "two-documents": ("a: 1\n---\nb: 2", 2, "not valid YAML"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_yaml_is_one_line_with_its_place(case):
    text, line, said = BAD[case]
    began = time.process_time()
    with pytest.raises(UserError) as caught:
        parse(text, "file.yaml")
    message = str(caught.value)
    assert message.startswith(f"file.yaml:{line}: ")
    assert said in message
    assert "\n" not in message and len(message) < 300
    assert time.process_time() - began < 5


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a: 2020-01-01", {"a": "2020-01-01"}),  # a date is text
        ("2020-01-01: x", {"2020-01-01": "x"}),
        ("a: 1e-4", {"a": 1e-4}),
        ("a: [0, 0.5, -0.1, 1_000, -7]", {"a": [0, 0.5, -0.1, 1000, -7]}),
        ("a: [1:30, -010, 0_7, 0x10, 0b1, 1:30.5]", {"a": ["1:30", "-010", "0_7", "0x10", "0b1", "1:30.5"]}),  # text
        ("a: [.inf, -.INF, 1., 1e5, 1.5e+3]", {"a": [math.inf, -math.inf, 1.0, 1e5, 1500.0]}),
        ("a: [00.5, .5, -.5, +.5, .5e3, -.5E-1, 08]", {"a": [0.5, 0.5, -0.5, 0.5, 500.0, -0.05, "08"]}),
        ("a: &x {b: 1}\nc: *x", {"a": {"b": 1}, "c": {"b": 1}}),
        ("a: &x {b: 1, d: 2}\nc: {<<: *x, b: 3}", {"a": {"b": 1, "d": 2}, "c": {"b": 3, "d": 2}}),
        ("a: [" + "1, " * (MAX_NODES - 10) + "]", {"a": [1] * (MAX_NODES - 10)}),
        ("a: " + "[" * (MAX_DEPTH - 1) + "]" * (MAX_DEPTH - 1), None),
        ('a: "tab\\tand line\\n"', {"a": "tab\tand line\n"}),
    ],
)
def test_plain_yaml_within_the_bounds_is_read(text, value):
    found = parse(text, "file.yaml")
    assert value is None or found == value


@pytest.mark.parametrize(
    "item",
    [".ppo=1", "..=1", "=1", "ppo.=1", "a b=1", "\x1b=1", "x" * 300 + "=1", "ppo.kl_coef"],
)
def test_a_key_after_set_is_a_dotted_name(item):
    with pytest.raises(UserError, match="write it as key=value"):
        parse_overrides([item])


def test_a_key_after_set_is_given_once():
    with pytest.raises(UserError, match=r"--set a\.b=2: a\.b is given twice"):
        parse_overrides(["a.b=1", "a.c=1", "a.b=2"])


@pytest.mark.parametrize("value", ["? [a]\n: b", "!!set {x}", "&a [*a]", '"\\ud800"', "[" * 1000, "[1, 2", "\0"])
def test_a_value_after_set_is_read_as_strictly_as_a_file(value):
    with pytest.raises(UserError, match=r"^--set ppo\.steps="):
        parse_overrides([f"ppo.steps={value}"])


@pytest.mark.parametrize("key", ["a-b", "a b", "a\nb", "\u202e", "1.5"])
def test_an_unknown_key_of_any_letters_is_named(tmp_path, key):
    folder = tmp_path / "cpu-tiny/v1"
    folder.mkdir(parents=True)
    (folder / "recipe.yaml").write_text((RECIPE / "recipe.yaml").read_text() + f"\n{json.dumps(key)}: 1\n")
    with pytest.raises(UserError, match="unknown key"):
        load(folder)


def test_only_ordinary_files_of_a_bounded_size_are_read(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "large").write_text("#" * (MAX_BYTES + 1))
    (tmp_path / "latin").write_bytes(b"a: \xe9")
    (tmp_path / "link").symlink_to("/dev/zero")
    for name, said in {
        "pipe": "a pipe or a device",
        "link": "a pipe or a device",
        "large": "more than 256 KiB",
        "latin": "not UTF-8 at byte 3",
        "none": "no such file",
        ".": "cannot be read",
    }.items():
        with pytest.raises(UserError, match=said):
            read_yaml(tmp_path / name)


def test_a_recipe_that_is_a_device_ends_in_one_line(tmp_path):
    (tmp_path / "v1").mkdir()
    (tmp_path / "v1/recipe.yaml").symlink_to("/dev/zero")
    with pytest.raises(UserError, match="a pipe or a device"):
        load(tmp_path / "v1")


def test_accelerates_settings_pass_the_same_reader(tmp_path):
    folder = tmp_path / "cpu-tiny/v1"
    folder.mkdir(parents=True)
    (folder / "recipe.yaml").write_text((RECIPE / "recipe.yaml").read_text())
    (folder / "accelerate-ddp.yaml").write_text("a: &a [*a]")
    with pytest.raises(UserError, match=r"accelerate-ddp\.yaml:1: "):
        launching._engine_flags(load(folder))
