"""The preference pairs of the reward model and of DPO, as token ids."""

from typing import NamedTuple

from rlhf.data.corpus import Split
from rlhf.data.pairs import EncodedPair, encode_pairs
from rlhf.data.rows import PreferencePair
from rlhf.data.tokenize import DialogueTokenizer
from rlhf.recipe.schema import Dpo, Rm
from rlhf.run.directory import StageRun


class StagePairs(NamedTuple):
    """The pairs of a stage, without pairs of which nothing would be left after cutting."""

    training: list[EncodedPair]
    cuts: dict[str, int]  # counts of what was cut from the training pairs
    validation: list[EncodedPair]  # none without `eval_steps`
    heldout: list[EncodedPair]
    heldout_rows: list[PreferencePair]  # of `heldout`

    def lengths(self) -> list[int]:
        """Return the tokens of each training pair's longer sequence."""
        return [pair.longest() for pair in self.training]


def stage_pairs(
    run: StageRun, tokenizer: DialogueTokenizer, pairs: Split[PreferencePair], options: Rm | Dpo
) -> StagePairs:
    """Encode the pairs of a stage. Note in its manifest what was cut."""
    training, cuts, _ = encode_pairs(tokenizer, pairs.train[: options.max_samples], options)
    heldout, heldout_cuts, heldout_rows = encode_pairs(tokenizer, pairs.test[: options.max_eval_samples], options)
    run.describe(cuts={"train": cuts, "heldout": heldout_cuts})
    validation: list[EncodedPair] = []
    if options.eval_steps:
        validation, _, _ = encode_pairs(tokenizer, pairs.validation[: options.max_eval_samples], options)
    return StagePairs(training, cuts, validation, heldout, heldout_rows)
