"""Data checks: each sign is counted as defined, and its hint appears when it is due."""

import json
import math
import random
import time
from dataclasses import replace
from difflib import SequenceMatcher
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf.cli import data as commands
from rlhf.data.formats import FileReport, ParsedRows, ReadReport
from rlhf.data.quality.check import check, label_noise, share
from rlhf.data.quality.flaws import NEAR_IDENTICAL, nearly_identical
from rlhf.data.rows import Document, Example, LeftOut, Message, PreferencePair, PromptOnly
from tests.unit.rows import pair_of_one_turn


def parsed(
    documents=(), examples=(), pairs=(), malformed=(), prompts_differ=(), identical=(), empty=(), untrained=()
) -> ParsedRows:
    count = sum(map(len, (documents, examples, pairs, malformed, prompts_differ, identical, empty, untrained)))
    files = (FileReport("a.jsonl", "0" * 64, "preference", count),)
    left_out: dict[LeftOut, tuple[str, ...]] = {
        "prompts_differ": tuple(prompts_differ),
        "identical": tuple(identical),
        "empty": tuple(empty),
        "untrained": tuple(untrained),
    }
    report = ReadReport(files, tuple(malformed), left_out)
    return ParsedRows((*documents, *examples, *pairs), report)


def hints(report) -> dict[str, str]:
    return {line.name: line.hint for line in report.table() if line.hint}


def severities(report) -> dict[str, str]:
    return {line.name: line.severity for line in report.findings()}


def distinct(n: int) -> list[PreferencePair]:
    """Pairs without any sign of bad data, half of them with the longer answer chosen."""
    answers = ("one short answer", "a somewhat longer answer this is")
    return [pair_of_one_turn(f"question {i}", answers[i % 2], answers[1 - i % 2], i) for i in range(n)]


def test_good_pairs_give_no_finding():
    report = check(parsed(pairs=distinct(1000)))
    assert report.findings() == [] and report.pairs == 1000


def test_prompts_alone_are_counted_and_said_to_be_for_ppo_only():
    asked = tuple(PromptOnly((Message("user", f"question {i} of all"),), f"p:{i}") for i in range(50))
    report = check(replace(parsed(), rows=asked))
    assert (report.prompts, report.repeated_prompts, report.severity) == (50, 0, "note")
    assert "Only PPO, RLOO and GRPO" in hints(report)["prompts without a response"]
    both = check(replace(parsed(), rows=(*distinct(1000), *asked)))
    assert "prompts without a response" not in hints(both) and "words per prompt" in [
        line.name for line in both.table()
    ]


def test_the_last_line_names_what_is_wrong_and_what_leaves_it_out():
    verdict = commands.flaws_line(check(parsed(pairs=distinct(1000) + distinct(200))))
    assert verdict.startswith("1 warning (duplicates)")
    assert verdict.endswith("; `rlhf run … --set data.drop=[duplicates]` leaves such rows out of training")
    assert commands.flaws_line(check(parsed(pairs=distinct(1000)))) == "nothing wrong was found"


def test_left_out_rows_are_counted_and_listed():
    malformed = [(f"a.jsonl:{n}", "'text' is null; it must be text") for n in range(12)]
    report = check(
        parsed(pairs=distinct(80), malformed=malformed, prompts_differ=["a.jsonl:90"], identical=["b:1"] * 7)
    )
    assert (report.rows, report.malformed, report.prompts_differ, report.identical) == (100, 12, 1, 7)
    assert len(report.listed["malformed"]) == 10
    table = report.table()
    assert (
        "malformed",
        "12 (12.0 %)",
        "A run stops at the first. Repair them, or leave them out: data.on_bad_row=skip.",
        "error",
    ) in table
    assert ("", "a.jsonl:3: 'text' is null; it must be text", "", "") in table
    identical = ("identical", "7 (7.0 %), as b:1, b:1, b:1", "Left out; equal answers carry no preference.", "warning")
    assert identical in table
    differ = ("prompts differ", "1 (1.0 %), as a.jsonl:90", "Left out; their answers cannot be compared.", "note")
    assert differ in table
    assert report.severity == "error"


def test_near_identical_contradictory_duplicate_and_repeated():
    words = " ".join(map(str, range(40)))
    near = pair_of_one_turn("near", words, words + " more", 1)
    both_ways = [
        pair_of_one_turn("both", "yes it is", "no it is not", 2),
        pair_of_one_turn("both", "no it is not", "yes it is", 3),
    ]
    other_prompt = pair_of_one_turn("other", "no it is not", "yes it is", 4)
    twice = [
        pair_of_one_turn("twice", "a b c", "d e f", 5),
        pair_of_one_turn("twice", "a b c", "d e f", 6),
        pair_of_one_turn("twice", "a b", "d e f", 7),
    ]
    report = check(parsed(pairs=[near, *both_ways, other_prompt, *twice]))
    assert (report.near_identical, report.contradictory, report.duplicates, report.repeated_prompts) == (1, 2, 1, 3)
    assert report.listed["near_identical"] == ("a.jsonl:1",)
    assert report.listed["contradictory"] == ("a.jsonl:2", "a.jsonl:3")
    assert {"near identical", "contradictory", "duplicates", "pairs"} <= set(hints(report))
    assert "repeated prompts" not in hints(report)
    both = next(line for line in report.findings() if line.name == "contradictory")
    assert (both.value, both.severity) == ("2 (28.6 %), as a.jsonl:2, a.jsonl:3", "warning")
    assert report.severity == "warning"


def test_few_prompts_and_few_pairs():
    report = check(parsed(pairs=[pair_of_one_turn("same", f"{n} is it", "it is not", n) for n in range(10)]))
    assert report.repeated_prompts == 9 and "PPO" in hints(report)["repeated prompts"]
    assert hints(report)["pairs"].startswith("Fewer than 50: the H100 guide expects marginal gains")


def test_hints_wait_for_more_than_one_percent():
    one_word = pair_of_one_turn("short", "yes", "it is not so")
    assert "one word" not in hints(check(parsed(pairs=[*distinct(99), one_word])))
    report = check(parsed(pairs=[*distinct(98), one_word, pair_of_one_turn("shorter", "it is not so", "no")]))
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
def test_a_bias_by_length_is_hinted_at_where_it_is_strong(longer, shorter, equal, hint):
    answers = [("a b c", "d e")] * longer + [("d e", "a b c")] * shorter + [("a b", "d e")] * equal
    report = check(parsed(pairs=[pair_of_one_turn(f"q {n}", *both) for n, both in enumerate(answers)]))
    assert (report.chosen_longer.count, report.chosen_longer.total) == (longer, longer + shorter)
    assert hints(report).get("chosen longer", "").startswith(hint) and ("chosen longer" in hints(report)) == bool(hint)


class Bounded(NamedTuple):
    share: float
    low: float
    high: float


def bounded(count: int, total: int) -> Bounded:
    """A share of at least one row, and its bounds."""
    of = share(count, total)
    assert of.share is not None and of.low is not None and of.high is not None
    return Bounded(of.share, of.low, of.high)


def test_a_share_has_the_interval_of_wilson():
    of = bounded(8, 10)
    assert (of.share, round(of.low, 3), round(of.high, 3)) == (0.8, 0.490, 0.943)
    z2 = 1.959963984540054**2
    assert share(0, 10).low == pytest.approx(0) and share(0, 10).high == pytest.approx(z2 / (10 + z2))
    assert share(10, 10).high == pytest.approx(1) and share(10, 10).low == pytest.approx(10 / (10 + z2))
    assert share(0, 0).share is None


@settings(deadline=None)
@given(st.integers(1, 400), st.integers(0, 400))
def test_wilson_bounds_solve_the_score_equation(total, count):
    of = bounded(min(count, total), total)
    for bound in (of.low, of.high):
        assert 0 <= bound <= 1
        assert math.isclose((of.share - bound) ** 2, 1.959963984540054**2 * bound * (1 - bound) / total, abs_tol=1e-12)


def test_lengths_are_counted_in_words_and_dialogues_in_turns():
    prompt = (
        Message("system", "be brief"),
        Message("user", "one two"),
        Message("assistant", "x"),
        Message("user", "y"),
    )
    pairs = [PreferencePair(prompt, "w " * n + "w", "w", "a:1") for n in range(100)]
    report = check(
        parsed(pairs=pairs, documents=[Document("a b c", "a:1")], examples=[Example(prompt[1:2], "b c", "a:2")])
    )
    chosen = report.lengths["chosen"]
    assert (chosen.mean, chosen.p10, chosen.p50, chosen.p90, chosen.p99, chosen.longest) == (50.5, 10, 50, 90, 99, 100)
    assert report.lengths["prompt"].longest == 6 and report.lengths["prompt"].p50 == 6
    assert report.lengths["text"].p50 == 3 and report.lengths["response"].p50 == 2
    assert report.turns == {1: 1, 3: 100}
    table = [(line.name, line.value) for line in report.table()]
    assert ("messages per prompt", "1: 1, 3: 100") in table
    place = table.index(("words per chosen", "mean 50, 10 % 10, 50 % 50, 90 % 90, 99 % 99, longest 100"))
    assert (chosen.upto, chosen.counts) == ((8, 16, 32, 64, 128), (8, 8, 16, 32, 36))
    assert table[place + 1] == ("", "▂▂▄██ texts of up to 8, 16, …, 128")


def test_rows_without_pairs_have_no_figures_of_pairs():
    examples = [Example((Message("user", f"q {n}"),), "yes" if n < 2 else "it is so", f"a:{n}") for n in range(50)]
    report = check(parsed(examples=[*examples, examples[-1]]))
    assert (report.examples, report.one_word, report.duplicates, report.repeated_prompts) == (51, 2, 1, 1)
    assert ("demonstrations", "51") in [(line.name, line.value) for line in report.table()]
    assert "chosen" not in report.lengths and "chosen longer" not in [line[0] for line in report.table()]
    report = check(parsed(documents=[Document("a b", "a:1"), Document("a b", "a:2"), Document("c", "a:3")]))
    assert (report.documents, report.duplicates, report.turns) == (3, 1, {})
    assert ("text rows", "3") in [(line.name, line.value) for line in report.table()]
    assert set(hints(report)) == {"duplicates"}
    assert "one word" not in [line[0] for line in report.table()]


def test_to_dict_is_plain_json_with_the_verdicts():
    report = check(parsed(pairs=[pair_of_one_turn("q", "yes", "no it is not")], malformed=[("a:1", "why")]))
    content: dict[str, Any] = report.to_dict()
    assert json.loads(json.dumps(content)) == content
    assert content["turns"] == {"1": 1} and content["listed"]["malformed"] == ["a:1: why"]
    assert [tuple(finding.values()) for finding in content["findings"]] == report.findings() != []
    assert content["severity"] == "error"
    assert check(parsed()).to_dict()["pairs"] == 0 and check(parsed()).severity == "error"


def test_severity_is_the_worst_of_all():
    assert check(parsed(pairs=distinct(1000))).severity == ""
    assert severities(check(parsed(pairs=distinct(999)))) == {"pairs": "note"}
    one = [*distinct(1000), pair_of_one_turn("odd", "caf\u00c3\u00a9 it is", "no it is not", 7)]
    assert severities(check(parsed(pairs=one))) == {"mojibake": "note"}
    assert severities(check(parsed(pairs=one[-50:]))) == {"pairs": "note", "mojibake": "warning"}


def test_label_noise_is_what_was_planted():
    """Each of 4,000 questions labelled twice, each label wrong with probability 0.2, independently."""
    rng = random.Random(0)
    asked = [n for n in range(4000) for _ in range(2)]
    answers = {1: ("it is so", "it is not"), -1: ("it is not", "it is so")}
    pairs = [pair_of_one_turn(f"q {n}", *answers[rng.choices((1, -1), (8, 2))[0]]) for n in asked]
    estimate = label_noise(pairs)
    assert estimate.low is not None and estimate.high is not None and estimate.disagreement.share is not None
    assert estimate.disagreement.total == 4000
    assert estimate.low < 0.2 < estimate.high and estimate.high - estimate.low < 0.05
    assert estimate.disagreement.share == pytest.approx(0.32, abs=0.03)
    assert estimate.noise == pytest.approx((1 - math.sqrt(1 - 2 * estimate.disagreement.share)) / 2)
    line = next(line for line in check(parsed(pairs=pairs)).table() if line.name == "label noise")
    advice = f"; DPO can allow for it: dpo.label_smoothing={estimate.noise:.2f}"
    assert line.value.endswith(f"from 4,000 labelled more than once{advice}") and not line.severity


def test_label_noise_by_hand():
    """One triple (2 of its 3 label pairs differ), one agreeing pair; coin flips cannot be noisier than one half."""
    triple = [pair_of_one_turn("a", "x y", "z"), pair_of_one_turn("a", "z", "x y"), pair_of_one_turn("a", "x y", "z")]
    agreeing = [pair_of_one_turn("b", "x y", "z"), pair_of_one_turn("b", "x y", "z")]
    estimate = label_noise([*triple, *agreeing, pair_of_one_turn("c", "x", "z")])
    assert estimate.disagreement.total == 2 and estimate.disagreement.share == pytest.approx(1 / 3)
    assert estimate.noise == pytest.approx((1 - math.sqrt(1 / 3)) / 2) and estimate.high == 0.5
    assert label_noise([pair_of_one_turn("d", "x", "y"), pair_of_one_turn("d", "y", "x")]).noise == 0.5
    both_ways = [pair_of_one_turn(f"q {n}", *answers) for n in range(60) for answers in (("x", "y"), ("y", "x"))]
    assert severities(check(parsed(pairs=both_ways)))["label noise"] == "warning"
    few = check(parsed(pairs=both_ways[:58]))
    assert "label noise" not in severities(few)
    line = next(line for line in few.table() if line.name == "label noise")
    assert line.value == "too few to tell: 29 labelled more than once, fewer than 30"


def test_without_second_labels_the_noise_is_unknown():
    report = check(parsed(pairs=distinct(50)))
    assert report.label_noise.noise is None and report.label_noise.disagreement.total == 0
    assert "the file alone cannot tell" in next(line.value for line in report.table() if line.name == "label noise")


def test_scripts_are_counted_and_not_condemned():
    pairs = [*distinct(1000), pair_of_one_turn("Как тебя зовут?", "Меня зовут Анна.", "Не скажу тебе.", 1)]
    report = check(parsed(pairs=pairs))
    assert report.scripts == {"Latin": 3000, "Cyrillic": 3} and report.severity == ""
    assert ("scripts", "Latin 99.9 %, Cyrillic 0.1 %", "", "") in report.table()


def test_leakage_within_the_split_and_into_another_file():
    answer = "this very answer is long enough that nobody would write it twice by chance alone"
    pairs = [pair_of_one_turn(f"question {n}", f"{n} it is", f"{n} it is not", n) for n in range(200)]
    assert check(parsed(pairs=pairs)).leaked == 0
    canned = [pair_of_one_turn(f"question {n}", answer, f"{n} it is not", n) for n in range(40)]
    assert check(parsed(pairs=[*canned, *pairs[40:]])).leaked == 0, "an answer of so many rows is a phrase, not a copy"
    copied = [pair_of_one_turn(f"question {n}", answer, f"{n} it is not", n) for n in range(30, 40)]
    report = check(parsed(pairs=[*pairs[:30], *copied, *pairs[40:]]))
    assert 0 < report.leaked == report.leakage.same_answer < 10
    assert report.leakage.training_rows == 10 - report.leaked and severities(report)["leaked"] == "warning"
    apart = check(parsed(pairs=pairs[40:]), heldout=parsed(pairs=[*pairs[:40], pairs[50]]))
    assert (apart.leakage.training, apart.leakage.heldout, apart.leaked) == (160, 41, 1)
    assert (apart.leakage.same_start, apart.leakage.same_turn) == (1, 1)
    assert apart.listed["leaked"] == ("a.jsonl:50 (a.jsonl:50)",)


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
def test_texts_are_nearly_identical_in_either_order(a, b, near):
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
    pairs = [pair_of_one_turn(f"question {n}", text * 3 + str(n), text * 3 + f"{n} not", n) for n in range(2000)]
    start = time.perf_counter()
    assert check(parsed(pairs=pairs)).near_identical == 2000
    assert time.perf_counter() - start < 4  # 150,000 pairs in a minute would be 0.8; the rest is for a busy machine
