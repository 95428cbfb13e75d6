"""The options of `rlhf new`, and the card or processor that one of them names."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, get_args

from peakmem import cards
from rlhf.plan.fit import USABLE
from rlhf.recipe import TrainingName
from rlhf.recipe.schema_online import MODEL_REWARD
from rlhf.recipe.stages import DPO, POLICIES, PPO, RM, SFT, PolicyName, PolicyStart
from rlhf.terminal.wording import GB

TemplateName = Literal["chat", "hh", "plain"]
TEMPLATES: tuple[TemplateName, ...] = get_args(TemplateName)
FIRST_MINUTES = 15  # of training on a CPU, unless --minutes says otherwise: a first result, before a long run


class ChosenCard(NamedTuple):
    """A card by its name in recipes, with its memory; or the processor of this machine, `cpu`."""

    name: str
    memory_gb: float
    note: str  # where the memory is from
    threads: int | None = None  # of a processor

    @property
    def is_cpu(self) -> bool:
        """Return whether this is the processor."""
        return self.threads is not None

    @property
    def limit(self) -> int:
        """Return the bytes that settings may need."""
        return round(self.memory_gb * GB * USABLE)

    @property
    def words(self) -> str:
        """Return the card in words: `one RTX 4090`, `one card with 12 GB`, `a CPU with 16 GB free`."""
        if self.is_cpu:
            return f"a CPU with {self.memory_gb:g} GB free"
        return (
            f"one {cards.CARDS[self.name].words}"
            if self.name in cards.CARDS
            else f"one card with {self.memory_gb:g} GB"
        )


KNOWN_CARDS = {name: ChosenCard(name, *card.memory) for name, card in cards.CARDS.items() if card.memory}


class NewOptions(NamedTuple):
    """The options of `rlhf new`."""

    model: str
    card: ChosenCard
    stages: tuple[PolicyName, ...] = (PPO, DPO)
    data: tuple[str, ...] = ()  # files, or a key of DATA_SETS; empty: the one that suits the template
    revision: str | None = None
    template: TemplateName | None = None
    max_length: int | None = None
    name: str | None = None
    rewards: tuple[str, ...] = ()  # of PPO, RLOO and GRPO, as in `reward_funcs`; empty: the reward model
    start: PolicyStart | None = None  # where policies start; None: at the base if there are `rewards`, else at SFT
    task: str | None = None  # of reasoning-gym, instead of `data`
    minutes: float | None = None  # that training may take, as projected; None: FIRST_MINUTES on a CPU, else no limit
    changes: Mapping[str, Any] = MappingProxyType({})  # keys of the section `data` about the rows of `data`

    @property
    def policy_start(self) -> PolicyStart:
        """Return where policies start."""
        return self.start or ("base" if self.rewards else SFT)

    @property
    def budget(self) -> float | None:
        """Return the minutes that training may take; None without a limit."""
        return self.minutes or (FIRST_MINUTES if self.card.is_cpu else None)

    @property
    def has_reward_model(self) -> bool:
        """Return whether the recipe has a reward model."""
        return not self.rewards or MODEL_REWARD in self.rewards

    @property
    def trained(self) -> tuple[TrainingName, ...]:
        """Return the stages of the recipe that train, in order."""
        has: dict[TrainingName, bool] = {SFT: self.policy_start == SFT, RM: self.has_reward_model}
        return (*(stage for stage in has if has[stage]), *(stage for stage in POLICIES if stage in self.stages))
