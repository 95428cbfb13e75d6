"""Pages do not mislead: links lead somewhere, commands parse, and every key of a recipe has its row."""

import importlib.util
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest

from rlhf import cli

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES += sorted((ROOT / "recipes").rglob("*.md"))


def commands(page: Path, program: str) -> list[str]:
    """The command lines of a program that a page shows, in blocks of code and between backticks."""
    text = page.read_text()
    lines = [line for block in re.findall(r"```\w*\n(.*?)```", text, re.S) for line in block.splitlines()]
    shown = [line.split("  #")[0].strip() for line in [*lines, *re.findall(r"`([^`\n]+)`", text)]]
    return sorted({line for line in shown if line.startswith(f"{program} ") and "COMMAND" not in line})


def parse(words: list[str]) -> None:
    """Raise click's error where these are no words that follow `rlhf`."""
    command: click.Command = cli.cli
    while isinstance(command, click.Group) and words and not words[0].startswith("-"):
        name, *words = words
        found = command.get_command(click.Context(command), name)
        if found is None:
            raise click.UsageError(f"no command {name}")
        command = found
    command.make_parser(click.Context(command)).parse_args(words)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_parse(page):
    for line in commands(page, "rlhf"):
        parse(shlex.split(line)[1:])
    clean = {name: os.environ[name] for name in ("PATH", "HOME")} | {"RUNTIME": "local"}
    for line in commands(page, "make"):
        made = ["make", "-n", *shlex.split(line)[1:]]
        done = subprocess.run(made, cwd=ROOT, env=clean, capture_output=True, text=True)
        assert done.returncode == 0, f"{line}: {done.stderr}"
        for shown in re.findall(r"^\S*/rlhf (.+?)$", done.stdout, re.M):
            parse(shlex.split(shown))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        file, _, anchor = target.partition("#")
        there = page.parent / file if file else page
        if not target.startswith("http"):
            assert there.exists(), target
            assert not anchor or anchor in anchors(there), target


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_key_of_a_recipe_is_explained():
    """The page of keys is made from the schema and from docs/keys.yaml, which have the same keys."""
    pytest.importorskip("mkdocs", reason="the extra `docs` is not installed (make docs)")
    spec = importlib.util.spec_from_file_location("docs_site", ROOT / "docs" / "site.py")
    assert spec and spec.loader
    site = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(site)
    page = site.keys_page()
    assert "| `kl_coef` |" in page and "`objective/kl_per_token`" in page


def test_the_site_is_built(tmp_path):
    pytest.importorskip("mkdocs", reason="the extra `docs` is not installed (make docs)")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"})
