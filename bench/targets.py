"""Targets for a benchmark's figures. A ratio of 1 or above reaches a target."""

from collections.abc import Mapping
from typing import Literal, NamedTuple

from bench.kinds import Spread, StageSteps
from rlhf.recipe import StageName
from rlhf.recipe.totals import CHAIN


class Target(NamedTuple):
    """A limit on one figure of a stage, or on its sum over several stages."""

    name: str
    stages: tuple[StageName, ...]
    key: Literal["mfu", "mbu", "hours", "peak_vram_bytes"]  # of a stage's row in the record
    value: float  # in `unit`; a share of 1 without one
    at_most: bool  # otherwise at least
    unit: str


DECODING_MBU = 0.60  # share of the bandwidth of a large copy, for a decoding step alone and in whole steps of PPO
# Of the rate of a large product measured on the same card; the best published figure for a LoRA of this size is
# NeMo-Automodel's 42.8 % of the nominal rate.
MFU = 0.42
HOURS, PEAK = 4.0, 12e9  # the guides have 12 to 36 hours, 18 to 24 GB
TARGETS = {
    "h100-mistral-7b": (
        *(Target(f"{stage}: MFU", (stage,), "mfu", MFU, False, "") for stage in ("sft", "dpo")),
        Target("ppo: MBU of decoding", ("ppo",), "mbu", DECODING_MBU, False, ""),
        Target("sft, rm and ppo: hours", CHAIN, "hours", HOURS, True, "h"),
    ),
    "4090-llama2-7b": tuple(
        Target(f"{stage}: peak memory", (stage,), "peak_vram_bytes", PEAK, True, "bytes")
        for stage in ("sft", "rm", "ppo", "dpo")
    ),
}


class Measured(NamedTuple):
    """A target and what was measured for it; None if it was not."""

    target: Target
    value: float | None
    ends: tuple[float, float] | None  # the same at both quartiles of the seconds that it follows from

    @property
    def ratio(self) -> float | None:
        """Return how near the target is: 1 or above if it is reached, None if nothing was measured."""
        if self.value is None:
            return None
        return self.target.value / self.value if self.target.at_most else self.value / self.target.value

    @property
    def reached(self) -> bool | None:
        """Return whether the target is reached; None if it lies between both ends, or nothing was measured."""
        return None if self.ends is None else reached(self.ends, self.target.value, self.target.at_most)


def reached(ends: tuple[float, float], limit: float, at_most: bool = False) -> bool | None:
    """Return whether a figure with these ends is at least (at most) a limit; None if it lies between them."""
    low, high = (end <= limit if at_most else end >= limit for end in ends)
    return low if low == high else None


def rate_ends(rate: float, seconds: Spread) -> tuple[float, float]:
    """Return a rate by the median of `seconds` as it is by both quartiles, in its unit."""
    return rate * seconds["median"] / seconds["high"], rate * seconds["median"] / seconds["low"]


def measured(recipe: str, stages: Mapping[StageName, StageSteps]) -> list[Measured]:
    """Return what was measured for each target of a recipe; None where a stage of it was not."""
    results = []
    for target in TARGETS.get(recipe, ()):
        values = [stages[stage].get(target.key) if stage in stages else None for stage in target.stages]
        known = [value for value in values if value is not None]
        if len(known) < len(values):
            results.append(Measured(target, None, None))
            continue
        ends = [_ends(target.key, value, stages[stage]) for stage, value in zip(target.stages, known, strict=True)]
        low, high = map(sum, zip(*ends, strict=True))
        results.append(Measured(target, sum(known), (low, high)))
    return results


def _ends(key: str, value: float, row: StageSteps) -> tuple[float, float]:
    """Return a stage's figure at both quartiles of its seconds; a size has no seconds."""
    seconds = row.get("phase_seconds", {}).get("rollout/decode") if key == "mbu" else row.get("step_seconds")
    if key == "peak_vram_bytes" or seconds is None:
        return value, value
    if key == "hours":
        return value * seconds["low"] / seconds["median"], value * seconds["high"] / seconds["median"]
    return rate_ends(value, seconds)


def rows(recipe: str, stages: Mapping[StageName, StageSteps]) -> list[tuple[str, ...]]:
    """Return a table row for each target of a recipe: target, limit, measured, ratio; "-" if not measured."""
    table: list[tuple[str, ...]] = []
    for result in measured(recipe, stages):
        target, ratio = result.target, result.ratio
        limit = f"{'≤' if target.at_most else '≥'} {target.value:g} {target.unit}".strip()
        table.append((target.name, limit, *(("-", "-") if ratio is None else (f"{result.value:.3g}", f"{ratio:.2f}"))))
    return table
