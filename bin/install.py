"""Runs the pip command that it is given, says what pip does, and exits with pip's code.

    python bin/install.py .venv/bin/pip install --extra-index-url URL torch

pip asks an index that does not answer again for each package, which takes many minutes: indexes of the command are
tried first. pip prints nothing while it unpacks, so a line is printed each `EVERY` seconds. This program needs no
package, because none may be installed yet.
"""

import http.client
import re
import ssl
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

TIMEOUT = 5.0  # seconds that an index may take to answer
EVERY = 15.0  # seconds of silence until a line says that pip is at work
INDEX_OPTIONS = ("--extra-index-url", "--index-url", "-i")


def indexes(arguments: Sequence[str]) -> list[str]:
    """Return the URLs of http and https that pip's arguments name as an index, without a user's name and password.

    There are none where a proxy is named.
    """
    if any(argument.partition("=")[0] == "--proxy" for argument in arguments):
        return []  # the answer is the proxy's
    named = [value for option, value in pairwise(arguments) if option in INDEX_OPTIONS]
    named += [value for option, _, value in (a.partition("=") for a in arguments) if option in INDEX_OPTIONS]
    return [re.sub(r"//[^/@]*@", "//", url) for value in named for url in value.split() if re.match("https?://", url)]


def silent(urls: Sequence[str], timeout: float = TIMEOUT) -> dict[str, str]:
    """Return the reason for each URL that does not answer in `timeout` seconds; any answer counts, a refusal too."""
    reasons = dict.fromkeys(urls, f"nothing came in {timeout:.0f} s")

    def ask(url: str) -> None:
        try:
            urllib.request.urlopen(url, timeout=timeout).close()
        except (urllib.error.HTTPError, http.client.HTTPException):
            pass
        except (OSError, ValueError) as error:
            reason = getattr(error, "reason", error)
            if not isinstance(reason, ssl.SSLError):  # an answer: whether to trust it is said by pip's options
                reasons[url] = str(reason)
                return
        del reasons[url]

    # In threads, because the search for a host's address has no limit of its own.
    threads = [threading.Thread(target=ask, args=(url,), daemon=True) for url in reasons]
    for thread in threads:
        thread.start()
    end = time.monotonic() + timeout
    for thread in threads:
        thread.join(max(0, end - time.monotonic()))
    return dict(reasons)


def shown(line: str) -> str | None:
    """Return what is printed of a line of pip's; None for most: they would be several for each package."""
    if line.startswith("Installing collected"):
        return "  Unpacking"
    download = re.match(r" *(Downloading .* [MG]B)\)", line)
    return f"  {download[1]})" if download else None


class Progress:
    """How far pip is, by the lines that it prints and by the packages that stand in the environment."""

    def __init__(self, pip: str):
        self.started = time.monotonic()
        self._installed = Path(pip).parent.parent / "lib"
        self._found = self._before = self._total = 0

    def note(self, line: str) -> None:
        """Take note of a line of pip's."""
        if line.lstrip().startswith("Collecting "):
            self._found += 1
        elif line.startswith("Installing collected packages: "):
            self._total, self._before = line.count(",") + 1, self._count()

    def __str__(self) -> str:
        seconds = f"{time.monotonic() - self.started:.0f} s"
        if self._total:
            return f"  {min(self._count() - self._before, self._total)} of {self._total} packages unpacked, {seconds}"
        return f"  {self._found} packages found, {seconds}"

    def _count(self) -> int:
        return sum(1 for _ in self._installed.glob("python*/site-packages/*.dist-info"))


def run(command: Sequence[str]) -> int:
    """Run pip and return its exit code; its errors are printed as they are."""
    printed = time.monotonic()
    progress = Progress(command[0])
    over = threading.Event()

    def say(text: str) -> None:
        nonlocal printed
        printed = time.monotonic()
        print(text, flush=True)

    def beat() -> None:
        while not over.wait(max(0.05, printed + EVERY - time.monotonic())):
            if time.monotonic() >= printed + EVERY:
                say(str(progress))

    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, errors="replace") as pip:
        threading.Thread(target=beat, daemon=True).start()
        assert pip.stdout is not None
        for line in pip.stdout:
            progress.note(line)
            if text := shown(line):
                say(text)
        over.set()
    return pip.returncode


def main(command: Sequence[str]) -> int:
    """Refuse indexes that do not answer, or run pip."""
    if reasons := silent(indexes(command)):
        for url, reason in reasons.items():
            print(f"setup: the index {url} in PIP_ARGS does not answer ({reason})", file=sys.stderr)
        print("setup: leave it out of PIP_ARGS; pip's own index has every package", file=sys.stderr)
        return 1
    return run(command)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
