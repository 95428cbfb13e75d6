"""How long the rows of MetaMathQA's batches are: the one thing about the runs that is not published.

Known is the mean, from the number of tokens that every run reports. Two numbers are calibrated, on one run (LoRA, rank
32), and then kept for all others: how much lengths vary (on its average), and the longest row (on its maximum). The
order of the rows is random.
"""

from statistics import NormalDist

import numpy as np

CALIBRATED_ON = "results/lora--llama-3.2-3B-rank32.json"
MEAN = 208.93  # tokens of a row without the EOS that is counted with it: 4,198,051 tokens in 20,000 rows
SHAPE = 7.3  # of a gamma distribution
LONGEST = 698
ROWS, BATCH, BUCKET = 20_000, 4, 80  # rows of a run, of a batch, and of a bucket that is sorted from long to short
LIMIT, SHORTEST = 768, 40
WINDOW = 10  # steps after which run.py empties the cache


def windows() -> np.ndarray:
    """Return the tokens of the longest row of each batch, (windows, steps), in the order of a run."""
    lengths = np.minimum(np.round(_rows()).astype(int), LIMIT)
    buckets = -np.sort(-lengths.reshape(-1, BUCKET), axis=1)
    return buckets[:, ::BATCH].reshape(-1, WINDOW)


def _rows() -> np.ndarray:
    """Return gamma-distributed lengths (Wilson and Hilferty's approximation), one from each of equal parts."""
    order = np.random.default_rng(0).permutation(ROWS)
    normal = NormalDist()
    z = np.array([normal.inv_cdf((place + 0.5) / ROWS) for place in order])
    x: np.ndarray = np.maximum(1 - 1 / (9 * SHAPE) + z / np.sqrt(9 * SHAPE), 0.05) ** 3
    x = np.maximum(x * (MEAN / x.mean()), SHORTEST)
    x[x.argmax()] = LONGEST
    return x
