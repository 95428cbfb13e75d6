"""Statistics of ratings: wins and losses of a policy, win rates with intervals, agreement of raters."""

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from rlhf import stats
from rlhf.data.scripts import words
from rlhf.files import JsonObject
from rlhf.rating.pairs import Pair, PairedAnswers
from rlhf.rating.store import JUDGE, WIN_OF_B, Rating, current_ratings
from rlhf.terminal import harmless, screen
from rlhf.terminal.tables import rows_table

Vote = tuple[Rating, Pair]


class Agreement(NamedTuple):
    """Of `of` ratings that prefer an answer, the share whose preferred answer also has the higher value."""

    share: float
    of: int


class Figures(NamedTuple):
    """Statistics of one rater, or of several raters, whose votes on a pair are averaged and count once.

    Wins are those of policy b. `order_decided` is the share of pairs on which the order of the answers changed a
    judge's choice.
    """

    wins: int
    losses: int
    ties: int
    skips: int
    pairs: int
    win_rate: stats.Estimate | None
    length_controlled_win_rate: stats.Estimate | None
    agrees_with_score: Agreement | None
    agrees_with_true_reward: Agreement | None
    alpha: float | None
    order_decided: float | None

    def as_json(self) -> JsonObject:
        """Return the statistics as plain JSON values."""
        return {key: value._asdict() if hasattr(value, "_asdict") else value for key, value in self._asdict().items()}


class RatingSummary(NamedTuple):
    """Statistics of the ratings of two policies' answers, for each rater and for groups of raters.

    `equal` counts pairs with equal answers, which are not rated; `of_other_answers` ratings of answers that are gone.
    """

    a: str
    b: str
    pairs: int
    equal: int
    of_other_answers: int
    raters: dict[str, Figures]
    groups: dict[str, Figures]

    def as_json(self) -> JsonObject:
        """Return the summary as plain JSON values."""
        by_name = {key: {name: f.as_json() for name, f in getattr(self, key).items()} for key in ("raters", "groups")}
        return self._asdict() | by_name


def summarize(paired: PairedAnswers) -> RatingSummary:
    """Return the statistics of all ratings of these pairs."""
    pairs = {(pair.item, pair.digest): pair for pair in paired.pairs}
    ratings = current_ratings(paired.file)
    votes = [(rating, pairs[rating.pair]) for rating in ratings if rating.pair in pairs]
    raters = sorted({rating.rater for rating, _ in votes}, key=lambda name: (name.startswith(JUDGE), name))
    people = [name for name in raters if not name.startswith(JUDGE)]
    groups = {"people": people, "all": raters} if len(people) < len(raters) else {"all": raters}
    by_rater = {name: [(rating, pair) for rating, pair in votes if rating.rater == name] for name in raters}
    return RatingSummary(
        a=paired.a,
        b=paired.b,
        pairs=len(paired.pairs),
        equal=paired.equal,
        of_other_answers=len(ratings) - len(votes),
        raters={name: _figures(by_rater[name]) for name in raters},
        groups={
            group: _figures([vote for name in names for vote in by_rater[name]])
            for group, names in groups.items()
            if len(names) > 1
        },
    )


def _figures(votes: Sequence[Vote]) -> Figures:
    """Return the statistics of votes. The outcome of a pair is the mean of its votes."""
    counts = Counter(rating.choice for rating, _ in votes)
    choices = defaultdict(list)
    for rating, pair in votes:
        if rating.choice in WIN_OF_B:
            choices[pair.item].append(rating.choice)
    pairs = {pair.item: pair for _, pair in votes}
    outcomes = [fmean(WIN_OF_B[choice] for choice in pair_choices) for pair_choices in choices.values()]
    length_differences = [float(len(words(pairs[item].b)) - len(words(pairs[item].a))) for item in choices]
    in_both_orders = [rating.said for rating, _ in votes if rating.said and None not in rating.said.values()]
    return Figures(
        wins=sum(outcome > 0.5 for outcome in outcomes),
        losses=sum(outcome < 0.5 for outcome in outcomes),
        ties=sum(outcome == 0.5 for outcome in outcomes),
        skips=counts["skip"],
        pairs=len(outcomes),
        win_rate=stats.wilson(sum(outcomes), len(outcomes)) if outcomes else None,
        length_controlled_win_rate=stats.length_controlled_win_rate(outcomes, length_differences),
        agrees_with_score=_agreement(votes, "score"),
        agrees_with_true_reward=_agreement(votes, "true_reward"),
        alpha=stats.krippendorff_alpha(list(choices.values())),
        order_decided=fmean(said["ab"] != said["ba"] for said in in_both_orders) if in_both_orders else None,
    )


def _agreement(votes: Sequence[Vote], key: str) -> Agreement | None:
    """Return how often the preferred answer is also the one with the higher value of `key`."""
    agree = []
    for rating, pair in votes:
        a, b = pair.values.get(key, (0.0, 0.0))
        if rating.choice in ("a", "b") and a != b:
            agree.append((b > a) == (rating.choice == "b"))
    return Agreement(fmean(agree), len(agree)) if agree else None


COLUMNS: Mapping[str, Callable[[Figures], str]] = {
    "won": lambda figures: str(figures.wins),
    "lost": lambda figures: str(figures.losses),
    "tied": lambda figures: str(figures.ties),
    "skipped": lambda figures: str(figures.skips),
    "win rate": lambda figures: _interval(figures.win_rate),
    "at equal length": lambda figures: _interval(figures.length_controlled_win_rate),
    "agrees with score": lambda figures: _agreement_text(figures.agrees_with_score),
    "with true reward": lambda figures: _agreement_text(figures.agrees_with_true_reward),
    "order decided": lambda figures: _percent(figures.order_decided),
    "alpha": lambda figures: "" if figures.alpha is None else f"{figures.alpha:.2f}",
}


def show_summary(summary: RatingSummary, file: Path) -> None:
    """Print the summary as a table without empty columns. `file` holds the ratings."""
    if not summary.raters:
        screen.OUT.print(f"{summary.b} against {summary.a}: nothing of {summary.pairs} rated yet")
        return
    rows_by_name = [*summary.raters.items(), *summary.groups.items()]
    columns = ["rater", *COLUMNS]
    rows = [[harmless(name), *(cell(figures) for cell in COLUMNS.values())] for name, figures in rows_by_name]
    filled = [i for i in range(len(columns)) if any(row[i] for row in rows)]
    equal = f", {summary.equal} more with equal answers left out" if summary.equal else ""
    title = f"{summary.b} against {summary.a}: {summary.pairs} pairs{equal}"
    rows_table(title, [columns[i] for i in filled], [[row[i] for i in filled] for row in rows])
    if summary.of_other_answers:
        screen.OUT.print(f"{summary.of_other_answers} ratings belong to answers that no longer exist")
    screen.OUT.print(f"ratings in {file}", style="dim")


def _interval(rate: stats.Estimate | None) -> str:
    """Return a rate and its interval in percent."""
    return f"{rate.value:.0%} ({100 * rate.low:.0f}–{100 * rate.high:.0f})" if rate else ""


def _agreement_text(agreement: Agreement | None) -> str:
    return f"{agreement.share:.0%} of {agreement.of}" if agreement else ""


def _percent(share: float | None) -> str:
    return f"{share:.0%}" if share is not None else ""
