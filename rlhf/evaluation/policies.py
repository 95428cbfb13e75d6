"""Sampled responses to held-out prompts and their metrics: score, divergence, length, true reward."""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Self

import torch
from torch import Tensor

from rlhf.data.batch import Rollout
from rlhf.data.corpus import Prompt
from rlhf.data.normal import says_something
from rlhf.data.tokenize import DialogueTokenizer
from rlhf.data.worlds import toy
from rlhf.evaluation.reward_model import add_reward_models
from rlhf.models.loading import load_base
from rlhf.models.roles import AdapterStart
from rlhf.models.shared_base import SharedBase, check_scores
from rlhf.process import distributed
from rlhf.recipe import Recipe
from rlhf.recipe.schema import Evaluate
from rlhf.recipe.stages import HELDOUT_ANSWERS, SFT, PolicyLabel, PolicyName, PolicyStart, Role, derived_seed
from rlhf.rollout.check import check_first
from rlhf.rollout.decoding import Sampling
from rlhf.rollout.engine import sample
from rlhf.run.directory import StageRun
from rlhf.run.evidence import HELDOUT_PROMPTS, NO_VERDICT, OF_FUNCTION
from rlhf.run.layout import ADAPTER
from rlhf.stats import (
    Estimate,
    clustered_share,
    distinct,
    gain_in_sd,
    length_controlled_win_rate,
    mean_interval,
    outcomes,
    paired_difference,
    share_bounds,
)
from rlhf.terminal import counted
from rlhf.terminal.progress import working

KL_CHUNK = 1024  # response tokens whose two distributions exist at the same time, at most
KL_LOGITS = 2**25  # numbers in each distribution's tensor, at most: 220 tokens of a vocabulary of 152,000, 128 MiB


# (prompts, responses, the reward model's scores or None, responses as tokens) -> rewards by name, and scores that
# replace the model's.
EvaluationRewards = Callable[
    [Sequence[Prompt], Sequence[str], Tensor | None, Sequence[list[int]]], tuple[dict[str, Tensor], Tensor | None]
]


@dataclass(frozen=True)
class PolicySamples:
    """Responses of one policy to the same prompts, with their measures; per-response tensors (N,) on the CPU.

    The responses to one prompt follow each other: N is prompts · `samples_per_prompt`.
    """

    texts: list[str]
    lengths: Tensor  # in tokens, EOS included
    ended: Tensor
    kl: float  # nats per token to the reference, from full distributions at every response token
    # All that judges responses, by the name of its metric; NaN where it gives no verdict: `score`, raw, of the reward
    # model, or the weighted sum of the rewards; `true_reward` of a toy world; `second_score`, raw, of the second reward
    # model; `reward_<name>` of each reward function.
    judged: dict[str, Tensor]
    samples_per_prompt: int = 1

    @classmethod
    def unjudged(cls, texts: list[str]) -> Self:
        """Return answers of which the texts alone are known."""
        none = torch.zeros(len(texts))
        return cls(texts, lengths=none, ended=none, kl=0.0, judged={})

    @property
    def prompts(self) -> int:
        """Return the number of prompts."""
        return len(self.texts) // self.samples_per_prompt

    def functions(self) -> dict[str, Tensor]:
        """Return what reward functions give, by the name of its metric."""
        return {name: numbers for name, numbers in self.judged.items() if name.startswith(OF_FUNCTION)}

    def no_verdict(self) -> dict[str, float]:
        """Return the share of responses without a verdict, of each number that some lack."""
        shares = {f"{name}{NO_VERDICT}": x.isnan().float().mean().item() for name, x in self.judged.items()}
        return {name: share for name, share in shares.items() if share}

    def metrics(self) -> dict[str, float]:
        """Return means over responses, of what judges them over those with a verdict; docs/metrics.yaml has units."""
        return {
            "response_length": self.lengths.float().mean().item(),
            "eos_rate": self.ended.float().mean().item(),
            "kl_per_token": self.kl,
            **{name: _mean_verdict(numbers) for name, numbers in self.judged.items()},
            **self.no_verdict(),
        }


def load_roles(run: StageRun, device: torch.device, start: Path | None, trained: Sequence[PolicyName]) -> SharedBase:
    """Return the base with the `start` as `reference`, each trained policy under its stage's name, any reward model."""
    roles: dict[Role, AdapterStart] = {
        "reference": start,
        **{stage: run.folder(stage) / ADAPTER for stage in trained},
    }
    hardware = run.loaded.recipe.hardware
    shared = SharedBase(load_base(run.base, device), roles, lean=hardware.trunk == "lean", joins=hardware.joined_rows)
    add_reward_models(shared, run)
    return shared


def role_of(label: PolicyLabel, recipe: Recipe) -> Role:
    """Return the role under which `load_roles` has a policy; SFT, at which policies start, is the reference."""
    return "reference" if label == SFT or label == recipe.start else label


def heldout_sampling(options: Evaluate, at_once: int | None = None) -> Sampling:
    """Return the settings of held-out sampling; `at_once` limits the prompts that are decoded together."""
    return Sampling(
        max_prompt_length=options.max_prompt_length,
        response_length=options.response_length,
        temperature=options.temperature,
        batch_size=min(at_once or options.batch_size, options.batch_size),
        top_p=options.top_p,
    )


@torch.no_grad()
def measure(
    shared: SharedBase,
    role: Role,
    tokenizer: DialogueTokenizer,
    prompts: Sequence[Prompt],
    sampling: Sampling,
    *,
    seed: int,
    with_true_reward: bool,
    samples_per_prompt: int = 1,
    reward_fn: EvaluationRewards | None = None,
    whose: str = "",
) -> PolicySamples:
    """Sample `samples_per_prompt` responses to each prompt from a role and measure them.

    `with_true_reward` adds the true reward of the toy world. `reward_fn` adds the rewards of functions and replaces
    the scores. `whose` answers they are is said while it goes on.
    """
    prompts = [prompt for prompt in prompts for _ in range(samples_per_prompt)]
    ids, _ = tokenizer.encode_prompts(prompts, sampling.max_prompt_length)
    answers = counted(len(prompts), "answer") + (f" of {whose}" if whose else "")
    with (
        working(f"sampling {answers}") as say,
        torch.random.fork_rng([shared.device] if shared.device.type == "cuda" else []),
    ):
        torch.manual_seed(derived_seed(seed, HELDOUT_ANSWERS))
        with shared.role(role):
            rollout = sample(
                shared.base,
                ids,
                tokenizer,
                sampling,
                trunk=shared.role_trunk,
                done=lambda share: say(f"sampling {answers}, {share:.0%}"),
            )
            check_first(shared, rollout, sampling)
        texts = tokenizer.decode_rows(rollout.tokens, rollout.mask)
        scores = {head: torch.zeros(len(ids), device=shared.device) for head in shared.score_heads}
        divergence = torch.zeros((), dtype=torch.float64, device=shared.device)
        shards = rollout.sharded_by_length(sampling.batch_size)
        for number, index in enumerate(shards):
            say(f"measuring {answers}, {number / len(shards):.0%}")
            batch = rollout.rows(index)
            if role != "reference":
                divergence += exact_kl(shared, role, batch, sampling.temperature or 1.0)
            for head, numbers in scores.items():
                numbers[index] = shared.scores(batch, head)
        distributed.all_sum(*scores.values(), divergence)
        for numbers in scores.values():
            check_scores(numbers)
    truths: Tensor | None = None
    rewards: dict[str, Tensor] = {}
    if with_true_reward:
        prompt_texts = [tokenizer.prompt_text(prompt) for prompt in prompts]
        truths = torch.tensor([toy.true_reward(p, t) for p, t in zip(prompt_texts, texts, strict=True)])
    score, second_score = (scores[head].cpu() if head in scores else None for head in ("reward", "second_reward"))
    if reward_fn is not None:
        rewards, score = reward_fn(prompts, texts, score, rollout.response_ids)
    judged = {"score": score, "true_reward": truths, "second_score": second_score}
    judged |= {f"{OF_FUNCTION}{name}": numbers for name, numbers in rewards.items()}
    return PolicySamples(
        texts=texts,
        lengths=rollout.response_length.cpu(),
        ended=rollout.ended.cpu(),
        kl=divergence.item() / int(rollout.response_length.sum()),
        judged={name: numbers for name, numbers in judged.items() if numbers is not None},
        samples_per_prompt=samples_per_prompt,
    )


@torch.no_grad()
def exact_kl(shared: SharedBase, role: Role, rollout: Rollout, temperature: float) -> float:
    """Return Σ_t KL(π_role(·|s_t) || π_reference(·|s_t)) in nats over the response tokens of a batch."""
    mask = rollout.mask
    with shared.role(role):
        policy_hidden = shared.response_hidden(rollout)[mask]
    with shared.role("reference"):
        reference_hidden = shared.response_hidden(rollout)[mask]
    total = 0.0
    chunk = max(1, min(KL_CHUNK, KL_LOGITS // shared.vocabulary))
    for a, b in zip(policy_hidden.split(chunk), reference_hidden.split(chunk), strict=True):
        logp = (shared.logits(a) / temperature).log_softmax(-1)
        logq = (shared.logits(b) / temperature).log_softmax(-1)
        total += (logp.exp() * (logp - logq)).sum(dtype=torch.float64).item()
    return total


def gains_over_start(before: PolicySamples, after: PolicySamples, start: PolicyStart) -> dict[str, float]:
    """Return a policy's metrics beside those of its start, with gains and the ends of 95 % intervals.

    Gains of reward functions are in their own units, the others in standard deviations of the start's own samples.
    Means are over the responses with a verdict; gains and wins over the prompts where both responses have one.
    Responses to one prompt may depend on each other. An interval that cannot be estimated is left out.
    """
    metrics = after.metrics() | {f"response_length_{start}": before.metrics()["response_length"]}
    estimates = _means(after)
    for name in (*before.functions(), *_judges(before, after)):
        prompts, (old, new) = _with_verdict(after, before.judged[name], after.judged[name])
        metrics[f"{name}_{start}"] = _mean_verdict(before.judged[name])
        if name.startswith(OF_FUNCTION):
            metrics[f"{name}_gain"] = new.mean().item() - old.mean().item()
            estimates[f"{name}_gain"] = paired_difference(old.tolist(), new.tolist(), prompts)
        else:
            metrics[f"{name}_gain_sd"] = gain(old, new)
            estimates[f"{name}_gain_sd"] = gain_in_sd(old.tolist(), new.tolist(), prompts)
    metrics |= {f"{name}_{start}": share for name, share in before.no_verdict().items()}
    if (differences := _score_gains(before, after)) is not None:
        metrics |= win_rate(differences, start, after.samples_per_prompt)
        prompts, (known,) = _with_verdict(after, differences)
        won = outcomes(known.tolist())
        estimates[f"win_rate_vs_{start}"] = clustered_share(won, prompts) if won else None
    return metrics | _ends(estimates) | {HELDOUT_PROMPTS: after.prompts}


def own_figures(policy: PolicySamples) -> dict[str, float]:
    """Return a policy's metrics by itself, with the intervals of what reward functions give."""
    return policy.metrics() | _ends(_means(policy)) | {HELDOUT_PROMPTS: policy.prompts}


def _means(policy: PolicySamples) -> dict[str, Estimate | None]:
    """Return the mean of each reward function with its interval."""
    estimates: dict[str, Estimate | None] = {}
    for name, numbers in policy.functions().items():
        prompts, (known,) = _with_verdict(policy, numbers)
        rewards: list[float] = known.tolist()
        if rewards and set(rewards) <= {0.0, 1.0}:  # a share of right answers
            estimates[name] = clustered_share(rewards, prompts)
        elif rewards:
            estimates[name] = mean_interval(rewards, prompts, share_bounds(rewards))
    return estimates


def _judges(before: PolicySamples, after: PolicySamples) -> list[str]:
    """Return the names of what judges both sides, beside reward functions."""
    return [name for name in before.judged if name in after.judged and not name.startswith(OF_FUNCTION)]


def _score_gains(before: PolicySamples, after: PolicySamples) -> Tensor | None:
    """Return the score after less the one before (N,), NaN without both verdicts; None where a side has no scores."""
    old, new = before.judged.get("score"), after.judged.get("score")
    return None if old is None or new is None else new - old


def gain(old: Tensor, new: Tensor) -> float:
    """Return the mean of `new` (N,) less that of `old` (N,), in sd of `old`; not finite if all of `old` are equal.

    With fewer than two numbers there is no sd, and the gain is NaN.
    """
    return ((new.mean() - old.mean()) / old.std()).item() if len(old) > 1 else math.nan


def gains_over_base(base: PolicySamples, after: PolicySamples) -> dict[str, float]:
    """Return a policy's gains over the base, in standard deviations of the base's own samples."""
    judged = {name: _with_verdict(after, base.judged[name], after.judged[name])[1] for name in _judges(base, after)}
    return {f"{name}_gain_over_base_sd": gain(old, new) for name, (old, new) in judged.items()}


def further_metrics(
    before: PolicySamples, after: PolicySamples, gains: Mapping[str, float], start: PolicyStart
) -> dict[str, float]:
    """Return what the evaluation adds to `gains_over_start`.

    These are variety, the win rate at equal length, and how much more the score gained than the true reward, or than
    the score of the second reward model.
    """
    counts = Counter(after.texts)
    metrics = {
        "distinct_1": distinct(after.texts, 1),
        "distinct_2": distinct(after.texts, 2),
        "empty_rate": sum(not says_something(text) for text in after.texts) / len(after.texts),
        "equal_rate": sum(count for count in counts.values() if count > 1) / len(after.texts),
    }
    if before is after:
        return metrics
    if (differences := _score_gains(before, after)) is not None:
        judged = ~differences.isnan()
        length_differences = (after.lengths - before.lengths).double().where(judged, math.nan)
        controlled = length_controlled_win_rate(
            per_prompt_means(_won(differences), after.samples_per_prompt).tolist(),
            per_prompt_means(length_differences, after.samples_per_prompt).tolist(),
        )
        metrics[f"ties_vs_{start}"] = (differences[judged] == 0).double().mean().item()
        if controlled is not None:
            rate = f"lc_win_rate_vs_{start}"
            metrics |= {rate: controlled.value} | _ends({rate: controlled})
    for name, other in (("proxy_truth_gap_sd", "true_reward_gain_sd"), ("second_gap_sd", "second_score_gain_sd")):
        if other in gains and "score_gain_sd" in gains:
            metrics[name] = gains["score_gain_sd"] - gains[other]
    return metrics


def of_several_samples(policy: PolicySamples) -> dict[str, float]:
    """Return pass@k of the rewards that are 0 or 1, with 95 % intervals over prompts."""
    shares = {
        f"{name}_{pass_at}": shares
        for name, verdicts in policy.functions().items()
        for pass_at, shares in pass_at_k(verdicts.view(-1, policy.samples_per_prompt).tolist()).items()
    }
    estimates = {name: clustered_share(x, range(len(x))) for name, x in shares.items()}
    return {name: fmean(values) for name, values in shares.items()} | _ends(estimates)


def pass_at_k(verdicts: Sequence[Sequence[float]]) -> dict[str, list[float]]:
    """Return pass@k, prompt by prompt, for k = 2, 4, 8, …, from verdicts of 0 and 1, NaN where there is none.

    Of n verdicts with c right ones it is 1 − C(n − c, k)/C(n, k) (arXiv 2107.03374, eq. 1). A prompt with fewer than k
    verdicts does not count. Other rewards have no pass@k: the result is empty.
    """
    known = [[number for number in numbers if number == number] for numbers in verdicts]
    if not {number for numbers in known for number in numbers} <= {0.0, 1.0}:
        return {}
    most = max(map(len, known), default=0)
    return {
        f"pass_at_{k}": [
            1 - math.comb(len(numbers) - int(sum(numbers)), k) / math.comb(len(numbers), k)
            for numbers in known
            if len(numbers) >= k
        ]
        for k in (2**power for power in range(1, most.bit_length()))
    }


def _ends(estimates: Mapping[str, Estimate | None]) -> dict[str, float]:
    """Return the ends of the intervals that could be estimated, as `<metric>_low` and `<metric>_high`."""
    return {
        f"{metric}_{end}": value
        for metric, estimate in estimates.items()
        if estimate is not None
        for end, value in (("low", estimate.low), ("high", estimate.high))
    }


def _mean_verdict(numbers: Tensor) -> float:
    """Return the mean of numbers, without those that are NaN for want of a verdict; NaN without any."""
    return numbers[~numbers.isnan()].mean().item()


def _with_verdict(policy: PolicySamples, *sides: Tensor) -> tuple[list[int], list[Tensor]]:
    """Return the prompts of the responses that have a verdict, not NaN, on each side, and each side's numbers."""
    kept = ~torch.stack([side.isnan() for side in sides]).any(0)
    prompts = torch.arange(policy.prompts).repeat_interleave(policy.samples_per_prompt)
    return prompts[kept].tolist(), [side[kept] for side in sides]


def per_prompt_means(values: Tensor, samples_per_prompt: int) -> Tensor:
    """Return means (prompts,) of per-response values (N,) that are not NaN, of the prompts that have any.

    Responses to one prompt are not independent observations.
    """
    means = values.view(-1, samples_per_prompt).nanmean(1)
    return means[~means.isnan()]


def _won(differences: Tensor) -> Tensor:
    """Return 1, 0 or 0.5 (N,) for wins, losses and ties by differences (N,), and NaN for those that are NaN."""
    return torch.tensor(outcomes(differences.tolist()), dtype=torch.float64).where(~differences.isnan(), math.nan)


def win_rate(differences: Tensor, start: PolicyStart, samples_per_prompt: int = 1) -> dict[str, float]:
    """Return the share of responses with the higher score, and the half-width of its 95 % interval (normal).

    Ties count half, and differences that are NaN not at all. Several responses to a prompt count as one observation,
    their mean. With one prompt the half-width is NaN, and without any the share too.
    """
    wins = per_prompt_means(_won(differences), samples_per_prompt)
    half_width = math.nan
    if len(wins) > 1:  # with 1.96, not stats.Z95: released recipes log this number
        half_width = 1.96 * wins.std().item() / math.sqrt(len(wins))
    return {f"win_rate_vs_{start}": wins.mean().item(), f"win_rate_vs_{start}_ci95": half_width}
