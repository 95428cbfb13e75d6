"""What the live checks look for: the usual ways in which training goes wrong.

Each function `find_…` looks for one of them in a history and returns a sentence about it, or None. Where the docstring
does not name the rows, a value is the mean of the newest five, and "at first" stands for the mean of the oldest five.
There is no report before enough rows are logged. Thresholds are ours unless a source stands beside them; "the guide" is
the published H100 guide.
"""

import itertools
import math
import statistics
from collections.abc import Sequence

from rlhf.observe.history import FEW, History
from rlhf.recipe.schema import Optimization
from rlhf.recipe.schema_model import Model
from rlhf.recipe.schema_online import Ppo
from rlhf.run.evidence import IS_BETTER
from rlhf.stats import sigmoid

MANY = 20  # rows before a trend is judged, at least
TREND_SHARE = 0.25  # of the run that a trend is judged from, after warm-up
KL_LIMIT = 5 * math.log(2)  # nats per token: the guide's 5 bits
# Mean |difference| of log-probabilities between sampler and trainer, nats per token. A float32 trainer and a bfloat16
# server were 0.04 to 0.06 apart, two float32 ones 1e-5, and servers with another base or other settings 0.09 to 0.29.
MISMATCH = {"float32": 0.02, "bfloat16": 0.1}
MISMATCH_4BIT = 0.5  # of a server, which has the weights that NF4 rounds in training; not measured


def find_nan(h: History) -> str | None:
    """Report the first value of the newest row that is not finite; those of an evaluation are left out."""
    wrong = [key for key, value in h.newest.items() if value is None or not math.isfinite(value)]
    wrong = [key for key in wrong if not key.startswith("eval/")]  # a gain is undefined where scores do not vary
    return f"{wrong[0]} is not a number" if wrong else None


def find_flat_loss(h: History) -> str | None:
    """Report a loss that falls by at most twice its noise, from the first quarter of `trend_rows` to the last."""
    losses = h.values("loss")
    if len(losses) < trend_rows(h):
        return None
    quarter = len(losses) // 4
    first, last = losses[:quarter], losses[-quarter:]
    noise = noise_of_difference(last, quarter)
    fall = statistics.fmean(first) - statistics.fmean(last)
    if fall > 2 * noise:
        return None
    if fall <= 0:
        return f"the loss has risen by {-fall:.3g}"
    return "the loss has fallen by {}, less than twice its noise, {}".format(*apart(fall, 2 * noise))


def find_rising_loss(h: History) -> str | None:
    """Report a loss more than 20 % above the best so far, and further than noise brings a steady loss.

    The best is the first row, or the least mean of five earlier rows. In n rows it is the least of many, looked at many
    times: of n^2 differences between steady means the largest is about 2 sqrt(ln n) times the noise of one. The limit
    is two times that noise above it.
    """
    last, losses = h.last("loss"), h.values("loss")
    if last is None or len(losses) < 2 * FEW:
        return None
    best = min(losses[0], h.least_mean("loss"))
    if last <= 1.2 * best:
        return None
    noise = noise_of_difference(losses, FEW) * 2 * (math.sqrt(math.log(len(losses))) + 1)
    if last <= best + noise:
        return None
    return "the loss has risen from {} to {}".format(*apart(best, last))


def find_large_updates(h: History) -> str | None:
    """Report updates that move the policy by more than 0.1 of approxkl."""
    distance = h.last("policy/approxkl_avg")
    return (
        f"an update moves the policy by {distance:.2g} (approxkl)" if distance is not None and distance > 0.1 else None
    )


def find_same_scores(h: History) -> str | None:
    """Report batches whose highest and lowest scores lie at most 0.01 apart."""
    low, high = h.last("min_reward"), h.last("max_reward")
    if low is None or high is None or high - low > 0.01:
        return None
    return f"the scores of a batch lie within {high - low:.2g} of each other"


def find_chance(h: History) -> str | None:
    """Report an accuracy less than two standard errors above 0.5, in the later half of at least `trend_rows`."""
    if len(h.values("accuracy")) < trend_rows(h):
        return None
    accuracy, pairs = late_accuracy(h, "accuracy")
    return f"accuracy is {accuracy:.3f} on {pairs} pairs: a guess" if not beyond_chance(accuracy, pairs) else None


def late_accuracy(h: History, key: str) -> tuple[float, int]:
    """Return the mean accuracy of the later half of the logged rows, and the number of pairs that it is of."""
    accuracies = h.values(key)
    late = accuracies[len(accuracies) // 2 :]
    pairs = len(late) * h.options.logging_steps * h.supervised.per_device_train_batch_size
    return statistics.fmean(late), pairs * h.supervised.gradient_accumulation_steps


def beyond_chance(accuracy: float, pairs: int) -> bool:
    """Return whether an accuracy is at least two standard errors above 0.5."""
    return accuracy >= 0.5 + 2 * math.sqrt(0.25 / pairs)


def find_learning(h: History) -> str | None:
    """Say what shows that something is learned, or return None.

    That is a gain on held-out prompts whose interval is above zero, or an accuracy beyond a guess.
    """
    gain = h.gain()
    if gain is not None and gain.verdict == IS_BETTER:
        return f"{gain.name} on held-out prompts has risen, {gain.in_words()}"
    for key in ("accuracy", "rewards/accuracies") if isinstance(h.options, Optimization) else ():
        if len(h.values(key)) >= 2 * FEW:
            accuracy, pairs = late_accuracy(h, key)
            if beyond_chance(accuracy, pairs):
                return f"accuracy is {accuracy:.3f} on {pairs} pairs"
    return None


def find_overconfident(h: History) -> str | None:
    """Report scores from below 0.01 to above 0.99 after a sigmoid; the guide has 0.3 to 0.7."""
    low, high = h.last("min_reward"), h.last("max_reward")
    if low is None or high is None or not (sigmoid(low) < 0.01 and sigmoid(high) > 0.99):
        return None
    return f"scores reach from {sigmoid(low):.4f} to {sigmoid(high):.4f} after a sigmoid"


def find_high_kl(h: History) -> str | None:
    """Report a KL to the reference above the recipe's limit or the guide's, whichever is lower, over three rows."""
    limit = min(h.online.best_kl_limit or KL_LIMIT, KL_LIMIT)
    kl = h.last("objective/kl_per_token", 3)
    if kl is None or kl <= limit:
        return None
    return "KL to the reference is {} nats per token, above {}".format(*apart(kl, limit))


def find_negative_kl(h: History) -> str | None:
    """Report a KL to the reference below -0.01 nats per token, over three rows, if its estimator is k1."""
    kl = h.last("objective/kl_per_token", 3)
    if kl is None or kl >= -0.01 or h.online.kl_estimator != "k1":
        return None
    return f"KL to the reference is negative, {kl:.3g} nats per token"


def mismatch_limit(model: Model, served: bool) -> float:
    """Return how far log-probabilities of sampling and training may differ on average, in nats per token."""
    return MISMATCH_4BIT if served and model.quantization == "nf4" else MISMATCH[model.dtype]


def find_sampling_mismatch(h: History) -> str | None:
    """Report a sampler and a trainer that differ by more than their precision explains, over three rows."""
    difference = h.last("rollout/logprob_diff_avg", 3)
    limit = mismatch_limit(h.recipe.model, served=h.online.vllm_url is not None)
    if difference is None or difference <= limit:
        return None
    return "log-probabilities of sampling and training differ by {} nats per token, above {}".format(
        *apart(difference, limit)
    )


def find_longer(h: History) -> str | None:
    """Report responses more than 1.5 times as long as at first, with a higher score."""
    first, last = h.first("response/length"), h.last("response/length")
    worse, better = h.first("objective/scores"), h.last("objective/scores")
    if first is None or last is None or worse is None or better is None:
        return None
    if not (last > 1.5 * first and better > worse):
        return None
    return f"responses have grown from {first:.0f} to {last:.0f} tokens while the score rose"


def find_fewer_ends(h: History) -> str | None:
    """Report a fall of the share of responses that end by at least 20 points, and further than noise brings it.

    In n rows the newest mean is compared n times; the largest such difference is about sqrt(2 ln n) times the noise of
    one.
    """
    first, last, rates = h.first("response/eos_rate"), h.last("response/eos_rate"), h.values("response/eos_rate")
    if first is None or last is None or last > first - 0.2:
        return None
    if last > first - noise_of_difference(rates, FEW) * (math.sqrt(2 * math.log(len(rates))) + 1):
        return None
    return f"{last:.0%} of the responses end, {first:.0%} did at first"


def find_repetition(h: History) -> str | None:
    """Report responses of which at least half is repeated text, on average over those sampled last."""
    shares = [share for text in h.responses if (share := repeated(text)) is not None]
    if not shares or (mean := statistics.fmean(shares)) < 0.5:
        return None
    return f"{mean:.0%} of the sampled text repeats earlier text"


def find_entropy_collapse(h: History) -> str | None:
    """Report an entropy of at most 30 % of the one at first."""
    first, last = h.first("policy/entropy_avg"), h.last("policy/entropy_avg")
    if first is None or last is None or last > 0.3 * first:
        return None
    return f"entropy has fallen from {first:.3g} to {last:.3g} nats per token"


def find_no_signal(h: History) -> str | None:
    """Report a share of more than 70 % of the groups with equal rewards."""
    share = h.last("groups/no_signal")
    return (
        f"{share:.0%} of the groups have equal rewards and teach nothing" if share is not None and share > 0.7 else None
    )


def find_clipping(h: History) -> str | None:
    """Report a share of more than 30 % of the tokens that are clipped."""
    share = h.last("policy/clipfrac_avg")
    return f"{share:.0%} of the tokens are clipped" if share is not None and share > 0.3 else None


def find_value_explosion(h: History) -> str | None:
    """Report a value loss above 1 and above ten times the one at first, or above 1,000.

    The one at first is the first row, or the median of the oldest five rows if that is lower.
    """
    losses = h.values("loss/value_avg")
    if len(losses) < 2 * FEW:
        return None
    first_loss, last = min(losses[0], statistics.median(losses[:FEW])), statistics.fmean(losses[-FEW:])
    exploded = last > max(1.0, 10 * first_loss) or last > 1000  # some explode in the first step
    return f"the value loss has gone from {first_loss:.3g} to {last:.3g}" if exploded else None


def find_flat_reward(h: History) -> str | None:
    """Report a score that rises by at most twice its noise, from the first quarter of `trend_rows` to the last.

    The score is the one before KL and penalties. Steps in which only the critic learns do not count.
    """
    only_critic = h.options.value_warmup_steps if isinstance(h.options, Ppo) else 0
    scores = h.values("objective/scores")[only_critic // h.options.logging_steps :]
    if len(scores) < trend_rows(h):
        return None
    quarter = len(scores) // 4
    first, last = statistics.fmean(scores[:quarter]), statistics.fmean(scores[-quarter:])
    noise = noise_of_difference(scores, quarter)
    if last - first > 2 * noise:
        return None
    went = "from {} to {}".format(*apart(first, last))
    return f"the score went {went} in {len(scores)} rows: no rise beyond twice its noise, {2 * noise:.2g}"


def apart(one: float, other: float) -> tuple[str, str]:
    """Return two numbers with three digits, or as many as it takes to tell different ones apart."""
    for digits in range(3, 18):
        texts = f"{one:.{digits}g}", f"{other:.{digits}g}"
        if texts[0] != texts[1] or one == other:
            break
    return texts


def trend_rows(h: History) -> int:
    """Return the number of rows from which a trend is judged: 20, or those of warm-up and a quarter of the run."""
    options = h.options
    warmup = options.warmup_ratio if isinstance(options, Optimization) else 0.0
    return max(MANY, int((TREND_SHARE + warmup) * h.total_steps) // options.logging_steps)


def noise_of_difference(values: Sequence[float], count: int) -> float:
    """Return the standard error of the difference of two means of `count` values that are as noisy as `values`.

    Half of the mean square of their steps is the variance of one value, whatever slow trend they have.
    """
    steps = [b - a for a, b in itertools.pairwise(values)]
    return math.sqrt(statistics.fmean(x * x for x in steps) / count)


def repeated(text: str) -> float | None:
    """Return the share of a text's six-character runs that occurred in it before; None below 20 characters."""
    runs = [text[start : start + 6] for start in range(len(text) - 5)]
    return 1 - len(set(runs)) / len(runs) if len(text) >= 20 else None
