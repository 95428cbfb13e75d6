"""Signs of bad preference data, counted before a GPU is paid for.

Counts only: no model reads the texts, so an answer that is wrong or chosen by mistake goes unseen. Read some pairs too.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Sequence

from rlhf.data.formats import ParsedRows
from rlhf.data.quality import spread
from rlhf.data.quality.flaws import FLAWS, texts
from rlhf.data.quality.leakage import leaks
from rlhf.data.quality.oddities import script
from rlhf.data.quality.report import LISTED, LabelNoise, Leakage, QualityReport, Share
from rlhf.data.rows import Document, Message, PreferencePair, Row
from rlhf.data.split import divide, row_key
from rlhf.stats import wilson


def check(
    rows: ParsedRows,
    *,
    heldout: ParsedRows | None = None,
    seed: int = 0,
    fraction: float = 0.1,
    count: spread.LengthFn = spread.words,
    unit: str = "words",
) -> QualityReport:
    """Count the signs of bad data; docs/data.md has the time it takes.

    Leakage is looked for between `rows` and `heldout`, or within `rows` as the seed and the fraction divide them.
    Lengths are what `count` says, in its `unit`.
    """
    report = rows.report
    all_rows: list[Row] = rows.all
    prompts = [row.prompt for row in all_rows if not isinstance(row, Document)]
    if heldout is None:
        training, heldout_rows = divide(all_rows, row_key, seed=seed, fraction=fraction)
    else:
        training, heldout_rows = all_rows, heldout.all
    flawed_rows = {name: find(all_rows) for name, find in FLAWS.items()}
    leaked = leaks(training, heldout_rows)
    parts = {
        "prompt": ["\n".join(message.content for message in prompt) for prompt in prompts],
        "chosen": [pair.chosen for pair in rows.pairs],
        "rejected": [pair.rejected for pair in rows.pairs],
        "response": [example.response for example in rows.examples],
        "text": [document.text for document in rows.documents],
    }
    lengths = {part: count(texts) for part, texts in parts.items() if texts}
    sources_by_field = {
        "malformed": [f"{source}: {reason}" for source, reason in report.malformed],
        "prompts_differ": report.prompts_differ,
        "identical": report.identical,
        "empty": report.empty,
        **{name: [row.source for row in flawed] for name, flawed in flawed_rows.items()},
        "leaked": [f"{row.source} ({like.source})" for row, like in leaked.heldout],
    }
    return QualityReport(
        rows=report.rows,
        malformed=len(report.malformed),
        prompts_differ=len(report.prompts_differ),
        identical=len(report.identical),
        empty=len(report.empty),
        documents=len(rows.documents),
        examples=len(rows.examples),
        pairs=len(rows.pairs),
        prompts=len(rows.bare_prompts),
        **{name: len(flawed) for name, flawed in flawed_rows.items()},
        repeated_prompts=len(prompts) - len(set(prompts)),
        chosen_longer=_chosen_longer(rows.pairs),
        label_noise=label_noise(rows.pairs),
        leaked=len(leaked.heldout),
        leakage=Leakage(
            training=len(training),
            heldout=len(heldout_rows),
            training_rows=len(leaked.leaking),
            **{kind: len(pairs) for kind, pairs in leaked.by_kind.items()},
        ),
        unit=unit,
        lengths={part: spread.spread(values) for part, values in lengths.items()},
        turns=dict(sorted(Counter(map(_turns, prompts)).items())),
        scripts=dict(Counter(filter(None, (script(text) for row in all_rows for text in texts(row)))).most_common()),
        listed={field: tuple(sources[:LISTED]) for field, sources in sources_by_field.items()},
    )


def share(count: float, total: int) -> Share:
    """Return a share with its 95 % Wilson interval."""
    if not total:
        return Share(count, total, None, None, None)
    return Share(count, total, *wilson(count, total))


def label_noise(pairs: Sequence[PreferencePair]) -> LabelNoise:
    """Estimate the rate of wrong labels from answers that were labelled more than once."""
    labels: dict[tuple[object, ...], list[int]] = defaultdict(lambda: [0, 0])
    for pair in pairs:
        first, second = sorted((pair.chosen, pair.rejected))
        labels[pair.prompt, first, second][pair.chosen == first] += 1
    relabelled = [(a, b) for a, b in labels.values() if a + b > 1]
    disagreement = share(sum(2 * a * b / ((a + b) * (a + b - 1)) for a, b in relabelled), len(relabelled))
    return LabelNoise(disagreement, *map(_noise, (disagreement.share, disagreement.low, disagreement.high)))


def _noise(disagreement: float | None) -> float | None:
    """Return the rate of wrong labels that explains a rate of disagreement; None without one."""
    return None if disagreement is None else (1 - math.sqrt(max(0.0, 1 - 2 * disagreement))) / 2


def _chosen_longer(pairs: Sequence[PreferencePair]) -> Share:
    """Return the share of pairs whose chosen answer has more words, among those of unequal length."""
    differences = [len(pair.chosen.split()) - len(pair.rejected.split()) for pair in pairs]
    return share(sum(d > 0 for d in differences), sum(d != 0 for d in differences))


def _turns(prompt: Sequence[Message]) -> int:
    """Return the number of turns in a prompt; a system message is none."""
    return sum(message.role != "system" for message in prompt)
