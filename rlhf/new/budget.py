"""How much of a recipe is trained in a time: steps, rows and held-out prompts, by the projected hours of the chain."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from rlhf.errors import UserError
from rlhf.new.content import Content, Supervised, supervised
from rlhf.new.data import OwnData
from rlhf.recipe.stages import ONLINE, STAGE_TABLE

EVALUATED = 0.15  # of the projected time goes into evaluations, at most
HELDOUT = (128, 64, 32, 16, 8)  # held-out prompts to choose from: as many as that share allows
EVALUATIONS = 2  # of PPO, RLOO and GRPO while they train, with the last: too few to choose a checkpoint by
FEWEST = 10  # steps
ROOM = 1.25  # times a projection is the budget that a message names: the next one may measure slower rates


class Times(NamedTuple):
    """Projected minutes of training, and those of them that evaluate."""

    total: float
    evaluating: float


class Chosen(NamedTuple):
    """A recipe of little time beside the whole one."""

    content: Content
    minutes: float
    whole: Content
    whole_minutes: float

    @property
    def longer(self) -> str | None:
        """Return in words what a longer recipe takes and how to have it; None where this is the whole."""
        if self.content.steps >= self.whole.steps:
            return None
        part = f"{self.content.steps} of {self.whole.steps} steps"
        more = round(self.whole_minutes + 0.5)
        return f"this is a first recipe, {part}; all of them are projected to take {more} minutes: --minutes {more}"


def within(minutes: float, content: Content, times: Callable[[Content], Times]) -> Chosen:
    """Return the longest recipe that is projected to train in `minutes`, with evaluations of at most EVALUATED of it.

    All stages get the same part of their steps and rows. Raises UserError where not even FEWEST steps fit.
    """
    whole, whole_minutes = _projected(content, content.steps, times)
    if whole_minutes <= minutes:
        return Chosen(whole, whole_minutes, whole, whole_minutes)
    fits, too_long = FEWEST, content.steps
    chosen, taken = _projected(content, fits, times)
    if taken > minutes:
        raise UserError(too_few(minutes, taken))
    while fits + 1 < too_long:
        middle = (fits + too_long) // 2
        tried, projected = _projected(content, middle, times)
        if projected <= minutes:
            fits, chosen, taken = middle, tried, projected
        else:
            too_long = middle
    return Chosen(chosen, taken, whole, whole_minutes)


def least(content: Content, times: Callable[[Content], Times]) -> float:
    """Return the projected minutes of FEWEST steps."""
    return _projected(content, FEWEST, times)[1]


def too_few(minutes: float, most: float, least: float | None = None) -> str:
    """Return that a budget is too small, and one that is enough. `least`: what the steps take with short answers."""
    takes = f"{most:.0f} minutes here"
    if least is not None:
        takes = f"{least:.1f} to {takes}, by the length of the base's answers"
    return (
        f"{minutes:g} minutes are too few: {FEWEST} steps are projected to take {takes}; "
        f"--minutes {math.ceil(ROOM * most)} allows them, or choose a smaller model or a lower --max-length"
    )


def _projected(content: Content, steps: int, times: Callable[[Content], Times]) -> tuple[Content, float]:
    """Return the content with so many steps, as many held-out prompts as EVALUATED allows, and its minutes."""
    part = _part(content, steps)
    for heldout in HELDOUT:
        tried = part._replace(heldout=heldout, heldout_rows=heldout)
        if any(STAGE_TABLE[stage].samples == "all" for stage in content.trained):
            tried = tried._replace(sampled=heldout)  # those stages sample as many as `evaluate`
        projected = times(tried)
        if projected.evaluating <= EVALUATED * projected.total:
            break
    return tried, projected.total


def _part(content: Content, steps: int) -> Content:
    """Return the content with so many steps, and the same part of the rows of the other stages."""
    part = steps / content.steps
    known = (content.data.pairs or content.data.prompts) if isinstance(content.data, OwnData) else None
    changed: dict[str, Any] = {}
    for name, before in content._asdict().items():
        if not isinstance(before, Supervised):
            continue
        most = before.max_samples or known or 0
        few = supervised(most, known, part)
        changed[name] = before._replace(max_samples=few.max_samples, every=few.every, logging_steps=few.logging_steps)
    supervises = not set(content.trained) <= set(ONLINE)
    return content._replace(steps=steps, evaluations=EVALUATIONS, validated=supervises, **changed)
