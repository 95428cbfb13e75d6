"""The order of training rows: batches of equal length, in random order, each row once per epoch."""

import itertools

import torch
from safetensors.torch import load_file

from rlhf.stages.supervised.row_order import LengthBuckets
from tests.helpers import beside, run_stages, small


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


def test_the_micro_batch_decides_nothing(trained, tmp_path):
    """Eight rows at once, or two at a time: the same rows make each step, and the same adapter but for rounding."""
    found = []
    for micro, accumulated in ((8, 1), (2, 4)):
        changes = {"sft__per_device_train_batch_size": micro, "sft__gradient_accumulation_steps": accumulated}
        out = tmp_path / str(micro)
        run_stages(small(**changes, sft__group_by_length=True), beside(trained, out, "pretrain"), "sft")
        found.append(load_file(out / "cpu-tiny/v1/sft/adapter/adapter_model.safetensors"))
    for name, tensor in found[0].items():
        torch.testing.assert_close(found[1][name], tensor, atol=1e-5, rtol=1e-3)
