"""Writes the tables of pages that say what the code, a record or a prediction says (`make docs-tables`).

A table stands between `<!-- NAME -->` and `<!-- /NAME -->`. For `keys ppo` its rows name keys of the section `ppo`; all
columns but the meaning, the last one, are written from the schema. A new key needs a row with its name and its meaning
in one of the section's tables: "| `key` | meaning |".
"""

import importlib
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from bench import preferences, sums
from bench.against import table
from bench.kinds import PeerRecord, SameRecord, SupervisedRecord
from bench.memory import budgets, sizes
from bench.paths import ROOT, newest
from bench.peer import figures
from bench.reading import read
from rlhf.errors import UserError
from rlhf.evaluation import reproduce
from rlhf.plan import side_by_side
from rlhf.recipe import Recipe, load
from rlhf.recipe.strict import Section

BLOCK = re.compile(r"(<!-- (?P<name>[^/].*?) -->\n)(?P<table>.*?)(<!-- /(?P=name) -->)", re.S)
ROW = re.compile(r"^\| `(\w+)` \|(?:.*[^\\\n]\|)? (.*) \|$", re.M)
LARGE = 1e30  # a bound of numbers that only keeps them finite
MANY = 8  # values that a text may have; more are explained elsewhere
TABLES: dict[str, Callable[[], str]] = {
    "peaks": lambda: budgets.peaks_table(ROOT / "recipes"),
    "strategies": lambda: budgets.strategies_table(ROOT / "recipes/h100-mistral-7b/v1"),
    "sizes": lambda: sizes.table(sizes.content()),
    "guides": lambda: side_by_side.markdown(side_by_side.lines(ROOT / "recipes", ROOT / "results"), ROOT),
    "sums": sums.table,
    "preferences": preferences.table,
    "results": lambda: reproduce.table_of(newest(ROOT / "results", "cpu-tiny/v2/cpu/*.json")),
    "ppo-step": lambda: figures.markdown(_steps("trl-1.12-ppo")),
    "ppo-phases": lambda: figures.phases_table(_steps("trl-1.12-ppo")),
    "grpo-step": lambda: figures.markdown(_steps("trl-1.16-grpo")),
    "grpo-phases": lambda: figures.phases_table(_steps("trl-1.16-grpo")),
    "rloo-step": lambda: figures.markdown(_steps("trl-1.16-rloo")),
    "rloo-phases": lambda: figures.phases_table(_steps("trl-1.16-rloo")),
    "real steps": lambda: figures.stages_table(
        [read(file, SupervisedRecord) for file in sorted(ROOT.glob("results/peers/trl-1.16-smollm2/cpu_*.json"))]
    ),
    "planted": lambda: table.planted(ROOT / "results/against"),
    "the same": lambda: table.same(
        [read(file, SameRecord) for file in sorted(ROOT.glob("results/against/same_*.json"))]
    ),
}


def _steps(peer: str) -> PeerRecord:
    """Return the newest record of steps compared with a peer's on a CPU."""
    return read(newest(ROOT / "results", f"peers/{peer}/cpu_*.json"), PeerRecord)


def _with_limit(cells: list[str]) -> list[str]:
    """Return a row of limits, `what | limit | set by`, with the value of the constant that sets it."""
    module, _, constant = cells[2].strip("`").rpartition(".")
    return [cells[0], f"{getattr(importlib.import_module(f'rlhf.{module}'), constant):,.0f}", cells[2]]


def _with_value(cells: list[str]) -> list[str]:
    """Return a row of settings, which begins with a key, with its value in the recipe for a 24 GB card."""
    value: Any = load(ROOT / "recipes/4090-llama2-7b/v2").recipe
    for part in cells[0].strip("`").split("."):
        value = getattr(value, part)
    cells[1] = json.dumps(value).strip('"')
    return cells


FILLED: dict[str, Callable[[list[str]], list[str]]] = {  # tables of which one or two columns are written
    "limits": _with_limit,
    "settings of both": _with_value,
}


def written(text: str) -> str:
    """Return a page's text with its tables as they should be. Raises UserError where key and row do not match."""
    rows: dict[str, list[str]] = {}
    for block in BLOCK.finditer(text):
        if block["name"].startswith("keys "):
            rows.setdefault(block["name"][5:], []).extend(key for key, _ in ROW.findall(block["table"]))
    for sections, shown in rows.items():
        keys = fields(sections).keys()
        for key in [*keys, *shown]:
            if shown.count(key) != 1 or key not in keys:
                problem = "is no key" if key not in keys else "has two rows" if key in shown else "has no row"
                raise UserError(f"{key} of {sections} {problem} in the tables; a row is | `{key}` | meaning |")
    return BLOCK.sub(lambda block: block[1] + _table(block["name"], block["table"]) + block[4], text)


def _table(name: str, table: str) -> str:
    """Return a table as it should be; one that has another name stays as it is."""
    if name in FILLED:
        head, ruler, *rows = table.splitlines(keepends=True)
        cells = ([cell.strip() for cell in row.strip().strip("|").split(" | ")] for row in rows)
        return head + ruler + "".join(f"| {' | '.join(FILLED[name](row))} |\n" for row in cells)
    if not name.startswith("keys "):
        return TABLES[name]() + "\n" if name in TABLES else table
    described = fields(name.removeprefix("keys "))
    lines = ["| key | values | default | meaning |", "|---|---|---|---|"]
    lines += [f"| `{key}` | {' | '.join(described[key])} | {meaning} |" for key, meaning in ROW.findall(table)]
    return "\n".join(lines) + "\n"


def fields(name: str) -> dict[str, tuple[str, str]]:
    """Return the values and the default of each key of the sections that a table is about: `data.toy`, `rloo grpo`.

    `recipe` is the file itself, without its sections. Where sections differ, both cells say so.
    """
    by_key: dict[str, dict[str, tuple[str, str]]] = {}
    for section in name.split():
        kind = _kind(section)
        schema = kind.model_json_schema()
        for key, field in kind.model_fields.items():
            if name == "recipe" and sections(field.annotation):
                continue
            default = "–" if field.is_required() else json.dumps(field.default, default=list).strip('"')
            by_key.setdefault(key, {})[section] = (_values(schema["properties"][key], default == "null"), default)
    return {key: (_merged(0, cells), _merged(1, cells)) for key, cells in by_key.items()}


def _merged(column: int, cells: dict[str, tuple[str, str]]) -> str:
    """Return a cell of several sections: the common value, or each with the sections that have it."""
    sections: dict[str, list[str]] = {}
    for section, row in cells.items():
        sections.setdefault(row[column], []).append(section)
    if len(sections) == 1:
        return next(iter(sections))
    return "; ".join(f"{', '.join(names)}: {value}" for value, names in sections.items())


def _kind(section: str) -> type[Section]:
    """Return the class of a section by its dotted name."""
    kind: type[Section] = Recipe
    for part in [] if section == "recipe" else section.split("."):
        (kind,) = sections(kind.model_fields[part].annotation)
    return kind


def sections(annotation: Any) -> list[type[Section]]:
    """Return the classes of sections in the type of a key."""
    kinds = [annotation, *getattr(annotation, "__args__", ())]
    return [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Section)]


def _values(schema: dict[str, Any], null_by_default: bool) -> str:
    """Return in words which values a key takes. That null is one is left out where it is the default."""
    kinds = [kind for kind in schema.get("anyOf", [schema]) if kind.get("type") != "null" or not null_by_default]
    return ", or ".join(map(_value, kinds))


def _value(kind: dict[str, Any]) -> str:
    if "enum" in kind or "const" in kind:
        choices = kind.get("enum", [kind.get("const")])
        return ", ".join(f"`{choice}`" for choice in choices) if len(choices) <= MANY else "text"
    name = kind.get("type")
    if name in ("integer", "number"):
        return _range(kind, whole=name == "integer")
    return {"boolean": "`true`, `false`", "string": "text", "array": "list", "object": "mapping", "null": "null"}.get(
        str(name), "section"
    )


def _range(kind: dict[str, Any], whole: bool) -> str:
    """Return the bounds of a number in words; every number has both."""
    bounds: list[Any] = [kind.get(name) for name in ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")]
    low, above, high, below = bounds
    if whole:
        first, last = (above + 1 if low is None else low), (below - 1 if high is None else high)
        return f"{first:,} to {last:,}"
    if low is not None and high is not None and high < LARGE:
        return f"{low:,g} to {high:,g}"
    lowest = f"above {above:,g}" if low is None else f"{low:,g} or more" if low > -LARGE else "any number"
    if below is not None:
        return f"{lowest}, below {below:,g}"
    return lowest if high >= LARGE else f"{lowest}, at most {high:,g}"


def pages() -> Iterator[Path]:
    """Yield the pages that have tables to write."""
    for page in (ROOT / "README.md", *sorted(ROOT.glob("docs/*.md")), *sorted(ROOT.glob("recipes/*/*/README.md"))):
        names = [block["name"] for block in BLOCK.finditer(page.read_text())]
        if any(name in TABLES or name in FILLED or name.startswith("keys ") for name in names):
            yield page


def main() -> None:
    """Write all tables, and the picture of `sums`."""
    for page in pages():
        page.write_text(written(page.read_text()))
        print(f"written: {page.relative_to(ROOT)}")
    sums.IMAGE.write_text(sums.chart(), encoding="utf-8")
    print(f"written: {sums.IMAGE.relative_to(ROOT)}")


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(str(error))
