"""Passes that a rehearsal repeats instead of running them: the events and the peaks are those of running each."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch

from peakmem.device import StandIn
from rlhf.data.batch import Rollout
from rlhf.plan.phases import PHASES, PHASES_OF_A_STEP, Event
from rlhf.plan.rehearsal import paths, short_runs
from rlhf.plan.rehearsal.meta_runs import Rehearsals
from rlhf.plan.rehearsal.passes import Repeats, _shape
from rlhf.recipe import StageName
from tests.helpers import GROUP
from tests.invariants.tiny import tiny

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning"),
    pytest.mark.usefixtures("as_in_a_worker"),
]

MANY: dict[str, Any] = {
    "batch_size": 8,
    "per_device_train_batch_size": 1,
    "rollout_batch_size": 4,
    "score_batch_size": 1,
    "num_mini_batches": 2,
}
CARD: dict[str, Any] = {"hardware__device": "cuda", "model__dtype": "bfloat16"}


def sizes(events: list[Event]) -> list[tuple[int, tuple[str, ...], str]]:
    """What the allocator is asked for, in order; which of a minibatch's rows a loop still holds is left out."""
    return [(event.bytes, event.phase, event.name) for event in events]


@pytest.mark.parametrize(("stage", "device"), [("ppo", "cuda"), ("grpo", "cpu")])
def test_repeated_micro_batches_are_those_that_run(monkeypatch, stage, device):
    """Micro-batches of one row, four in each minibatch, all as long as the recipe admits."""
    place = {"hardware__device": device, "model__dtype": "bfloat16" if device == "cuda" else "float32"}
    group: dict[str, Any] = (
        {"grpo": GROUP | MANY | {"max_prompt_length": 40, "max_completion_length": 8}} if stage == "grpo" else {}
    )
    changes = {f"ppo__{key}": value for key, value in MANY.items()} | {"ppo__value_model": "adapter"}
    loaded = tiny(2, **changes, **group, **place)
    counts: Counter[str] = Counter()
    repeat, call, differing = Repeats._repeat, Repeats.__call__, Repeats.differing

    def counted(self: Repeats, done: Any) -> Any:
        counts["repeated"] += 1
        counts["/".join(done.recorded[0].phase)] += 1
        return repeat(self, done)

    monkeypatch.setattr(Repeats, "_repeat", counted)
    some = Rehearsals(2)
    peaks = some(loaded, stage)
    assert counts["score"] > 2 and counts["update"] > 4

    def runs(self: Repeats, key: Any, run: Any) -> Any:
        self.forget()
        return call(self, key, run)

    def runs_each(self: Repeats, items: Any, key_of: Any) -> Any:
        return differing(self, items, lambda item: (key_of(item), None)[1])

    before = counts["repeated"]
    monkeypatch.setattr(Repeats, "__call__", runs)
    monkeypatch.setattr(Repeats, "differing", runs_each)
    every = Rehearsals(2)
    assert every(loaded, stage) == peaks
    assert sizes(every.events) == sizes(some.events)
    assert counts["repeated"] == before, "each pass has run"


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


def test_a_shape_is_all_that_the_events_of_rows_depend_on():
    def shape(prompts: list[int], numbers: list[int] | None = None, index: list[int] | None = None) -> Any:
        with StandIn("cuda", PHASES, 1000):
            ids = torch.zeros(len(prompts), 9, dtype=torch.int64).to("meta")
            lengths, ones = (torch.tensor(x).to("meta") for x in (prompts, [1] * len(prompts)))
            rollout = Rollout(ids, lengths, ones, ones > 0)
            if numbers is not None:
                rollout = replace(rollout, prompt_numbers=torch.tensor(numbers).to("meta"))
            return _shape(rollout if index is None else rollout.rows(torch.tensor(index).to("meta")))

    assert shape([3, 4]) == shape([3, 4]) != shape([4, 4])
    assert shape([3, 4, 5], index=[1, 2]) == shape([4, 5])
    assert shape([3, 3, 3], [7, 7, 8]) == shape([3, 3, 3], [1, 1, 0]) != shape([3, 3, 3], [0, 1, 1])
    assert shape([3, 3], [0, 0]) != shape([3, 3])
    unknown = torch.zeros(2, dtype=torch.int64, device="meta")
    assert _shape(Rollout(unknown, unknown, unknown, unknown)) is None, "outside the stand-in nothing is known"


@pytest.fixture
def stand_in():
    with StandIn("cuda", PHASES, 1000) as device:
        yield device


def test_what_leaves_something_behind_runs_again(stand_in):
    repeats, calls, kept = Repeats(stand_in), Counter[str](), []

    def makes(name: str, keep: bool) -> torch.Tensor:
        calls[name] += 1
        x = torch.ones(300, 4, device="meta")
        if keep:
            kept.append(x * 2)
        return x + x

    for _ in range(3):
        repeats("closed", lambda: makes("closed", keep=False))
        repeats("open", lambda: makes("open", keep=True))
    assert calls == {"closed": 1, "open": 3}
    repeats.forget()
    repeats("closed", lambda: makes("closed", keep=False))
    assert calls["closed"] == 2


def test_a_result_with_a_gradient_is_made_each_time(stand_in):
    """A copy would have no graph through which a backward pass could go."""
    repeats, weight = Repeats(stand_in), torch.ones(300, 4, device="meta").requires_grad_()
    results = [repeats("double", lambda: weight * 2) for _ in range(2)]
    assert all(result.grad_fn is not None for result in results)


def test_a_repeated_result_is_followed_until_it_is_released(stand_in):
    repeats = Repeats(stand_in)

    def double(x: torch.Tensor) -> torch.Tensor:
        return (x * 2) + 1

    x = torch.ones(300, 4, device="meta")
    results = [repeats("double", lambda: double(x)) for _ in range(3)]
    assert [result.shape for result in results] == [x.shape] * 3
    assert len({id(result.untyped_storage()) for result in results}) == 3
    results.clear()
    x = torch.empty(0)
    alive: Counter[int | None] = Counter()
    for event in stand_in.events():
        alive[event.storage] += event.bytes
    assert alive and not any(alive.values())
    assert stand_in.peaks()[""].work.launched == 7, "ones, and three times two operations"
