"""Numbers, ranges and sizes as text, the same in tables, reports, messages and options."""

import math
import re
from collections.abc import Iterable, Mapping

GB = 1e9  # bytes
SHOWN = {  # phrases of keys that say little by themselves
    "lc_win_rate": "win rate at equal length",
    "proxy_truth_gap": "gain by score less gain by truth",
    "second_gap": "gain by score less gain by the second reward model",
    "kl": "KL",
    "sd": ", standard deviations",
    "score_sd": "standard deviation of scores",
    "distinct_1": "share of distinct words",
    "distinct_2": "share of distinct pairs of words",
    "eos_rate": "share that ends",
    "equal_rate": "share of answers given twice",
    "rouge_l": "ROUGE-L",
    "bleu": "BLEU",
    "no_verdict": ", share without a verdict",
}
PHRASES = re.compile(rf"(?<![^_])(?:{'|'.join(sorted(SHOWN, key=len, reverse=True))})(?![^_])")
NAMED = re.compile(
    r"reward_(?!good$|bad$)(?P<name>.+?)"
    r"(?P<rest>(?:_no_verdict)?(?:_pass_at_\d+|_gain|_sft|_base)?(?:_low|_high)?)"
)


def number(value: object) -> str:
    """Return a value as text: 4 significant digits, whole numbers with separators, - for None."""
    if value is None:
        return "-"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if isinstance(value, int) or (math.isfinite(value) and abs(value) >= 1000 and value == int(value)):
        return f"{int(value):,}"
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e15 else f"{value + 0.0:.4g}"  # and no -0


def metric(key: str) -> str:
    """Return the key of a metric as it is shown: records keep the key, and only here stands what people read.

    What a user named, a reward function or a task, keeps its name: `reward_my_rewards.longer_gain` is "reward
    my_rewards:longer, gain". Of other keys the phrases of SHOWN are replaced; `_` is a space.
    """
    if named := NAMED.fullmatch(key):
        module, _, function = named["name"].rpartition(".")
        name = f"{module}:{function}" if module else function
        rest = (named["rest"] or "").replace("_", " ").strip()
        return f"reward {name}" + (f", {rest}" if rest else "")
    return PHRASES.sub(lambda found: SHOWN[found[0]], key).replace("_", " ").replace(" ,", ",")


def estimate(metrics: Mapping[str, float | None], key: str, between: str = " ") -> str:
    """Return a metric as text; "" without it.

    If `metrics` has `<key>_low` and `<key>_high`, `between` and this interval follow.
    """
    value, low, high = (metrics.get(f"{key}{end}") for end in ("", "_low", "_high"))
    interval = "" if low is None or high is None else f"{between}({number(low)} to {number(high)})"
    return "" if value is None else number(value) + interval


def without_ends(keys: Iterable[str]) -> list[str]:
    """Return the keys of metrics without the ends and half-widths of intervals that `estimate` shows beside them."""
    every = list(keys)
    shown = {key for key in every if {f"{key}_low", f"{key}_high"} <= set(every)}
    return [key for key in every if not any(key == f"{of}{end}" for of in shown for end in ("_low", "_high", "_ci95"))]


def span(low: float | None, high: float | None) -> str:
    """Return a range in words: `≤ 5`, `≥ 0.6`, `0.05 – 0.3`."""
    if low is not None and low == high:
        return number(low)
    if low is not None and high is not None:
        return f"{number(low)} – {number(high)}"
    return f"≥ {number(low)}" if low is not None else f"≤ {number(high)}" if high is not None else "-"


def gb(size: float, digits: int = 2) -> str:
    """Return a size in bytes as GB of 10^9 bytes; `-` for none."""
    return f"{size / GB:.{digits}f}" if size else "-"


def size_in_bytes(text: str) -> int | None:
    """Return the bytes of a size such as `12GB` or `1.5 GiB`; None for all else, as a number without a unit."""
    match = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,9})?) ?(GB|GiB)", text, re.IGNORECASE)
    if not match or not float(match[1]):
        return None
    return round(float(match[1]) * (2**30 if match[2].lower() == "gib" else 10**9))
