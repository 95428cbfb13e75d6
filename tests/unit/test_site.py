"""The documentation as a site loads nothing from elsewhere."""

import importlib.util
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("mkdocs", reason="the extra `docs` is not installed (make docs)")

ROOT = Path(__file__).parents[2]


def site():
    spec = importlib.util.spec_from_file_location("site_hooks", ROOT / "docs/site.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


PAGE = SimpleNamespace(file=SimpleNamespace(src_uri="a.md"))


@pytest.mark.parametrize(
    "html",
    [
        '<script src="https://example.org/a.js"></script>',
        '<img alt="x" src=//example.org/a.png>',
        '<link rel="stylesheet" href="https://example.org/a.css">',
    ],
)
def test_a_page_that_loads_something_from_elsewhere_ends_the_build(html):
    with pytest.raises(Exception, match=r"a\.md: loads (https:)?//example\.org/a\.\w+ from elsewhere"):
        site().on_post_page(f"<html>{html}</html>", PAGE, None)


def test_links_and_files_of_the_site_are_none():
    html = '<a href="https://example.org">x</a><script src="a.js"></script><link rel="icon" href="a.png">'
    assert site().on_post_page(html, PAGE, None) == html


def test_a_mark_becomes_the_list_of_a_package_s_modules(monkeypatch, tmp_path):
    (tmp_path / "bench").mkdir()
    (tmp_path / "bench/__init__.py").write_text('"""What is measured."""')
    (tmp_path / "bench/one.py").write_text('"""Counts `a|b`. More."""')
    hooks = site()
    monkeypatch.setattr(hooks, "ROOT", tmp_path)
    page = SimpleNamespace(file=SimpleNamespace(src_uri="code.md", abs_src_path=""))
    shown = hooks.on_page_markdown("before\n<!-- modules of bench -->\nafter", page, None, None)
    assert shown.splitlines()[3:] == ["| **bench/** | What is measured. |", r"| one.py | Counts a\|b. |", "after"]
