"""The report of a check of preference data: counts and lengths, and the lines with advice that are shown of them.

docs/data.md says what each count means and cannot see.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Literal, NamedTuple

from rlhf.data import amount
from rlhf.data.quality import spread

LISTED, SHOWN = 10, 3  # sources kept of each flaw, and shown beside it in the table
RARE, SOME, MANY = 0.01, 0.05, 0.5  # tolerated shares: of most flaws, of unfinished answers, of repeated prompts
LENGTH_BIAS = 0.6  # share from which on length alone predicts the label noticeably
NOISY, TWICE = 0.25, 30  # rate of wrong labels that is worth a warning, from so many answers labelled more than once

Severity = Literal["", "note", "warning", "error"]  # "": nothing looks wrong
SEVERITIES: tuple[Severity, ...] = ("", "note", "warning", "error")


class Line(NamedTuple):
    """A line of the report: a count or value and, if it looks wrong, advice and a severity."""

    name: str
    value: str
    hint: str = ""
    severity: Severity = ""


@dataclass(frozen=True, slots=True)
class Share:
    """The share `count` of `total` with its 95 % Wilson interval; None if total is 0."""

    count: float
    total: int
    share: float | None
    low: float | None
    high: float | None


@dataclass(frozen=True, slots=True)
class LabelNoise:
    """The rate e of wrong labels, from the share of repeated labels that differ (`disagreement`).

    Labels that are wrong independently and equally often differ in d = 2e(1 − e), so e = (1 − √(1 − 2d)) / 2, and 0.5
    for d above that. `disagreement.total` counts the answers labelled more than once, each as one observation: the
    share of its label pairs that differ. None if nothing was labelled twice.
    """

    disagreement: Share
    noise: float | None
    low: float | None
    high: float | None


@dataclass(frozen=True, slots=True)
class Leakage:
    """Rows on each side, and held-out rows that resemble a training row, counted by kind (leakage.py).

    `training_rows` are the training rows that they resemble, which `data.drop: [leaked]` leaves out.
    """

    training: int
    heldout: int
    training_rows: int
    same_start: int
    same_turn: int
    same_answer: int
    near_copies: int


@dataclass(frozen=True, slots=True)
class QualityReport:
    """Counts of a check. Rows left out on reading come first, then the rows kept.

    near_identical … html   rows with a flaw; flaws.py and oddities.py define them
    leaked           held-out rows that resemble training rows
    repeated_prompts rows whose prompt appeared earlier, duplicates included
    chosen_longer    among the pairs whose answers differ in length; in words, whatever `unit` is
    unit             of the lengths: words, split at white space, or tokens
    lengths          by part: prompt, chosen, rejected, response, text; parts without texts are absent
    turns            rows by number of messages in the prompt, the system message not counted
    scripts          messages, answers and texts by the script that most of their letters are of
    template         rows that the tokenizer's template would change; None where no tokenizer was given
    listed           by field: the first LISTED sources; malformed rows with the reason, leaked ones with their likes
    """

    rows: int
    malformed: int
    prompts_differ: int
    identical: int
    empty: int
    untrained: int
    documents: int
    examples: int
    pairs: int
    prompts: int
    near_identical: int
    contradictory: int
    tied: int
    inverted: int
    duplicates: int
    further_answers: int
    one_word: int
    repeats_prompt: int
    unfinished: int
    other_script: int
    templated: int
    replaced: int
    mojibake: int
    control: int
    invisible: int
    html: int
    leaked: int
    repeated_prompts: int
    chosen_longer: Share
    label_noise: LabelNoise
    leakage: Leakage
    unit: str
    lengths: dict[str, spread.Lengths]
    turns: dict[int, int]
    scripts: dict[str, int]
    listed: dict[str, tuple[str, ...]]
    template: int | None = None

    def with_template(self, refused: Sequence[tuple[str, str]]) -> "QualityReport":
        """Return the report with the rows that a tokenizer's template would change: their places and the reasons."""
        places = tuple(f"{source}: {reason}" for source, reason in refused[:LISTED])
        return replace(self, template=len(refused), listed={**self.listed, "template": places})

    @property
    def severity(self) -> Severity:
        """Return the worst severity of all lines."""
        return max((line.severity for line in self.table()), key=SEVERITIES.index)

    def to_dict(self) -> dict[str, object]:
        """Return the report as plain JSON values, with its table and findings."""
        result: dict[str, object] = json.loads(json.dumps(asdict(self)))
        table, findings = ([line._asdict() for line in lines] for lines in (self.table(), self.findings()))
        return result | {"severity": self.severity, "findings": findings, "table": table}

    def findings(self) -> list[Line]:
        """Return the lines that show a sign of bad data. An empty list does not prove that the data is good."""
        return [line for line in self.table() if line.severity]

    def table(self) -> list[Line]:
        """Return all lines of the report."""
        return [
            *self._left_out(),
            *self._row_counts(),
            *self._labels(),
            *self._signs(),
            *self._characters(),
            *self._template(),
            *self._leaked(),
            *self._length_lines(),
        ]

    def _left_out(self) -> list[Line]:
        """Return the number of rows read, and those that the reader left out."""
        repair = "A run stops at the first. Repair them, or leave them out: data.on_bad_row=skip."
        return [
            Line("rows read", f"{self.rows:,}"),
            self._flaw("malformed", self.malformed, self.rows, repair, below="error", above="error"),
            *(Line("", problem) for problem in self.listed["malformed"]),
            self._flaw(
                "prompts_differ",
                self.prompts_differ,
                self.rows,
                "Left out; their answers cannot be compared.",
                below="note",
            ),
            self._flaw(
                "identical", self.identical, self.rows, "Left out; equal answers carry no preference.", below="note"
            ),
            self._flaw("empty", self.empty, self.rows, "Left out; an answer is missing.", below="note"),
            self._flaw(
                "untrained",
                self.untrained,
                self.rows,
                "Left out: no answer has a weight above 0.",
                above="note",
            ),
        ]

    def _row_counts(self) -> list[Line]:
        """Return the number of rows of each kind that are left."""
        kinds = (
            ("text rows", self.documents),
            ("demonstrations", self.examples),
            ("pairs", self.pairs),
            ("prompts without a response", self.prompts),
        )
        lines = [Line(name, f"{count:,}") for name, count in kinds if count]
        if self.pairs and (advice := amount.advice(self.pairs)):
            index = next(index for index, line in enumerate(lines) if line.name == "pairs")
            lines[index] = lines[index]._replace(hint=f"{advice[0].upper()}{advice[1:]}.", severity="note")
        if self.prompts and not self.examples + self.pairs:
            hint = (
                "Only PPO, RLOO and GRPO can use them; SFT and the reward model need rows with responses beside them."
            )
            lines[-1] = lines[-1]._replace(hint=hint, severity="note")
        return lines or [
            Line("rows kept", "0", "Nothing is left to train on. The lines above say why rows were left out.", "error")
        ]

    def _labels(self) -> list[Line]:
        """Return the signs that only pairs can show."""
        if not self.pairs:
            return []
        near_hint = "Hardly any preference signal in these; drop them or collect answers that differ more."
        contradictory_hint = "The same answers are labelled both ways; keep the majority's label or drop them."
        tied_hint = "The scores of both answers are equal, so the label is arbitrary; drop them."
        inverted_hint = "The rejected answer has the higher score; find out which is right, the scores or the labels."
        return [
            self._flaw("near_identical", self.near_identical, self.pairs, near_hint),
            self._flaw("contradictory", self.contradictory, self.pairs, contradictory_hint, below="note"),
            self._flaw("tied", self.tied, self.pairs, tied_hint, below="note"),
            self._flaw("inverted", self.inverted, self.pairs, inverted_hint, below="note"),
            _noise_line(self.label_noise),
            _length_line(self.chosen_longer),
        ]

    def _signs(self) -> list[Line]:
        """Return the signs that prompts and answers of any kind can show."""
        answered = self.examples + self.pairs
        prompted = answered + self.prompts
        prompts_hint = "Few distinct prompts; PPO samples from them, and more variety generalises better."
        short_hint = "Read some: often answers cut off or missing."
        repeats_hint = "Answers begin with their prompt, and a model will too: write the answers alone."
        unfinished_hint = "Answers stop in the middle; a model that learns from them will too. Drop or complete them."
        lines = [
            self._flaw("duplicates", self.duplicates, prompted + self.documents, "Copies weigh more; keep one of each.")
        ]
        if prompted:
            templated_hint = "The template would be written twice: give plain texts, without its marks."
            lines.append(self._flaw("templated", self.templated, prompted, templated_hint, below="note"))
        if self.further_answers:
            answers_hint = "RLOO and GRPO refuse two right answers to one prompt. data.drop leaves these rows out."
            lines.append(
                self._flaw(
                    "further_answers", self.further_answers, self.examples + self.prompts, answers_hint, below="note"
                )
            )
        if answered:
            lines.append(self._flaw("one_word", self.one_word, answered, short_hint, above="note"))
            lines.append(self._flaw("repeats_prompt", self.repeats_prompt, answered, repeats_hint, below="note"))
            lines.append(self._flaw("unfinished", self.unfinished, answered, unfinished_hint, SOME))
        if prompted:
            lines.append(
                self._flaw("repeated_prompts", self.repeated_prompts, prompted, prompts_hint, MANY, above="note")
            )
        return lines

    def _characters(self) -> list[Line]:
        """Return signs of damaged or unusual characters, and the scripts of the texts."""
        total = self.documents + self.examples + self.pairs + self.prompts
        lost_hint = "U+FFFD: characters were lost when the text was decoded; take it from its source anew."
        misread_hint = "UTF-8 that was read as cp1252 or Latin-1; decode the source anew."
        script_hint = "The answer's script is not that of what it answers; fine in translations."
        scripts = sum(self.scripts.values())
        shares = ", ".join(f"{name} {100 * n / scripts:.1f} %" for name, n in self.scripts.items())
        return [
            self._flaw("replaced", self.replaced, total, lost_hint, below="note"),
            self._flaw("mojibake", self.mojibake, total, misread_hint, below="note"),
            self._flaw("control", self.control, total, "Control characters; take them out.", below="note"),
            self._flaw(
                "invisible", self.invisible, total, "Zero-width or direction characters; take them out.", below="note"
            ),
            self._flaw("html", self.html, total, "HTML tags or entities; fine where code was asked for.", above="note"),
            self._flaw("other_script", self.other_script, total, script_hint, above="note"),
            Line("scripts", shares or "no letters"),
        ]

    def _template(self) -> list[Line]:
        """Return the number of rows that the template would change, where a tokenizer was given, with the first."""
        if self.template is None:
            return []
        total = self.documents + self.examples + self.pairs + self.prompts
        hint = "A run stops at them, or leaves them out with data.on_bad_row=skip."
        count = self._flaw("template", self.template, total, hint, below="error", above="error")
        return [count, *(Line("", problem) for problem in self.listed["template"][:SHOWN])]

    def _leaked(self) -> list[Line]:
        """Return the leaked rows and how they were found; that they were not looked for where a side is empty."""
        leakage = self.leakage
        if not (leakage.heldout and leakage.training):
            return [
                Line("leaked", f"not looked for: training rows {leakage.training:,}, held-out rows {leakage.heldout:,}")
            ]
        hint = (
            "Held-out rows that are also in training make results look better. data.drop: [leaked] leaves those "
            "training rows out."
        )
        line = self._flaw("leaked", self.leaked, leakage.heldout, hint, below="note")
        by_kind = {
            "same start": leakage.same_start,
            "same turn": leakage.same_turn,
            "same answer": leakage.same_answer,
            "near copies": leakage.near_copies,
        }
        counts = ", ".join(f"{kind} {count:,}" for kind, count in by_kind.items() if count)
        return [line, Line("", f"{counts}; {leakage.training_rows:,} training rows like them")] if counts else [line]

    def _length_lines(self) -> list[Line]:
        """Return the lengths of each part of a row, and the number of messages."""
        lines = []
        for part, summary in self.lengths.items():
            shares = {10: summary.p10, 50: summary.p50, 90: summary.p90, 99: summary.p99}
            quantiles = ", ".join(f"{share} % {length}" for share, length in shares.items())
            quantiles += f", longest {summary.longest}"
            lines += [
                Line(f"{self.unit} per {part}", f"mean {summary.mean:.0f}, {quantiles}"),
                *([Line("", bars)] if (bars := summary.bars()) else []),
            ]
        if self.turns:
            turns = ", ".join(f"{turns}: {count:,}" for turns, count in self.turns.items())
            lines.append(Line("messages per prompt", turns))
        return lines

    def _flaw(
        self,
        field: str,
        count: int,
        total: int,
        hint: str,
        tolerated: float = RARE,
        below: Severity = "",
        above: Severity = "warning",
    ) -> Line:
        """Return a line on a count. Its severity is `above` over the tolerated share, `below` up to it."""
        name = field.replace("_", " ")
        if not count:
            return Line(name, "0")
        listed = self.listed.get(field, ())[:SHOWN] if field not in ("malformed", "template") else ()
        places = re.sub(r"[^ (]*/", "", ", ".join(listed))  # without the folders of files
        value = f"{count:,} ({100 * count / total:.1f} %)" + (f", as {places}" if places else "")
        severity = above if count > tolerated * total else below
        return Line(name, value, hint if severity else "", severity)


def _percent(value: float | None, low: float | None, high: float | None) -> str:
    """Return a share and its interval in percent."""
    assert value is not None and low is not None and high is not None
    return f"{100 * value:.1f} % ({100 * low:.1f} to {100 * high:.1f})"


def _noise_line(noise: LabelNoise) -> Line:
    """Return the line on wrong labels."""
    if noise.low is None:
        hint = "evaluating a calibrated reward model bounds it"
        return Line("label noise", f"nothing is labelled twice, so the file alone cannot tell; {hint}")
    twice = noise.disagreement.total
    if twice < TWICE:
        return Line("label noise", f"too few to tell: {twice} labelled more than once, fewer than {TWICE}")
    value = f"{_percent(noise.noise, noise.low, noise.high)}, from {twice:,} labelled more than once"
    if noise.noise and 0.005 <= noise.noise < 0.5:
        value += f"; DPO can allow for it: dpo.label_smoothing={noise.noise:.2f}"
    if noise.low <= NOISY:
        return Line("label noise", value)
    return Line("label noise", value, "Labels contradict each other often; ask more annotators for each.", "warning")


def _length_line(longer: Share) -> Line:
    """Return the line on how often the longer answer was chosen."""
    if longer.low is None or longer.high is None:
        return Line("chosen longer", "no pairs to compare")
    value = _percent(longer.share, longer.low, longer.high)
    if longer.low > LENGTH_BIAS:
        hint = "Length alone predicts the label; watch response length under PPO, or balance the pairs."
    elif longer.high < 1 - LENGTH_BIAS:
        hint = "Shorter answers mostly win; the policy may learn to say little. Balance the pairs if you mind."
    else:
        return Line("chosen longer", value)
    return Line("chosen longer", value, hint, "warning")
