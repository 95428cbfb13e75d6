"""Preference pairs made by hand, for tests of what is counted in them."""

from rlhf.data.rows import Message, PreferencePair


def pair_of_one_turn(prompt: str, chosen: str, rejected: str, n: int = 0) -> PreferencePair:
    """A question with two answers, in line `n` of a file."""
    return PreferencePair((Message("user", prompt),), chosen, rejected, f"a.jsonl:{n}")
