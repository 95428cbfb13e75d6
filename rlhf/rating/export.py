"""Ratings of `rlhf ab` and `rlhf judge` as preference rows, which training and `rlhf data check` read."""

import json
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import click

from rlhf.data.transcripts import parse_hh
from rlhf.errors import UserError
from rlhf.files import read_lines, write_output
from rlhf.observe import console
from rlhf.options import OUTPUT, refuse_inputs
from rlhf.rating import store
from rlhf.rating.pairs import Comparison, compare
from rlhf.run.finished import read_manifest
from rlhf.terminal import say

VERDICTS = ("a", "b", "tie")  # a skip is none


class Exported(NamedTuple):
    """Rows to write, and what became of the pairs: rated, tied, and left out because an answer is empty."""

    rows: list[dict[str, Any]]
    rated: int
    ties: int
    empty: int


def export(
    found: Comparison, samples: Path, template: str, *, raters: Collection[str] = (), keep_ties: bool = False
) -> Exported:
    """Rows `prompt`, `chosen`, `rejected` for the pairs that were rated, in their order.

    Several raters decide by majority: a verdict needs more than half of the votes, and is a tie without; skips are no
    votes. `raters`: count these only. A tie is left out, or with `keep_ties` becomes two rows, one each way round,
    from which a reward model learns equal scores. `samples`: the samples.jsonl that was rated. `template`: the
    recipe's tokenizer.template, in which its prompts are written.

    Raises UserError without ratings, for a rater who gave none, and for prompts that cannot be read back.
    """
    votes = store.standing(found.file)
    known = sorted({row["rater"] for row in votes})
    if not known:
        raise UserError(f"{found.file}: no ratings yet; `rlhf ab` and `rlhf judge` make some (make: ab, judge)")
    for rater in raters:
        if rater not in known:
            raise UserError(f"{found.file}: no ratings of {rater!r}; it has those of {', '.join(known)}")
    given: dict[tuple[int, str], dict[str, str]] = defaultdict(dict)
    for row in votes:
        if row["verdict"] in VERDICTS and (not raters or row["rater"] in raters):
            given[row["item"], row["sha256"]][row["rater"]] = row["verdict"]
    texts = read_lines(samples)
    rows: list[dict[str, Any]] = []
    counts: Counter[str] = Counter()
    for pair in found.pairs:
        verdicts = given.get((pair.item, pair.digest))
        if not verdicts:
            continue
        verdict = majority(verdicts.values())
        sides = {side: texts[pair.item][name]["response"].strip() for side, name in (("a", found.a), ("b", found.b))}
        counts["rated"] += 1
        counts["ties"] += verdict == "tie"
        counts["empty"] += not all(sides.values())
        if all(sides.values()):
            prompt = _prompt(texts[pair.item], template, samples)
            ways = (verdict,) if verdict != "tie" else ("b", "a") if keep_ties else ()
            rows += [_row(prompt, sides, chosen, verdicts, found) for chosen in ways]
    return Exported(rows, counts["rated"], counts["ties"], counts["empty"])


def majority(verdicts: Iterable[str]) -> str:
    """The verdict that more than half of the raters gave, else a tie."""
    counts = Counter(verdicts)
    verdict, count = counts.most_common(1)[0]
    return verdict if 2 * count > counts.total() else "tie"


@click.group("ratings")
def ratings_group() -> None:
    """Export ratings as preference rows."""


@ratings_group.command("export")
@click.argument("root", type=click.Path(path_type=Path), metavar="RUN")
@click.option("--a", metavar="POLICY", help="First policy, as for `rlhf ab`. [default: sft]")
@click.option("--b", metavar="POLICY", help="Second policy, as for `rlhf ab`. [default: ppo, or dpo without ppo]")
@click.option("--rater", "raters", multiple=True, metavar="NAME", help="Count only this rater; may be repeated.")
@click.option("--keep-ties", is_flag=True, help="Write a tie as two rows, one each way round. [default: left out]")
@click.option("--to", type=OUTPUT, required=True, metavar="FILE", help="JSON lines file to write.")
def export_ratings(
    root: Path, a: str | None, b: str | None, raters: tuple[str, ...], keep_ties: bool, to: Path
) -> None:
    """Write the rated pairs of a run as preference rows.

    RUN is a run directory, <out>/<recipe>/<version>. The rows are for --data and `rlhf data check`.
    """
    found = compare(root, a, b)
    refuse_inputs(to, [found.file, root / "evaluate" / "samples.jsonl"])
    manifest = read_manifest(root / "evaluate")
    template = manifest["settings"].get("tokenizer", {}).get("template", "hh")
    exported = export(found, root / "evaluate" / "samples.jsonl", template, raters=raters, keep_ties=keep_ties)
    counts = f"{exported.rated} rated pairs; {exported.ties} ties {'as two rows each' if keep_ties else 'left out'}"
    counts += f", {exported.empty} with an empty answer" if exported.empty else ""
    if not exported.rows:
        raise UserError(f"{found.file}: nothing to export of {counts}")
    write_output(to, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in exported.rows))
    console.OUT.print(f"{len(exported.rows)} preference rows of {counts}; written to {to}", markup=False)
    say(
        f"note: these prompts were held out with seed {manifest['seed']}, and are again with that seed: train on "
        "them with another --seed, and do not evaluate on what was trained on"
    )


def _row(
    prompt: Any, sides: Mapping[str, str], chosen: str, verdicts: Mapping[str, str], found: Comparison
) -> dict[str, Any]:
    rejected = "a" if chosen == "b" else "b"
    names = {"a": found.a, "b": found.b}
    return {
        "prompt": prompt,
        "chosen": sides[chosen],
        "rejected": sides[rejected],
        "chosen_from": names[chosen],
        "rejected_from": names[rejected],
        "ratings": {rater: names.get(verdict, verdict) for rater, verdict in sorted(verdicts.items())},
    }


def _prompt(row: Mapping[str, Any], template: str, samples: Path) -> Any:
    """The prompt as readers know it: a transcript as it stands, or the messages that a chat template was made from."""
    if "messages" in row:
        return row["messages"]
    if template != "hh" or not parse_hh(row["prompt"])[:-1]:
        raise UserError(f"{samples}: its prompts are written in a chat template; evaluate again, which keeps messages")
    return row["prompt"]
