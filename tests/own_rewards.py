"""Reward functions of a user, which recipes name as `tests.own_rewards:NAME`."""


def answer_and_length(completions: list[str], answer: list[str]) -> list[float]:
    """Return the answer as a number, so that a reward shows to which prompt it was given, plus a part by the text."""
    return [float(a) + len(text) / 1000 for text, a in zip(completions, answer, strict=True)]
