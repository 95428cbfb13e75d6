"""The documentation as a site, in a browser whose requests are written down."""

import functools
import http.server
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.browser import chromium as chromium
from tests.browser import needs_browser, open_page, wait

pytest.importorskip("mkdocs", reason="the extra `docs` is not installed (make docs)")

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    """The address of the built site, served on this machine."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"})
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@needs_browser
@pytest.mark.slow
def test_a_page_and_its_search_ask_nobody_else(chromium, address):
    page = open_page(chromium, "about:blank")
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto(f"{address}/overview.html")
    page.keyboard.press("f")
    page.keyboard.type("rollout")
    wait(page, "document.querySelectorAll('.md-search-result__item').length")
    elsewhere = [url for url in asked if not url.startswith((address, "data:", "blob:"))]
    assert elsewhere == [] and len(asked) > 3
