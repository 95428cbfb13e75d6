"""The rewards of PPO, RLOO and GRPO: the reward functions that the recipe names, applied to sampled responses."""

import math
from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from rlhf.data.corpus import Prompt, Split
from rlhf.data.tokenize import DialogueTokenizer
from rlhf.errors import UserError
from rlhf.objectives.masked import masked_mean
from rlhf.process import distributed
from rlhf.recipe import StageName
from rlhf.recipe.schema_online import MODEL_REWARD, OnlineOptions
from rlhf.stages.online import reward_functions, reward_guest
from rlhf.stages.online.reward_call import RewardFunction, json_messages
from rlhf.terminal import excerpt

ByName = dict[str, Tensor]  # a number (B,) for each response, by the name of the reward; NaN without a verdict


def without_verdict(rewards: Tensor) -> Tensor:
    """Return (B,) bool: where a function gave None. Its other numbers are finite."""
    return rewards.isnan()


def check_answers(
    where: str, function: RewardFunction, prompts: Sequence[Prompt], right_answers: Mapping[Prompt, str]
) -> None:
    """Raise UserError, which begins with `where`, for a right answer that no response can match."""
    answers = [right_answers[prompt] for prompt in prompts]
    for prompt, fault in zip(prompts, function.answer_faults(answers), strict=True):
        if fault is not None:
            raise UserError(
                f"{where}: {function.name} cannot judge responses to {excerpt(prompt[-1].content)!r}: the "
                f"answer {fault}; correct the row's answer or remove the row"
            )


def mean_rewards(by_name: ByName) -> dict[str, Tensor]:
    """Return the mean of each reward over its verdicts, by the key of its metric; a reward without any has none."""
    return mean_judged({f"rewards/{name}": (raw, ~without_verdict(raw)) for name, raw in by_name.items()})


def mean_judged(numbers: dict[str, tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    """Return the mean of each number (B,) over the responses of its mask (B,); none of a number without any."""
    return {key: masked_mean(x, judged) for key, (x, judged) in numbers.items() if judged.any()}


class FunctionRewards(NamedTuple):
    """What reward functions give the responses of a step, on the CPU."""

    by_name: ByName
    total: Tensor  # (B,) their weighted sum; NaN where a response is not judged

    @property
    def judged(self) -> Tensor:
        """Return (B,) bool: which responses have a verdict of every function that counts."""
        return ~without_verdict(self.total)


class RewardSum:
    """Reward functions of a section of the recipe, with their weights; the reward model may be one of them.

    Raises UserError for a name without a function.
    """

    def __init__(
        self,
        stage: StageName,
        options: OnlineOptions,
        right_answers: dict[Prompt, str],
        tokenizer: DialogueTokenizer,
        folder: Path | None = None,
        known: dict[str, RewardFunction] | None = None,
        device: str = "cpu",
    ):
        """`folder` is that of the run: a judge keeps its marks there. `device`: where reward models of others compute.

        Functions in `known` are used by their names, and new ones are added to it: a judge that several policies are
        measured with is asked once.
        """
        self.stage, self.right_answers, self.tokenizer = stage, right_answers, tokenizer
        labels = reward_functions.labels(options.reward_funcs)
        self.weights = dict(zip(labels, options.weights, strict=True))
        known = {} if known is None else known
        for name in options.reward_funcs:
            if name != MODEL_REWARD and name not in known:
                found = reward_functions.find(name, f"{stage}.reward_funcs")
                if folder is not None:
                    settle(found)
                known[name] = found.opened(folder, options.reward_timeout, options.reward_retries, device)
        self.functions = {
            label: None if name == MODEL_REWARD else known[name]
            for label, name in zip(labels, options.reward_funcs, strict=True)
        }

    @property
    def called(self) -> list[RewardFunction]:
        """Return the rewards that are functions."""
        return [function for function in self.functions.values() if function]

    def usable(self, prompts: Split[Prompt]) -> Split[Prompt]:
        """Return the prompts that the rewards can judge: all, or those with a right answer if a function needs it.

        Raises UserError where none are left on a side of the split, and for a right answer that no response can match.
        """
        needing = [function for function in self.called if function.needs_answer]
        if not needing:
            return prompts
        kept = prompts.only(lambda prompt: prompt in self.right_answers)
        for function in needing:
            check_answers(self.stage, function, list(kept), self.right_answers)
        return kept.required(self.stage, 'prompts with a right answer ({"prompt", "answer"})')

    def per_response(
        self,
        prompts: Sequence[Prompt],
        texts: Sequence[str],
        model_scores: Tensor | None,
        ids: Sequence[list[int]],
    ) -> ByName:
        """Return the rewards of each response by name, on the CPU; the same numbers on every rank.

        ids: the tokens of each response, for functions of these.
        Raises UserError, one line that names prompt and response, for a function that raises or is not finite.
        """
        computed: dict[str, list[float | None]] = {}
        if any(self.functions.values()):
            written = [self.tokenizer.prompt_text(prompt) for prompt in prompts]
            messages = [json_messages(prompt) for prompt in prompts]
            right_answers = [self.right_answers.get(prompt) for prompt in prompts]
            seed = int(sha256(torch.get_rng_state().numpy().tobytes()).hexdigest()[:8], 16)  # a resumed run has it too
            computed = distributed.from_main(
                lambda: {
                    label: function(written, texts, right_answers, ids, seed, messages)
                    for label, function in self.functions.items()
                    if function
                }
            )
        by_name: ByName = {}
        for label, function in self.functions.items():
            if function is None:
                assert model_scores is not None
                by_name[label] = model_scores.cpu()
            else:
                by_name[label] = torch.tensor(
                    [math.nan if number is None else number for number in computed[label]], dtype=torch.float32
                )
        return by_name

    def of_functions(
        self, prompts: Sequence[Prompt], texts: Sequence[str], ids: Sequence[list[int]]
    ) -> FunctionRewards | None:
        """Return the rewards of functions alone, of one response to each prompt; None where there are no functions."""
        if not any(self.functions.values()):
            return None
        by_name = self.per_response(prompts, texts, torch.zeros(len(texts)), ids)  # the model's part of the sum is 0
        of_functions = {label: numbers for label, numbers in by_name.items() if self.functions[label]}
        return FunctionRewards(of_functions, self.total(by_name))

    def total(self, by_name: ByName) -> Tensor:
        """Return the weighted sum (B,) of rewards; NaN, not judged, where one of them has no verdict.

        No number can stand for a verdict: 0 is the worst mark of some scales and the best of others. A reward of weight
        0 measures and does not count, so it may lack a verdict.
        """
        counted = {
            label: raw if self.weights[label] else raw.masked_fill(without_verdict(raw), 0.0)
            for label, raw in by_name.items()
        }
        return torch.stack([weight * counted[label] for label, weight in self.weights.items()]).sum(0)

    def judged(self, by_name: ByName) -> Tensor:
        """Return (B,) bool: which responses have a verdict of every reward that counts."""
        return ~without_verdict(self.total(by_name))

    def for_evaluation(
        self,
        prompts: Sequence[Prompt],
        texts: Sequence[str],
        model_scores: Tensor | None,
        ids: Sequence[list[int]],
    ) -> tuple[ByName, Tensor]:
        """Return the rewards of functions by name, and the `total` of all, for an evaluation."""
        by_name = self.per_response(prompts, texts, model_scores, ids)
        return {label: numbers for label, numbers in by_name.items() if self.functions[label]}, self.total(by_name)


def settle(function: RewardFunction) -> None:
    """Let a function that may use torch, one of the user's or a model, compute with this process's threads and kernels.

    It comes before the function is opened, which may compute.
    """
    if function.guest.folder is None and "load" not in function.signature.methods:
        return
    function.guest.keep(
        reward_guest.settle,
        threads=torch.get_num_threads(),
        deterministic=torch.are_deterministic_algorithms_enabled(),
        warn_only=torch.is_deterministic_algorithms_warn_only_enabled(),
    )


def total_figures(functions: Iterable[RewardFunction]) -> dict[str, float]:
    """Return the sums of what several functions counted, by name."""
    totals: dict[str, float] = {}
    for function in functions:
        for name, value in function.figures().items():
            totals[name] = totals.get(name, 0) + value
    return totals
