"""What a stage has logged so far, as the live checks read it."""

import math
import statistics
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from copy import copy

from rlhf.recipe import Recipe, StageName
from rlhf.recipe.schema import Optimization
from rlhf.recipe.schema_online import MODEL_REWARD, OnlineBase, OnlineOptions
from rlhf.recipe.stages import POLICIES
from rlhf.run.evidence import OF_EVALUATIONS, Gain, gain_of_stage

FEW = 5  # logged rows that a mean is taken over, and that a check waits for


class History:
    """The values that a stage has logged, by key, oldest first, and the responses sampled last.

    `total_steps` is that of the run; 0 as long as it is not known.
    """

    def __init__(self, recipe: Recipe, stage: StageName, total_steps: int = 0):
        self.recipe, self.stage, self.total_steps = recipe, stage, total_steps
        self.newest: Mapping[str, float | None] = {}  # the row that was logged last
        self.responses: list[str] = []
        self._values: dict[str, list[float]] = defaultdict(list)  # finite ones, by key
        self._least_means: dict[str, tuple[int, float]] = {}  # by key: number of means taken so far, and their least
        self._evaluated: Mapping[str, float | None] = {}  # the newest row with figures of held-out prompts
        self._columns: Collection[str] | None = None  # keys that may be read; None: all

    def add(self, row: Mapping[str, float | None]) -> None:
        """Add a logged row. Its values are kept by key, because the checks ask for all values of a key at every row."""
        self.newest = row
        if any(key.startswith(OF_EVALUATIONS) for key in row):
            self._evaluated = row
        for key, value in row.items():
            if value is not None and math.isfinite(value):
                self._values[key].append(value)

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

    @property
    def rewards(self) -> str:
        """Return in words what rewards the policy; "" in a stage that learns from given rows."""
        if isinstance(self.options, Optimization):
            return ""
        functions = any(name != MODEL_REWARD for name in self.online.reward_funcs)
        model = MODEL_REWARD in self.online.reward_funcs
        return " and ".join(["the reward model"] * model + ["the reward functions"] * functions)

    def of(self, columns: Collection[str]) -> "History | None":
        """Return this history with these keys alone; None while one of them was not logged."""
        if not all(self._values.get(key) for key in columns):
            return None
        view = copy(self)
        view._columns = columns
        return view

    def gain(self) -> Gain | None:
        """Return the gain of the newest evaluation on held-out prompts; None without one."""
        stage = self.stage
        return gain_of_stage(stage, self._evaluated, OF_EVALUATIONS) if stage in POLICIES else None

    def values(self, key: str) -> Sequence[float]:
        """Return the finite values logged under a key, oldest first. Raises KeyError for one that was not asked for."""
        if self._columns is not None and key not in self._columns:
            raise KeyError(key)
        return self._values.get(key, ())

    def last(self, key: str, count: int = FEW) -> float | None:
        """Return the mean of the newest `count` values; None while there are fewer."""
        newest = self.values(key)[-count:]
        return statistics.fmean(newest) if len(newest) == count else None

    def first(self, key: str, count: int = FEW) -> float | None:
        """Return the mean of the oldest `count` values; None while there are fewer than twice as many."""
        values = self.values(key)
        return statistics.fmean(values[:count]) if len(values) >= 2 * count else None

    def least_mean(self, key: str) -> float:
        """Return the least mean of FEW successive values, without the newest FEW; infinity while there are too few."""
        values = self.values(key)
        taken, least = self._least_means.get(key, (0, math.inf))
        for start in range(taken, len(values) - 2 * FEW + 1):
            taken, least = start + 1, min(least, statistics.fmean(values[start : start + FEW]))
        self._least_means[key] = (taken, least)
        return least
