"""Whatever a file or an option holds, a reader returns what it promises or raises one UserError of one line."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from rlhf import recipe
from rlhf.data import formats
from rlhf.data.formats import AS_THEY_ARE
from rlhf.data.rows import PreferencePair, of_kind
from rlhf.errors import UserError
from rlhf.recipe import parse_overrides
from tests.helpers import RECIPE

# Derandomized: the same examples in every run.
quietly = settings(
    max_examples=60, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
)
NAMES = (
    *("prompt", "chosen", "rejected", "completion", "label", "answer", "response", "question"),
    *("messages", "conversations", "role", "content", "text"),
)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES) | st.text(), inner, max_size=4),
    max_leaves=12,
)
messages = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "system", "human", "x"]), "content": st.text() | values}
)
rows = st.dictionaries(st.sampled_from(NAMES), st.text() | st.lists(messages, max_size=3) | values, max_size=5)


@contextmanager
def refused_in_one_line(*places: str) -> Iterator[None]:
    """Let one UserError pass whose message is one line and names each place."""
    try:
        yield
    except UserError as error:
        assert "\n" not in str(error) and all(place in str(error) for place in places), error


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, bytes], Path]:
    folder = tmp_path_factory.mktemp("any") / "own" / "v1"
    folder.mkdir(parents=True)

    def write(name: str, content: bytes) -> Path:
        (folder / name).write_bytes(content)
        return folder / name

    return write


@quietly
@given(content=st.lists(rows | values, max_size=4), skip=st.booleans())
def test_rows_of_any_json(file, content: list[Any], skip: bool):
    path = file("rows.jsonl", "".join(json.dumps(row) + "\n" for row in content).encode())
    with refused_in_one_line("rows.jsonl"):
        found = formats.read([path], AS_THEY_ARE.model_copy(update={"on_bad_row": "skip" if skip else "stop"}))
        left_out = sum(found.counts().values())
        assert sum(file.rows or 0 for file in found.files) == len(content) == len(found.rows) + left_out
        assert skip or not found.malformed
        for pair in of_kind(found.rows, PreferencePair):
            assert pair.chosen.strip() and pair.rejected.strip() and pair.chosen != pair.rejected
            pair.chosen.encode()


@quietly
@given(
    content=st.binary(max_size=200), name=st.sampled_from(["a.jsonl", "a.json", "a.csv", "a.tsv", "a.parquet", "a.gz"])
)
@example(content=b"\x1f\x8b", name="a.gz")
@example(content=b"PAR1", name="a.jsonl")
def test_a_data_file_of_any_bytes(file, content: bytes, name: str):
    with refused_in_one_line(name):
        formats.read([file(name, content)], AS_THEY_ARE.model_copy(update={"on_bad_row": "skip"}))


@quietly
@given(content=st.binary(max_size=200) | values.map(lambda value: yaml.safe_dump(value).encode()))
@example(content=b"a: *b")
@example(content=b"? [a]\n: b")
@example(content=b"<<: [1]")
@example(content=b"seed: !!python/name:os.system")
@example(content=b"seed: 0\nseed: 1")
@example(content=b"seed: " + b"[" * 3000)
def test_a_recipe_of_any_bytes(file, content: bytes):
    with refused_in_one_line("recipe.yaml"):
        recipe.load(file("recipe.yaml", content).parent)
        raise AssertionError("no section of a recipe is there")


def leaves(values: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """The dotted keys of a recipe's values."""
    for key, value in values.items():
        yield from leaves(value, f"{prefix}{key}.") if isinstance(value, dict) else (prefix + key,)


KEYS = sorted(leaves(recipe.load(RECIPE).recipe.model_dump(mode="json", exclude_none=True)))


@settings(quietly, max_examples=200)
@given(changes=st.dictionaries(st.sampled_from(KEYS) | st.text(max_size=12), values, min_size=1, max_size=3))
@example(changes={"ppo": 1})
@example(changes={"ppo.steps": float("nan")})
@example(changes={"ppo.__class__": 1})
def test_a_recipe_with_any_changes(changes: dict[str, Any]):
    with refused_in_one_line():
        json.dumps(recipe.load(RECIPE, changes).recipe.model_dump(mode="json"), allow_nan=False)


@quietly
@given(items=st.lists(st.text(max_size=40) | st.sampled_from(["ppo.steps=[1", "=", ".ppo=1", "ppo.=1", "a=1"])))
@example(items=["a=1", "a.b=2"])
@example(items=["ppo.steps=!!python/name:os.system"])
def test_options_of_any_text(items: list[str]):
    with refused_in_one_line():
        recipe.load(RECIPE, parse_overrides(items))
