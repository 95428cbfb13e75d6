"""Runs both sides in turn and collects what changed."""

import math
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from bench.against import judge, micro
from bench.against.checkout import Checkout
from bench.against.judge import Bounds, Change
from bench.against.sides import Cost, Side
from bench.paths import ROOT
from bench.rounds import in_order
from rlhf.recipe import PinnedRecipe, StageName

CARD_RECIPE = ROOT / "recipes" / "4090-llama2-7b" / "v2"  # 4-bit base, gradient checkpointing, PPO: what a CPU's lacks
AGAIN = 2  # times as many pairs of what looks worse
MICRO_SLOWER = 0.10  # for calls of microseconds, whose least time also depends on where the linker put them
Say = Callable[[str], None]


class Comparison:
    """Context manager around the processes of both sides, which stay alive: a start takes longer than a stage."""

    def __init__(
        self,
        old: Checkout,
        new: Checkout,
        loaded: PinnedRecipe,
        *,
        steps: int,
        shape: str,
        bounds: Bounds,
        say: Say,
        most_seconds: float = math.inf,
    ):
        self.old, self.new = Side(old, loaded, steps, shape), Side(new, loaded, steps, shape)
        self.bounds = bounds
        self._end = time.monotonic() + most_seconds  # after it no further pair is timed
        self._say = say
        self._stack = ExitStack()

    def __enter__(self) -> "Comparison":
        with ExitStack() as stack:
            for side in (self.old, self.new):
                stack.enter_context(side)
            for side in (self.old, self.new):
                side.wait_until_ready()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *problem: object) -> None:
        self._stack.__exit__(*problem)  # type: ignore[arg-type]  # the three of every context manager

    def predicted(self, recipe: Path) -> list[Change]:
        """Return the changes of what is predicted for a card's recipe. The sides work at the same time."""
        name = f"{recipe.resolve().parent.name} {recipe.resolve().name}"
        self._say(f"predicting {name} with both")
        for side in (self.old, self.new):
            side.ask_prediction(recipe)
        return [*judge.predicted(name, self.old.prediction(), self.new.prediction(), self.bounds)]

    def counted(self, stages: Sequence[StageName]) -> list[Change]:
        """Return the changes of what the stages count. The sides work at the same time, which changes no count."""
        changes: list[Change] = []
        for stage in stages:
            self._say(f"counting {stage} of both")
            for side in (self.old, self.new):
                side.ask_cost(stage, count=True)
            changes += judge.counted(stage, self.old.cost(), self.new.cost(), self.bounds)
        return changes

    def timed(self, stages: Sequence[StageName], rounds: int) -> list[Change]:
        """Return the changes of the stages' seconds, from `rounds` pairs of runs. The stages have been counted before.

        Stages that look worse are measured twice as often again by new processes, because many figures are compared, of
        which one may look worse by chance. A stage for which the time does not suffice is left out.
        """
        pairs: dict[StageName, list[tuple[Cost, Cost]]] = {stage: [] for stage in stages}
        self._rounds(pairs, stages, rounds)
        stages = [stage for stage in stages if len(pairs[stage]) == rounds]
        suspects = [stage for stage in stages if any(c.worse for c in judge.timed(stage, pairs[stage], self.bounds))]
        if suspects:
            self._say(f"{', '.join(suspects)}: looks worse, and is measured again by new processes")
            for side in (self.old, self.new):
                side.restart()
                side.wait_until_ready()
            self._rounds({stage: [] for stage in suspects}, suspects, 1)  # a first run also imports
            self._rounds(pairs, suspects, AGAIN * rounds)
        stages = [stage for stage in stages if stage not in suspects or len(pairs[stage]) == (1 + AGAIN) * rounds]
        return [change for stage in stages for change in judge.timed(stage, pairs[stage], self.bounds)]

    def _rounds(
        self, pairs: dict[StageName, list[tuple[Cost, Cost]]], stages: Sequence[StageName], rounds: int
    ) -> None:
        """Add `rounds` pairs of each stage to `pairs`."""
        for number in range(rounds):
            for stage in stages:
                if time.monotonic() > self._end:
                    self._say("the time is up: the remaining pairs are not timed")
                    return
                self._say(f"round {number + 1} of {rounds}: {stage} of both, in turn")
                pairs[stage].append(self._pair(stage, number))

    def _pair(self, stage: StageName, number: int) -> tuple[Cost, Cost]:
        """Return what a stage costs on the old side and on the new one, one after the other, in each order in turn."""
        costs = {}
        for side in in_order((self.old, self.new), number):
            side.ask_cost(stage, count=False)
            costs[side] = side.cost()
        return costs[self.old], costs[self.new]


def small_functions(old: Checkout, new: Checkout, rounds: int, bounds: Bounds, say: Say) -> list[Change]:
    """Return the changes of the small functions' times, from pairs of runs; more pairs where one looks worse."""
    runs: list[tuple[dict[str, float], dict[str, float]]] = []
    for number in range((1 + AGAIN) * rounds):
        if number == rounds and not any(change.worse for change in micro.changes(runs, bounds)):
            break
        say(f"round {number + 1}: small functions of both, in turn")
        by_side = {side: micro.run(side, new.root / micro.FOLDER, side == old) for side in in_order((old, new), number)}
        runs.append((by_side[old], by_side[new]))
        if not all(runs[0]):
            return []
    return [*micro.changes(runs, bounds)]
