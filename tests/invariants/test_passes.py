"""The work of a step is that of the last rehearsed one, without what a stage does once."""

from typing import Any

import pytest

from rlhf.plan.phases import PHASES_OF_A_STEP
from rlhf.plan.rehearsal import paths, short_runs
from rlhf.plan.rehearsal.meta_runs import Rehearsals
from rlhf.recipe import StageName
from tests.invariants.tiny import tiny

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning"),
    pytest.mark.usefixtures("as_in_a_worker"),
]

CARD: dict[str, Any] = {"hardware__device": "cuda", "model__dtype": "bfloat16"}


LEAN: dict[str, Any] = {"hardware__trunk": "lean", "lora__lora_dropout": 0.0}
REPEATED: dict[str, tuple[StageName, dict[str, Any]]] = {
    "sft, 8 bits": ("sft", {"sft__optim": "adamw_8bit"}),
    "dpo": ("dpo", LEAN | {"dpo__optim": "adamw_torch"}),
    "ppo": ("ppo", {"ppo__value_model": "head"}),
}


@pytest.mark.parametrize("case", REPEATED)
def test_what_a_stage_does_once_is_not_part_of_a_step(monkeypatch, case):
    """However many steps a rehearsal takes, the work is that of one, for each model that is trained."""
    stage, changes = REPEATED[case]
    if "8 bits" in case:
        pytest.importorskip("bitsandbytes")
    loaded, found = tiny(2, **CARD | changes), []
    for steps in (2, 3):
        monkeypatch.setattr(short_runs, "REHEARSED_STEPS", steps)
        monkeypatch.setattr(paths, "REHEARSED_STEPS", steps)
        rehearsals = Rehearsals(2)
        found.append({name: peak.work for name, peak in rehearsals(loaded, stage).items()})
    two, three = ({name: work for name, work in f.items() if name.split("/")[0] in PHASES_OF_A_STEP} for f in found)
    assert two == three
    assert all(work.launched for work in two.values())
