"""The weighted sum of the rewards that a section of the recipe names, applied to sampled responses."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from hashlib import sha256
from pathlib import Path

import torch
from torch import Tensor

from rlhf.data.corpus import Prompt, Split
from rlhf.data.tokenize import DialogueTokenizer
from rlhf.errors import UserError
from rlhf.process import distributed
from rlhf.recipe.schema_online import MODEL_REWARD, OnlineOptions
from rlhf.recipe.stages import StageName
from rlhf.stages.online.loop import ByName, FunctionRewards
from rlhf.stages.online.rewards import RewardFunction, find, json_messages, labels
from rlhf.terminal import excerpt

Columns = Callable[[Iterable[str]], dict[Prompt, dict[str, object]]]  # names -> by prompt, what rows have beside it


class RewardSum:
    """Reward functions of a section of the recipe, with their weights; the reward model may be one of them.

    `columns`: what rows have beside their prompts. `folder` is that of the run, where a judge keeps its marks; `device`
    is where reward models of others compute. Functions in `known` are used by their names, and new ones are added to
    it. Raises UserError for a name without a function.
    """

    def __init__(
        self,
        stage: StageName,
        options: OnlineOptions,
        right_answers: Mapping[Prompt, str],
        tokenizer: DialogueTokenizer,
        columns: Columns = lambda names: {},
        folder: Path | None = None,
        known: dict[str, RewardFunction] | None = None,
        device: str = "cpu",
    ):
        self.stage, self.right_answers, self.tokenizer = stage, right_answers, tokenizer
        names = dict(zip(labels(options.reward_funcs), options.reward_funcs, strict=True))
        self.weights = dict(zip(names, options.weights, strict=True))
        known = {} if known is None else known
        for name in names.values():
            if name != MODEL_REWARD and name not in known:
                known[name] = find(name, f"{stage}.reward_funcs").begun(folder, options.reward_timeout, device)
        self.functions = {label: None if name == MODEL_REWARD else known[name] for label, name in names.items()}
        wanted = {column for function in self.called for column in function.columns}
        self.columns = columns(sorted(wanted)) if wanted else {}

    @property
    def called(self) -> list[RewardFunction]:
        """Return the rewards that are functions."""
        return [function for function in self.functions.values() if function]

    def usable(self, prompts: Split[Prompt]) -> Split[Prompt]:
        """Return the prompts that the rewards can judge: those with the answer and the columns that functions need.

        Raises UserError where none are left on a side of the split, and for a right answer that no response can match.
        """
        for function in self.called:
            for column, needed in function.columns.items():
                if needed:
                    having = {prompt for prompt, row in self.columns.items() if column in row}
                    prompts = prompts.only(having.__contains__)
                    what = f"prompts with a column {column!r}, which the reward {function.name} takes"
                    prompts = prompts.required(self.stage, what)
            if function.needs_answer:
                prompts = prompts.only(self.right_answers.__contains__)
                prompts = prompts.required(self.stage, 'prompts with a right answer ({"prompt", "answer"})')
                check_answers(self.stage, function, {prompt: self.right_answers[prompt] for prompt in prompts})
        return prompts

    def per_response(
        self, prompts: Sequence[Prompt], texts: Sequence[str], model_scores: Tensor | None, ids: Sequence[list[int]]
    ) -> ByName:
        """Return the rewards of each response by name, on the CPU; the same numbers on every rank.

        ids: the tokens of each response. Raises UserError as `RewardFunction` does.
        """
        computed: dict[str, list[float | None]] = {}
        if self.called:
            given = self._given(prompts, texts, ids)
            seed = int(sha256(torch.get_rng_state().numpy().tobytes()).hexdigest()[:8], 16)  # a resumed run has it too
            computed = distributed.from_main(
                lambda: {label: function(given, seed) for label, function in self.functions.items() if function}
            )
        by_name: ByName = {}
        for label, function in self.functions.items():
            if function is None:
                assert model_scores is not None
                by_name[label] = model_scores.cpu()
            else:
                numbers = [math.nan if number is None else number for number in computed[label]]
                by_name[label] = torch.tensor(numbers, dtype=torch.float32)
        return by_name

    def _given(
        self, prompts: Sequence[Prompt], texts: Sequence[str], ids: Sequence[list[int]]
    ) -> dict[str, Sequence[object]]:
        """Return the lists that functions are called with."""
        of_rows = [self.columns.get(prompt, {}) for prompt in prompts]
        return {name: [row.get(name) for row in of_rows] for row in of_rows for name in row} | {
            "prompts": [self.tokenizer.prompt_text(prompt) for prompt in prompts],
            "messages": [json_messages(prompt) for prompt in prompts],
            "completions": texts,
            "completion_ids": ids,
            "answer": [self.right_answers.get(prompt) for prompt in prompts],
        }

    def of_functions(
        self, prompts: Sequence[Prompt], texts: Sequence[str], ids: Sequence[list[int]]
    ) -> FunctionRewards | None:
        """Return the rewards of functions alone, of one response to each prompt; None where there are no functions."""
        if not self.called:
            return None
        by_name = self.per_response(prompts, texts, torch.zeros(len(texts)), ids)  # the model's part of the sum is 0
        of_functions = {label: numbers for label, numbers in by_name.items() if self.functions[label]}
        return FunctionRewards(of_functions, self.total(by_name))

    def total(self, by_name: ByName) -> Tensor:
        """Return the weighted sum (B,) of rewards; NaN, not judged, where one of them has no verdict.

        No number can stand for a verdict: 0 is the worst mark of some scales and the best of others. A reward of weight
        0 measures and does not count, so it may lack a verdict.
        """
        counted = {n: raw if self.weights[n] else raw.masked_fill(raw.isnan(), 0.0) for n, raw in by_name.items()}
        return torch.stack([weight * counted[label] for label, weight in self.weights.items()]).sum(0)

    def judged(self, by_name: ByName) -> Tensor:
        """Return (B,) bool: which responses have a verdict of every reward that counts."""
        return ~self.total(by_name).isnan()

    def for_evaluation(
        self, prompts: Sequence[Prompt], texts: Sequence[str], model_scores: Tensor | None, ids: Sequence[list[int]]
    ) -> tuple[ByName, Tensor]:
        """Return the rewards of functions by name, and the `total` of all, for an evaluation."""
        by_name = self.per_response(prompts, texts, model_scores, ids)
        return {label: numbers for label, numbers in by_name.items() if self.functions[label]}, self.total(by_name)


def check_answers(where: str, function: RewardFunction, right_answers: Mapping[Prompt, str]) -> None:
    """Raise UserError, which begins with `where`, for a right answer that no response can match."""
    for prompt, answer in right_answers.items():
        if fault := function.answer_fault(answer):
            raise UserError(
                f"{where}: {function.name} cannot judge responses to {excerpt(prompt[-1].content)!r}: the answer "
                f"{fault}; correct the row's answer or remove the row"
            )


def total_figures(functions: Iterable[RewardFunction]) -> dict[str, float]:
    """Return the sums of what several functions counted, by name."""
    totals: dict[str, float] = {}
    for function in functions:
        for name, value in function.figures().items():
            totals[name] = totals.get(name, 0) + value
    return totals
