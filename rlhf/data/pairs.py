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

    A pair is dropped, and counted, when either side loses its whole response. Raises UserError when none is left.
    """
    longest_response = options.max_completion_length if isinstance(options, Dpo) else None
    limits = options.max_prompt_length, options.max_length, longest_response
    with working("encoding pairs"):
        chosen, cut_chosen = tokenizer.encode([(p.prompt, p.chosen) for p in pairs], *limits)
        rejected, cut_rejected = tokenizer.encode([(p.prompt, p.rejected) for p in pairs], *limits)
    encoded = [EncodedPair(c, r) for c, r in zip(chosen, rejected, strict=True) if c and r]
    if not encoded:
        raise UserError("no pair's responses fit below max_length; raise it or lower max_prompt_length")
    counts = {
        "prompts_cut": cut_chosen["prompts_cut"],  # both sides have the same prompt
        "responses_cut": cut_chosen["responses_cut"] + cut_rejected["responses_cut"],
        "pairs_dropped": len(pairs) - len(encoded),
    }
    return encoded, counts, [p for p, c, r in zip(pairs, chosen, rejected, strict=True) if c and r]
