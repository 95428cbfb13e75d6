"""The options of `rlhf new`, and the card or processor that one of them names."""

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from peakmem import cards
from rlhf.errors import OptionError
from rlhf.plan import machine
from rlhf.plan.fit import USABLE
from rlhf.plan.hardware import lacks_bfloat16
from rlhf.recipe import TrainingName
from rlhf.recipe.schema_online import MODEL_REWARD
from rlhf.recipe.stages import DPO, ONLINE, POLICIES, PPO, RM, SFT, PolicyName, PolicyStart
from rlhf.terminal.wording import GB, size_in_bytes

Wanted = Literal["sft"] | PolicyName
STAGES: tuple[Wanted, ...] = (SFT, *POLICIES)


class ChosenCard(NamedTuple):
    """A card by its name in recipes, with its memory; or the processor of this machine, `cpu`."""

    name: str
    memory_gb: float
    threads: int | None = None  # of a processor

    @property
    def is_cpu(self) -> bool:
        """Return whether this is the processor."""
        return self.threads is not None

    @property
    def limit(self) -> int:
        """Return the bytes that settings may need."""
        return round(self.memory_gb * GB * USABLE)


KNOWN_CARDS = {name: ChosenCard(name, card.memory[0]) for name, card in cards.CARDS.items() if card.memory}


def card_of(text: str) -> ChosenCard:
    """Return what --card names: `cpu`, `4090`, `h100` or a size such as `24GB`. Raises OptionError."""
    name = text.lower()
    if name == "cpu":
        return ChosenCard("cpu", round(machine.free_bytes() / GB, 2), machine.threads())
    if reason := lacks_bfloat16(name):
        raise OptionError(f"--card {text}: {reason}, as a new recipe does")
    if name in KNOWN_CARDS:
        return KNOWN_CARDS[name]
    if (size := size_in_bytes(text)) is None:
        known = ", ".join(known for known in KNOWN_CARDS if not lacks_bfloat16(known))
        raise OptionError(f"--card {text}: name a size with its unit, for example 24GB, or one of {known}, or cpu")
    return ChosenCard(re.sub(r"\s", "", name), round(size / GB, 2))


class NewOptions(NamedTuple):
    """The options of `rlhf new`."""

    model: str
    card: ChosenCard
    stages: tuple[Wanted, ...] = (PPO, DPO)
    data: tuple[str, ...] = ()  # files, or a key of DATA_SETS; empty: the one that suits the template
    revision: str | None = None
    max_length: int | None = None
    name: str | None = None
    rewards: tuple[str, ...] = ()  # of PPO, RLOO and GRPO, as in `reward_funcs`; empty: the reward model
    start: PolicyStart | None = None  # where policies start; None: at the base if there are `rewards`, else at SFT
    task: str | None = None  # of reasoning-gym, instead of `data`
    changes: Mapping[str, Any] = MappingProxyType({})  # keys of the section `data` about the rows of `data`

    @property
    def trained(self) -> tuple[TrainingName, ...]:
        """Return the stages of the recipe that train, in order: SFT and the reward model where others need them."""
        start = self.start or ("base" if self.rewards else SFT)
        sampled = not {*ONLINE}.isdisjoint(self.stages)
        scored = sampled and (not self.rewards or MODEL_REWARD in self.rewards)
        has: dict[TrainingName, bool] = {SFT: start == SFT or SFT in self.stages, RM: scored}
        return (*(stage for stage in has if has[stage]), *(stage for stage in POLICIES if stage in self.stages))
