"""What ratings say: wins and losses of a policy, rates with intervals, agreement of raters."""

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from rlhf import stats
from rlhf.observe import console
from rlhf.observe.console import harmless
from rlhf.rating.pairs import Comparison, Pair
from rlhf.rating.store import JUDGE, WORTH, standing


def summarize(found: Comparison) -> dict[str, Any]:
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
    columns: dict[str, Callable[[str, Mapping[str, Any]], str]] = {
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
