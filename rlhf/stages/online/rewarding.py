"""The rewards of RLOO and GRPO: those that the recipe names, for responses to prompts of the data."""

from collections.abc import Sequence

import torch
from torch import Tensor

from rlhf.data.load import Divided, Prompt
from rlhf.data.tokenize import Codec
from rlhf.process import distributed
from rlhf.recipe import MODEL_REWARD, Group
from rlhf.stages.online import rewards

By = dict[str, Tensor]  # a number (B,) for each response, by the name of the reward


class Rewards:
    """The reward functions of a section of the recipe, with their weights; the reward model is named among them.

    Raises UserError for a name that is none.
    """

    def __init__(self, stage: str, options: Group, answers: dict[Prompt, str], codec: Codec):
        self.stage, self.answers, self.codec = stage, answers, codec
        labels = rewards.labels(options.reward_funcs)
        self.weights = dict(zip(labels, options.weights, strict=True))
        self.functions = {
            label: None if name == MODEL_REWARD else rewards.find(name, f"{stage}.reward_funcs")
            for label, name in zip(labels, options.reward_funcs, strict=True)
        }

    def usable(self, prompts: Divided[Prompt]) -> Divided[Prompt]:
        """Return the prompts that the rewards can judge: all, or those with an answer where a function needs it.

        Raises UserError where none are left on a side of the split.
        """
        if not any(function and function.needs_answer for function in self.functions.values()):
            return prompts
        kept = prompts.only(lambda prompt: prompt in self.answers)
        return kept.required(self.stage, 'prompts with an answer ({"prompt", "answer"})')

    def of(self, prompts: Sequence[Prompt], texts: Sequence[str], model_scores: Tensor | None) -> By:
        """Return what each reward gives for each response, on the CPU; the same numbers on every process.

        Raises UserError, one line that names prompt and response, for a function that raises or is not finite.
        """
        if any(self.functions.values()):
            written = [self.codec.prompt_text(prompt) for prompt in prompts]
            right = [self.answers.get(prompt) for prompt in prompts]
            given = distributed.from_main(
                lambda: {label: f(written, texts, right) for label, f in self.functions.items() if f}
            )
        found: By = {}
        for label, function in self.functions.items():
            if function is None:
                assert model_scores is not None
                found[label] = model_scores.cpu()
            else:
                found[label] = torch.tensor(given[label], dtype=torch.float32)
        return found

    def total(self, found: By) -> Tensor:
        """Return the weighted sum (B,) of rewards."""
        return torch.stack([weight * found[label] for label, weight in self.weights.items()]).sum(0)

    def judge(self, prompts: Sequence[Prompt], texts: Sequence[str], model_scores: Tensor | None) -> tuple[By, Tensor]:
        """Return the rewards of functions by name, and the weighted sum of all, for an evaluation."""
        found = self.of(prompts, texts, model_scores)
        return {label: numbers for label, numbers in found.items() if self.functions[label]}, self.total(found)
