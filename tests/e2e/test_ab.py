"""`rlhf ab`: two policies' answers rated blind in a real browser, who else gets nothing, and what the ratings say."""

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from rlhf.errors import UserError
from rlhf.rating import store
from rlhf.rating.pairs import TEXT_CHARACTERS, Pair, pair_answers, turns
from rlhf.rating.server import Server
from rlhf.rating.summary import summarize
from tests.browser import chromium as chromium
from tests.browser import complaints, needs_browser, open_page, wait
from tests.e2e.evaluations import evaluation, row
from tests.helpers import RECIPE, beside, not_none, rlhf, run_stages, small

HOSTILE = [
    "<script>document.title = 'taken over'</script>",
    '"><img src=x onerror="document.title = 1">',
    "</div></script><style>* { display: none }</style>",
    "x" * 1_000_000,
    "bell \x07 escape \x1b[31m null \x00 delete \x7f line \u2028 end",
    "\u202eright to left",
]


@pytest.fixture
def root(tmp_path) -> Path:
    return evaluation(tmp_path, [row(i) for i in range(10)])


@pytest.fixture
def serve():
    """Start a server on a free port; all are stopped afterwards."""
    servers = []

    def start(root: Path, **options) -> Server:
        servers.append(Server(pair_answers(root), 0, **options))
        threading.Thread(target=servers[-1].serve_forever, args=(0.01,), daemon=True).start()
        return servers[-1]

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def choices(root: Path, rater: str) -> dict[int, str]:
    rows = store.current_ratings(root / "ab" / "sft-vs-ppo.jsonl")
    return {row.item: row.choice for row in rows if row.rater == rater}


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
        seen.append("1" if "good" in page.text_content("#first") else "2")
        press(page, seen[-1])
        if done == 4:
            page.reload()
            wait(page, "now && at('ask').hidden")
    assert page.text_content("#count") == "10 of 10" and page.evaluate("!at('over').hidden && at('pair').hidden")
    assert choices(root, "ann") == dict.fromkeys(range(10), "b")
    press(page, "u")
    assert page.text_content("#count") == "9 of 10" and "question 9" in page.text_content("#prompt")
    assert set(seen) == {"1", "2"}, "the order is drawn"
    assert not complaints(page)


@needs_browser
def test_tie_skip_undo_and_another_rater(chromium, root, serve):
    server = serve(root)
    page = begin(chromium, server, "ben")
    for key in ("0", "t", "s", "1", "u", "u", "2"):
        press(page, key)
    rated = choices(root, "ben")
    assert list(rated.values())[:2] == ["tie", "tie"] and rated[2] in ("a", "b") and len(rated) == 3
    assert page.text_content("#count") == "3 of 10" and "question 3" in page.text_content("#prompt")
    page.keyboard.press("x")
    page.keyboard.press("Control+1")  # the browser's own
    other = begin(chromium, server, "eve")
    assert other.text_content("#count") == "0 of 10"
    other.evaluate("document.querySelector('[data-choice=second]').click()")
    wait(other, "now.done === 1")
    assert len(choices(root, "eve")) == 1 and len(choices(root, "ben")) == 3
    other.evaluate("at('leave').click()")
    assert other.evaluate("!at('ask').hidden && at('pair').hidden")
    page.reload()
    wait(page, "now")
    assert page.text_content("#who") == "ben" and page.text_content("#count") == "3 of 10"
    assert not complaints(page) + complaints(other)


@needs_browser
def test_a_name_that_is_refused_and_a_server_that_is_gone_are_said(chromium, root, serve):
    server = serve(root)
    page = open_page(chromium, server.url)
    page.keyboard.type("judge:x")
    page.keyboard.press("Enter")
    wait(page, "at('refused').textContent.includes('a name has up to 40 letters')")
    page.evaluate("at('name').select()")
    page.keyboard.type("ida")
    page.keyboard.press("Enter")
    wait(page, "now && at('ask').hidden")
    server.token = "of another process"
    page.keyboard.press("1")
    wait(page, "at('status').textContent.includes('load the page again')")
    assert not (root / "ab").exists()


@needs_browser
def test_what_a_model_says_is_only_shown(chromium, tmp_path, serve):
    root = evaluation(tmp_path, [row(i, text, f"other {text}") | {"prompt": text} for i, text in enumerate(HOSTILE)])
    page = begin(chromium, serve(root), "ann")
    for _ in HOSTILE:
        shown = page.text_content("#prompt") + page.text_content("#first") + page.text_content("#second")
        assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f\u202e\u2028]", shown)
        assert len(shown) < 4 * TEXT_CHARACTERS
        assert page.evaluate("document.querySelectorAll('main script, main img, main style').length") == 0
        assert page.evaluate("at('pair').offsetHeight > 100 && document.body.scrollWidth <= innerWidth")
        press(page, "1")
    assert page.evaluate("document.title") == "Which answer is better?"
    assert not complaints(page)


@needs_browser
@pytest.mark.parametrize(("width", "beside_each_other"), [(390, False), (1280, True)])
def test_answers_are_side_by_side_where_there_is_room(chromium, root, serve, tmp_path, width, beside_each_other):
    page = begin(chromium, serve(root), "ann")
    page.set_viewport_size({"width": width, "height": 844})
    page.emulate_media(color_scheme="dark")
    page.screenshot(path=tmp_path / "page.png")
    top = "at('{}').getBoundingClientRect().top"
    assert page.evaluate(f"{top.format('first')} === {top.format('second')}") == beside_each_other
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(20, 24, 29)"
    assert (tmp_path / "page.png").read_bytes().startswith(b"\x89PNG")


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


def test_the_prompt_is_a_dialogue():
    transcript = "Be kind.\n\nHuman: Hi\n\nAssistant: Hello!\n\nHuman: A joke?\n\nAssistant:"
    dialogue = [("Instructions", "Be kind."), ("Person", "Hi"), ("Assistant", "Hello!"), ("Person", "A joke?")]
    assert turns(transcript) == dialogue
    messages = [{"role": "user", "content": "Hi\x1b[31m"}, {"role": "assistant", "content": "Hello!"}]
    assert turns("<|user|>Hi<|end|>", messages) == [("Person", "Hi[31m"), ("Assistant", "Hello!")]
    assert turns("no transcript") == [("Prompt", "no transcript")]


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


def test_the_order_depends_on_seed_and_rater_alone(root, serve):
    pairs = pair_answers(root).pairs

    def orders(seed: int, rater: str) -> str:
        return "".join(serve(root, seed=seed).order(rater, pair) for pair in pairs)

    assert orders(0, "ann") == orders(0, "ann")
    assert len({orders(0, "ann"), orders(1, "ann"), orders(0, "ben")}) == 3


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Host": "evil.example"}, 403),  # DNS rebinding
        ({"Host": "evil.example:{port}"}, 403),
        ({"Host": None}, 403),
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"X_Token": None}, 403),
        ({"X_Token": "guess\xe9"}, 403),
        ({"Content_Type": "text/plain"}, 415),
        ({"Content_Type": "application/x-www-form-urlencoded"}, 415),
        ({"Content_Length": None}, 411),
        ({"Content_Length": "-1"}, 411),
        ({"Content_Length": "9999999"}, 413),
        ({"Host": "localhost:{port}", "Origin": "http://localhost:{port}"}, 200),
    ],
)
def test_only_the_page_may_rate(root, serve, headers, status):
    server = serve(root)
    sent = {name: value and value.format(port=server.server_port) for name, value in headers.items()}
    body = b"" if "Content_Length" in headers else rate()
    assert ask(server, "/rate", body, **sent)[0] == status
    assert (root / "ab").exists() == (status == 200)


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/rate", rate(item=10), 400),
        ("/rate", rate(choice="a"), 400),
        ("/rate", rate(rater="judge:me"), 400),
        ("/rate", rate(rater="../x"), 400),
        ("/rate", rate(rater=""), 400),
        ("/rate", rate(rater="x" * 41), 400),
        ("/rate", json.dumps({"item": [0], "choice": {}, "rater": "ann"}).encode(), 400),
        ("/rate", b'{"rater": 1}', 400),
        ("/rate", b"\xff", 400),
        ("/rate", b"[" * 4000, 400),
        ("/rate", b'"' + b"x" * 5000 + b'"', 413),
        ("/../rate", rate(), 404),
        ("/etc/passwd", rate(), 404),
    ],
)
def test_what_is_no_rating_is_refused_and_the_server_goes_on(root, serve, path, body, status):
    server = serve(root)
    assert ask(server, path, body)[0] == status
    assert not (root / "ab").exists()
    assert ask(server, "/rate", rate())[0] == 200


def test_a_bug_of_ours_is_not_called_a_wrong_rating(root, serve, monkeypatch, capfd):
    monkeypatch.setattr(Server, "next", lambda server, rater: dict[str, object]()["no such key"])
    with pytest.raises(http.client.RemoteDisconnected):
        ask(serve(root), "/rate", rate())
    assert "KeyError: 'no such key'" in capfd.readouterr().err


def test_no_path_leads_to_a_file(root, serve):
    server = serve(root)
    for path in ("/page.html", "/../../etc/passwd", "//etc/passwd", "/%2e%2e/server.py", "/?x"):
        assert ask(server, path, method="GET")[0] == 404
    assert ask(server, "/", method="GET", Host="evil.example")[0] == 403
    assert ask(server, "/", method="PUT")[0] == 501


def test_the_server_is_this_machine_s_own(root, serve, monkeypatch, capsys):
    server = serve(root)
    assert server.server_address[0] == "127.0.0.1"
    arguments = ("ab", "--recipe", RECIPE, "--out", root.parents[1])
    assert rlhf(monkeypatch, capsys, *arguments, "--host", "0.0.0.0")[0] == 2
    code, _, err = rlhf(monkeypatch, capsys, *arguments, "--port", server.server_port)
    assert code == 1 and err == f"error: port {server.server_port} is in use: choose another --port\n"


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


def add(file: Path, rater: str, pairs: list[Pair]) -> None:
    for pair in pairs:
        store.append(file, store.new_line(pair, rater, "b", "ab"))


def test_many_may_write_at_the_same_time(tmp_path):
    answers = pair_answers(evaluation(tmp_path, [row(i) for i in range(40)]))
    with ProcessPoolExecutor(4) as pool:
        for task in [pool.submit(add, answers.file, f"rater-{i}", answers.pairs) for i in range(4)]:
            task.result()
    assert len(store.current_ratings(answers.file)) == len(answers.file.read_text().splitlines()) == 160


def test_a_line_that_was_cut_goes_and_one_that_is_no_rating_is_named(root):
    answers = pair_answers(root)
    add(answers.file, "ann", answers.pairs[:2])
    answers.file.write_text(answers.file.read_text().replace('"choice"', '"verdict"', 1))  # the key before 0.2.0
    with open(answers.file, "a") as handle:
        handle.write('{"item": 3, "ra')
    assert len(store.current_ratings(answers.file)) == 2
    add(answers.file, "ann", answers.pairs[2:3])
    assert len(store.current_ratings(answers.file)) == 3
    with open(answers.file, "a") as handle:
        handle.write('{"rater": "ann", "item": [3], "sha256": "x", "verdict": "a", "shown": "ab"}\n')
    with pytest.raises(UserError, match=r"sft-vs-ppo.jsonl:4: not a rating; take that line out"):
        Server(answers, 0)


@pytest.mark.parametrize("said", [{"ab": "a"}, {"ab": "a", "first": "b"}, {}])
def test_a_judge_s_rating_without_both_orders_is_no_rating(root, said):
    answers = pair_answers(root)
    add(answers.file, "judge:m", answers.pairs[:1])
    line = json.loads(answers.file.read_text())
    answers.file.write_text(json.dumps(line | {"said": {"ab": "a", "ba": None}}) + "\n")
    assert summarize(answers).raters["judge:m"].order_decided is None
    answers.file.write_text(json.dumps(line | {"said": said}) + "\n")
    with pytest.raises(UserError, match=r"sft-vs-ppo.jsonl:1: not a rating; take that line out"):
        summarize(answers)


def test_ratings_that_the_system_cannot_read_are_named(tmp_path):
    """The first page of a process's memory is such a file."""
    (tmp_path / "ratings.jsonl").symlink_to("/proc/self/mem")
    with pytest.raises(UserError, match=r"ratings.jsonl: cannot be read \(.*Input/output error\)"):
        store.current_ratings(tmp_path / "ratings.jsonl")


def test_ratings_do_not_count_for_other_answers(root):
    answers = pair_answers(root)
    add(answers.file, "ann", answers.pairs)
    evaluation(root.parents[1], [row(0), row(1, ppo="new"), *(row(i) for i in range(3, 10)), row(2)])
    summary = summarize(pair_answers(root))
    assert (summary.raters["ann"].wins, summary.of_other_answers) == (1, 9)


# ---- which pairs, and what the ratings say ----


def test_equal_answers_are_left_out_and_the_policies_are_chosen(tmp_path):
    rows = [row(0), row(1, "same \x07", " same"), row(2)]
    answers = pair_answers(evaluation(tmp_path, rows))
    assert ([pair.item for pair in answers.pairs], answers.equal) == ([0, 2], 1)
    for one in rows:
        one["dpo"] = one.pop("ppo")
    answers = pair_answers(evaluation(tmp_path, rows))
    assert (answers.a, answers.b, answers.file.name) == ("sft", "dpo", "sft-vs-dpo.jsonl")
    assert pair_answers(tmp_path / "cpu-tiny/v1", "dpo", "sft").b == "sft"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--out", "nowhere"],
            "no finished evaluation; first `rlhf run evaluate --with-parents` with",
        ),
        (["--b", "dpo"], "no answers of 'dpo'; it has those of sft, ppo"),
        (["--b", "sft"], "sft against itself"),
        (["--rater", "a b"], "up to 40 letters"),
    ],
)
def test_what_cannot_be_rated_is_one_line(root, monkeypatch, capsys, options, message):
    out = [] if "--out" in options else ["--out", root.parents[1]]
    code, _, err = rlhf(monkeypatch, capsys, "ab", "--recipe", RECIPE, *out, *options)
    assert code and message in " ".join(err.split())
    evaluation(root.parents[1], [row(0, "x", "x")])
    with pytest.raises(UserError, match="equal answers to all 1 prompts"):
        pair_answers(root)


def test_the_summary_by_hand(root, monkeypatch, capsys):
    """Ten pairs: ann finds ppo better in 6 of 8, ties 1; ben agrees on the first two and not on the third."""
    evaluation(root.parents[1], [row(i, scores=(0.0, 1.0 if i < 5 else -1.0)) for i in range(10)])
    answers = pair_answers(root)
    better: list[store.Choice] = ["b"]
    given: dict[str, list[store.Choice]] = {"ann": [*better * 6, "a", "a", "tie", "skip"], "ben": ["b", "b", "a"]}
    for rater, votes in given.items():
        for pair, choice in zip(answers.pairs, votes, strict=False):
            store.append(answers.file, store.new_line(pair, rater, choice, "ba"))
    code, out, _ = rlhf(monkeypatch, capsys, "ab", "--recipe", RECIPE, "--out", root.parents[1], "--json")
    summary = json.loads(out)
    ann, both = summary["raters"]["ann"], summary["groups"]["all"]
    assert code == 0 and summary["groups"].keys() == {"all"}
    assert [ann[key] for key in ("wins", "losses", "ties", "skips", "pairs")] == [6, 2, 1, 1, 9]
    assert ann["win_rate"] == pytest.approx({"value": 6.5 / 9, "low": 0.4019, "high": 0.9096}, abs=1e-3)
    assert ann["agrees_with_score"] == {"share": 7 / 8, "of": 8}
    assert ann["alpha"] is None and ann["agrees_with_true_reward"] is None
    assert both["win_rate"]["value"] == pytest.approx(6 / 9), "the third pair is half won"
    assert [both[key] for key in ("wins", "losses", "ties", "skips", "pairs")] == [5, 2, 2, 1, 9], "each pair once"
    assert both["alpha"] == pytest.approx(1 - 2 / (6 - (5 * 4) / 5))
    code, out, _ = rlhf(monkeypatch, capsys, "ab", "--recipe", RECIPE, "--out", root.parents[1], "--summary")
    assert code == 0 and "72% (40–91)" in out and "88% of 8" in out and "67% (" in out
    assert "true reward" not in out and "order decided" not in out


def test_one_rater_is_no_group(root):
    """Nor is one person beside a judge."""
    answers = pair_answers(root)
    store.append(answers.file, store.new_line(answers.pairs[0], "ann", "b", "ab"))
    assert summarize(answers).groups == {}
    store.append(answers.file, store.new_line(answers.pairs[0], "judge:model", "b", "ab"))
    assert summarize(answers).groups.keys() == {"all"}


def test_longer_answers_that_win_for_their_length_do_not_at_equal_length(tmp_path):
    rows = [row(i, "short " * (9 + i % 4), "long " * (12 + i % 4 + 3 * (i % 5 - 1))) for i in range(60)]
    answers = pair_answers(evaluation(tmp_path, rows))
    for pair in answers.pairs:
        longer = len(pair.b.split()) > len(pair.a.split())
        store.append(answers.file, store.new_line(pair, "ann", "b" if longer else "a", "ab"))
    figures = summarize(answers).raters["ann"]
    assert not_none(figures.win_rate).low > 0.6
    assert not_none(figures.length_controlled_win_rate).low < 0.5


def test_answers_of_a_real_evaluation_can_be_rated(trained, tmp_path):
    out = beside(trained, tmp_path, "pretrain", "sft", "rm")
    run_stages(small(), out, "evaluate")
    answers = pair_answers(out / "cpu-tiny/v1", "base", "sft")
    assert len(answers.pairs) + answers.equal == 8
    assert all(pair.values.keys() == {"score", "true_reward"} for pair in answers.pairs)
