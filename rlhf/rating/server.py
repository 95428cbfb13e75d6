"""A local page on which people rate pairs blind, and the server of that page and its ratings.

The standard library's server is enough for three kinds of requests with bodies below 4 KiB from this machine.
"""

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
from rlhf.rating.ratings import current_ratings, rate
from rlhf.terminal import screen

PAGE = Path(__file__).with_name("page.html")
PORT = 8808
BODY = 4096  # bytes of a request, at most
RATER = re.compile(r"[A-Za-z0-9._-]{1,40}")  # no colon, so that no person can pass for a judge
CHOICES = ("first", "second", "tie", "skip")  # of a rater on the page


class Server(ThreadingHTTPServer):
    """Server of the page for this machine alone. All ratings are in the file, which other processes may extend too."""

    daemon_threads = True

    def __init__(self, paired: PairedAnswers, port: int):
        self.pairs = {pair.item: pair for pair in paired.pairs}
        self.file = paired.file
        self.token = secrets.token_urlsafe(32)  # valid for this process: an older page may show other answers
        current_ratings(self.file)  # report a damaged file now
        try:
            super().__init__(("127.0.0.1", port), Handler)
        except OSError as error:
            raise UserError(f"--port {port} cannot be used ({error.strerror}): choose another") from None
        self.hosts = {f"{name}:{self.server_port}" for name in ("127.0.0.1", "localhost")}

    @property
    def url(self) -> str:
        """Return the address of the page."""
        return f"http://127.0.0.1:{self.server_port}/"

    def handle_error(self, request: socket | tuple[bytes, socket], client_address: object) -> None:
        if not isinstance(sys.exc_info()[1], ConnectionError):  # a browser may close before it has read the answer
            super().handle_error(request, client_address)

    def order(self, rater: str, pair: Pair) -> AnswerOrder:
        """Return the order in which a rater sees a pair: always the same, and another rater another one."""
        first_byte = hashlib.sha256(f"{rater} {pair.item} {pair.digest}".encode()).digest()[0]
        return "ba" if first_byte % 2 else "ab"

    def next(self, rater: str) -> JsonObject:
        """Return the content of the page: the first pair that the rater has not rated, without the policies' names."""
        own = {(row.item, row.sha256) for row in current_ratings(self.file) if row.rater == rater}
        unrated = [pair for pair in self.pairs.values() if (pair.item, pair.digest) not in own]
        progress: JsonObject = {"done": len(self.pairs) - len(unrated), "total": len(self.pairs)}
        if not unrated:
            return progress
        first, second = unrated[0].in_order(self.order(rater, unrated[0]))
        return progress | {"item": unrated[0].item, "turns": unrated[0].turns, "first": first, "second": second}

    def rate(self, rater: str, pair: Pair, choice: str) -> None:
        """Store a rater's choice, one of CHOICES."""
        order = self.order(rater, pair)
        rate(self.file, pair, rater, {"first": order[0], "second": order[1]}.get(choice, choice), order)


class Handler(BaseHTTPRequestHandler):
    """GET / returns the page; POST /next and /rate return the content that it shows next. No request names a file."""

    server: Server
    timeout = 30  # seconds for a request to arrive

    def do_GET(self) -> None:
        if self.headers["Host"] not in self.server.hosts:  # a foreign page whose name resolves to this machine
            self._refuse(403, "another host's name")
        elif self.path != "/":
            self._refuse(404, "no such page")
        else:
            nonce = secrets.token_urlsafe(16)
            page = string.Template(PAGE.read_text(encoding="utf-8"))
            text = page.substitute(nonce=nonce, token=self.server.token)
            policy = f"script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; connect-src 'self'; img-src data:"
            self._send(200, "text/html; charset=utf-8", text.encode(), policy)

    def do_POST(self) -> None:
        length = self.headers.get("Content-Length", "")
        # No other site's page can read the token, and none may send the header.
        if not secrets.compare_digest(self.headers.get("X-Token", "").encode(), self.server.token.encode()):
            self._refuse(403, "the server was started anew: load the page again")
        elif not re.fullmatch(r"[0-9]{1,9}", length) or int(length) > BODY:
            self._refuse(413, "no length, or too long")
        else:
            self._answer(self.rfile.read(int(length)))

    def _answer(self, body: bytes) -> None:
        """Do what a request from the page asks for, and send what the page shows next."""
        if self.path not in ("/next", "/rate"):
            return self._refuse(404, "no such page")
        try:
            request: dict[str, Any] = json.loads(body)
            rater = request["rater"]
            named = RATER.fullmatch(rater)
            rating = (self.server.pairs[request["item"]], request["choice"]) if self.path == "/rate" else None
        except (ValueError, TypeError, KeyError, RecursionError):
            return self._refuse(400, "no rating of a pair that is here")
        if not named or (rating and rating[1] not in CHOICES):
            return self._refuse(400, "a name has up to 40 letters, digits, dots, dashes and underscores")
        try:
            if rating:
                self.server.rate(rater, *rating)
            content = self.server.next(rater)
        except (UserError, OSError) as error:
            return self._refuse(500, str(error))
        self._send(200, "application/json", json.dumps(content).encode())

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
