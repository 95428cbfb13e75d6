"""Lengths of texts, in words or in a tokenizer's tokens."""

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rlhf.data import scripts
from rlhf.errors import OptionError, UserError, no_such
from rlhf.terminal import message_of

LengthFn = Callable[[Sequence[str]], list[int]]  # texts -> the length of each

BARS = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True, slots=True)
class Lengths:
    """Summary of the lengths of some texts: mean, nearest-rank quantiles and a histogram.

    A quantile is the smallest length that this share of the texts does not exceed. `counts[i]` texts are longer than
    `upto[i - 1]` and no longer than `upto[i]`, which doubles from 8.
    """

    mean: float
    p10: int
    p50: int
    p90: int
    p99: int
    longest: int
    upto: tuple[int, ...]
    counts: tuple[int, ...]

    def bars(self) -> str:
        """Return the histogram as one bar for each range; ranges without texts are blank. "" for a single range."""
        if len(self.upto) == 1:
            return ""
        highest = max(self.counts)
        bars = "".join(BARS[math.ceil(len(BARS) * n / highest) - 1] if n else " " for n in self.counts)
        ends = [str(end) for end in self.upto]
        return f"{bars} texts of up to {', '.join(ends if len(ends) < 4 else [*ends[:2], '…', ends[-1]])}"


def spread(lengths: Sequence[int]) -> Lengths:
    """Return the summary of the lengths of one or more texts."""
    ordered = sorted(lengths)
    p10, p50, p90, p99 = (ordered[math.ceil(q * len(ordered)) - 1] for q in (0.1, 0.5, 0.9, 0.99))
    upto = [8]
    while upto[-1] < ordered[-1]:
        upto.append(2 * upto[-1])
    counts = [0] * len(upto)
    for length in ordered:
        counts[bisect_left(upto, length)] += 1
    return Lengths(sum(ordered) / len(ordered), p10, p50, p90, p99, ordered[-1], tuple(upto), tuple(counts))


def words(texts: Sequence[str]) -> list[int]:
    """Return the number of words of each text, as rlhf/data/scripts.py tells words apart."""
    return [len(scripts.words(text)) for text in texts]


def tokens(folder: str | Path, option: str = "") -> LengthFn:
    """Return a function that counts a local tokenizer's tokens, without special tokens and the markers of turns.

    `option` is the one that names the folder, for messages. Raises OptionError without such a folder, and UserError
    when no tokenizer in it can be read.
    """
    folder, named = Path(folder), f"{option} {folder}".lstrip()
    if not folder.is_dir():
        raise OptionError(no_such("folder", named, "name one that holds a tokenizer.json"))
    try:
        if (folder / "tokenizer.json").is_file():  # this avoids torch and is faster
            from tokenizers import Tokenizer

            fast = Tokenizer.from_file(str(folder / "tokenizer.json"))
            fast.no_truncation()
            fast.no_padding()
            return lambda texts: [len(text) for text in fast.encode_batch_fast(list(texts), add_special_tokens=False)]
        from transformers import AutoTokenizer

        loaded = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # the libraries raise many types, plain Exception among them
        raise UserError(f"{named}: no tokenizer could be read there: {message_of(error)}") from error
    return lambda texts: [len(ids) for ids in loaded(list(texts), add_special_tokens=False).input_ids]
