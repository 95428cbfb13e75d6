"""The reward `reward_model`: any sequence-classification checkpoint, with a tokenizer of its own.

It reads messages and answers as text, so that its family and vocabulary may be others than the policy's.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rlhf.errors import UserError
from rlhf.recipe.strict import is_commit

if TYPE_CHECKING:
    from rlhf.models.classifier import Classifier


class ModelReward:
    """A reward model as a reward function. Raises ValueError for options that it cannot use."""

    def __init__(
        self,
        *,
        name: str,
        revision: str | None = None,
        quantization: str = "none",
        label: int = 0,
        mean: float = 0.0,
        sd: float = 1.0,
        batch_size: int = 8,
    ):
        if not os.path.isdir(name) and not is_commit(revision):
            raise ValueError(f"{name} is no folder here; a name on the hub needs revision, the 40-digit commit")
        if quantization not in ("none", "nf4"):
            raise ValueError("quantization is 'none' or 'nf4'")
        if not sd > 0 or batch_size < 1 or label < 0:
            raise ValueError("sd must be above 0, batch_size at least 1, label at least 0")
        self.name, self.revision, self.quantization, self.label = name, revision, quantization, label
        self.mean, self.sd, self.batch_size = mean, sd, batch_size
        self._classifier: Classifier | None = None

    def begin(self, folder: Path | None, device: str) -> None:
        """Load the checkpoint, once, to score on a device. Raises UserError where it cannot be used."""
        if self._classifier is None:
            from rlhf.models.classifier import Classifier  # imports transformers, which other rewards do without

            self._classifier = Classifier(self.name, self.revision, device, packed=self.quantization == "nf4")
            if self.label >= self._classifier.labels:
                raise UserError(
                    f"reward_model: {self.name} gives {self._classifier.labels} numbers: label={self.label}"
                )

    def __call__(self, messages: Sequence[Sequence[Mapping[str, str]]], completions: Sequence[str]) -> list[float]:
        """Return (score - mean) / sd of each answer to its messages, each with role and content."""
        self.begin(None, "cpu")
        assert self._classifier is not None
        texts = [self._classifier.encode(*dialogue) for dialogue in zip(messages, completions, strict=True)]
        rows = self._classifier.scores(texts, self.batch_size)
        return [(row[self.label] - self.mean) / self.sd for row in rows]
