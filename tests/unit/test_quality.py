"""Data checks: each sign is counted as defined, and its hint appears when it is due."""

import json
import math
import time
from difflib import SequenceMatcher

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf.data.formats import Document, Example, FileReport, Message, PreferencePair, ReadReport, Rows
from rlhf.data.quality import NEAR_IDENTICAL, check, nearly_identical, share


def pair(prompt: str, chosen: str, rejected: str, n: int = 0) -> PreferencePair:
    return PreferencePair((Message("user", prompt),), chosen, rejected, f"a.jsonl:{n}")


def rows(documents=(), examples=(), pairs=(), malformed=(), prompts_differ=(), identical=(), empty=()) -> Rows:
    count = sum(map(len, (documents, examples, pairs, malformed, prompts_differ, identical, empty)))
    files = (FileReport("a.jsonl", "0" * 64, "preference", count),)
    report = ReadReport(files, tuple(malformed), tuple(prompts_differ), tuple(identical), tuple(empty))
    return Rows(tuple(documents), tuple(examples), tuple(pairs), report)


def hints(report) -> dict[str, str]:
    return {name: hint for name, _, hint in report.table() if hint}


def distinct(n: int) -> list[PreferencePair]:
    """Pairs without any sign of bad data, half of them with the longer answer chosen."""
    answers = ("one short answer", "a somewhat longer answer this is")
    return [pair(f"question {i}", answers[i % 2], answers[1 - i % 2], i) for i in range(n)]


def test_good_pairs_give_no_verdict():
    report = check(rows(pairs=distinct(1000)))
    assert report.verdicts() == [] and report.pairs == 1000


def test_left_out_rows_are_counted_and_listed():
    malformed = [(f"a.jsonl:{n}", "'text' is null; it must be text") for n in range(12)]
    report = check(rows(pairs=distinct(80), malformed=malformed, prompts_differ=["a.jsonl:90"], identical=["b:1"] * 7))
    assert (report.rows, report.malformed, report.prompts_differ, report.identical) == (100, 12, 1, 7)
    assert len(report.listed["malformed"]) == 10
    table = report.table()
    assert ("malformed", "12 (12.0 %)", "Left out; repair them or take them out of the file.") in table
    assert ("", "a.jsonl:3: 'text' is null; it must be text", "") in table
    assert ("prompts differ", "1 (1.0 %), as a.jsonl:90", "Left out; their answers cannot be compared.") in table
    assert ("identical", "7 (7.0 %), as b:1, b:1, b:1", "Left out; equal answers carry no preference.") in table


def test_near_identical_contradictory_duplicate_and_repeated():
    words = " ".join(map(str, range(40)))
    near = pair("near", words, words + " more", 1)
    both_ways = [pair("both", "yes it is", "no it is not", 2), pair("both", "no it is not", "yes it is", 3)]
    other_prompt = pair("other", "no it is not", "yes it is", 4)
    twice = [pair("twice", "a b c", "d e f", 5), pair("twice", "a b c", "d e f", 6), pair("twice", "a b", "d e f", 7)]
    report = check(rows(pairs=[near, *both_ways, other_prompt, *twice]))
    assert (report.near_identical, report.contradictory, report.duplicates, report.repeated_prompts) == (1, 2, 1, 3)
    assert report.listed["near_identical"] == ("a.jsonl:1",)
    assert report.listed["contradictory"] == ("a.jsonl:2", "a.jsonl:3")
    assert {"near identical", "contradictory", "duplicates", "pairs"} <= set(hints(report))
    assert "repeated prompts" not in hints(report)
    assert any(line.startswith("contradictory: 2 (28.6 %), as a.jsonl:2, a.jsonl:3. The") for line in report.verdicts())


def test_few_prompts_and_few_pairs():
    report = check(rows(pairs=[pair("same", f"{n} is it", "it is not", n) for n in range(10)]))
    assert report.repeated_prompts == 9 and "PPO" in hints(report)["repeated prompts"]
    assert hints(report)["pairs"] == "Few for a reward model; 1,000 or more are advised."


def test_hints_wait_for_more_than_one_percent():
    one_word = pair("short", "yes", "it is not so")
    assert "one word" not in hints(check(rows(pairs=[*distinct(99), one_word])))
    report = check(rows(pairs=[*distinct(98), one_word, pair("shorter", "it is not so", "no")]))
    assert report.one_word == 2 and "one word" in hints(report)


@pytest.mark.parametrize(
    ("longer", "shorter", "equal", "hint"),
    [
        (90, 10, 0, "Length alone"),
        (10, 90, 0, "Shorter answers"),
        (65, 35, 0, ""),
        (35, 65, 0, ""),
        (2, 0, 0, ""),
        (0, 0, 9, ""),
    ],
)
def test_length_bias(longer, shorter, equal, hint):
    answers = [("a b c", "d e")] * longer + [("d e", "a b c")] * shorter + [("a b", "d e")] * equal
    report = check(rows(pairs=[pair(f"q {n}", *both) for n, both in enumerate(answers)]))
    assert (report.chosen_longer.count, report.chosen_longer.total) == (longer, longer + shorter)
    assert hints(report).get("chosen longer", "").startswith(hint) and ("chosen longer" in hints(report)) == bool(hint)


def test_wilson_interval():
    of = share(8, 10)
    assert (of.share, round(of.low, 3), round(of.high, 3)) == (0.8, 0.490, 0.943)
    z2 = 1.959963984540054**2
    assert share(0, 10).low == pytest.approx(0) and share(0, 10).high == pytest.approx(z2 / (10 + z2))
    assert share(10, 10).high == pytest.approx(1) and share(10, 10).low == pytest.approx(10 / (10 + z2))
    assert share(0, 0).share is None


@settings(deadline=None)
@given(st.integers(1, 400), st.integers(0, 400))
def test_wilson_bounds_solve_the_score_equation(total, count):
    of = share(min(count, total), total)
    for bound in (of.low, of.high):
        assert 0 <= bound <= 1
        assert math.isclose((of.share - bound) ** 2, 1.959963984540054**2 * bound * (1 - bound) / total, abs_tol=1e-12)


def test_lengths_and_turns():
    prompt = (
        Message("system", "be brief"),
        Message("user", "one two"),
        Message("assistant", "x"),
        Message("user", "y"),
    )
    pairs = [PreferencePair(prompt, "w " * n + "w", "w", "a:1") for n in range(100)]
    report = check(
        rows(pairs=pairs, documents=[Document("a b c", "a:1")], examples=[Example(prompt[1:2], "b c", "a:2")])
    )
    chosen = report.lengths["chosen"]
    assert (chosen.mean, chosen.p10, chosen.p50, chosen.p90, chosen.p99, chosen.longest) == (50.5, 10, 50, 90, 99, 100)
    assert report.lengths["prompt"].longest == 6 and report.lengths["prompt"].p50 == 6
    assert report.lengths["text"].p50 == 3 and report.lengths["response"].p50 == 2
    assert report.turns == {1: 1, 3: 100}
    assert ("messages per prompt", "1: 1, 3: 100", "") in report.table()
    assert ("words per chosen", "mean 50, 10 % 10, 50 % 50, 90 % 90, 99 % 99, longest 100", "") in report.table()


def test_instruction_and_text_rows():
    examples = [Example((Message("user", f"q {n}"),), "yes" if n < 2 else "it is so", f"a:{n}") for n in range(50)]
    report = check(rows(examples=[*examples, examples[-1]]))
    assert (report.examples, report.one_word, report.duplicates, report.repeated_prompts) == (51, 2, 1, 1)
    assert "chosen" not in report.lengths and "chosen longer" not in [line[0] for line in report.table()]
    report = check(rows(documents=[Document("a b", "a:1"), Document("a b", "a:2"), Document("c", "a:3")]))
    assert (report.documents, report.duplicates, report.turns) == (3, 1, {})
    assert set(hints(report)) == {"duplicates"}
    assert "one word" not in [line[0] for line in report.table()]


def test_to_dict_is_plain_json_with_the_verdicts():
    report = check(rows(pairs=[pair("q", "yes", "no it is not")], malformed=[("a:1", "why")]))
    content = report.to_dict()
    assert json.loads(json.dumps(content)) == content
    assert content["turns"] == {"1": 1} and content["listed"]["malformed"] == ["a:1: why"]
    assert content["verdicts"] == report.verdicts() != []
    assert check(rows()).to_dict()["pairs"] == 0


@pytest.mark.parametrize(
    ("a", "b", "near"),
    [
        (range(20), [*range(19), "x"], True),  # 2 · 19 / 40, the limit itself
        (range(19), [*range(18), "x"], False),
        (range(40), [*range(17), *range(18, 40)], True),  # one word less
        (range(20), [*range(10, 20), *range(10)], False),  # the same words in another order
        (range(20), range(22), True),  # 2 · 20 / 42
        (range(20), range(23), False),
        (range(40), ["x", *range(1, 39), "y"], True),
        (range(40), ["x", *range(1, 20), "z", *range(21, 39), "y"], False),
        ([], [], True),
    ],
)
def test_nearly_identical(a, b, near):
    a, b = list(map(str, a)), list(map(str, b))
    assert nearly_identical(a, b) == nearly_identical(b, a) == near


word = st.sampled_from([f"w{n}" for n in range(30)])


@settings(deadline=None, derandomize=True)  # not a theorem: both match greedily, from different starts
@given(st.lists(word, min_size=20, max_size=60), st.lists(st.tuples(st.integers(0, 59), word), max_size=5))
def test_nearly_identical_finds_at_least_what_difflib_does(words, edits):
    other = list(words)
    for position, replacement in edits:
        other[position % len(other)] = replacement
    if SequenceMatcher(None, words, other, autojunk=False).ratio() >= NEAR_IDENTICAL:
        assert nearly_identical(words, other)
    equal = sum(a == b for a, b in zip(words, other, strict=True))
    assert not nearly_identical(words, other) or len(words) - equal <= 5


def test_long_nearly_identical_answers_are_cheap():
    words = [f"w{n % 700}" for n in range(20_000)]
    start = time.perf_counter()
    assert nearly_identical(words, [*words[:9000], "x", *words[9001:]])
    assert not nearly_identical(["a", "b"] * 5000, ["b", "b", "a", "a"] * 2500)
    assert time.perf_counter() - start < 2


def test_many_pairs_are_checked_quickly():
    text = "and so it went on for a while until nobody knew what the question had been at all "
    pairs = [pair(f"question {n}", text * 3 + str(n), text * 3 + f"{n} not", n) for n in range(2000)]
    start = time.perf_counter()
    assert check(rows(pairs=pairs)).near_identical == 2000
    assert time.perf_counter() - start < 4  # 150,000 pairs in a minute would be 0.8; the rest is for a busy machine
