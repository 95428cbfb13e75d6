"""Ratings of `rlhf ab` and `rlhf judge` as preference rows, which training and `rlhf data check` read."""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from rlhf.data.transcripts import parse_hh
from rlhf.errors import UserError
from rlhf.rating import store
from rlhf.rating.pairs import PairedAnswers
from rlhf.run import reader
from rlhf.run.outcomes import SampleLine

CHOICES = ("a", "b", "tie")  # choices that count; a skip does not


class ExportedRows(NamedTuple):
    """Rows to write, and the numbers of pairs that were rated, tied, or left out because an answer is empty."""

    rows: list[dict[str, object]]
    rated: int
    ties: int
    empty: int


def export(
    paired: PairedAnswers, samples: Path, template: str, *, raters: Collection[str] = (), keep_ties: bool = False
) -> ExportedRows:
    """Return rows `prompt`, `chosen`, `rejected` for the rated pairs, in their order.

    Several raters decide by majority: a choice needs more than half of the votes and is otherwise a tie; skips do not
    count. `raters` limits the votes to these raters. A tie is left out. With `keep_ties` it becomes two rows, one each
    way round, from which a reward model learns equal scores. `samples` is the samples.jsonl that was rated. `template`
    is the recipe's tokenizer.template, in which its prompts are written.

    Raises UserError without ratings, for a rater without ratings, and for prompts that cannot be read back.
    """
    choices = _choices(store.current_ratings(paired.file), paired.file, raters)
    lines = reader.read_lines(samples, SampleLine)
    rows: list[dict[str, object]] = []
    counts: Counter[str] = Counter()
    for pair in paired.pairs:
        by_rater = choices.get((pair.item, pair.digest))
        if not by_rater:
            continue
        choice = majority(by_rater.values())
        line = lines[pair.item]
        sides = {"a": line.answers[paired.a].response.strip(), "b": line.answers[paired.b].response.strip()}
        counts["rated"] += 1
        counts["ties"] += choice == "tie"
        counts["empty"] += not all(sides.values())
        if all(sides.values()):
            prompt = _prompt(line, template, samples)
            chosen_sides = (choice,) if choice != "tie" else ("b", "a") if keep_ties else ()
            rows += [_row(prompt, sides, chosen, by_rater, paired) for chosen in chosen_sides]
    return ExportedRows(rows, counts["rated"], counts["ties"], counts["empty"])


def majority(choices: Iterable[str]) -> str:
    """Return the choice of more than half of the raters, else a tie."""
    counts = Counter(choices)
    choice, count = counts.most_common(1)[0]
    return choice if 2 * count > counts.total() else "tie"


def _choices(
    ratings: Iterable[store.Rating], file: Path, raters: Collection[str]
) -> dict[tuple[int, str], dict[str, str]]:
    """Return each pair's choices by rater. Raises UserError without ratings, or for a rater without any."""
    ratings = list(ratings)
    raters_with_ratings = sorted({rating.rater for rating in ratings})
    if not raters_with_ratings:
        raise UserError(f"{file}: no ratings yet; `rlhf ab` and `rlhf judge` make some")
    for rater in raters:
        if rater not in raters_with_ratings:
            raise UserError(f"{file}: no ratings of {rater!r}; it has those of {', '.join(raters_with_ratings)}")
    choices: dict[tuple[int, str], dict[str, str]] = defaultdict(dict)
    for rating in ratings:
        if rating.choice in CHOICES and (not raters or rating.rater in raters):
            choices[rating.pair][rating.rater] = rating.choice
    return choices


def _row(
    prompt: list[object] | str,
    sides: Mapping[str, str],
    chosen: str,
    choices: Mapping[str, str],
    paired: PairedAnswers,
) -> dict[str, object]:
    """Return a preference row that also names the two policies and each rater's choice."""
    rejected = "a" if chosen == "b" else "b"
    names = {"a": paired.a, "b": paired.b}
    return {
        "prompt": prompt,
        "chosen": sides[chosen],
        "rejected": sides[rejected],
        "chosen_from": names[chosen],
        "rejected_from": names[rejected],
        "ratings": {rater: names.get(choice, choice) for rater, choice in sorted(choices.items())},
    }


def _prompt(line: SampleLine, template: str, samples: Path) -> list[object] | str:
    """Return the prompt of a line of `samples`, written in this template. Raises UserError."""
    with reader.advising(f"they have template: {template}; evaluate again to keep messages"):
        return readable_prompt(line, str(samples), template == "hh")


def readable_prompt(line: SampleLine, source: str, is_transcript: bool = True) -> list[object] | str:
    """Return the prompt in a form that readers of data know: its messages, or a transcript if it may be one.

    Raises UserError for any other, naming the source.
    """
    if line.messages:
        return line.messages
    if not is_transcript or not parse_hh(line.prompt)[:-1]:
        raise UserError(f"{source}: a prompt without messages that is no transcript cannot be read back")
    return line.prompt
