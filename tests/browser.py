"""A real browser in tests: the Chromium that is installed, driven by Playwright; no browser is downloaded."""

import importlib.util
import shutil
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome") or shutil.which("chrome")
DRIVER = importlib.util.find_spec("playwright")
PATIENCE = 30  # seconds
needs_browser = pytest.mark.skipif(not CHROMIUM or not DRIVER, reason="no Chromium here, or no Playwright to drive it")


@pytest.fixture(scope="module")
def chromium() -> Iterator["Browser"]:
    """Headless Chromium, without its sandbox (Playwright's default), which refuses to start as root."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM)
        yield browser
        browser.close()


def open_page(browser: "Browser", url: str, **options: Any) -> "Page":
    """Open a page with storage of its own, as in another person's browser; `options` are those of a context."""
    page = browser.new_context(**options).new_page()
    page.goto(url)
    return page


def wait(page: "Page", expression: str) -> None:
    """Wait until an expression of the page's script is true.

    Playwright's own `wait_for_function` asks again from within the page, where a strict policy forbids `eval`.
    """
    end = time.monotonic() + PATIENCE
    while not page.evaluate(f"Boolean({expression})"):
        assert time.monotonic() < end, f"never true: {expression}; the page says: {page.inner_text('body')}"
        page.wait_for_timeout(20)


def complaints(page: "Page") -> list[str]:
    """Return errors of scripts, and what a policy blocked."""
    logged = [message.text for message in page.console_messages() if message.type == "error"]
    return logged + [str(error) for error in page.page_errors()]
