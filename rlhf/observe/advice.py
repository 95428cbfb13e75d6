"""Advice on what the live checks find: recipe keys and values to try, made from the settings of the run.

Several keys are in the order in which to try them. "The guide" is the published H100 guide.
"""

from rlhf.observe.history import History
from rlhf.recipe.learning_rates import usual_rate
from rlhf.recipe.schema import Rm
from rlhf.recipe.schema_online import GroupOptions, Ppo


def half_rate(h: History) -> dict[str, float]:
    """Return half the learning rate, the guide's advice for divergence."""
    return {f"{h.stage}.learning_rate": h.options.learning_rate / 2}


def higher_rate(h: History) -> dict[str, float]:
    """Return the rate with which adapters on such a base begin (learning_rates.py) where the recipe's is lower.

    Otherwise twice the recipe's: the guide's advice (2e-5 instead of 1e-5) where PPO does not converge.
    """
    now, usual = h.options.learning_rate, usual_rate(h.recipe, h.stage) or 0.0
    return {f"{h.stage}.learning_rate": usual if usual > now else 2 * now}


def higher_rate_and_epochs(h: History) -> dict[str, float]:
    """Return a higher rate and twice the epochs."""
    return higher_rate(h) | {f"{h.stage}.num_train_epochs": 2 * h.supervised.num_train_epochs}


def smaller_updates(h: History) -> dict[str, float]:
    """Return the guide's advice on divergence during PPO that the recipe does not follow yet."""
    advice = half_rate(h)
    if h.online.passes > 2:
        advice[f"{h.stage}.{h.online.passes_key}"] = 2
    if h.online.num_mini_batches > 1:
        advice[f"{h.stage}.num_mini_batches"] = h.online.num_mini_batches // 2
    return advice


def more_kl(h: History) -> dict[str, float]:
    """Return twice the weight of the KL, or half the target where the weight follows one."""
    if h.online.kl_target is not None:
        return {f"{h.stage}.kl_target": h.online.kl_target / 2}
    return {f"{h.stage}.{h.online.kl_key}": 2 * h.online.kl_coef or 0.05}


def stay_near_reference(h: History) -> dict[str, float]:
    """Return keys that keep the policy close to the reference: more KL penalty, smaller updates."""
    return more_kl(h) | smaller_updates(h)


def ending_penalty(h: History) -> dict[str, float]:
    """Return keys for responses that do not end."""
    return {f"{h.stage}.missing_eos_penalty": 2 * (h.online.missing_eos_penalty or 0.5)} | more_kl(h)


def more_entropy(h: History) -> dict[str, float]:
    """Return keys for a policy of low entropy."""
    return more_kl(h) | {f"{h.stage}.entropy_coef": 2 * h.online.entropy_coef or 0.01}


def fit_more(h: History) -> dict[str, float]:
    """Return keys for a reward model that has learned too little."""
    return {f"{h.stage}.num_train_epochs": 2 * h.supervised.num_train_epochs} | higher_rate(h)


def fit_less(h: History) -> dict[str, float]:
    """Return keys for a reward model that has learned its pairs by heart."""
    rm = h.recipe.options(Rm, h.stage)
    fewer_epochs = {f"{h.stage}.num_train_epochs": rm.num_train_epochs / 2}
    if rm.loss_type != "bradley_terry":  # the other loss refuses centred rewards
        return fewer_epochs
    return fewer_epochs | {f"{h.stage}.center_rewards_coefficient": 2 * rm.center_rewards_coefficient or 0.01}


def larger_groups(h: History) -> dict[str, float]:
    """Return keys for groups whose responses all get the same reward."""
    assert isinstance(h.online, GroupOptions)
    advice: dict[str, float] = {f"{h.stage}.num_generations": 2 * h.online.num_generations}
    if (now := h.online.resample_groups) < 1_000:  # the largest that a recipe may have
        advice[f"{h.stage}.resample_groups"] = min(max(4, 2 * now), 1_000)
    return advice


def nearer_sampler(h: History) -> dict[str, str]:
    """Return settings that sample as training computes, or correct the difference; none for a server."""
    options = h.online
    if options.correction != "none":
        return {}
    return {f"{h.stage}.sampling_correction": "token_truncate"}


def slower_critic(h: History) -> dict[str, float]:
    """Return a quarter of the critic's learning rate."""
    return {"ppo.value_learning_rate": h.recipe.options(Ppo).value_learning_rate / 4}
