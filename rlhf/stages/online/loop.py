"""What a method that learns from its own samples is handed: session.py makes it. No method imports how."""

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

from rlhf.data.batch import Rollout
from rlhf.models.shared_base import SharedBase
from rlhf.recipe import StageName
from rlhf.recipe.schema_online import OnlineOptions
from rlhf.stages.online.scores import FunctionRewards, ScoreNorm
from rlhf.stages.online.train_state import TrainState
from rlhf.terminal.progress import Bar


class Loop(Protocol):
    """One run of a stage: data, models, sampling, evaluation and log files.

    `shared` has the roles `policy` and `reference`, both at the start (SFT, or the base itself), and the reward model
    where the stage needs it. The reference is measured already, and `score_norm` is how scores are normalised.
    """

    stage: StageName
    shared: SharedBase
    options: OnlineOptions
    rm_dir: Path
    score_norm: ScoreNorm

    def restore(self, state: TrainState[Any]) -> None:
        """Continue from the checkpoint of a resumed run. Divide the frozen layers among ranks if the recipe says so."""

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Measure time and memory of a block under this name."""

    def sample(self, step: int) -> Rollout:
        """Sample the policy's responses to the prompts of a step, those to one prompt side by side."""

    def function_rewards(self, step: int, rollout: Rollout) -> FunctionRewards | None:
        """Return what reward functions give the responses of a step; None where a recipe names none."""

    def end_step(self, state: TrainState[Any], rollout: Rollout, metrics: dict[str, float], bar: Bar) -> None:
        """Evaluate, log and save after a step, as often as the recipe says."""

    def finish(self, state: TrainState[Any]) -> dict[str, float]:
        """Write the resulting adapter, last or best. Return its metrics beside the start's on held-out prompts."""
