"""Hooks of MkDocs for `make docs`: what the site has beyond docs/.

Pages link to files of the repository that lie outside docs/. Markdown among them (`PAGES`, `INDEXES` and the recipes'
cards) becomes pages of the site; any other file is copied. Links are rewritten to match. The page of keys and metrics
is made from the schema of recipes, keys.yaml and metrics.yaml.
"""

import json
import os.path
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from pydantic import BaseModel

from rlhf.recipe import Recipe

ROOT = Path(__file__).parents[1]
PAGES = ("README.md", "CONTRIBUTING.md", "CODE_OF_CONDUCT.md", "SECURITY.md", "CHANGELOG.md")
INDEXES = (
    *("recipes/README.md", "results/README.md", "bench/README.md"),
    *("peakmem/README.md", "peakmem/validation/README.md"),
)
# of rlhf.objectives, in reading order
MODULES = ("masked", "logprobs", "kl", "rewards", "importance", "losses", "groups")
LOADED = re.compile(  # with an address that names a host; links, which readers follow or not, are none
    r"<(?:script|img|iframe|source|video|audio)\b[^>]*?\bsrc=[\"']?(?P<address>(?:https?:)?//[^\s\"'>]+)"
    r"|<link\b(?![^>]*\brel=[\"']?(?:canonical|license))[^>]*?\bhref=[\"']?(?P<sheet>(?:https?:)?//[^\s\"'>]+)"
)
ARCHIVED = re.compile(r"\[([^\]]*)\]\((?:\.\./)*archive/[^)]*\)")  # links to what the site leaves out
LINK = re.compile(r"\]\((?![a-z]+:|#)([^)\s#]*)(#[^)\s]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages outside docs/, recipes' cards, and the pages about keys and rlhf/objectives."""
    below = (path.relative_to(ROOT).as_posix() for path in sorted(ROOT.glob("recipes/*/*/README.md")))
    for path in (*PAGES, *INDEXES, *below):
        if (ROOT / path).exists():
            files.append(File.generated(config, site_path(path), abs_src_path=str(ROOT / path)))
    text = "# The mathematics\n\nPure functions: tensors in, tensors out.\n\n"
    text += "\n".join(f"::: rlhf.objectives.{name}\n" for name in MODULES)
    files.append(File.generated(config, "objectives.md", content=text))
    files.append(File.generated(config, "keys.md", content=keys_page()))
    return files


def keys_page() -> str:
    """Return the page of keys and metrics. Raises PluginError where the schema has other keys than keys.yaml."""
    parts = ["# Keys and metrics\n\nA recipe is `recipe.yaml`; `--set SECTION.KEY=VALUE` changes a key for a run.\n"]
    for title, meanings in meant("keys").items():
        known = {key: row for section in title.split() for key, row in schema_rows(section).items()}
        if known.keys() != meanings.keys():
            raise PluginError(f"docs/keys.yaml, {title}: {sorted(known.keys() ^ meanings.keys())}")
        rows = [f"| `{key}` | {' | '.join(known[key])} | {cell(text)} |" for key, text in meanings.items()]
        heading = ", ".join(f"`{section}`" for section in title.split())
        parts.append(
            f"## {heading}\n\n| key | values | default | meaning |\n|---|---|---|---|\n" + "\n".join(rows) + "\n"
        )
    for title, meanings in meant("metrics").items():
        rows = [f"| {key} | {cell(text)} |" for key, text in meanings.items()]
        parts.append(f"## {title}\n\n| number | meaning |\n|---|---|\n" + "\n".join(rows) + "\n")
    return "\n".join(parts)


def meant(name: str) -> dict[str, dict[str, str]]:
    """Return the meanings in docs/NAME.yaml, by section."""
    content: dict[str, dict[str, str]] = yaml.safe_load((ROOT / "docs" / f"{name}.yaml").read_text(encoding="utf-8"))
    return content


def schema_rows(section: str) -> dict[str, tuple[str, str]]:
    """Return values and default of each key of a section, such as `data.toy`; of `recipe` without its sections."""
    kind: type[BaseModel] = Recipe
    for part in [] if section == "recipe" else section.split("."):
        kind = next(sections(kind.model_fields[part].annotation))
    properties = kind.model_json_schema()["properties"]
    rows = {}
    for key, field in kind.model_fields.items():
        if section != "recipe" or not any(sections(field.annotation)):
            default = "" if field.is_required() else json.dumps(field.default, default=list).strip('"')
            rows[key] = (cell(values(properties[key])), cell(default))
    return rows


def sections(annotation: Any) -> Iterator[type[BaseModel]]:
    """Yield the classes of sections in the type of a key."""
    for kind in (annotation, *getattr(annotation, "__args__", ())):
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield kind


def values(schema: dict[str, Any]) -> str:
    """Return in words which values a key takes."""
    if "anyOf" in schema:
        return ", ".join(values(kind) for kind in schema["anyOf"] if kind.get("type") != "null")
    if "enum" in schema or "const" in schema:
        return ", ".join(f"`{choice}`" for choice in schema.get("enum", [schema.get("const")]))
    low = schema.get("minimum", schema.get("exclusiveMinimum"))
    high = schema.get("maximum", schema.get("exclusiveMaximum"))
    if schema.get("type") in ("integer", "number") and low is not None:
        above = "above " if "exclusiveMinimum" in schema else ""
        return f"{above}{low:g}" + (
            f" to {high:g}" if high is not None and high < 1e15 else " or more" if not above else ""
        )
    return {"boolean": "`true`, `false`", "string": "text", "array": "list"}.get(str(schema.get("type")), "mapping")


def cell(text: str) -> str:
    """Return a text for a table's cell."""
    return text.replace("|", "\\|")


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrite links for the places that files have on the site, and copy the files that no page shows."""
    uri = page.file.src_uri
    folder = Path(page.file.abs_src_path).relative_to(ROOT).parent if page.file.abs_src_path else Path("docs")

    def rewrite(link: re.Match[str]) -> str:
        path = os.path.normpath(folder / link[1])
        site = site_path(path) if link[1] else uri
        if files.get_file_from_path(site) is None and (ROOT / path).is_file():
            files.append(File.generated(config, site, abs_src_path=str(ROOT / path)))
        return f"]({os.path.relpath(site, Path(uri).parent)}{link[2] or ''})"

    return LINK.sub(rewrite, ARCHIVED.sub(r"\1", markdown))


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Raise PluginError for a page that loads anything from elsewhere: a script, a style sheet, a picture."""
    loaded = LOADED.search(output)
    if loaded:
        raise PluginError(f"{page.file.src_uri}: loads {loaded['address'] or loaded['sheet']} from elsewhere")
    return output


def site_path(path: str) -> str:
    """Return the path on the site of a file of the repository."""
    return "overview.md" if path == "README.md" else path.removeprefix("docs/")
