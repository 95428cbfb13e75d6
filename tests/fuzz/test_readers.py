"""Readers of foreign text: whatever it is, they return what they promise or raise the one error that they promise."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from rlhf.data import formats
from rlhf.data.columns import KIND_KEYS
from rlhf.errors import UserError
from rlhf.recipe import parse_overrides
from rlhf.recipe.plain_yaml import read_yaml
from rlhf.recipe.strict import with_overrides

# Derandomized: the same examples in every run of the suite. `make fuzz` asks for more.
EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "60"))
quietly = settings(
    max_examples=EXAMPLES, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
)
NAMES = sorted({key for keys in KIND_KEYS.values() for key in keys} | {"response", "conversations", "role", "content"})
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES) | st.text(), inner, max_size=4),
    max_leaves=12,
)
messages = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "system", "human", "x"]), "content": st.text() | values}
)
rows = st.dictionaries(st.sampled_from(NAMES), st.text() | st.lists(messages, max_size=3) | values, max_size=5)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, bytes], Path]:
    folder = tmp_path_factory.mktemp("readers")

    def write(name: str, content: bytes) -> Path:
        (folder / name).write_bytes(content)
        return folder / name

    return write


@quietly
@given(content=st.lists(rows | values, max_size=4), skip=st.booleans())
def test_rows_of_any_json_are_read_counted_or_refused(file, content: list[Any], skip: bool):
    path = file("rows.jsonl", "".join(json.dumps(row) + "\n" for row in content).encode())
    try:
        found = formats.read([path], on_bad_row="skip" if skip else "stop")
    except UserError as error:
        assert "\n" not in str(error)
        return
    report = found.report
    kept = sum(map(len, (found.documents, found.examples, found.pairs, found.bare_prompts)))
    assert report.rows == len(content) == kept + sum(report.counts().values())
    assert skip or not report.malformed
    for pair in found.pairs:
        assert pair.chosen.strip() and pair.rejected.strip() and pair.chosen != pair.rejected
        pair.chosen.encode()


@quietly
@given(
    content=st.binary(max_size=200), name=st.sampled_from(["a.jsonl", "a.json", "a.csv", "a.tsv", "a.parquet", "a.gz"])
)
@example(content=b"\x1f\x8b", name="a.gz")
@example(content=b"PAR1", name="a.jsonl")
def test_bytes_of_any_kind_are_read_or_refused(file, content: bytes, name: str):
    try:
        formats.read([file(name, content)], on_bad_row="skip")
    except UserError as error:
        assert name in str(error)


@quietly
@given(content=st.text(max_size=200) | values.map(lambda value: yaml.safe_dump(value, allow_unicode=True)))
@example(content="a: *b")
@example(content="? [a]\n: b")
@example(content="<<: [1]")
def test_yaml_of_any_kind_is_a_mapping_or_refused(file, content: str):
    path = file("recipe.yaml", content.encode(errors="surrogatepass"))
    try:
        found = read_yaml(path)
    except UserError as error:
        assert "recipe.yaml" in str(error)
        return
    assert isinstance(found, dict)
    json.dumps(found)  # what is hashed and written to a manifest


@quietly
@given(
    items=st.lists(
        st.text(max_size=40) | st.tuples(st.text(max_size=12), values).map(lambda p: f"{p[0]}={p[1]}"), max_size=3
    )
)
@example(items=[".ppo=1"])
@example(items=["a=1", "a.b=2"])
def test_overrides_of_any_kind_are_values_or_refused(items: list[str]):
    try:
        found = with_overrides({"ppo": {"steps": 1}}, parse_overrides(items))
    except UserError:
        return
    json.dumps(found)
