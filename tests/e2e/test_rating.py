"""`rlhf ab` and `rlhf judge`: pairs rated blind in a browser and by endpoints with known faults; what ratings say."""

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from rlhf.errors import UserError
from rlhf.evaluation import judging
from rlhf.rating import judge, ratings
from rlhf.rating.pairs import Pair, pair_answers
from rlhf.rating.server import Server
from tests.browser import chromium as chromium
from tests.browser import complaints, needs_browser, open_page, wait
from tests.e2e.evaluations import evaluation, row
from tests.e2e.judges import parts, stubs
from tests.helpers import RECIPE, not_none, rlhf

HOSTILE = [
    "<script>document.title = 'taken over'</script>",
    '"><img src=x onerror="document.title = 1">',
    "x" * 20_000,
    "bell \x07 escape \x1b[31m null \x00 delete \x7f line \u2028 end",
]


@pytest.fixture
def root(tmp_path, monkeypatch) -> Path:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    return evaluation(tmp_path, [row(i) for i in range(10)])


@pytest.fixture
def serve():
    """Start a server on a free port; all are stopped afterwards."""
    servers = []

    def start(root: Path) -> Server:
        servers.append(Server(pair_answers(root), 0))
        threading.Thread(target=servers[-1].serve_forever, args=(0.01,), daemon=True).start()
        return servers[-1]

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def rows(root: Path) -> list[ratings.Rating]:
    return ratings.current_ratings(root / "ab" / "sft-vs-ppo.jsonl")


def choices(root: Path, rater: str) -> dict[int, str]:
    return {row.item: row.choice for row in rows(root) if row.rater == rater}


# ---- the page, in a browser ----


def begin(chromium, server: Server, rater: str):
    page = open_page(chromium, server.url)
    page.keyboard.type(rater)
    page.keyboard.press("Enter")
    wait(page, "now && at('ask').hidden")
    return page


def press(page, key: str) -> None:
    """Press a key and wait for what it does."""
    page.evaluate("before = now")
    page.keyboard.press(key)
    wait(page, "now !== before && !busy")


@needs_browser
def test_ten_pairs_by_keyboard_with_a_reload_in_the_middle(chromium, root, serve):
    page = begin(chromium, serve(root), "ann")
    seen = []
    for done in range(10):
        assert page.text_content("#count") == f"{done} of 10"
        assert f"question {done}" in page.text_content("#prompt")
        seen.append("s" if done == 9 else "1" if "good" in page.text_content("#first") else "2")
        press(page, seen[-1])
        if done == 4:
            page.reload()
            wait(page, "now && at('ask').hidden")
    assert page.text_content("#count") == "10 of 10" and page.evaluate("!at('over').hidden && at('pair').hidden")
    assert choices(root, "ann") == dict.fromkeys(range(9), "b") | {9: "skip"}
    assert {"1", "2"} < set(seen), "the order is drawn"
    assert not complaints(page)


@needs_browser
def test_what_a_model_says_is_only_shown(chromium, tmp_path, serve):
    root = evaluation(tmp_path, [row(i, text, f"other {text}") | {"prompt": text} for i, text in enumerate(HOSTILE)])
    page = begin(chromium, serve(root), "ann")
    for _ in HOSTILE:
        shown = page.text_content("#prompt") + page.text_content("#first") + page.text_content("#second")
        assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f\u2028]", shown)
        assert page.evaluate("document.querySelectorAll('main script, main img, main style').length") == 0
        assert page.evaluate("at('pair').offsetHeight > 100 && document.body.scrollWidth <= innerWidth")
        press(page, "1")
    assert page.evaluate("document.title") == "Which answer is better?"
    assert not complaints(page)


# ---- who is answered ----


def ask(
    server: Server, path: str, body: bytes = b"", method: str = "POST", **headers: str
) -> tuple[int, dict[str, str], str]:
    """A request as the page would send it, except for `headers`; None leaves one out."""
    usual = {"Host": f"127.0.0.1:{server.server_port}", "Content-Type": "application/json", "X-Token": server.token}
    usual |= {"Content-Length": str(len(body))}
    sent = usual | {name.replace("_", "-"): value for name, value in headers.items()}
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=10)
    connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
    for name, value in sent.items():
        if value is not None:
            connection.putheader(name, value)
    connection.endheaders(body)
    answer = connection.getresponse()
    return answer.status, dict(answer.getheaders()), answer.read().decode()


def rate(item: int = 0, choice: str = "first", rater: str = "ann") -> bytes:
    return json.dumps({"item": item, "choice": choice, "rater": rater}).encode()


def test_nobody_learns_which_answer_is_whose(root, serve):
    server = serve(root)
    _, headers, page = ask(server, "/", method="GET")
    status, _, body = ask(server, "/next", rate())
    assert status == 200
    assert json.loads(body).keys() == {"done", "total", "item", "turns", "first", "second"}
    assert not re.search(r"\b(sft|ppo|sha256)\b", page + body)
    nonce = not_none(re.search(r"script-src 'nonce-([\w-]+)'", headers["Content-Security-Policy"]))[1]
    assert page.count(f'nonce="{nonce}"') == 2 and "unsafe" not in headers["Content-Security-Policy"]
    assert not re.search(r'(?:src|href)="(?!data:)', page), "all is in the page"


def test_the_order_depends_on_the_rater_alone(root, serve):
    pairs = pair_answers(root).pairs

    def orders(rater: str) -> str:
        return "".join(serve(root).order(rater, pair) for pair in pairs)

    assert orders("ann") == orders("ann") != orders("ben")


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"X_Token": None}, 403),
        ({"X_Token": "guess\xe9"}, 403),
        ({"Content_Length": None}, 413),
        ({"Content_Length": "-1"}, 413),
        ({"Content_Length": "9999999"}, 413),
        ({}, 200),
    ],
)
def test_only_the_page_may_rate(root, serve, headers, status):
    server = serve(root)
    assert server.server_address[0] == "127.0.0.1"
    body = b"" if "Content_Length" in headers else rate()
    assert ask(server, "/rate", body, **headers)[0] == status
    assert (root / "ab").exists() == (status == 200)


@pytest.mark.parametrize("host", ["evil.example", None, "localhost:{port}"])
def test_only_this_machine_reads_the_page_and_its_token(root, serve, host):
    """Also by a foreign name that resolves to this machine."""
    server = serve(root)
    status, _, page = ask(server, "/", method="GET", Host=host and host.format(port=server.server_port))
    assert (status == 200) == (server.token in page) == (host == "localhost:{port}")


# ---- what is on disk ----


def test_a_server_that_is_killed_loses_nothing(root, serve):
    command = [sys.executable, "-m", "rlhf.cli", "ab", "--recipe", str(RECIPE), "--out", str(root.parents[1])]
    child = subprocess.Popen([*command, "--port", "0"], stdout=subprocess.PIPE, text=True, env=os.environ)
    port = int(not_none(re.search(r"127\.0\.0\.1:(\d+)/", not_none(child.stdout).readline()))[1])
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request("GET", "/")
    token = not_none(re.search(r'data-token="([\w-]+)"', connection.getresponse().read().decode()))[1]
    for item in range(3):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        headers = {"X-Token": token, "Content-Type": "application/json"}
        connection.request("POST", "/rate", rate(item, "tie"), headers)
        assert connection.getresponse().status == 200
    child.send_signal(signal.SIGKILL)
    child.wait()
    assert choices(root, "ann") == dict.fromkeys(range(3), "tie")
    assert json.loads(ask(serve(root), "/next", rate())[2])["item"] == 3


def add(file: Path, rater: str, pairs: list[Pair], choice: str = "b") -> None:
    for pair in pairs:
        ratings.rate(file, pair, rater, choice, "ab")


# ---- which pairs, and what the ratings say ----


def test_equal_answers_are_left_out_and_the_policies_are_chosen(tmp_path):
    lines = [row(0), row(1, "same \n", " same"), row(2)]
    answers = pair_answers(evaluation(tmp_path, lines))
    assert ([pair.item for pair in answers.pairs], answers.equal) == ([0, 2], 1)
    for one in lines:
        one["dpo"] = one.pop("ppo")
    answers = pair_answers(evaluation(tmp_path, lines))
    assert (answers.a, answers.b, answers.file.name) == ("sft", "dpo", "sft-vs-dpo.jsonl")
    assert pair_answers(tmp_path / "cpu-tiny/v1", "dpo", "sft").b == "sft"
    for a, b in (("sft", "kto"), ("sft", "sft")):
        with pytest.raises(UserError, match=r"samples.jsonl: .*--a and --b"):
            pair_answers(tmp_path / "cpu-tiny/v1", a, b)


def test_the_summary_by_hand(root, monkeypatch, capsys):
    """Ten pairs: ann finds ppo better in 6 of 8, ties 1; ben agrees on the first two and not on the third."""
    evaluation(root.parents[1], [row(i, scores=(0.0, 1.0 if i < 5 else -1.0)) for i in range(10)])
    answers = pair_answers(root)
    for rater, votes in {"ann": ["b"] * 6 + ["a", "a", "tie", "skip"], "ben": ["b", "b", "a"]}.items():
        for pair, choice in zip(answers.pairs, votes, strict=False):
            add(answers.file, rater, [pair], choice)
    figures = ratings.summarize(answers)
    ann, both = figures["ann"], figures["people"]
    assert figures.keys() == {"ann", "ben", "people"}
    assert ann[:4] == (6, 2, 1, 1) and both[:4] == (5, 2, 2, 1), "each pair once"
    assert tuple(not_none(ann.win_rate)) == pytest.approx((6.5 / 9, 0.4019, 0.9096), abs=1e-3)
    assert ann.agrees == {"score": (7 / 8, 8)}
    assert not_none(both.win_rate).value == pytest.approx(6 / 9), "the third pair is half won"
    code, out, _ = rlhf(monkeypatch, capsys, "ab", "--recipe", RECIPE, "--out", root.parents[1], "--summary")
    assert code == 0 and "72% (40–91)" in out and "88% of 8" in out and "67% (" in out
    add(answers.file, "judge:m", answers.pairs, "a")
    assert ratings.summarize(answers).keys() == {"ann", "ben", "judge:m", "people"}


def test_ratings_do_not_count_for_other_answers(root):
    answers = pair_answers(root)
    add(answers.file, "ann", answers.pairs)
    evaluation(root.parents[1], [row(0), row(1, ppo="new"), *(row(i) for i in range(3, 10)), row(2)])
    assert ratings.summarize(pair_answers(root))["ann"].wins == 1


# ---- a model that judges ----


def honest(question: str, times: int) -> str:
    _, first, second = parts(question)
    return "C" if ("good" in first) == ("good" in second) else "A" if "good" in first else "**B**"


@pytest.fixture
def stub():
    with stubs() as start:
        yield start


ROWS = [row(i, *(("same x", "same y") if i == 9 else ())) for i in range(10)]


@pytest.fixture
def asked(root, monkeypatch, capsys):
    """Exit code, stdout and stderr of `rlhf judge` with this endpoint."""
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    evaluation(root.parents[1], ROWS)
    where = ("--recipe", RECIPE, "--out", root.parents[1], "--model", "some/model")
    return lambda url, *options: rlhf(monkeypatch, capsys, "judge", *where, "--url", url, *options)


def test_an_honest_judge_is_asked_in_both_orders_and_never_again(root, asked, stub):
    server = stub(honest)
    evaluation(root.parents[1], ROWS[:1])
    asked(server.url)
    evaluation(root.parents[1], ROWS)
    conversation = "Human: question 0\n\nAssistant:"
    assert sorted(parts(question) for question in server.about_pairs()) == [
        [conversation, "a good answer", "a poor answer"],
        [conversation, "a poor answer", "a good answer"],
    ]
    assert not re.search(r"\b(sft|ppo)\b", "".join(server.asked))
    code, out, _ = asked(server.url)
    assert code == 0 and len(server.about_pairs()) == 20
    assert choices(root, "judge:some/model") == dict.fromkeys(range(9), "b") | {9: "tie"}
    first = rows(root)[0].plain()
    assert first["said"] == {"ab": "b", "ba": "b"}
    assert "judge:some/model" in out and "0%" in out
    assert asked(server.url)[0] == 0 and len(server.about_pairs()) == 20


def test_a_judge_that_looks_at_the_order_decides_nothing(root, asked, stub):
    asked(stub(lambda question, times: "A").url)
    figures = ratings.summarize(pair_answers(root))["judge:some/model"]
    assert figures.ties == 10 and figures.order_decided == 1 and not_none(figures.win_rate).value == 0.5
    assert figures.length_controlled_win_rate is None, "ties alone have no residuals, and so no interval"


def test_a_pair_that_the_endpoint_refuses_stays_to_be_judged(root, asked, stub):
    def mind(question, times):
        return (400, "too long: answer: A") if "question 3" in question else honest(question, times)

    code, _, err = asked(stub(mind).url)
    assert code == 0 and "1 of 10" in err and "400: too long" in err and 3 not in choices(root, "judge:some/model")
    asked(stub(honest).url)
    assert choices(root, "judge:some/model")[3] == "b"


def test_what_was_judged_is_kept_when_the_endpoint_fails_for_good(root, asked, stub, monkeypatch):
    server = stub(lambda question, times: (500, "oops") if "question 4" in question else honest(question, times))
    monkeypatch.setattr(judge, "AT_ONCE", 1)
    with pytest.raises(UserError, match="500: oops") as caught:
        judge.run(pair_answers(root), server.url, "some/model")
    assert server.url in str(caught.value)
    assert max(map(server.asked.count, server.asked)) == 1 + judging.RETRIES
    kept, before = choices(root, "judge:some/model").keys(), len(server.about_pairs())
    assert kept >= {0, 1, 2, 3} and 4 not in kept
    server.mind = honest
    assert asked(server.url)[0] == 0 and len(server.about_pairs()) - before <= 2 * (10 - len(kept))
    assert len(rows(root)) == 10
