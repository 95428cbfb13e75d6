"""Which of two policies' answers is better: rated blind by people on a local page, and what the ratings say.

Ratings are lines of `<out>/<recipe>/<version>/ab/<a>-vs-<b>.jsonl`, only ever appended. The last line of a rater about
a pair counts; `undo` takes it back. A line names its pair by index and hash, so that it never counts for other answers.
"""

import errno
import fcntl
import hashlib
import json
import os
import re
import secrets
import string
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from rlhf import stats
from rlhf.data.transcripts import parse_hh
from rlhf.errors import UserError
from rlhf.observe import console
from rlhf.observe.console import harmless
from rlhf.process.endings import Stopped
from rlhf.recipe import POLICIES
from rlhf.run.finished import verified
from rlhf.run.reader import read_lines
from rlhf.run.records import SampleLine

PAGE = Path(__file__).with_suffix(".html")
PORT = 8808
LONGEST = 20_000  # characters of a text that is shown
BODY = 4096  # bytes of a request, at most
RATER = re.compile(r"[A-Za-z0-9._-]{1,40}")  # no colon: nobody passes for a judge
JUDGE = "judge:"
WORTH = {"a": 0.0, "b": 1.0, "tie": 0.5}  # of a verdict to b
VERDICTS = (*WORTH, "skip", "undo")
CHOICES = ("first", "second", "tie", "skip")


class Pair(NamedTuple):
    """Two answers to the prompt of row `item`, as they are shown; `worth` holds what is known of both, by name."""

    item: int
    digest: str
    prompt: str
    a: str
    b: str
    worth: dict[str, tuple[float, float]]
    turns: Sequence[tuple[str, str]] = ()  # the prompt as a dialogue: who speaks, and what


class Comparison(NamedTuple):
    """The pairs of two policies whose answers differ, how many do not, and the file of their ratings."""

    a: str
    b: str
    pairs: list[Pair]
    equal: int
    file: Path


# ---- pairs and ratings ----


def compare(root: Path, a: str | None = None, b: str | None = None) -> Comparison:
    """Pair two policies' answers of the evaluation below `<out>/<recipe>/<version>`; sft and ppo, or dpo, unless named.

    Raises UserError without a finished evaluation, without such policies, and where all answers are equal.
    """
    if not (root / "evaluate" / "summary.json").is_file():
        raise UserError(f"{root / 'evaluate'}: no finished evaluation; first `rlhf run evaluate` (make: eval)")
    verified(root, "evaluate")
    rows = read_lines(root / "evaluate" / "samples.jsonl", SampleLine)
    if not rows:
        raise UserError(f"{root / 'evaluate' / 'samples.jsonl'}: no samples there")
    names = [name for name in rows[0] if all(_answered(row.get(name)) for row in rows)]
    a = a or "sft"
    policies = [name for name in POLICIES if name in names and name != a]
    if b is None and not policies:
        raise UserError(
            f"{root / 'evaluate'}: no trained policy to compare with {a}; it has answers of {', '.join(names)}"
        )
    b = b or policies[0]
    for name in (a, b):
        if name not in names:
            raise UserError(f"{root / 'evaluate'}: no answers of {name!r}; it has those of {', '.join(names)}")
    if a == b:
        raise UserError(f"{a} against itself: choose another --a or --b")
    # Where each policy gave several answers to a prompt, the first ones are rated: a prompt counts once.
    pairs = [_pair(index, row, a, b) for index, row in enumerate(rows) if row.get("sample", 0) == 0]
    differing = [pair for pair in pairs if pair.a != pair.b]
    if not differing:
        raise UserError(f"{a} and {b} gave equal answers to all {len(pairs)} prompts: there is nothing to rate")
    return Comparison(a, b, differing, len(pairs) - len(differing), root / "ab" / f"{a}-vs-{b}.jsonl")


def _answered(found: Any) -> bool:
    return isinstance(found, dict) and isinstance(found.get("response"), str)


def _pair(index: int, row: Mapping[str, Any], a: str, b: str) -> Pair:
    said = (row["prompt"], row[a]["response"], row[b]["response"])
    known = [key for key in ("score", "true_reward") if all(row[name].get(key) is not None for name in (a, b))]
    digest = hashlib.sha256(json.dumps(said).encode()).hexdigest()[:16]
    prompt, first, second = map(_shown, said)
    worth = {key: (row[a][key], row[b][key]) for key in known}
    return Pair(index, digest, prompt, first, second, worth, turns(row))


SPEAKERS = {"system": "Instructions", "user": "Person", "assistant": "Assistant"}


def turns(row: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The prompt of a sample as a dialogue: who speaks, and what, safe to be shown.

    From `messages` where the row has them, otherwise from a transcript; any other text is one turn of a "Prompt".
    """
    messages = row.get("messages")
    if isinstance(messages, list) and all(isinstance(m, dict) for m in messages):
        said = [(SPEAKERS.get(str(m.get("role")), "Prompt"), str(m.get("content", ""))) for m in messages]
    else:
        text = str(row.get("prompt", ""))
        said = [(SPEAKERS[message.role], message.content) for message in parse_hh(text) if message.content.strip()]
        if not any(who == SPEAKERS["user"] for who, _ in said):
            said = [("Prompt", text)]
    return [(who, _shown(text)) for who, text in said]


def _shown(text: str) -> str:
    """Without what could take over a page or a terminal, cut where it is very long."""
    kept = harmless(text).strip()
    more = len(kept) - LONGEST
    return f"{kept[:LONGEST]}… ({more:,} more characters)" if more > 0 else kept


def rating(pair: Pair, rater: str, verdict: str, shown: str, **more: Any) -> dict[str, Any]:
    """A line of the file. `shown` is the order: "ab", or "ba" where b came first."""
    when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    ours = {"item": pair.item, "sha256": pair.digest, "rater": rater, "verdict": verdict, "shown": shown}
    return ours | more | {"time": when}


def append(file: Path, row: Mapping[str, Any]) -> None:
    """Add a line that a crash cannot take back; several processes may do so at the same time."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with open(file, "ab+") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        handle.seek(0)
        whole = handle.read().rfind(b"\n") + 1
        handle.truncate(whole)  # what follows was cut by a crash and never acknowledged
        handle.write(json.dumps(row).encode() + b"\n")
        handle.flush()
        os.fsync(handle.fileno())


def standing(file: Path) -> list[dict[str, Any]]:
    """The ratings that count, oldest first. Raises UserError for a line that is none."""
    rows: dict[tuple[Any, ...], dict[str, Any]] = {}
    lines = file.read_bytes().split(b"\n")[:-1] if file.exists() else []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            key = (row["rater"], row["item"], row["sha256"])
            known = [*map(type, key)] == [str, int, str] and row["verdict"] in VERDICTS and row["shown"] in ("ab", "ba")
        except (ValueError, TypeError, KeyError, RecursionError):
            known = False
        if not known:
            raise UserError(f"{file}:{number}: not a rating; take that line out")
        rows.pop(key, None)
        if row["verdict"] != "undo":
            rows[key] = row
    return list(rows.values())


# ---- what the ratings say ----


def summary(found: Comparison) -> dict[str, Any]:
    """Wins, losses and rates of b by rater and for several raters together, agreement, what did not count."""
    pairs = {(pair.item, pair.digest): pair for pair in found.pairs}
    rows = standing(found.file)
    votes = [(row, pairs[row["item"], row["sha256"]]) for row in rows if (row["item"], row["sha256"]) in pairs]
    raters = sorted({row["rater"] for row, _ in votes}, key=lambda name: (name.startswith(JUDGE), name))
    people = [name for name in raters if not name.startswith(JUDGE)]
    groups = {"people": people, "all": raters} if len(people) < len(raters) else {"all": raters}
    of = {name: [(row, pair) for row, pair in votes if row["rater"] == name] for name in raters}
    return {
        "a": found.a,
        "b": found.b,
        "pairs": len(found.pairs),
        "equal": found.equal,
        "of_other_answers": len(rows) - len(votes),
        "raters": {name: _figures(of[name]) for name in raters},
        "groups": {
            group: _figures([vote for name in names for vote in of[name]])
            for group, names in groups.items()
            if len(names) > 1
        },
    }


def _figures(votes: Sequence[tuple[Mapping[str, Any], Pair]]) -> dict[str, Any]:
    """Of one rater, or of several, who then have one vote together on each pair: their mean."""
    counts = Counter(row["verdict"] for row, _ in votes)
    verdicts = defaultdict(list)
    for row, pair in votes:
        if row["verdict"] in WORTH:
            verdicts[pair.item].append(row["verdict"])
    of = {pair.item: pair for _, pair in votes}
    outcomes = [fmean(WORTH[verdict] for verdict in given) for given in verdicts.values()]
    longer = [float(len(of[i].b.split()) - len(of[i].a.split())) for i in verdicts]
    asked = [row["said"] for row, _ in votes if "said" in row and None not in row["said"].values()]
    controlled = stats.length_controlled_win_rate(outcomes, longer)
    return {
        "wins": counts["b"],
        "losses": counts["a"],
        "ties": counts["tie"],
        "skips": counts["skip"],
        "pairs": len(outcomes),
        "win_rate": stats.wilson(sum(outcomes), len(outcomes))._asdict() if outcomes else None,
        "length_controlled_win_rate": controlled._asdict() if controlled else None,
        "agrees_with_score": _agreement(votes, "score"),
        "agrees_with_true_reward": _agreement(votes, "true_reward"),
        "alpha": stats.krippendorff_alpha(list(verdicts.values())),
        "order_decided": fmean(said["ab"] != said["ba"] for said in asked) if asked else None,
    }


def _agreement(votes: Sequence[tuple[Mapping[str, Any], Pair]], key: str) -> dict[str, float] | None:
    """How often the answer that was preferred is also the one of the higher worth."""
    higher = []
    for row, pair in votes:
        a, b = pair.worth.get(key, (0.0, 0.0))
        if row["verdict"] in ("a", "b") and a != b:
            higher.append((b > a) == (row["verdict"] == "b"))
    return {"share": fmean(higher), "of": len(higher)} if higher else None


def show(found: Mapping[str, Any], file: Path) -> None:
    """The summary as a table; columns without anything in them are left out."""
    if not found["raters"]:
        console.OUT.print(f"{found['b']} against {found['a']}: nothing of {found['pairs']} rated yet")
        return
    columns = {
        "rater": lambda name, row: harmless(name),
        "won": lambda name, row: str(row["wins"]),
        "lost": lambda name, row: str(row["losses"]),
        "tied": lambda name, row: str(row["ties"]),
        "skipped": lambda name, row: str(row["skips"]),
        "win rate": lambda name, row: _interval(row["win_rate"]),
        "at equal length": lambda name, row: _interval(row["length_controlled_win_rate"]),
        "agrees with score": lambda name, row: _percent((row["agrees_with_score"] or {}).get("share")),
        "with true reward": lambda name, row: _percent((row["agrees_with_true_reward"] or {}).get("share")),
        "order decided": lambda name, row: _percent(row["order_decided"]),
        "alpha": lambda name, row: f"{row['alpha']:.2f}" if row["alpha"] is not None else "",
    }
    of = [*found["raters"].items(), *found["groups"].items()]
    rows = [[cell(name, row) for cell in columns.values()] for name, row in of]
    used = [i for i in range(len(columns)) if any(row[i] for row in rows)]
    equal = f", {found['equal']} more with equal answers left out" if found["equal"] else ""
    title = f"{found['b']} against {found['a']}: {found['pairs']} pairs{equal}"
    console.rows_table(title, [list(columns)[i] for i in used], [[row[i] for i in used] for row in rows])
    if found["of_other_answers"]:
        console.OUT.print(f"{found['of_other_answers']} ratings are of answers that are not there any more")
    console.OUT.print(f"ratings in {file}", style="dim", markup=False)


def _interval(found: Mapping[str, float] | None) -> str:
    return f"{found['value']:.0%} ({100 * found['low']:.0f}–{100 * found['high']:.0f})" if found else ""


def _percent(share: float | None) -> str:
    return f"{share:.0%}" if share is not None else ""


# ---- the page ----


class Server(ThreadingHTTPServer):
    """Serves the page to this machine alone. What it knows of ratings is in the file, which others may write to too."""

    daemon_threads = True

    def __init__(self, found: Comparison, port: int, *, rater: str = "", seed: int = 0, limit: int | None = None):
        self.pairs = {pair.item: pair for pair in found.pairs[:limit]}
        self.file, self.rater, self.seed = found.file, rater, seed
        self.token = secrets.token_urlsafe(32)  # of this process: a page of an earlier one may show other answers
        standing(self.file)  # a damaged file is reported now
        try:
            super().__init__(("127.0.0.1", port), Handler)
        except OSError as error:
            why = "is in use" if error.errno == errno.EADDRINUSE else f"cannot be had ({error.strerror})"
            raise UserError(f"port {port} {why}: choose another --port") from None
        self.hosts = {f"{name}:{self.server_port}" for name in ("127.0.0.1", "localhost")}

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exc_info()[1], ConnectionError):  # a browser may leave before it has read the answer
            super().handle_error(request, client_address)

    def order(self, rater: str, pair: Pair) -> str:
        drawn = hashlib.sha256(f"{self.seed} {rater} {pair.item} {pair.digest}".encode()).digest()[0]
        return "ba" if drawn % 2 else "ab"

    def rated(self, rater: str) -> list[int]:
        """Which pairs a rater is done with, oldest first."""
        rows = [row for row in standing(self.file) if row["rater"] == rater and row["item"] in self.pairs]
        return [row["item"] for row in rows if row["sha256"] == self.pairs[row["item"]].digest]

    def next(self, rater: str) -> dict[str, Any]:
        """What the page shows: the first pair that the rater has not rated; nothing says whose answer is whose."""
        done = self.rated(rater)
        progress = {"done": len(done), "total": len(self.pairs)}
        left = self.pairs.keys() - set(done)
        if not left:
            return progress
        pair = self.pairs[min(left)]
        first, second = (getattr(pair, name) for name in self.order(rater, pair))
        return progress | {"item": pair.item, "turns": pair.turns, "first": first, "second": second}

    def rate(self, rater: str, pair: Pair, choice: str) -> None:
        order = self.order(rater, pair)
        verdict = {"first": order[0], "second": order[1]}.get(choice, choice)
        append(self.file, rating(pair, rater, verdict, order))

    def undo(self, rater: str) -> None:
        if done := self.rated(rater):
            pair = self.pairs[done[-1]]
            append(self.file, rating(pair, rater, "undo", self.order(rater, pair)))


class Handler(BaseHTTPRequestHandler):
    """GET / is the page; POST /next, /rate and /undo answer with what it shows then. No request names a file."""

    server: Server
    timeout = 30  # seconds for a request to arrive

    def do_GET(self) -> None:
        if self.headers["Host"] not in self.server.hosts:
            self._refuse(403, "another host's name")  # a page elsewhere whose name was pointed at this machine
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
        try:
            asked = json.loads(body)
            rater = asked["rater"]
            if not RATER.fullmatch(rater):
                return self._refuse(400, "a name has up to 40 letters, digits, dots, dashes and underscores")
            if self.path == "/rate":
                pair, choice = self.server.pairs[asked["item"]], CHOICES[CHOICES.index(asked["choice"])]
                self.server.rate(rater, pair, choice)
            elif self.path == "/undo":
                self.server.undo(rater)
            elif self.path != "/next":
                return self._refuse(404, "no such page")
            found = self.server.next(rater)
        except UserError as error:
            return self._refuse(500, str(error))
        except OSError as error:
            return self._refuse(500, f"{self.server.file}: {error.strerror}")
        except (ValueError, TypeError, KeyError, RecursionError):
            return self._refuse(400, "no rating of a pair that is here")
        self._send(200, "application/json", json.dumps(found).encode())

    def _refuse(self, status: int, why: str) -> None:
        self._send(status, "application/json", json.dumps({"error": why}).encode())

    def _send(self, status: int, kind: str, body: bytes, policy: str = "") -> None:
        self.send_response(status)
        closed = "default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        headers = {
            "Content-Type": kind,
            "Content-Length": str(len(body)),
            "Content-Security-Policy": closed + policy,
            "X-Content-Type-Options": "nosniff",
            "Cross-Origin-Resource-Policy": "same-origin",
            "Referrer-Policy": "no-referrer",
            "Cache-Control": "no-store",
        }
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Nothing on the terminal for each request."""


def serve(server: Server) -> None:
    """Until Ctrl-C, which loses nothing."""
    console.OUT.print(f"rate at {server.url}   (Ctrl-C ends it; ratings go to {server.file})", markup=False)
    try:
        server.serve_forever()
    except (KeyboardInterrupt, Stopped):
        console.OUT.print(f"stopped; {len(standing(server.file))} ratings in {server.file}", markup=False)
    finally:
        server.server_close()
