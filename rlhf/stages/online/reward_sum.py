"""The reward functions that sections of a recipe name, called on sampled responses."""

import math
from collections.abc import Sequence
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path

import torch

from rlhf.data.corpus import Corpus, Prompt, Split
from rlhf.data.tokenize import DialogueTokenizer
from rlhf.process import distributed
from rlhf.recipe.schema_online import MODEL_REWARD, OnlineOptions
from rlhf.recipe.stages import StageName
from rlhf.run.reader import advising
from rlhf.stages.online.rewards import find, labels
from rlhf.stages.online.scores import ByName, FunctionRewards


class RewardSum:
    """The reward functions of a section of the recipe with their weights; an evaluation has those of several sections.

    `stage` is the one that calls them. `folder` is that of the run, where a judge keeps its marks; `device` is where
    reward models of others compute. Raises UserError for a name without a function, and for rows of one prompt that
    differ in what a function reads.
    """

    def __init__(
        self,
        stage: StageName,
        sections: Sequence[OnlineOptions],
        corpus: Corpus,
        tokenizer: DialogueTokenizer,
        folder: Path | None = None,
        device: str = "cpu",
    ):
        self.stage, self.tokenizer = stage, tokenizer
        named = {
            name: (weight, options.reward_timeout)
            for options in sections
            for name, weight in zip(options.reward_funcs, options.weights, strict=True)
            if name != MODEL_REWARD
        }
        self.functions = {
            label: find(name, f"{stage}: reward_funcs") for label, name in zip(labels([*named]), named, strict=True)
        }
        for function in self.functions.values():
            function.weight, function.timeout = named[function.name]
            function.begin(folder, device)
        wanted = {column for function in self.functions.values() for column in function.columns}
        self.columns = corpus.columns(sorted(wanted)) if wanted else {}
        self.right_answers = corpus.right_answers() if self.functions else {}

    def usable(self, prompts: Split[Prompt]) -> Split[Prompt]:
        """Return the prompts that the functions can judge: those with the answer and the columns that they need.

        Raises UserError where none are left on a side of the split, and for a right answer that no response can match.
        """
        for function in self.functions.values():
            for column in function.needs:
                having = {prompt for prompt, row in self.columns.items() if column in row}
                what = f"prompts with a column {column!r}, which the reward {function.name} takes"
                prompts = prompts.only(having.__contains__).required(self.stage, what)
            if function.needs_answer:
                what = 'prompts with a right answer ({"prompt", "answer"})'
                prompts = prompts.only(self.right_answers.__contains__).required(self.stage, what)
                if function.is_named:
                    with advising("correct the row's answer or remove the row"):
                        function(self._given([*prompts], [""] * len(prompts), [[]] * len(prompts)))
        return prompts

    def __call__(self, prompts: Sequence[Prompt], texts: Sequence[str], ids: Sequence[list[int]]) -> FunctionRewards:
        """Return the rewards of one response to each prompt; the same numbers on every rank.

        A response without a verdict of a reward is NaN there and in the sum. No number can stand for a verdict: 0 is
        the worst mark of some scales and the best of others.
        ids: the tokens of each response. Raises UserError as `RewardFunction` does.
        """
        given = self._given(prompts, texts, ids)
        seed = int(sha256(torch.get_rng_state().numpy().tobytes()).hexdigest()[:8], 16)  # a resumed run has it too
        computed = distributed.from_main(lambda: [function(given, seed) for function in self.functions.values()])
        by_name: ByName = {}
        total = torch.zeros(len(texts))
        for (label, function), numbers in zip(self.functions.items(), computed, strict=True):
            raw = by_name[label] = torch.tensor([math.nan if number is None else number for number in numbers])
            if function.weight:  # one of weight 0 measures and does not count, so it may lack a verdict
                total = total + function.weight * raw
        return FunctionRewards(by_name, total)

    def _given(
        self, prompts: Sequence[Prompt], texts: Sequence[str], ids: Sequence[list[int]]
    ) -> dict[str, Sequence[object]]:
        """Return the lists that functions are called with."""
        of_rows = [self.columns.get(prompt, {}) for prompt in prompts]
        return {name: [row.get(name) for row in of_rows] for row in of_rows for name in row} | {
            "prompts": [self.tokenizer.prompt_text(prompt) for prompt in prompts],
            "messages": [[asdict(message) for message in prompt] for prompt in prompts],
            "completions": texts,
            "completion_ids": ids,
            "answer": [self.right_answers.get(prompt) for prompt in prompts],
        }
