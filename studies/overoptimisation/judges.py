"""What the toy world says of answers: reward functions with weight 0, by which PPO's evaluations measure a policy."""

from rlhf.data.worlds import toy


def truth(prompts: list[str], completions: list[str]) -> list[float]:
    """Return the true reward of each answer."""
    return [toy.true_reward(prompt, text) for prompt, text in zip(prompts, completions, strict=True)]


def utility(prompts: list[str], completions: list[str]) -> list[float]:
    """Return what each answer is worth to the annotator, whose choices are the labels."""
    return [toy.annotator_utility(prompt, text) for prompt, text in zip(prompts, completions, strict=True)]
