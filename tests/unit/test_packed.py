"""Rows joined without padding: same numbers, fewer tokens. A reference implementation stands for a card's kernel."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from rlhf.data.batch import Rollout, collate
from rlhf.models.lean import fused_linear, packed
from rlhf.models.lean.trunk import LeanTrunk
from rlhf.models.matmul import round_to_few_sizes
from tests import kernels
from tests.trunk_models import KINDS, distance, trunk_model

PROMPTS = (7, 1, 4, 2)  # tokens of each
NUMBERS = (0, 0, 0, 1, 2, 2, 3)  # of the prompt of each row
RESPONSES = (6, 1, 3, 1, 5, 2, 4)


@pytest.fixture
def tokens(monkeypatch) -> Iterator[list[int]]:
    """Holds the tokens that each group of linear layers has computed."""
    counts: list[int] = []
    forward = fused_linear.LinearGroup.forward

    def noting(self: Any, z: Tensor) -> Tensor:
        counts.append(len(z))
        return forward(self, z)

    monkeypatch.setattr(fused_linear.LinearGroup, "forward", noting)
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
@pytest.mark.parametrize("device", ["cpu", "card"])
def test_joined_rows_have_the_states_and_gradients_of_padded_ones(device, kind, shared, responses, tokens, monkeypatch):
    if device == "card":
        kernels.join_rows(monkeypatch)
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
    real = prompts + sum(responses) - len(responses)
    computed_tokens = real if device == "card" else round_to_few_sizes(real)
    assert max(tokens[:groups]) == tokens[0] == computed_tokens, "no padding is computed"


@pytest.mark.parametrize("device", ["cpu", "card"])
def test_what_the_rows_of_a_pair_begin_with_is_computed_once(device, tokens, monkeypatch):
    """Also where a row is the beginning of the other one, where both are equal, and where nothing is."""
    if device == "card":
        kernels.join_rows(monkeypatch)
    peft = trunk_model()
    begin, other = [5, 6, 7, 8, 9], [20, 21, 22]
    pairs = [(begin + other, [*begin, 30]), (begin, begin + other), (begin, begin), ([3, 4], [10]), ([9], [9, 9])]
    rows = collate([[]] * 10, [row for side in zip(*pairs, strict=True) for row in side], 0, 1)
    found: list[list[Tensor]] = []
    for packs in (False, True):
        monkeypatch.setattr(LeanTrunk, "packs", packs)
        trunk = LeanTrunk(peft.get_base_model())
        tokens.clear()
        with trunk.merging("policy"):
            states = (trunk.pair_hidden if packs else trunk.last_hidden)("policy", rows.ids, rows.last)
            peft.zero_grad()
            (states * torch.randn(states.shape, generator=torch.Generator().manual_seed(2))).sum().backward()
        found.append([states.detach(), *(p.grad.clone() for p in peft.parameters() if p.grad is not None)])
    assert max(distance(a, b) for a, b in zip(*found, strict=True)) < 4e-6
    unlike = (5 + 3 + 1) + (4 + 1 + 4) + (4 + 1 + 1) + (2 + 1) + (1 + 2)
    assert tokens[0] == (unlike if device == "card" else round_to_few_sizes(unlike))


def test_bfloat16_is_rounded_as_in_padded_rows(tokens, monkeypatch):
    """Each is as far from float32 as the other: the kernel alone differs, and sums of products."""
    kernels.join_rows(monkeypatch)
    exact, half = trunk_model(), trunk_model(dtype=torch.bfloat16)
    for a, b in zip(exact.parameters(), half.parameters(), strict=True):
        a.data.copy_(b)
    rows = rollout(torch.Generator().manual_seed(3))
    truth = computed(exact, monkeypatch, rows, packs=False)
    padded, joined = (computed(half, monkeypatch, rows, packs=packs) for packs in (False, True))
    errors, usual = (sum(distance(a, b) for a, b in zip(found, truth, strict=True)) for found in (joined, padded))
    assert 0 < errors < 1.1 * usual


@pytest.mark.parametrize(
    ("device", "dtype", "size", "packs"),
    [
        ("card", "bfloat16", 16, True),
        ("card", "float32", 16, False),
        ("card", "bfloat16", 12, False),
        ("cpu", "float32", 12, True),
        ("cpu", "bfloat16", 16, False),
    ],
)
def test_rows_are_joined_where_attention_takes_them(device, dtype, size, packs, monkeypatch):
    monkeypatch.setitem(packed.APART_BY_DEVICE, "cpu", device == "cpu")
    sizes = {"vocab_size": 64, "hidden_size": 4 * size, "intermediate_size": 16, "num_hidden_layers": 1}
    peft = trunk_model(dtype=getattr(torch, dtype), sizes=sizes | {"num_attention_heads": 4, "num_key_value_heads": 2})
    assert LeanTrunk(peft.get_base_model(), joins=True).packs == packs
    assert not LeanTrunk(peft.get_base_model()).packs
