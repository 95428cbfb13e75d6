"""Logits that are not rounded to 16 bits, where a device can multiply 16-bit matrices into float32."""

import pytest
import torch
from torch import Tensor, nn

from rlhf.models import matmul
from rlhf.models.output_layer import output_of
from rlhf.objectives.logprobs import linear_token_logprobs
from rlhf.rollout.decoding import draw_tokens

MM = torch.mm


def as_on_cuda(x: Tensor, y: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
    """torch.mm of CUDA: sums of 16-bit products in float32, rounded only if the result has 16 bits."""
    return MM(x, y) if out_dtype is None else MM(x.to(out_dtype), y.to(out_dtype))


@pytest.mark.parametrize("wide", [False, True], ids=["rounded", "wide"])
def test_sampling_and_training_make_the_same_logits(monkeypatch, wide):
    """Of one token each in 40 rows; the truth is a product in float64."""
    monkeypatch.setitem(matmul.FLOAT32_OF_HALVES_BY_DEVICE, "cpu", wide)
    monkeypatch.setattr(torch, "mm", as_on_cuda)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(40, 64, generator=generator).bfloat16()
    layer = nn.Linear(64, 500, bias=False).bfloat16()
    layer.weight.data.copy_(torch.randn(500, 64, generator=generator) / 2)
    logits = output_of(layer, hidden)
    ids, sampled = draw_tokens(logits, torch.rand(40, generator=generator), 1.0)
    trained = linear_token_logprobs(hidden, layer.weight.detach(), ids, to_logits=matmul.wide_matmul).logp
    truth = (hidden.double() @ layer.weight.double().t()).log_softmax(-1).gather(1, ids[:, None]).squeeze(1)
    assert logits.dtype == sampled.dtype == trained.dtype == torch.float32
    assert torch.allclose(sampled, trained, atol=1e-5)
    error = (trained - truth).abs().max()
    assert error < 1e-4 if wide else 1e-3 < error < 0.1


def test_layers_that_are_no_plain_whole_product_are_called(monkeypatch):
    """With a bias or in float32; a rank of several holds a part of the weight outside of the layer's own call."""
    monkeypatch.setattr("rlhf.models.output_layer.wide_matmul", lambda *_: pytest.fail("the layer is not called"))
    states = torch.randn(2, 4)
    parted = nn.Linear(4, 8, bias=False).bfloat16()
    parted.weight = nn.Parameter(parted.weight[:4])
    for layer in (nn.Linear(4, 8), nn.Linear(4, 8, bias=False), parted):
        found = output_of(layer, states.to(layer.weight.dtype))
        assert torch.equal(found, layer(states.to(layer.weight.dtype)).float())
