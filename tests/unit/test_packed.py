"""Rows joined without padding, with a reference implementation of torch's CUDA kernel: same numbers, fewer tokens."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from rlhf.data.batch import Rollout, collate
from rlhf.models.lean import fused_linear, packed
from rlhf.models.lean.trunk import LeanTrunk
from tests import kernels
from tests.trunk_models import KINDS, distance, trunk_model

PROMPTS = (7, 1, 4, 2)  # tokens of each
NUMBERS = (0, 0, 0, 1, 2, 2, 3)  # of the prompt of each row
RESPONSES = (6, 1, 3, 1, 5, 2, 4)


@pytest.fixture
def tokens(monkeypatch) -> Iterator[list[int]]:
    """Let a CPU join rows as CUDA does, in float32. Holds the tokens that each group of linear layers has computed."""
    counts: list[int] = []
    forward = fused_linear.LinearGroup.forward

    def noting(self: Any, z: Tensor) -> Tensor:
        counts.append(len(z))
        return forward(self, z)

    monkeypatch.setattr(fused_linear.LinearGroup, "forward", noting)
    kernels.join_rows(monkeypatch)
    yield counts


def rollout(draw: torch.Generator, responses: tuple[int, ...] = RESPONSES) -> Rollout:
    prompts = [torch.randint(64, (n,), generator=draw).tolist() for n in PROMPTS]
    rows = [torch.randint(64, (n,), generator=draw).tolist() for n in responses]
    return collate([prompts[number] for number in NUMBERS], rows, 0, 1)


def computed(peft: Any, monkeypatch: pytest.MonkeyPatch, rows: Rollout, packs: bool) -> list[Tensor]:
    """The states of real slots and of the last tokens, and the gradients of a loss that weighs each of the former."""
    lean = LeanTrunk(peft.get_base_model())
    monkeypatch.setattr(LeanTrunk, "packs", packs)
    assert lean.packs == packs
    with lean.merging("policy"):
        states = lean.response_hidden("policy", rows)
        assert states.shape[:2] == rows.mask.shape
        states = states[rows.mask]
        peft.zero_grad()
        (states * torch.randn(states.shape, generator=torch.Generator().manual_seed(2))).sum().backward()
        with torch.no_grad():
            last = lean.last_hidden("policy", rows.ids, rows.last)
    return [states.detach(), last, *(p.grad.clone() for p in peft.parameters() if p.grad is not None)]


@pytest.mark.parametrize("responses", [RESPONSES, (1,) * len(NUMBERS)], ids=["long", "one"])
@pytest.mark.parametrize("shared", [False, True], ids=["apart", "shared"])
@pytest.mark.parametrize("kind", KINDS)
def test_joined_rows_have_the_states_and_gradients_of_padded_ones(kind, shared, responses, tokens, monkeypatch):
    peft = trunk_model(kind)
    rows = rollout(torch.Generator().manual_seed(3), responses)
    if shared:
        rows = replace(rows, prompt_numbers=torch.tensor(NUMBERS))
    padded = computed(peft, monkeypatch, rows, packs=False)
    tokens.clear()
    joined = computed(peft, monkeypatch, rows, packs=True)
    assert len(padded) == len(joined) == 2 + 2 * 7 * 2
    assert max(distance(a, b) for a, b in zip(joined, padded, strict=True)) < 4e-6
    prompts = sum(PROMPTS) if shared else sum(PROMPTS[number] for number in NUMBERS)
    groups = 4 + 5  # of linear layers in a pass; the last layer's queries are a group of their own
    assert max(tokens[:groups]) == tokens[0] == prompts + sum(responses) - len(responses), "no padding is computed"


def test_bfloat16_is_rounded_as_in_padded_rows(tokens, monkeypatch):
    """Each is as far from float32 as the other: the kernel alone differs, and sums of products."""
    exact, half = trunk_model(), trunk_model(dtype=torch.bfloat16)
    for a, b in zip(exact.parameters(), half.parameters(), strict=True):
        a.data.copy_(b)
    rows = rollout(torch.Generator().manual_seed(3))
    truth = computed(exact, monkeypatch, rows, packs=False)
    padded, joined = (computed(half, monkeypatch, rows, packs=packs) for packs in (False, True))
    errors, usual = (sum(distance(a, b) for a, b in zip(found, truth, strict=True)) for found in (joined, padded))
    assert 0 < errors < 1.1 * usual


@pytest.mark.parametrize(
    ("dtype", "size", "packs"), [("bfloat16", 16, True), ("float32", 16, False), ("bfloat16", 12, False)]
)
def test_rows_are_joined_where_the_kernel_takes_them(dtype, size, packs, monkeypatch):
    monkeypatch.setitem(packed.PACKS_BY_DEVICE, "cpu", True)
    sizes = {"vocab_size": 64, "hidden_size": 4 * size, "intermediate_size": 16, "num_hidden_layers": 1}
    peft = trunk_model(dtype=getattr(torch, dtype), sizes=sizes | {"num_attention_heads": 4, "num_key_value_heads": 2})
    assert LeanTrunk(peft.get_base_model(), joins=True).packs == packs
    assert not LeanTrunk(peft.get_base_model()).packs
