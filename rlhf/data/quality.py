"""Signs of bad preference data, counted before a GPU is paid for.

Counts only: no model reads the texts, so an answer that is wrong or chosen by mistake goes unseen. Read some pairs too.
Lengths are in words, split at white space.
"""

import json
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from difflib import SequenceMatcher

from rlhf.data.formats import Message, PreferencePair, Rows
from rlhf.stats import wilson

NEAR_IDENTICAL = 0.95  # least share of words, in order, that two answers have in common
COMPARED_WORDS = 300  # the in-order comparison costs their product; words beyond count as different
LISTED, SHOWN = 10, 3  # sources kept of each flaw, and shown beside it in the table
FEW_PAIRS = 1000  # published guides for one GPU ask for 1,000 to 10,000 pairs
RARE, MANY = 0.01, 0.5  # shares of the rows above which a flaw is worth a hint: most flaws, repeated prompts
LENGTH_BIAS = 0.6  # share from which on length alone predicts the label noticeably

Line = tuple[str, str, str]  # name, value, hint


@dataclass(frozen=True, slots=True)
class Share:
    """`count` of `total`, with the 95 % Wilson interval of the share; None of it when total is 0."""

    count: int
    total: int
    share: float | None
    low: float | None
    high: float | None


@dataclass(frozen=True, slots=True)
class Lengths:
    """Words per text; nearest-rank quantiles: the least length that this part of the texts does not exceed."""

    mean: float
    p10: int
    p50: int
    p90: int
    p99: int
    longest: int


@dataclass(frozen=True, slots=True)
class QualityReport:
    """What `check` counted. Rows left out on reading come first, then the rows kept.

    near_identical   pairs whose answers share NEAR_IDENTICAL of their words in order
    one_word         rows with a response of at most one word
    duplicates       rows that repeat an earlier row, the first of each not counted
    contradictory    pairs whose prompt and answers appear with the opposite label too, all copies counted
    repeated_prompts rows whose prompt appeared earlier, duplicates included
    chosen_longer    among the pairs whose answers differ in length
    lengths          by part: prompt, chosen, rejected, response, text; parts without texts are absent
    turns            rows by number of messages in the prompt, the system message not counted
    listed           by field: the first LISTED sources, with the reason for malformed rows
    """

    rows: int
    malformed: int
    prompts_differ: int
    identical: int
    empty: int
    documents: int
    examples: int
    pairs: int
    near_identical: int
    one_word: int
    duplicates: int
    contradictory: int
    repeated_prompts: int
    chosen_longer: Share
    lengths: dict[str, Lengths]
    turns: dict[int, int]
    listed: dict[str, tuple[str, ...]]

    def to_dict(self) -> dict[str, object]:
        """Plain JSON values only, the verdicts included."""
        result: dict[str, object] = json.loads(json.dumps(asdict(self)))
        return result | {"verdicts": self.verdicts()}

    def verdicts(self) -> list[str]:
        """One line for each sign of bad data; none is good news, not a proof."""
        return [f"{name}: {value}. {hint}" for name, value, hint in self.table() if hint]

    def table(self) -> list[Line]:
        """(name, value, hint) to print; the hint is empty where nothing looks wrong."""
        return [*self._left_out(), *self._kept(), *self._answers(), *self._signs(), *self._shape()]

    def _left_out(self) -> list[Line]:
        return [
            ("rows read", f"{self.rows:,}", ""),
            self._flaw("malformed", self.rows, 0, "Left out; repair them or take them out of the file."),
            *(("", problem, "") for problem in self.listed["malformed"]),
            self._flaw("prompts_differ", self.rows, 0, "Left out; their answers cannot be compared."),
            self._flaw("identical", self.rows, 0, "Left out; equal answers carry no preference."),
            self._flaw("empty", self.rows, 0, "Left out; an answer is missing."),
        ]

    def _kept(self) -> list[Line]:
        few = f"Few for a reward model; {FEW_PAIRS:,} or more are advised." if 0 < self.pairs < FEW_PAIRS else ""
        kinds = (("text rows", self.documents, ""), ("instruction rows", self.examples, ""), ("pairs", self.pairs, few))
        return [(name, f"{count:,}", hint) for name, count, hint in kinds if count]

    def _answers(self) -> list[Line]:
        """Signs that only pairs can show."""
        if not self.pairs:
            return []
        near = "Hardly any preference signal in these; drop them or collect answers that differ more."
        both_ways = "The same answers are labelled both ways; keep the majority's label or drop them."
        return [
            self._flaw("near_identical", self.pairs, RARE, near),
            self._flaw("contradictory", self.pairs, 0, both_ways),
            ("chosen longer", _percent(self.chosen_longer), _length_hint(self.chosen_longer)),
        ]

    def _signs(self) -> list[Line]:
        prompted = self.examples + self.pairs
        alike = "Few distinct prompts; PPO samples from them, and more variety generalises better."
        lines = [self._flaw("duplicates", prompted + self.documents, RARE, "Copies weigh more; keep one of each.")]
        if prompted:
            lines.append(self._flaw("one_word", prompted, RARE, "Read some: often answers cut off or missing."))
            lines.append(self._flaw("repeated_prompts", prompted, MANY, alike))
        return lines

    def _shape(self) -> list[Line]:
        lines = []
        for part, of in self.lengths.items():
            quantiles = f"10 % {of.p10}, 50 % {of.p50}, 90 % {of.p90}, 99 % {of.p99}, longest {of.longest}"
            lines.append((f"words per {part}", f"mean {of.mean:.0f}, {quantiles}", ""))
        if self.turns:
            turns = ", ".join(f"{turns}: {count:,}" for turns, count in self.turns.items())
            lines.append(("messages per prompt", turns, ""))
        return lines

    def _flaw(self, field: str, total: int, tolerated: float, hint: str) -> Line:
        """A line on one count, whose hint shows only above the tolerated share."""
        name, count = field.replace("_", " "), getattr(self, field)
        if not count:
            return name, "0", ""
        where = ", ".join(self.listed.get(field, ())[:SHOWN]) if field != "malformed" else ""
        value = f"{count:,} ({100 * count / total:.1f} %)" + (f", as {where}" if where else "")
        return name, value, hint if count > tolerated * total else ""


def check(rows: Rows) -> QualityReport:
    """Count the signs of bad data; seconds for 100,000 pairs."""
    report = rows.report
    prompts = [example.prompt for example in rows.examples] + [pair.prompt for pair in rows.pairs]
    chosen = [len(pair.chosen.split()) for pair in rows.pairs]
    rejected = [len(pair.rejected.split()) for pair in rows.pairs]
    response = [len(example.response.split()) for example in rows.examples]
    texts = {
        "prompt": [sum(len(message.content.split()) for message in prompt) for prompt in prompts],
        "chosen": chosen,
        "rejected": rejected,
        "response": response,
        "text": [len(document.text.split()) for document in rows.documents],
    }
    near_identical = [p.source for p in rows.pairs if nearly_identical(p.chosen.split(), p.rejected.split())]
    contradictory = _contradictory(rows.pairs)
    listed = {
        "malformed": [f"{source}: {reason}" for source, reason in report.malformed],
        "prompts_differ": report.prompts_differ,
        "identical": report.identical,
        "empty": report.empty,
        "near_identical": near_identical,
        "contradictory": contradictory,
    }
    return QualityReport(
        rows=report.rows,
        malformed=len(report.malformed),
        prompts_differ=len(report.prompts_differ),
        identical=len(report.identical),
        empty=len(report.empty),
        documents=len(rows.documents),
        examples=len(rows.examples),
        pairs=len(rows.pairs),
        near_identical=len(near_identical),
        one_word=sum(words <= 1 for words in [*response, *map(min, zip(chosen, rejected, strict=True))]),
        duplicates=_repeats(document.text for document in rows.documents)
        + _repeats((example.prompt, example.response) for example in rows.examples)
        + _repeats((pair.prompt, pair.chosen, pair.rejected) for pair in rows.pairs),
        contradictory=len(contradictory),
        repeated_prompts=_repeats(prompts),
        chosen_longer=share(
            sum(a > b for a, b in zip(chosen, rejected, strict=True)),
            sum(a != b for a, b in zip(chosen, rejected, strict=True)),
        ),
        lengths={part: _lengths(words) for part, words in texts.items() if words},
        turns=dict(sorted(Counter(map(_turns, prompts)).items())),
        listed={field: tuple(sources[:LISTED]) for field, sources in listed.items()},
    )


def nearly_identical(a: Sequence[str], b: Sequence[str]) -> bool:
    """Whether 2·M / (|a| + |b|) is at least NEAR_IDENTICAL, M the words that match in order as difflib counts them.

    Bounds that cost less come first: M is at most the shorter length, and at most the words in common in any order.
    The quadratic matching is left with what lies between the common start and end, and with COMPARED_WORDS of that.
    """
    least = NEAR_IDENTICAL * (len(a) + len(b)) / 2
    if min(len(a), len(b)) < least or (Counter(a) & Counter(b)).total() < least:
        return False
    start = _common_start(a, b)
    a, b = a[start:], b[start:]
    end = _common_start(a[::-1], b[::-1])
    a, b = a[: len(a) - end][:COMPARED_WORDS], b[: len(b) - end][:COMPARED_WORDS]
    blocks = SequenceMatcher(None, a, b, autojunk=False).get_matching_blocks()
    return start + end + sum(block.size for block in blocks) >= least


def _common_start(a: Sequence[str], b: Sequence[str]) -> int:
    return next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def share(count: int, total: int) -> Share:
    """Share with its 95 % Wilson interval."""
    if not total:
        return Share(count, total, None, None, None)
    return Share(count, total, *wilson(count, total))


def _contradictory(pairs: Sequence[PreferencePair]) -> list[str]:
    labelled = {(pair.prompt, pair.chosen, pair.rejected) for pair in pairs}
    return [pair.source for pair in pairs if (pair.prompt, pair.rejected, pair.chosen) in labelled]


def _repeats(items: Iterable[object]) -> int:
    counts = Counter(items)
    return counts.total() - len(counts)


def _turns(prompt: Sequence[Message]) -> int:
    return sum(message.role != "system" for message in prompt)


def _lengths(words: Sequence[int]) -> Lengths:
    ordered = sorted(words)
    p10, p50, p90, p99 = (ordered[math.ceil(q * len(ordered)) - 1] for q in (0.1, 0.5, 0.9, 0.99))
    return Lengths(sum(ordered) / len(ordered), p10, p50, p90, p99, ordered[-1])


def _percent(of: Share) -> str:
    if of.share is None or of.low is None or of.high is None:
        return "no pairs to compare"
    return f"{100 * of.share:.1f} % ({100 * of.low:.1f} to {100 * of.high:.1f})"


def _length_hint(of: Share) -> str:
    if of.low is not None and of.low > LENGTH_BIAS:
        return "Length alone predicts the label; watch response length under PPO, or balance the pairs."
    if of.high is not None and of.high < 1 - LENGTH_BIAS:
        return "Shorter answers mostly win; the policy may learn to say little. Balance the pairs if you mind."
    return ""
