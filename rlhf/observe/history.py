"""What a stage has logged so far, as the live checks read it."""

import math
import statistics
from collections.abc import Mapping

from rlhf.recipe import OnlineBase, OnlineOptions, Optimization, Recipe, StageName

FEW = 5  # logged rows that a mean is taken over, and that a check waits for


class History:
    """The values that a stage has logged, by key, oldest first, and the responses sampled last."""

    def __init__(self, recipe: Recipe, stage: StageName):
        self.recipe, self.stage = recipe, stage
        self.rows: list[Mapping[str, float | None]] = []
        self.responses: list[str] = []

    @property
    def options(self) -> Optimization | OnlineOptions:
        """Return the stage's section of the recipe."""
        section = self.recipe.section(self.stage)
        assert isinstance(section, Optimization | OnlineBase)
        return section

    @property
    def supervised(self) -> Optimization:
        """Return the section of a stage that learns from given rows."""
        assert isinstance(self.options, Optimization)
        return self.options

    @property
    def online(self) -> OnlineOptions:
        """Return the section of a stage that learns from its own samples."""
        assert not isinstance(self.options, Optimization)
        return self.options

    def values(self, key: str) -> list[float]:
        """Return the finite values logged under a key, oldest first."""
        logged = (row.get(key) for row in self.rows)
        return [value for value in logged if value is not None and math.isfinite(value)]

    def last(self, key: str, count: int = FEW) -> float | None:
        """Return the mean of the newest `count` values; None while there are fewer."""
        newest = self.values(key)[-count:]
        return statistics.fmean(newest) if len(newest) == count else None

    def first(self, key: str, count: int = FEW) -> float | None:
        """Return the mean of the oldest `count` values; None while there are fewer than twice as many."""
        values = self.values(key)
        return statistics.fmean(values[:count]) if len(values) >= 2 * count else None
