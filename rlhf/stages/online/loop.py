"""What a method that learns from its own samples is handed: models, and a run that samples, evaluates and saves."""

from contextlib import AbstractContextManager
from pathlib import Path
from typing import NamedTuple, Protocol

from torch import Tensor

from rlhf.data.batch import Rollout
from rlhf.models.shared_base import SharedBase
from rlhf.objectives.masked import masked_mean
from rlhf.recipe.schema_online import OnlineOptions
from rlhf.stages.online.role_passes import ScoreNorm
from rlhf.stages.online.train_state import TrainState
from rlhf.stages.result import Result
from rlhf.terminal.progress import Bar

ByName = dict[str, Tensor]  # a number (B,) for each response, by the name of the reward; NaN without a verdict


class FunctionRewards(NamedTuple):
    """What reward functions give the responses of a step, on the CPU."""

    by_name: ByName
    total: Tensor  # (B,) their weighted sum; NaN where a response is not judged

    @property
    def judged(self) -> Tensor:
        """Return (B,) bool: which responses have a verdict of every function that counts."""
        return ~self.total.isnan()


def mean_rewards(by_name: ByName) -> dict[str, Tensor]:
    """Return the mean of each reward over its verdicts, by the key of its metric; a reward without any has none."""
    return mean_judged({f"rewards/{name}": (raw, ~raw.isnan()) for name, raw in by_name.items()})


def mean_judged(numbers: dict[str, tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    """Return the mean of each number (B,) over the responses of its mask (B,); none of a number without any."""
    return {key: masked_mean(x, judged) for key, (x, judged) in numbers.items() if judged.any()}


class Loop(Protocol):
    """One run of a stage; session.py makes it, and says what each call raises.

    `shared` has the roles `policy` and `reference`, both at the start, and the reward model where the stage needs it.
    """

    shared: SharedBase
    options: OnlineOptions
    rm_dir: Path

    def measure_score_norm(self) -> ScoreNorm:
        """Return mean and sd by which scores are normalised."""

    def measure_reference(self) -> None:
        """Measure the reference on held-out prompts."""

    def restore(self, state: TrainState) -> None:
        """Continue from the checkpoint of a resumed run; in a new run do nothing."""

    def shard(self) -> None:
        """Divide the frozen layers among ranks if the recipe says so."""

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Measure time and memory of a block under this name."""

    def sample_step(self, step: int) -> Rollout:
        """Sample the policy's responses to the prompts of a step."""

    def function_rewards(self, step: int, rollout: Rollout) -> FunctionRewards | None:
        """Return what reward functions give these responses; None where a recipe names none."""

    def end_step(self, state: TrainState, rollout: Rollout, metrics: dict[str, float], bar: Bar) -> None:
        """Evaluate, log and save after a step, as often as the recipe says."""

    def finish(self, state: TrainState) -> Result:
        """Write the resulting adapter, last or best, and measure it."""
