"""The tables of README.md and its picture, from a record of `python -m studies.overoptimisation`."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean

from bench import paths
from bench.paths import ROOT
from bench.reading import read
from bench.svg import GREY, Axes, picture
from rlhf.stats import Estimate, weighted_mean
from studies.kinds import OptimisedPoint, OveroptimisationRecord
from studies.overoptimisation import curves
from studies.overoptimisation.curves import Form
from studies.paths import OVEROPTIMISATION

PAGE = OVEROPTIMISATION / "README.md"
RESULTS = OVEROPTIMISATION / "results"
IMAGE = ROOT / "docs" / "images" / "overoptimisation.svg"
TITLES: dict[Form, str] = {"best_of_n": "best-of-n", "ppo": "PPO"}
COLOURS = ("#1f6feb", "#1a7f37", "#d9822b", "#8250df", "#cf222e")
GAINS = ("proxy", "d at the end", "proxy at the end", "highest truth", "truth at the end", "utility at the end")
FITS = ("proxy", "α", "β", "residual", "residual of the other form", "fitted maximum at d")


def newest() -> Path:
    """Return the newest record; their names begin with the date."""
    return paths.newest(RESULTS)


def by_proxy(record: OveroptimisationRecord, form: Form) -> dict[str, list[list[OptimisedPoint]]]:
    """Return each proxy's curve of every seed."""
    runs = [run["best_of_n"] if form == "best_of_n" else run["ppo"] for run in record["seeds"].values()]
    return {name: [run[name] for run in runs] for name in runs[0]}


def distance(point: OptimisedPoint) -> float:
    """Return d = √KL of a point."""
    return math.sqrt(max(0.0, point["kl"]))


def mean_curve(seeds: Sequence[Sequence[OptimisedPoint]]) -> list[dict[str, float]]:
    """Return means over the seeds at each n or step: d, and the gains of proxy and truth."""
    return [
        {"d": fmean(map(distance, points)), **{key: fmean(p[key] for p in points) for key in ("proxy", "truth")}}
        for points in zip(*seeds, strict=True)
    ]


def truth(seeds: Sequence[Sequence[OptimisedPoint]]) -> list[tuple[float, float]]:
    """Return (d, gain in truth) of every point."""
    return [(distance(point), point["truth"]) for points in seeds for point in points]


def gains(record: OveroptimisationRecord, form: Form) -> str:
    """Return the table of a method's gains: a row for each proxy."""
    rows = [GAINS]
    for name, seeds in by_proxy(record, form).items():
        ends, middle = [points[-1] for points in seeds], mean_curve(seeds)
        top = max(middle, key=lambda point: point["truth"])
        end = weighted_mean(
            [Estimate(end["truth"], end["truth_low"], end["truth_high"]) for end in ends], [1 / len(ends)] * len(ends)
        )
        rows.append(
            (
                name,
                f"{middle[-1]['d']:.1f}",
                f"{middle[-1]['proxy']:.2f}",
                f"{top['truth']:.2f} at d = {top['d']:.1f}",
                f"{end.value:.2f} ({end.low:.2f} to {end.high:.2f}); {_range([e['truth'] for e in ends])}",
                f"{fmean(end['utility'] for end in ends):.2f}",
            )
        )
    return _table(rows)


def fits(record: OveroptimisationRecord, form: Form) -> str:
    """Return the table of the fitted forms of a method: a row for each proxy."""
    other = next(name for name in TITLES if name != form)
    rows = [FITS]
    for name, seeds in by_proxy(record, form).items():
        points = truth(seeds)
        fitted, each = curves.fit(form, points), [curves.fit(form, truth([points])) for points in seeds]
        peak = curves.peak(fitted, form)
        rows.append(
            (
                name,
                f"{fitted['alpha']:.2f}; {_range([fit['alpha'] for fit in each])}",
                f"{fitted['beta']:.2f}; {_range([fit['beta'] for fit in each])}",
                f"{fitted['residual']:.2f}",
                f"{curves.fit(other, points)['residual']:.2f}",
                "–" if peak is None else f"{peak:.1f}",
            )
        )
    return _table(rows)


def _table(rows: Sequence[Sequence[str]]) -> str:
    head, *others = (f"| {' | '.join(cells)} |" for cells in rows)
    return "\n".join([head, "|---|" + "---:|" * (len(rows[0]) - 1), *others])


def accuracies(record: OveroptimisationRecord) -> str:
    """Return the table of the reward models' accuracies on held-out pairs."""
    rows = [("reward model", "accuracy")]
    runs = list(record["seeds"].values())
    for name in runs[0]["accuracy"]:
        found = [100 * run["accuracy"][name] for run in runs]
        rows.append((name, f"{fmean(found):.1f} %; {_range(found, 1)}"))
    return _table(rows)


def _range(numbers: Sequence[float], digits: int = 2) -> str:
    return f"{min(numbers):.{digits}f} to {max(numbers):.{digits}f}"


def tables(record: OveroptimisationRecord) -> dict[str, str]:
    """Return all tables of a record, by the marks between which README.md has them."""
    of_methods = {f"{name.__name__} {form}": name(record, form) for name in (gains, fits) for form in TITLES}
    return {"accuracies": accuracies(record), **of_methods}


# -- the picture -------------------------------------------------------------------------------------------------------

WIDE, HIGH = 900, 640
PANELS: dict[Form, tuple[tuple[float, float, float], tuple[float, float, float]]] = {  # low, high and tick of each axis
    "best_of_n": ((0.0, 2.0, 0.5), (-0.5, 2.5, 0.5)),
    "ppo": ((0.0, 9.0, 1.0), (-2.0, 3.5, 0.5)),
}


def picture_of(record: OveroptimisationRecord) -> str:
    """Return the picture: both methods, of proxies without and with flipped labels."""
    parts: list[str] = []
    for row, form in enumerate(TITLES):
        every = by_proxy(record, form)
        for column, noisy in enumerate((False, True)):
            chosen = {name: seeds for name, seeds in every.items() if ("noisy" in name) == noisy}
            parts += _panel(form, chosen, row, column)
    note = "dots: truth of each seed; lines: the form fitted to them; pale: the proxy, mean over seeds"
    parts.append(f'<text x="{WIDE / 2:.0f}" y="{HIGH - 8}" text-anchor="middle" fill="{GREY}">{note}</text>')
    return picture(WIDE, HIGH, parts)


def _panel(
    form: Form, proxies: Mapping[str, Sequence[Sequence[OptimisedPoint]]], row: int, column: int
) -> Iterator[str]:
    """Return one of the four panels."""
    across, up = PANELS[form]
    left, top = 52 + column * (WIDE // 2), 24 + row * 305
    share_across, share_up = (
        lambda value, low=low, high=high: (value - low) / (high - low) for low, high, _ in (across, up)
    )
    axes = Axes(WIDE, HIGH, left, WIDE - left - 380, top, HIGH - top - 235, share_across, share_up)
    yield from axes.grid(_ticks(*across), _ticks(*up))
    yield axes.line([(across[0], 0.0), (across[1], 0.0)], "#888")
    for (name, seeds), colour in zip(proxies.items(), COLOURS, strict=False):
        middle, points = mean_curve(seeds), truth(seeds)
        fitted, furthest = curves.fit(form, points), max(d for d, _ in points)
        yield axes.line([(0.0, 0.0), *((point["d"], point["proxy"]) for point in middle)], colour, opacity=0.35)
        yield axes.line([(d, curves.value(fitted, form, d)) for d in _steps(furthest)], colour)
        yield from (axes.dot(point, colour, name, opacity=0.4) for point in points)
    yield from axes.key(dict(zip(proxies, COLOURS, strict=False)), left + 12, top + 14)
    yield f'<text x="{left + 190}" y="{top - 8}" text-anchor="middle">{TITLES[form]}: gain, sd of SFT</text>'
    yield f'<text x="{left + 190}" y="{top + 270}" text-anchor="middle">d = √KL, KL in nats per answer</text>'


def _ticks(low: float, high: float, step: float) -> dict[float, str]:
    return {low + i * step: f"{low + i * step:g}" for i in range(round((high - low) / step) + 1)}


def _steps(end: float) -> list[float]:
    return [end * i / 60 for i in range(61)]


def marked(name: str, table: str) -> str:
    """Return a table between its marks."""
    return f"<!-- {name} -->\n{table}\n<!-- /{name} -->"


def write(file: Path) -> None:
    """Write the picture of a record, and its name and tables into README.md."""
    record = read(file, OveroptimisationRecord)
    IMAGE.write_text(picture_of(record), encoding="utf-8")
    text = re.sub(r"results/\S+?\.json", f"results/{file.name}", PAGE.read_text(encoding="utf-8"))
    for name, table in tables(record).items():
        text = re.sub(marked(name, ".*?"), partial(lambda shown, _: shown, marked(name, table)), text, flags=re.DOTALL)
    PAGE.write_text(text, encoding="utf-8")
