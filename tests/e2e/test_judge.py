"""`rlhf judge`, against endpoints whose faults are known: biased, honest, busy, broken, talking nonsense."""

import re
import signal
import subprocess
import sys
import threading
import time
import zlib
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from rlhf.evaluation import endpoint
from rlhf.rating import judge, store
from rlhf.rating.pairs import pair_answers
from rlhf.rating.summary import summarize
from tests.e2e.evaluations import evaluation, row
from tests.e2e.judges import PROBE, parts, stubs
from tests.helpers import RECIPE, not_none, rlhf


def honest(question: str, times: int) -> str:
    _, first, second = parts(question)
    return "C" if ("good" in first) == ("good" in second) else "A" if "good" in first else "**B**"


@pytest.fixture
def stub():
    with stubs() as start:
        yield start


@pytest.fixture
def root(tmp_path, monkeypatch) -> Path:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    return evaluation(tmp_path, [row(i, *(("same x", "same y") if i == 9 else ())) for i in range(10)])


@pytest.fixture
def asked(root, monkeypatch, capsys):
    """Exit code, stdout and stderr of `rlhf judge` with this endpoint."""
    where = ("--recipe", RECIPE, "--out", root.parents[1], "--model", "some/model")
    return lambda url, *options: rlhf(monkeypatch, capsys, "judge", *where, "--url", url, *options)


def rows(root: Path) -> list[dict[str, Any]]:
    return [rating.plain() for rating in store.current_ratings(root / "ab" / "sft-vs-ppo.jsonl")]


def test_an_honest_judge_is_asked_twice_and_never_again(root, asked, stub):
    server = stub(honest)
    code, out, _ = asked(server.url)
    assert code == 0 and len(server.about_pairs()) == 20
    assert [r["choice"] for r in sorted(rows(root), key=lambda r: r["item"])] == ["b"] * 9 + ["tie"]
    assert {r["rater"] for r in rows(root)} == {"judge:some/model"}
    assert rows(root)[0]["said"] == {"ab": "b", "ba": "b"} and rows(root)[0]["replies"] == {"ab": "**B**", "ba": "A"}
    assert "judge:some/model" in out and "0%" in out
    assert asked(server.url)[0] == 0 and len(server.about_pairs()) == 20


def test_a_second_run_with_the_same_limit_judges_no_further_pairs(root, asked, stub):
    server = stub(honest)
    for _ in range(2):
        asked(server.url, "--limit", "2")
    assert sorted(rating["item"] for rating in rows(root)) == [0, 1] and len(server.about_pairs()) == 4


def test_the_question_holds_what_a_person_would_see(root, asked, stub):
    server = stub(honest)
    asked(server.url, "--limit", "1")
    texts = [parts(question) for question in server.about_pairs()]
    conversation = "Human: question 0\n\nAssistant:"
    assert sorted(texts) == [
        [conversation, "a good answer", "a poor answer"],
        [conversation, "a poor answer", "a good answer"],
    ]
    assert not re.search(r"\b(sft|ppo)\b", "".join(server.asked))


def test_a_judge_that_looks_at_the_order_decides_nothing(root, asked, stub):
    asked(stub(lambda question, times: "A").url)
    assert {r["choice"] for r in rows(root)} == {"tie"}
    figures = summarize(pair_answers(root)).raters["judge:some/model"]
    assert figures.order_decided == 1 and not_none(figures.win_rate).value == 0.5
    assert figures.length_controlled_win_rate is None, "ties alone have no residuals, and so no interval"


def test_a_pair_that_was_judged_in_one_order_only_says_nothing_about_the_order(root, asked, stub):
    """The judge refuses wherever the poor answer comes first; the pair that it judges twice is a tie both times."""

    def mind(question: str, times: int) -> str:
        return "I cannot compare these." if "poor" in parts(question)[1] else honest(question, times)

    asked(stub(mind).url)
    assert sum(None in rating["said"].values() for rating in rows(root)) == 9
    assert summarize(pair_answers(root)).raters["judge:some/model"].order_decided == 0


@pytest.mark.parametrize(
    "reply", ["I cannot compare these.", "", None, "A and B are both fine", "🤷" * 1000, "half a \ud83e"]
)
def test_refusals_and_nonsense_are_skips(root, asked, stub, reply):
    assert asked(stub(lambda question, times: reply).url)[0] == 0
    assert {r["choice"] for r in rows(root)} == {"skip"}
    assert all(len(text) <= judge.REPLY_CHARACTERS for r in rows(root) for text in r["replies"].values())


def test_a_pair_that_the_endpoint_refuses_stays_to_be_judged(root, asked, stub):
    def mind(question, times):
        return (400, "too long: answer: A") if "question 3" in question else honest(question, times)

    code, _, err = asked(stub(mind).url)
    assert code == 0 and "1 of 10 pairs are not judged" in err and "400: too long" in err
    assert sorted(r["choice"] for r in rows(root)) == ["b"] * 8 + ["tie"]
    asked(stub(honest).url)
    assert {r["item"]: r["choice"] for r in rows(root)}[3] == "b"


def test_nothing_keeps_a_judge_that_is_stopped(root, stub, tmp_path):
    """The endpoint answers the first questions and then keeps silent."""
    silence = threading.Event()

    def mind(question, times):
        if len(server.asked) > 3:
            silence.wait(60)
        return "A" if PROBE in question else honest(question, times)

    server = stub(mind)
    line = ["judge", "--recipe", RECIPE, "--out", root.parents[1], "--model", "m", "--url", server.url]
    line += ["--parallel", "1"]
    command = [sys.executable, "-m", "rlhf.cli", *map(str, line)]
    listens = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # a job in the background would not
    started = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, preexec_fn=listens)
    while len(server.asked) < 4:
        assert started.poll() is None
        silence.wait(0.05)
    started.send_signal(signal.SIGINT)
    _, err = started.communicate(timeout=10)
    silence.set()
    assert started.returncode == 130 and err.strip() == "stopped"
    assert len(rows(root)) == 1


def test_a_model_that_takes_no_temperature_is_asked_without(root, asked, stub):
    server = stub(honest)
    server.mind = lambda question, times: (
        (400, "no temperature") if server.temperatures[-1] is not None else honest(question, times)
    )
    assert asked(server.url, "--parallel", "1")[0] == 0
    assert server.temperatures == [0] + [None] * 21
    assert sorted(r["choice"] for r in rows(root)) == ["b"] * 9 + ["tie"]


def test_a_busy_and_broken_endpoint_is_asked_again(root, asked, stub, monkeypatch):
    waited: list[float] = []
    monkeypatch.setattr(time, "sleep", waited.append)
    faults = {1: (429, "slow down", ("Retry-After", "7")), 2: (500, "oops"), 3: (503, "")}
    server = stub(lambda question, times: faults.get(times) or honest(question, times))
    assert asked(server.url, "--parallel", "1")[0] == 0
    assert sorted(r["choice"] for r in rows(root)) == ["b"] * 9 + ["tie"]
    assert len(server.about_pairs()) == 4 * 20
    first = waited[2:5]  # the easy question was asked twice more before
    assert first[0] == 7 and 0.75 <= first[1] <= 1 and 1.5 <= first[2] <= 2, "as long as told, else ever longer"


def test_what_was_judged_is_kept_when_the_endpoint_fails_for_good(root, asked, stub):
    server = stub(lambda question, times: (500, "oops") if "question 4" in question else honest(question, times))
    threads = set(threading.enumerate())
    code, _, err = asked(server.url, "--parallel", "1")
    for thread in set(threading.enumerate()) - threads:  # one has begun the next pair, and ends it
        while thread.ident is None:  # it is about to start, and cannot be joined before
            time.sleep(0.01)
        thread.join(10)
    assert code == 1 and err.startswith(
        f"error: {server.url} fails (500: oops); what was judged is kept: try again later"
    )
    assert max(map(server.asked.count, server.asked)) == 1 + endpoint.RETRIES
    kept, before = {r["item"] for r in rows(root)}, len(server.about_pairs())
    assert kept >= {0, 1, 2, 3} and 4 not in kept and len(kept) < 9
    server.mind = honest
    assert asked(server.url)[0] == 0 and len(server.about_pairs()) - before == 2 * (10 - len(kept))
    assert len(rows(root)) == 10


@pytest.mark.parametrize(
    ("reply", "key", "message"),
    [
        ((401, "no key"), "", "wants a key in OPENAI_API_KEY, which is not set (401: no key)"),
        ((401, "bad key"), "sk-1", "which does not hold one that is accepted (401: bad key)"),
        (
            (404, "no such model"),
            "",
            "knows no model 'some/model', or is not an address up to /v1 (404: no such model)",
        ),
        ((400, "no temperature"), "", "refused the question (400: no temperature)"),
        ((302, "", ("Location", "http://127.0.0.1:9/")), "sk-1", "refused the question (302: )"),
        ((200, "<html>a\x1b[31m page"), "", "does not answer as a chat completion: <html>a[31m page"),
        ((200, '{"choices": []}'), "", 'does not answer as a chat completion: {"choices": []}'),
    ],
)
def test_what_is_wrong_with_an_endpoint_is_one_line(root, asked, stub, monkeypatch, reply, key, message):
    monkeypatch.setenv("OPENAI_API_KEY", key)
    server = stub(lambda question, times: reply)
    code, _, err = asked(server.url)
    assert code == 1 and message in err and len(err.splitlines()) == 1
    assert server.headers.get("Authorization") == (f"Bearer {key}" if key else None)
    assert len(server.asked) == (2 if reply[0] == 400 else 1) and not (root / "ab").exists()


@pytest.mark.parametrize(
    ("url", "expected", "message"),
    [
        (
            "http://127.0.0.1:9/v1",
            1,
            "no endpoint answers at http://127.0.0.1:9/v1 ([Errno 111] Connection refused); start one with",
        ),
        ("http://[nowhere/v1", 1, "no endpoint answers at http://[nowhere/v1"),
        ("file:///etc/passwd", 2, "--url file:///etc/passwd: an endpoint's address is, for example,"),
    ],
)
def test_an_address_without_an_endpoint_is_one_line(asked, url, expected, message):
    code, _, err = asked(url)
    assert code == expected and message in err and len(err.splitlines()) == 1


@pytest.mark.parametrize("status", [200, 400])
@pytest.mark.parametrize("named", [("Content-Encoding", "deflate"), ("Content-Type", "text/plain; charset=zlib")])
def test_an_answer_is_not_inflated(asked, stub, status, named):
    """A short answer that would become 10 MB."""
    packed = zlib.compress(b'{"choices": []}' + b" " * 10_000_000)
    code, _, err = asked(stub(lambda question, times: (status, packed, named)).url)
    assert code == 1 and "x\ufffd" in err and len(err.splitlines()) == 1 and len(err) < 500


@pytest.mark.parametrize("status", [200, 400, 500])
def test_a_long_answer_is_not_read_to_its_end(asked, stub, monkeypatch, status):
    monkeypatch.setattr(endpoint, "ANSWER_BYTES", 1000)
    code, _, err = asked(stub(lambda question, times: (status, "x" * 1001)).url)
    assert code == 1 and err == "error: the endpoint's answer is longer than 1,000 bytes\n"


def test_an_answer_that_trickles_in_is_not_waited_for(asked, stub, monkeypatch):
    monkeypatch.setattr(endpoint, "TIMEOUT", 0.2)
    server = stub(lambda question, times: (200, "x" * 1000))
    server.pause = 0.1
    code, _, err = asked(server.url)
    assert code == 1 and "the endpoint's answer takes longer than 0 s" in err


def test_a_proxy_of_the_environment_is_asked(asked, stub, monkeypatch):
    """The stub takes the request as a proxy does: with the whole address in its first line."""
    server = stub(lambda question, times: (404, "through the proxy"))
    monkeypatch.setenv("http_proxy", server.url.removesuffix("/v1"))
    monkeypatch.delenv("no_proxy", raising=False)
    _, _, err = asked("http://judge.invalid/v1")
    assert "http://judge.invalid/v1 knows no model" in err and server.path == "http://judge.invalid/v1/chat/completions"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("http_proxy", "nonsense://127.0.0.1:9"),
        ("all_proxy", "socks5://127.0.0.1:9"),
        ("http_proxy", "http://127.0.0.1:9"),
        ("SSL_CERT_FILE", "/nowhere.pem"),
    ],
)
def test_a_proxy_or_a_certificate_that_cannot_be_used_is_one_line(asked, monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    code, _, err = asked("http://judge.invalid/v1")
    assert code == 1 and "no endpoint answers at http://judge.invalid/v1 (" in err and len(err.splitlines()) == 1


def test_without_the_client_the_extra_is_named(asked, stub, monkeypatch):
    monkeypatch.setitem(sys.modules, "openai", None)
    for name in ("rlhf.evaluation.endpoint", "rlhf.rating.judge"):
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr("rlhf.rating.judge")
    code, _, err = asked("http://127.0.0.1:9/v1")
    assert code == 1 and err == "error: a judge needs openai: pip install '.[judge]'\n"


def test_a_key_is_never_shown(asked, monkeypatch, stub):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-\nsecret")
    code, out, err = asked(stub(honest).url)
    assert code == 1 and "OPENAI_API_KEY holds characters that no key has" in err and "secret" not in out + err


def test_people_and_judges_are_compared(root, asked, stub):
    answers = pair_answers(root)
    for rater in ("ann", "ben"):
        for pair in answers.pairs:
            store.append(answers.file, store.new_line(pair, rater, "b" if pair.item < 5 else "a", "ab"))
    _, out, _ = asked(stub(honest).url)
    groups = summarize(answers).groups
    assert groups["people"].alpha == 1 and not_none(groups["all"].alpha) < 0.5
    assert "people" in out and out.index("ann") < out.index("judge:some/model")


@pytest.mark.parametrize(
    ("reply", "letter"),
    [
        *(("A", "A"), ("b", "B"), (" C.\n", "C"), ("**B**", "B"), ("(A)", "A"), ("[[C]]", "C"), ("tie", "C")),
        *(("B, because it is short", "B"), ("A\nIt says more.", "A"), ("A: it says more", "A"), ("Answer: B", "B")),
        *(("The better answer is **A**.", "A"), ("Verdict: C", "C"), ("<think>A? No, B.</think>\n\nA", "A")),
        *(("A better one is hard to find", None), ("answer A or answer B", None), ("A and B", None), ("A/B", None)),
        *(
            ("Answer B repeats itself.\n\nA", "A"),
            ("Answer B repeats itself, so A it is", None),
            ("Answer: A\nB", None),
        ),
        *(("The worse answer is B", None), ("Worse answer: B", None), ("It isn't answer B.", None)),
        *(("A) wrong.\nB) right.\nSo B is better.", "B"), ("A, B and C are options; I choose B", None)),
        *(("I prefer answer B.", "B"), ("Neither A nor B", None), ("A: longer.\n\nVerdict: B", None)),
        *(("A. A is more helpful.", "A"), ("B: a clear and correct answer.", "B"), ("B, a clear answer", "B")),
        *(("Answer: B\n\nReasons:\nA: rude\nB: kind", "B"), ("Let me see.\n\nA: This is helpful but", None)),
        *((f"The {word} answer is B", None) for word in ("wrong", "incorrect", "weaker", "losing", "less helpful")),
        *(("Overall, I prefer the\nbetter answer: A", "A"), ("The better answer is a\nshort one.", None)),
        *(("**Answer A:**\nIt is polite, but", None), ("Answer A:\nrude\n\nAnswer B:\nkind\n\nB", "B")),
        *(("A is better because it is right.", "A"), ("The answer is B since A is not", "B"), ("I think B.", "B")),
        *(("Because A is better", None), ("A because B", "A"), ("I do not think B is better because of A", None)),
        *(("Answer A is better.", "A"), ("B is the better answer", "B"), ("I'd choose **A**.", "A")),
        *(("A better answer", None), ("B is better, but A is polite.", None), ("A is not better", None)),
        *((f"{letter} {dash} it is right", letter) for letter in "ABC" for dash in "-–—"),
        *(("C - tie", "C"), ("**A** – it says more", "A"), ("B- short", "B"), ("A - good\nB - bad", None)),
        *(("A - B", None), ("A – B and C are options", None), ("A-level answers both", None), ("B-", "B")),
        *(("A - C is wrong", None), ("A more helpful answer - B", None)),
        *(("It's a tie.", "C"), ("It is a tie", "C"), ("A tie.", "C"), ("The verdict is a tie.", "C")),
        *(("It's not a tie.", None), ("It’s B.", "B"), ("Is it A?", None), ("It is a", None)),
        *(("A: B", None), ("A;B", None), ("A. B.", None), ("x" + "\n" * 20_000 + "x", None)),
        *(
            (f"{words} B", "B")
            for words in ("Overall, the answer is", "**Conclusion:** the better one is", "I'd go with")
        ),
        *(("Preferred answer: A", "A"), ("Option B", "B"), ("\\boxed{B}", "B"), ("Response A:\nIt says", None)),
        *(("The final verdict is **tie**", "C"), ("So I choose B.", "B"), ("I wouldn't choose B.", None)),
        *(
            ("", None),
            ("D", None),
            ("Because", None),
            ("<think>A", None),
            ("<think>\nLet me compare.\nAnswer A:\nIt says", None),
        ),
    ],
)
def test_letters_are_found_where_there_is_just_one(reply, letter):
    assert judge.letter(reply) == letter


def test_what_is_stored_of_a_long_reply_holds_its_beginning_and_its_choice(root, asked, stub):
    reply = "<think>" + "x" * 1000 + "</think>\n\nA, because it is short"
    asked(stub(lambda question, times: reply).url)
    (stored,) = {text for rating in rows(root) for text in rating["replies"].values()}
    assert len(stored) <= judge.REPLY_CHARACTERS
    assert stored.startswith("<think>xx") and stored.endswith("</think>\n\nA, because it is short")
