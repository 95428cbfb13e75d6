"""A local page on which people rate pairs blind, and the server of that page and its ratings.

The standard library's server is enough for four kinds of requests with bodies below 4 KiB from this machine. A web
framework would not shorten this file much: most of it checks Host, Origin and token, sets the page's content security
policy and answers damaged requests.
"""

import errno
import hashlib
import json
import re
import secrets
import string
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socket import socket
from typing import Any

from rlhf.errors import UserError
from rlhf.files import JsonObject
from rlhf.process.endings import Stopped
from rlhf.rating.pairs import AnswerOrder, Pair, PairedAnswers
from rlhf.rating.store import Choice, append, current_ratings, new_line
from rlhf.terminal import screen

PAGE = Path(__file__).with_name("page.html")
PORT = 8808
BODY = 4096  # bytes of a request, at most
RATER = re.compile(r"[A-Za-z0-9._-]{1,40}")  # no colon, so that no person can pass for a judge
# What a rater chooses on the page, and how it is stored, by the order of the answers there.
CHOICES: dict[AnswerOrder, dict[str, Choice]] = {
    "ab": {"first": "a", "second": "b", "tie": "tie", "skip": "skip"},
    "ba": {"first": "b", "second": "a", "tie": "tie", "skip": "skip"},
}


class Server(ThreadingHTTPServer):
    """Server of the page for this machine alone. All ratings are in the file, which other processes may extend too."""

    daemon_threads = True

    def __init__(self, paired: PairedAnswers, port: int, *, rater: str = "", seed: int = 0, limit: int | None = None):
        self.pairs = {pair.item: pair for pair in paired.pairs[:limit]}
        self.file, self.rater, self.seed = paired.file, rater, seed
        self.token = secrets.token_urlsafe(32)  # valid for this process: an older page may show other answers
        current_ratings(self.file)  # report a damaged file now
        try:
            super().__init__(("127.0.0.1", port), Handler)
        except OSError as error:
            why = "is in use" if error.errno == errno.EADDRINUSE else f"cannot be used ({error.strerror})"
            raise UserError(f"port {port} {why}: choose another --port") from None
        self.hosts = {f"{name}:{self.server_port}" for name in ("127.0.0.1", "localhost")}

    @property
    def url(self) -> str:
        """Return the address of the page."""
        return f"http://127.0.0.1:{self.server_port}/"

    def handle_error(self, request: socket | tuple[bytes, socket], client_address: object) -> None:
        if not isinstance(sys.exc_info()[1], ConnectionError):  # a browser may close before it has read the answer
            super().handle_error(request, client_address)

    def order(self, rater: str, pair: Pair) -> AnswerOrder:
        """Return the order in which a rater sees a pair, a function of the seed."""
        first_byte = hashlib.sha256(f"{self.seed} {rater} {pair.item} {pair.digest}".encode()).digest()[0]
        return "ba" if first_byte % 2 else "ab"

    def rated(self, rater: str) -> list[int]:
        """Return the items of the pairs that a rater has rated, oldest first."""
        ratings = [
            rating for rating in current_ratings(self.file) if rating.rater == rater and rating.item in self.pairs
        ]
        return [rating.item for rating in ratings if rating.sha256 == self.pairs[rating.item].digest]

    def next(self, rater: str) -> JsonObject:
        """Return the content of the page: the first pair that the rater has not rated, without the policies' names."""
        rated = self.rated(rater)
        progress: JsonObject = {"done": len(rated), "total": len(self.pairs)}
        unrated = self.pairs.keys() - set(rated)
        if not unrated:
            return progress
        pair = self.pairs[min(unrated)]
        first, second = pair.in_order(self.order(rater, pair))
        return progress | {"item": pair.item, "turns": pair.turns, "first": first, "second": second}

    def rate(self, rater: str, pair: Pair, choice: str) -> None:
        """Store a rater's choice, a key of CHOICES."""
        order = self.order(rater, pair)
        append(self.file, new_line(pair, rater, CHOICES[order][choice], order))

    def undo(self, rater: str) -> None:
        """Take back the rater's last rating."""
        if rated := self.rated(rater):
            pair = self.pairs[rated[-1]]
            append(self.file, new_line(pair, rater, "undo", self.order(rater, pair)))


class Handler(BaseHTTPRequestHandler):
    """GET / returns the page; POST /next, /rate and /undo return the content that it shows next.

    No request names a file.
    """

    server: Server
    timeout = 30  # seconds for a request to arrive

    def do_GET(self) -> None:
        if self.headers["Host"] not in self.server.hosts:
            self._refuse(403, "another host's name")  # a foreign page whose name resolves to this machine
        elif self.path != "/":
            self._refuse(404, "no such page")
        else:
            nonce = secrets.token_urlsafe(16)
            page = string.Template(PAGE.read_text(encoding="utf-8")).substitute(
                nonce=nonce, token=self.server.token, rater=self.server.rater
            )
            policy = f"script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; connect-src 'self'; img-src data:"
            self._send(200, "text/html; charset=utf-8", page.encode(), policy)

    def do_POST(self) -> None:
        length = self.headers.get("Content-Length", "")
        if self.headers["Host"] not in self.server.hosts:
            self._refuse(403, "another host's name")
        elif self.headers.get("Origin", "") not in ("", *(f"http://{host}" for host in self.server.hosts)):
            self._refuse(403, "another site's page")
        elif not secrets.compare_digest(self.headers.get("X-Token", "").encode(), self.server.token.encode()):
            self._refuse(403, "the server was started anew: load the page again")
        elif self.headers.get_content_type() != "application/json":
            self._refuse(415, "not JSON")
        elif not re.fullmatch(r"[0-9]{1,9}", length):
            self._refuse(411, "no length")
        elif int(length) > BODY:
            self._refuse(413, "too long")
        else:
            self._answer(self.rfile.read(int(length)))

    def _answer(self, body: bytes) -> None:
        """Do what a request from the page asks for, and send what the page shows next."""
        if self.path not in ("/next", "/rate", "/undo"):
            return self._refuse(404, "no such page")
        try:
            request = json.loads(body)
            rater = request["rater"]
            named = RATER.fullmatch(rater)
            rating = self._rating_in(request) if self.path == "/rate" else None
        except (ValueError, TypeError, KeyError, RecursionError):
            return self._refuse(400, "no rating of a pair that is here")
        if not named:
            return self._refuse(400, "a name has up to 40 letters, digits, dots, dashes and underscores")
        try:
            if rating:
                self.server.rate(rater, *rating)
            elif self.path == "/undo":
                self.server.undo(rater)
            content = self.server.next(rater)
        except UserError as error:
            return self._refuse(500, str(error))
        except OSError as error:
            return self._refuse(500, f"{self.server.file}: {error.strerror}")
        self._send(200, "application/json", json.dumps(content).encode())

    def _rating_in(self, request: dict[str, Any]) -> tuple[Pair, str]:
        """Return the pair and the choice that a request names. Raises KeyError, TypeError or ValueError for others."""
        pair, choice = self.server.pairs[request["item"]], request["choice"]
        if choice not in CHOICES["ab"]:
            raise ValueError(f"{choice!r} is none of {', '.join(CHOICES['ab'])}")
        return pair, choice

    def _refuse(self, status: int, why: str) -> None:
        self._send(status, "application/json", json.dumps({"error": why}).encode())

    def _send(self, status: int, kind: str, body: bytes, policy: str = "") -> None:
        self.send_response(status)
        default_policy = "default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        headers = {
            "Content-Type": kind,
            "Content-Length": str(len(body)),
            "Content-Security-Policy": default_policy + policy,
            "X-Content-Type-Options": "nosniff",
            "Cross-Origin-Resource-Policy": "same-origin",
            "Referrer-Policy": "no-referrer",
            "Cache-Control": "no-store",
        }
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Print nothing for a request."""


def serve(server: Server) -> None:
    """Serve the page until Ctrl-C. Every rating is on disk by then."""
    screen.OUT.print(f"rate at {server.url}   (Ctrl-C ends it; ratings go to {server.file})")
    try:
        server.serve_forever()
    except (KeyboardInterrupt, Stopped):
        screen.OUT.print(f"stopped; {len(current_ratings(server.file))} ratings in {server.file}")
    finally:
        server.server_close()
