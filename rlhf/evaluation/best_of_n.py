"""Best-of-n of the start beside a policy at equal KL, and pass@k: arithmetic over samples that exist."""

from collections.abc import Iterable, Mapping
from itertools import compress
from statistics import fmean

from rlhf.stats import best_of, kl_of_best_of

SCORE = "score"
PerPrompt = list[list[float]]  # numbers of the answers to each prompt
Judgements = Mapping[str, PerPrompt]  # by judge: `score`, `true_reward`, `second_score`


def sizes(samples_per_prompt: int) -> list[int]:
    """Return the n of best-of-n and the k of pass@k that are shown: powers of two up to the number of samples."""
    return [2**power for power in range(1, samples_per_prompt.bit_length())]


def judged_whole(sides: Iterable[Judgements]) -> list[Judgements]:
    """Return the numbers of the prompts on all of whose answers every judge of every side has a verdict, not NaN."""
    each = [*sides]
    of_prompts = zip(*(numbers for side in each for numbers in side.values()), strict=True)
    whole = [all(number == number for numbers in of_prompt for number in numbers) for of_prompt in of_prompts]
    return [{judge: [*compress(numbers, whole)] for judge, numbers in side.items()} for side in each]


def best_by_score(judgements: Judgements, n: int) -> dict[str, list[float]]:
    """Return what each judge is expected to give the answer with the highest of n scores, prompt by prompt."""
    return {
        judge: [best_of(scores, values, n) for scores, values in zip(judgements[SCORE], numbers, strict=True)]
        for judge, numbers in judgements.items()
    }


def best_at_kl(judgements: Judgements, kl: float) -> dict[str, list[float]]:
    """Return `best_by_score` at a KL in nats per answer, linear in the KL between two whole n.

    It is empty for a KL that the best of all samples does not reach, without scores, and with one sample to a prompt.
    """
    samples = min(map(len, judgements.get(SCORE, [])), default=0)
    above = next((n for n in range(2, samples + 1) if kl_of_best_of(n) >= kl), None)
    if above is None:
        return {}
    low, high = kl_of_best_of(above - 1), kl_of_best_of(above)
    share = max(0.0, kl - low) / (high - low)
    fewer, more = best_by_score(judgements, above - 1), best_by_score(judgements, above)
    return {
        judge: [(1 - share) * a + share * b for a, b in zip(fewer[judge], more[judge], strict=True)]
        for judge in judgements
    }


def beside_best_of_n(start: Judgements, policy: Judgements, kl: float) -> dict[str, list[float]]:
    """Return metrics of a policy with `kl` nats per answer, prompt by prompt; none where `best_at_kl` has none.

    They are best-of-n of the start at that KL, and what the policy has more.
    """
    metrics = {}
    for judge, expected in best_at_kl(start, kl).items():
        metrics[f"{judge}_best_of_n"] = expected
        metrics[f"{judge}_over_best_of_n"] = [
            fmean(own) - best for own, best in zip(policy[judge], expected, strict=True)
        ]
    return metrics


def pass_at_k(verdicts: PerPrompt) -> dict[str, list[float]]:
    """Return pass@k, prompt by prompt, for each k of `sizes`, from verdicts of 0 and 1, NaN where there is none.

    A prompt with fewer than k verdicts does not count. Other rewards have no pass@k: the result is empty.
    """
    known = [[number for number in numbers if number == number] for numbers in verdicts]
    if not {number for numbers in known for number in numbers} <= {0.0, 1.0}:
        return {}
    return {
        f"pass_at_{k}": [best_of(numbers, numbers, k) for numbers in known if len(numbers) >= k]
        for k in sizes(max(map(len, known), default=0))
    }
