"""The gain of a trained policy over its start, SFT or the base, in the metric that says most."""

from collections.abc import Mapping
from typing import NamedTuple

from rlhf.recipe import EVALUATE, POLICIES, SFT, PolicyStart, StageName
from rlhf.run.records import Summary

Metrics = Mapping[str, float | None]


class Gain(NamedTuple):
    """A metric of the answers of the start and of the trained policy, and the gain with the ends of its 95 % interval.

    `unit` is that of the gain; "" is the metric's own. `low` and `high` are None if only an evaluation would tell.
    """

    stage: StageName
    name: str
    start: float
    end: float
    value: float
    low: float | None
    high: float | None
    unit: str
    origin: PolicyStart = SFT

    @property
    def kind(self) -> str:
        """Return good, bad, or "" if the interval holds 0; without an interval the sign of two digits decides."""
        low, high = (round(self.value, 2) if end is None else end for end in (self.low, self.high))
        return "good" if low > 0 else "bad" if high < 0 else ""


def gains_over_start(summaries: Mapping[str, Summary]) -> list[Gain]:
    """Return the gain of each policy for which one was measured, from the evaluation if that has it.

    The metric is the true reward; where it is unknown the first reward of a function, else the reward model's score.
    """
    evaluated = summaries[EVALUATE].metrics if EVALUATE in summaries else {}
    gains = []
    for stage in POLICIES:
        own = summaries[stage].metrics if stage in summaries else {}
        origin = origin_of(own)
        gain = _gain(stage, evaluated, f"{stage}/", origin, "{origin}/{name}")
        gain = gain or _gain(stage, own, "", origin, "{name}_{origin}")
        gains += [gain] if gain else []
    return gains


def origin_of(metrics: Metrics) -> PolicyStart:
    """Return where a policy started, by the metrics of its stage: they name the start beside its length of response."""
    return "base" if "response_length_base" in metrics else SFT


def _gain(stage: StageName, metrics: Metrics, prefix: str, origin: PolicyStart, start_key: str) -> Gain | None:
    """Return the gain from metrics whose keys have a `prefix`. `start_key` is the form of the keys of the start."""
    functions = [
        key.removeprefix(prefix).removesuffix("_gain")
        for key in metrics
        if key.startswith(f"{prefix}reward_") and key.endswith("_gain")
    ]
    keys = {"true_reward": "true_reward_gain_sd", **{name: f"{name}_gain" for name in functions}}
    for name, key in (keys | {"score": "score_gain_sd"}).items():
        start, end = metrics.get(start_key.format(origin=origin, name=name)), metrics.get(prefix + name)
        value, low, high = (metrics.get(f"{prefix}{key}{suffix}") for suffix in ("", "_low", "_high"))
        if start is not None and end is not None and value is not None:
            title = name.removeprefix("reward_").replace("_", " ")
            unit = "standard deviations" * key.endswith("_sd")
            return Gain(stage, title, start, end, value, low, high, unit, origin)
    return None
