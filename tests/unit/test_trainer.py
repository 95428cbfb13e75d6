"""The order of training rows: batches of equal length, in random order, each row once per epoch."""

import itertools
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rlhf.stages.supervised.row_order import LengthBuckets
from tests.helpers import beside, run_stages, small
from tests.lines import read_intact_lines
from tests.oracle.test_kto import KTO


def batches(sampler: LengthBuckets) -> list[list[int]]:
    rows = list(sampler)
    return [rows[at : at + sampler.batch_size] for at in range(0, len(rows), sampler.batch_size)]


def test_every_row_is_seen_once_and_batches_hold_rows_of_similar_length():
    lengths = [(7 * i) % 50 + 1 for i in range(1003)]
    sampler = LengthBuckets(lengths, 8, seed=1)
    found = batches(sampler)
    assert len(sampler) == 1003
    assert sorted(row for batch in found for row in batch) == list(range(1003))
    spread = [max(lengths[row] for row in batch) - min(lengths[row] for row in batch) for batch in found]
    assert sum(spread) / len(spread) < 6  # of 49; shuffled rows would have about 39
    assert len(found[-1]) == 3  # the short batch is last: elsewhere it would shift all that follow


def test_long_and_short_batches_are_mixed():
    lengths = [(7 * i) % 50 + 1 for i in range(1600)]
    means = [sum(lengths[row] for row in batch) / 8 for batch in batches(LengthBuckets(lengths, 8, seed=1))]
    falls = sum(a > b for a, b in itertools.pairwise(means)) / (len(means) - 1)
    assert 0.4 < falls < 0.6
    assert abs(sum(means[-40:]) / 40 - 25.5) < 8


def test_the_order_is_a_function_of_seed_and_epoch():
    lengths = list(range(100))
    first, same, other = (LengthBuckets(lengths, 4, seed) for seed in (1, 1, 2))
    assert list(first) == list(same) != list(other)
    same.set_epoch(1)
    assert list(first) != list(same)
    first.set_epoch(1)
    assert list(first) == list(same)


def test_rows_of_a_batch_are_in_order_of_their_length():
    """So that micro-batches, which are slices of it, have little padding."""
    lengths = [1 + (7 * i) % 50 for i in range(320)]
    order = list(LengthBuckets(lengths, 16, seed=3))
    batches = [[lengths[row] for row in order[at : at + 16]] for at in range(0, len(order), 16)]
    assert all(batch == sorted(batch) for batch in batches)


# Every row of a stage with all terms of its loss; 13 rows make a whole step and one of five.
WHOLE = {"learning_rate": 0.01, "warmup_ratio": 0.0, "logging_steps": 1, "eval_steps": 2, "save_steps": 2}
STAGES: dict[str, dict[str, Any]] = {
    "sft": WHOLE,
    "rm": WHOLE | {"center_rewards_coefficient": 0.5},
    "dpo": WHOLE | {"sft_weight": 1.0},
    "kto": KTO | WHOLE,
}
SPLITS = ((8, 1), (4, 2), (2, 4))


@pytest.mark.parametrize("stage", STAGES)
def test_the_micro_batch_decides_nothing(trained, tmp_path, stage):
    """The same rows make each step, short or whole: all that is logged and the adapter are the same."""
    found, adapters = [], []
    for micro, accumulated in SPLITS:
        batches = {"per_device_train_batch_size": micro, "gradient_accumulation_steps": accumulated}
        options = STAGES[stage] | batches | {"max_samples": 13, "max_eval_samples": 7}
        changes = {"kto": options} if stage == "kto" else {f"{stage}__{key}": v for key, v in options.items()}
        out = tmp_path / str(micro)
        run_stages(small(**changes), beside(trained, out, "pretrain", *(["sft"] if stage != "sft" else [])), stage)
        found.append(read_intact_lines(out / f"cpu-tiny/v1/{stage}/metrics.jsonl"))
        adapters.append(load_file(out / f"cpu-tiny/v1/{stage}/adapter/adapter_model.safetensors"))
    # KTO's z is a mean over a micro-batch that cannot be below 0, as the paper has it. It is 0 in the first step alone.
    last = 1 if stage == "kto" else None
    for lines in found[1:]:
        for line, whole in zip(lines[:last], found[0][:last], strict=True):
            assert line == pytest.approx(whole, rel=1e-3, abs=1e-5)
    for name, tensor in adapters[0].items():
        for other in adapters[1:] if last is None else ():
            torch.testing.assert_close(other[name], tensor, atol=1e-4, rtol=1e-3)
