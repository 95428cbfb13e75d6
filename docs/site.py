"""Hooks of MkDocs for `make docs`: what the site has beyond docs/.

Pages link to files of the repository that lie outside docs/. Markdown among them (`PAGES`, `INDEXES`, the recipes'
cards and the studies' pages) becomes pages of the site; any other file is copied. Links are rewritten to match. A mark
`<!-- modules of PACKAGE -->` becomes the list of its modules.
"""

import ast
import os.path
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
PAGES = ("README.md", "CONTRIBUTING.md", "CODE_OF_CONDUCT.md", "SECURITY.md", "CHANGELOG.md")
INDEXES = ("recipes/README.md", "results/README.md", "studies/README.md", "peakmem/README.md")
MODULES = ("masked", "logprobs", "kl", "gae", "rewards", "losses", "groups")  # of rlhf.objectives, in reading order
LOADED = re.compile(  # with an address that names a host; links, which readers follow or not, are none
    r"<(?:script|img|iframe|source|video|audio)\b[^>]*?\bsrc=[\"']?(?P<address>(?:https?:)?//[^\s\"'>]+)"
    r"|<link\b(?![^>]*\brel=[\"']?(?:canonical|license))[^>]*?\bhref=[\"']?(?P<sheet>(?:https?:)?//[^\s\"'>]+)"
)
ARCHIVED = re.compile(r"\[([^\]]*)\]\((?:\.\./)*archive/[^)]*\)")  # links to what the site leaves out
MODULE_MARK = re.compile(r"<!-- modules of (\w+) -->")
LINK = re.compile(r"\]\((?![a-z]+:|#)([^)\s#]*)(#[^)\s]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages outside docs/, recipes' cards, studies' pages and the page about rlhf/objectives."""
    below = (*sorted(ROOT.glob("recipes/*/*/README.md")), *sorted(ROOT.glob("studies/*/README.md")))
    for path in (*PAGES, *INDEXES, *(path.relative_to(ROOT).as_posix() for path in below)):
        files.append(File.generated(config, site_path(path), abs_src_path=str(ROOT / path)))
    text = "# The mathematics\n\nPure functions: tensors in, tensors out.\n\n"
    text += "\n".join(f"::: rlhf.objectives.{name}\n" for name in MODULES)
    files.append(File.generated(config, "objectives.md", content=text))
    return files


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

    listed = MODULE_MARK.sub(lambda mark: modules(ROOT / mark[1]), ARCHIVED.sub(r"\1", markdown))
    return LINK.sub(rewrite, listed)


def modules(package: Path) -> str:
    """Return every folder and every module with a docstring of a package, each with the docstring's first sentence."""
    lines = ["| module | what it is |", "|---|---|"]
    for folder in sorted({file.parent for file in package.rglob("*.py")}):
        lines.append(f"| **{folder.relative_to(ROOT)}/** | {summary(folder / '__init__.py')} |")
        files = [file for file in sorted(folder.glob("*.py")) if file.stem != "__init__" and summary(file)]
        lines += [f"| {file.name} | {summary(file)} |" for file in files]
    return "\n".join(lines)


def summary(file: Path) -> str:
    """Return the first sentence of a module's docstring, or its first line if that ends before, for a table's cell."""
    text = ast.get_docstring(ast.parse(file.read_text())) if file.exists() else None
    sentence = re.split(r"(?<=\.) (?=[A-Z])", (text or "").partition("\n")[0])[0]
    return sentence.replace("|", "\\|").replace("`", "")  # names, not commands to try


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Raise PluginError for a page that loads anything from elsewhere: a script, a style sheet, a picture."""
    loaded = LOADED.search(output)
    if loaded:
        raise PluginError(f"{page.file.src_uri}: loads {loaded['address'] or loaded['sheet']} from elsewhere")
    return output


def site_path(path: str) -> str:
    """Return the path on the site of a file of the repository."""
    return "overview.md" if path == "README.md" else path.removeprefix("docs/")
