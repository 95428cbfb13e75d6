"""Signs of bad preference data, counted before a GPU is paid for.

Counts only: no model reads the texts, so an answer that is wrong or chosen by mistake goes unseen. Read some pairs too.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from rlhf.data.formats import ParsedRows, ReadReport
from rlhf.data.normal import normal_prompt, normalise
from rlhf.data.quality import spread
from rlhf.data.quality.flaws import FLAWS, texts
from rlhf.data.quality.leakage import Leaks, leaks
from rlhf.data.quality.report import LISTED, LabelNoise, Leakage, QualityReport, Share
from rlhf.data.rows import Document, Message, PreferencePair, Row
from rlhf.data.scripts import script, words
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
    all_rows: Sequence[Row] = rows.rows
    prompts = [row.prompt for row in all_rows if not isinstance(row, Document)]
    if heldout is None:
        training, heldout_rows = divide(all_rows, row_key, seed=seed, fraction=fraction)
    else:
        training, heldout_rows = [*all_rows], [*heldout.rows]
    leaked = leaks(training, heldout_rows)
    flawed_rows = {name: find(all_rows) for name, find in FLAWS.items()}
    return QualityReport(
        rows=rows.report.rows,
        **rows.report.counts(),
        documents=len(rows.documents),
        examples=len(rows.examples),
        pairs=len(rows.pairs),
        prompts=len(rows.bare_prompts),
        **{name: len(flawed) for name, flawed in flawed_rows.items()},
        repeated_prompts=len(prompts) - len(set(map(normal_prompt, prompts))),
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
        lengths={part: spread.spread(count(part_texts)) for part, part_texts in _texts_by_part(rows, prompts).items()},
        turns=dict(sorted(Counter(map(_turns, prompts)).items())),
        scripts=dict(Counter(filter(None, (script(text) for row in all_rows for text in texts(row)))).most_common()),
        listed=_listed(rows.report, flawed_rows, leaked),
    )


def _texts_by_part(rows: ParsedRows, prompts: Sequence[Sequence[Message]]) -> dict[str, list[str]]:
    """Return the texts of each part of a row; a part without texts is absent."""
    parts = {
        "prompt": ["\n".join(message.content for message in prompt) for prompt in prompts],
        "chosen": [pair.chosen for pair in rows.pairs],
        "rejected": [pair.rejected for pair in rows.pairs],
        "response": [example.response for example in rows.examples],
        "text": [document.text for document in rows.documents],
    }
    return {part: part_texts for part, part_texts in parts.items() if part_texts}


def _listed(report: ReadReport, flawed_rows: Mapping[str, Sequence[Row]], leaked: Leaks) -> dict[str, tuple[str, ...]]:
    """Return the first LISTED sources by field of the report."""
    sources_by_field: dict[str, Sequence[str]] = {
        "malformed": [f"{source}: {problem}" for source, problem in report.malformed],
        **dict(report.left_out.items()),
        **{name: [row.source for row in flawed] for name, flawed in flawed_rows.items()},
        "leaked": [f"{row.source} ({like.source})" for row, like in leaked.heldout],
    }
    return {field: tuple(sources[:LISTED]) for field, sources in sources_by_field.items()}


def share(count: float, total: int) -> Share:
    """Return a share with its 95 % Wilson interval."""
    if not total:
        return Share(count, total, None, None, None)
    return Share(count, total, *wilson(count, total))


def label_noise(pairs: Sequence[PreferencePair]) -> LabelNoise:
    """Estimate the rate of wrong labels from answers that were labelled more than once."""
    labels: dict[tuple[object, ...], list[int]] = defaultdict(lambda: [0, 0])
    for pair in pairs:
        first, second = sorted((chosen := normalise(pair.chosen), normalise(pair.rejected)))
        labels[normal_prompt(pair.prompt), first, second][chosen == first] += 1
    relabelled = [(a, b) for a, b in labels.values() if a + b > 1]
    disagreement = share(sum(2 * a * b / ((a + b) * (a + b - 1)) for a, b in relabelled), len(relabelled))
    return LabelNoise(disagreement, *map(_noise, (disagreement.share, disagreement.low, disagreement.high)))


def _noise(disagreement: float | None) -> float | None:
    """Return the rate of wrong labels that explains a rate of disagreement; None without one."""
    return None if disagreement is None else (1 - math.sqrt(max(0.0, 1 - 2 * disagreement))) / 2


def _chosen_longer(pairs: Sequence[PreferencePair]) -> Share:
    """Return the share of pairs whose chosen answer has more words, among those of unequal length."""
    differences = [len(words(pair.chosen)) - len(words(pair.rejected)) for pair in pairs]
    return share(sum(d > 0 for d in differences), sum(d != 0 for d in differences))


def _turns(prompt: Sequence[Message]) -> int:
    """Return the number of turns in a prompt; a system message is none."""
    return sum(message.role != "system" for message in prompt)
