"""What a rehearsal does once for all stages and depths."""

import pytest

from bench.peaks import alone
from rlhf.plan.phases import PHASES
from rlhf.plan.rehearsal import seams
from rlhf.plan.rehearsal.meta_runs import Rehearsals
from rlhf.plan.rehearsal.work import Counting
from tests.helpers import run_stages
from tests.invariants.tiny import VOCAB, tiny


def test_the_functions_are_as_before_after_a_rehearsal():
    table = seams.seams()
    before = [getattr(seam.owner, seam.name) for seam in table]
    with seams.with_seams():
        assert all(getattr(seam.owner, seam.name) is not was for seam, was in zip(table, before, strict=True))
    assert [getattr(seam.owner, seam.name) for seam in table] == before


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_further_minibatches_take_no_more_memory(tmp_path):
    """PPO as a user runs it, 16 updates in two steps, beside its rehearsal, which has two updates in each step.

    The real run has neither a rehearsal's seams nor its changes.
    """
    loaded = tiny(2, ppo__steps=2, ppo__num_mini_batches=4, ppo__num_ppo_epochs=2, ppo__per_device_train_batch_size=2)
    run_stages(loaded, tmp_path, "sft", "rm")
    with alone(), Counting("cpu", PHASES, VOCAB) as tracker:
        run_stages(loaded, tmp_path, "ppo")
    with seams.with_seams():
        rehearsed = Rehearsals(None)(loaded, "ppo")
    real = tracker.worked_peaks()
    assert real["update"].work.launched > 3 * rehearsed["update"].work.launched
    for phase, close in (("rollout", 0.01), ("score", 0.005), ("update", 0.005)):
        assert rehearsed[phase].bytes == pytest.approx(real[phase].bytes, rel=close), phase
