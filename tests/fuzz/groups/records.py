"""Records of results, as `rlhf results` prints them."""

from pathlib import Path
from random import Random

from tests.fuzz.groups.run_dirs import spoil
from tests.fuzz.oracle import SOUND, Case
from tests.fuzz.reference import Reference
from tests.fuzz.sandbox import Outcome

RESULTS = Path(__file__).parents[3] / "results" / "cpu-tiny" / "v1" / "cpu"


def case(random: Random, place: Path, reference: Reference) -> Case:
    record = place / "record.json"
    record.write_bytes(random.choice(sorted(RESULTS.glob("*.json"))).read_bytes())
    sound = random.random() < SOUND
    name = "as it should be" if sound else spoil(random, record)
    return Case(
        f"results: {name}", ["results", "record.json"], place, valid=_table, must="accept" if sound else "either"
    )


def _table(outcome: Outcome) -> str | None:
    """Whether what was printed is a table, each line with as many cells as the first."""
    rows = [line for line in outcome.out.decode().splitlines() if line.startswith("|")]
    cells = {line.replace("\\|", "").count("|") for line in rows}
    return None if len(rows) > 2 and len(cells) == 1 else f"no table of equal rows was printed ({cells})"
