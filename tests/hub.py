"""A stand-in for the hub on this machine."""

import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlparse

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub:
    """Repositories by `models/org/name`: {file: content}; `gated` ones refuse."""

    def __init__(self) -> None:
        self.repos: dict[str, dict[str, bytes]] = {}
        self.gated: set[str] = set()
        self.requests: list[str] = []

    def serve(self) -> ThreadingHTTPServer:
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                status, headers, body = hub.answer(unquote(urlparse(self.path).path), self.rfile, self.headers)
                self.send_response(status)
                for key, value in ({"Content-Length": str(len(body))} | headers).items():
                    self.send_header(key, value)
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(body)

            do_HEAD = do_GET
            do_POST = do_GET

            def log_message(self, *_) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return server

    def answer(self, path, body, headers) -> tuple[int, dict[str, str], bytes]:
        sent = body.read(int(headers.get("Content-Length") or 0))
        self.requests.append(path)
        parts = path.strip("/").split("/")
        if parts[0] == "api":
            repo, rest = "/".join(parts[1:4]), parts[4:]
        else:
            kind = parts[0] if parts[0] == "datasets" else "models"
            parts = parts[1:] if parts[0] == "datasets" else parts
            repo, rest = f"{kind}/{'/'.join(parts[:2])}", parts[2:]
        files = self.repos.get(repo)
        if files is None:
            return 404, {"X-Error-Code": "RepoNotFound"}, b"{}"
        if repo in self.gated:
            return 403, {"X-Error-Code": "GatedRepo", "X-Error-Message": "Access is restricted"}, b"{}"
        if rest[:2] == ["revision", COMMIT] or rest == []:
            card = {"license": "apache-2.0"}
            names = [{"rfilename": name} for name in files]
            found = {"id": repo.partition("/")[2], "sha": COMMIT, "siblings": names, "cardData": card, "gated": False}
            return 200, {"Content-Type": "application/json"}, json.dumps(found).encode()
        if rest[:1] in (["tree"], ["paths-info"]):
            listed = {name: entry(name, content) for name, content in files.items()}
            folders = {str(parent) for name in files for parent in Path(name).parents if str(parent) != "."}
            listed |= {name: {"type": "directory", "path": name, "size": 0, "oid": "0" * 40} for name in folders}
            if rest[0] == "paths-info":
                asked = parse_qs(sent.decode())["paths"] if b"paths=" in sent else json.loads(sent)["paths"]
                entries = [listed[name] for name in asked if name in listed]
            else:
                below = "".join(f"{part}/" for part in rest[2:])
                entries = [listed[name] for name in listed if name.startswith(below)]
            return 200, {"Content-Type": "application/json"}, json.dumps(entries).encode()
        name = "/".join(rest[2:])
        if rest[:2] != ["resolve", COMMIT] or name not in files:
            code = "EntryNotFound" if rest[1:2] == [COMMIT] else "RevisionNotFound"
            return 404, {"X-Error-Code": code}, b"{}"
        content = files[name]
        tag = hashlib.sha256(content).hexdigest() if lfs(name) else git_hash(content)
        return 200, {"ETag": f'"{tag}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "none"}, content


def entry(name: str, content: bytes) -> dict[str, object]:
    """A file as the hub lists it."""
    found: dict[str, object] = {"type": "file", "path": name, "size": len(content), "oid": git_hash(content)}
    if lfs(name):
        found["lfs"] = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 1}
    return found


def lfs(name: str) -> bool:
    return name.endswith((".safetensors", ".gz", ".bin"))


def git_hash(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
