"""Endpoints for tests of judges, whose model says what a test wants."""

import contextlib
import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

PROBE = "What is 2 + 2?"


Reply = str | None | tuple[Any, ...]  # what a model says, or a status, a body and headers


class Stub(ThreadingHTTPServer):
    """Answers with what `mind(question, times asked)` gives: a reply, or a status with or without a body."""

    daemon_threads = True

    headers: Message  # of the latest request
    path: str

    def __init__(self, mind: Callable[[str, int], Reply]):
        super().__init__(("127.0.0.1", 0), Handler)
        self.mind = mind
        self.asked: list[str] = []
        self.temperatures: list[float | None] = []
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"

    def about_pairs(self) -> list[str]:
        return [q for q in self.asked if PROBE not in q]


class Handler(BaseHTTPRequestHandler):
    server: Stub

    def log_message(self, *_):
        pass

    def do_POST(self):
        content = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.temperatures.append(content.get("temperature"))
        question = content["messages"][0]["content"]
        self.server.asked.append(question)
        self.server.headers, self.server.path = self.headers, self.path
        reply: Reply = (404, '{"error": "no such path"}')
        if self.path == "/v1/chat/completions":
            reply = self.server.mind(question, self.server.asked.count(question))
        if isinstance(reply, str | None):
            reply = 200, json.dumps({"choices": [{"message": {"role": "assistant", "content": reply}}]})
        body = reply[1].encode() if isinstance(reply[1], str) else reply[1]
        self.send_response(reply[0])
        for name, value in (*reply[2:], ("Content-Length", str(len(body)))):
            self.send_header(name, value)
        self.end_headers()
        with contextlib.suppress(ConnectionError):  # who has read enough hangs up
            self.wfile.write(body)


def parts(question: str) -> list[str]:
    """Conversation, answer A and answer B, as the lines between them mark them."""
    return [text.strip() for text in re.split(r"^---- .*$", question, flags=re.M)[1:4]]


Start = Callable[[Callable[[str, int], Reply]], Stub]


@contextmanager
def stubs() -> Iterator[Start]:
    """Yield a function that starts an endpoint; all of them end with the block."""
    started: list[Stub] = []

    def start(mind: Callable[[str, int], Reply]) -> Stub:
        started.append(Stub(mind))
        return started[-1]

    yield start
    for one in started:
        one.shutdown()
        one.server_close()
