"""pass@k: arithmetic over samples that exist."""

import math

PerPrompt = list[list[float]]  # numbers of the answers to each prompt


def sizes(samples_per_prompt: int) -> list[int]:
    """Return the k of pass@k that are shown: powers of two up to the number of samples."""
    return [2**power for power in range(1, samples_per_prompt.bit_length())]


def pass_at_k(verdicts: PerPrompt) -> dict[str, list[float]]:
    """Return pass@k, prompt by prompt, for each k of `sizes`, from verdicts of 0 and 1, NaN where there is none.

    Of n verdicts with c right ones it is 1 − C(n − c, k)/C(n, k) (arXiv 2107.03374, eq. 1). A prompt with fewer than k
    verdicts does not count. Other rewards have no pass@k: the result is empty.
    """
    known = [[number for number in numbers if number == number] for numbers in verdicts]
    if not {number for numbers in known for number in numbers} <= {0.0, 1.0}:
        return {}
    return {
        f"pass_at_{k}": [
            1 - math.comb(len(numbers) - int(sum(numbers)), k) / math.comb(len(numbers), k)
            for numbers in known
            if len(numbers) >= k
        ]
        for k in sizes(max(map(len, known), default=0))
    }
