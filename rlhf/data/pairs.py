"""Preference pairs as token ids."""

from collections.abc import Sequence
from typing import NamedTuple

from rlhf.data.rows import PreferencePair
from rlhf.data.tokenize import DialogueTokenizer, Encoded
from rlhf.errors import UserError
from rlhf.recipe.schema import Dpo, Rm
from rlhf.terminal.progress import working


class EncodedPair(NamedTuple):
    """Both responses to one prompt."""

    chosen: Encoded
    rejected: Encoded

    def longest(self) -> int:
        """Return the tokens of the longer sequence, to which both are padded."""
        return len(self.chosen.prompt) + max(len(self.chosen.response), len(self.rejected.response))


def encode_pairs(
    tokenizer: DialogueTokenizer, pairs: Sequence[PreferencePair], options: Rm | Dpo
) -> tuple[list[EncodedPair], dict[str, int], list[PreferencePair]]:
    """Return both sides of each pair as token ids, counts of what was cut, and the pairs that are left.

    A pair is dropped, and counted, when either side loses its whole response, or when both become the same tokens: what
    tells them apart was cut off. Raises UserError when none is left.
    """
    longest_response = options.max_completion_length if isinstance(options, Dpo) else None
    limits = options.max_prompt_length, options.max_length, longest_response
    with working("encoding pairs"):
        chosen, cut_chosen = tokenizer.encode([(p.prompt, p.chosen) for p in pairs], *limits)
        rejected, cut_rejected = tokenizer.encode([(p.prompt, p.rejected) for p in pairs], *limits)
    both = [(EncodedPair(c, r), pair) for c, r, pair in zip(chosen, rejected, pairs, strict=True) if c and r]
    told_apart = [(ids, pair) for ids, pair in both if ids.chosen.response != ids.rejected.response]
    if not told_apart:
        raise UserError(
            f"no pair of {len(pairs):,} is left: within max_length {len(pairs) - len(both):,} lose a response and "
            f"{len(both):,} become equal; raise it or lower max_prompt_length"
        )
    counts = {
        "prompts_cut": cut_chosen["prompts_cut"],  # both sides have the same prompt
        "responses_cut": cut_chosen["responses_cut"] + cut_rejected["responses_cut"],
        "pairs_dropped": len(pairs) - len(both),
        "pairs_equal": len(both) - len(told_apart),
    }
    return [ids for ids, _ in told_apart], counts, [pair for _, pair in told_apart]
