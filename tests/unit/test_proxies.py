"""Addresses on this machine go around the proxies of the environment."""

import http.server
import json
import socket
import threading

import pytest

from rlhf.evaluation.judging import Endpoint
from rlhf.process import proxies
from rlhf.rollout.vllm import Client

NAMES = ("http_proxy", "HTTP_PROXY", "https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY", "no_proxy", "NO_PROXY")


@pytest.fixture(params=["127.0.0.1", "::1"])
def server(request):
    """A server on the loopback device that answers a chat."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            content = json.dumps({"choices": [{"message": {"content": "4"}}]}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def do_POST(self):
            self.rfile.read(int(self.headers["Content-Length"]))
            self.do_GET()

        def log_message(self, *_):
            pass

    class Server(http.server.ThreadingHTTPServer):
        address_family = socket.AF_INET6 if ":" in request.param else socket.AF_INET

    try:
        running = Server((request.param, 0), Handler)
    except OSError:
        pytest.skip("no IPv6 here")
    with running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        host = f"[{request.param}]" if ":" in request.param else request.param
        yield f"http://{host}:{running.server_port}"
        running.shutdown()


@pytest.fixture(params=["http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"])
def proxy(request, monkeypatch):
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(request.param, "http://user:secret@127.0.0.1:9")
    return request.param


def test_a_server_on_this_machine_is_asked_around_a_proxy(server, proxy):
    assert Endpoint(f"{server}/v1", "judge", "2 + 2?").reply("2 + 2?").text == "4"
    Client(server, lambda: "vllm serve")


@pytest.mark.parametrize(
    ("host", "local"),
    [
        *((host, True) for host in ("localhost", "LOCALHOST", "127.0.0.1", "0.0.0.0", "[::1]", "[::]")),
        *((host, False) for host in ("10.0.0.1", "localhost.org", "127.0.0.1.org", "[fe80::1]", "gpu-box", "", "[")),
    ],
)
def test_which_addresses_are_on_this_machine(host, local):
    assert proxies.is_local(f"http://{host}:8000/v1") is local
