"""Decoding in which rows read their own cached tokens only, with a reference implementation of torch's CUDA kernel."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from rlhf.data.batch import Rollout
from rlhf.models import flash, spans
from rlhf.models.traits import sliding_window
from rlhf.rollout import decoding as decoding_module
from rlhf.rollout import library_decoding, own_tokens
from rlhf.rollout.decoding import Sampling
from rlhf.rollout.engine import sample
from rlhf.rollout.library_decoding import WINDOW_BY_DEVICE, LibraryDecoding, using_attention
from tests import kernels, models
from tests.tape import capture_on_cpu

VOCABULARY, PAD, EOS = 64, 0, 5
NEW_TOKENS = 24  # with the longest prompt far beyond the windows of 16 tokens
LENGTHS = (3, 9, 20, 7)


class Ids:
    """The special tokens that sampling needs of a tokenizer."""

    pad_id, eos_id = PAD, EOS


@pytest.fixture
def read(monkeypatch) -> Iterator[list[Tensor]]:
    """Let a CPU decode as CUDA does, also in float32. Holds the tokens that each row of each call has read."""
    lengths: list[Tensor] = []

    def recorded(*args: Any, seqused_k: Tensor, **options: Any) -> tuple[Tensor, ...]:
        lengths.append(seqused_k.clone())
        return (kernels.one_kernel(*args, seqused_k=seqused_k, **options),)

    monkeypatch.setattr(spans, "flash_attention", recorded)
    monkeypatch.setattr(flash, "DTYPES", (torch.bfloat16, torch.float32))
    monkeypatch.setitem(own_tokens.BY_DEVICE, "cpu", True)
    monkeypatch.setattr(spans, "kernel_works", lambda *_: True)
    yield lengths


def prompts() -> list[list[int]]:
    draw = torch.Generator().manual_seed(1)
    return [torch.randint(6, VOCABULARY, (count,), generator=draw).tolist() for count in LENGTHS]


def drawn(model: Any, copies: int = 1, **changes: Any) -> Rollout:
    torch.manual_seed(0)
    settings = {"temperature": 1.0, "batch_size": 4 * copies, "samples_per_prompt": copies} | changes
    return sample(model, prompts(), Ids(), Sampling(32, NEW_TOKENS, **settings))


def decoding(model: Any) -> LibraryDecoding:
    sampling = Sampling(32, NEW_TOKENS, 1.0, 4)
    return LibraryDecoding(model, prompts(), torch.rand(4, NEW_TOKENS), sampling, Ids(), None)


@pytest.mark.parametrize(("kind", "copies"), [("llama", 1), *((kind, 3) for kind in models.KINDS)])
def test_the_same_tokens_as_through_a_mask(monkeypatch, read, kind, copies):
    """Of every type, beyond sliding windows, with padded prompts, several responses to each and rows that end."""
    model = models.model(kind, VOCABULARY).requires_grad_(False)
    found = drawn(model, copies)
    assert read, "rows were read by themselves"
    monkeypatch.setitem(own_tokens.BY_DEVICE, "cpu", False)
    calls = len(read)
    expected = drawn(model, copies)
    assert len(read) == calls
    assert torch.equal(found.tokens, expected.tokens)
    assert found.logprobs is not None and expected.logprobs is not None
    torch.testing.assert_close(found.logprobs * found.mask, expected.logprobs * expected.mask, atol=1e-5, rtol=1e-4)
    assert copies == 1 or int(found.response_length.min()) < NEW_TOKENS, "rows that end early belong to this test"


def test_a_step_reads_the_tokens_that_a_row_has(read):
    """Neither padding nor empty slots, of which a window of 256 steps would read 6 rows' worth here."""
    model = models.model("llama", VOCABULARY).requires_grad_(False)
    with using_attention(model, own_tokens.NAME), torch.no_grad():
        state = decoding(model)
        for step in range(1, 6):
            state.open_window(step)
            state.advance()
    steps = read[:: len(state.layers)]
    assert [x.tolist() for x in steps] == [[length + step for length in LENGTHS] for step in range(1, 6)]
    assert state.layers[0].window == state.layers[0].slots, "one capture serves the whole response"
    assert sum(int(x.sum()) for x in steps) == 255
    assert 5 * 4 * state.layers[0].slots == 5 * 4 * (20 + NEW_TOKENS) == 880


def test_a_sliding_layer_reads_its_window(read):
    model = models.model("mistral", VOCABULARY).requires_grad_(False)
    window = sliding_window(model.config)
    assert window == 16
    drawn(model)
    assert max(int(x.max()) for x in read) == window
    assert min(int(x.min()) for x in read) == min(LENGTHS) + 1


def test_rows_that_are_kept_stay_in_the_layout_of_the_kernel(monkeypatch, read):
    model = models.model("llama", VOCABULARY).requires_grad_(False)
    with using_attention(model, own_tokens.NAME), torch.no_grad():
        state = decoding(model)
        state.open_window(1)
        state.advance()
        state.rows.ended[1:3] = True
        before = [(layer.keys[[0, 3]].clone(), layer.values[[0, 3]].clone()) for layer in state.layers]
        state.drop_ended()
        for layer, (keys, values) in zip(state.layers, before, strict=True):
            assert torch.equal(layer.keys, keys) and torch.equal(layer.values, values)
            assert layer.keys.transpose(1, 2).is_contiguous() and layer.values.transpose(1, 2).is_contiguous()
        state.advance()
    assert read[-1].tolist() == [LENGTHS[0] + 2, LENGTHS[3] + 2]
    monkeypatch.setattr(decoding_module, "CAPTURE_BYTES", 0)
    state.captures = True
    slot = 2 * sum(layer.keys[0, :, 0].nbytes for layer in state.layers)
    monkeypatch.setattr(decoding_module, "CAPTURE_BYTES", round(slot * (sum(LENGTHS) / 4 + 2)) * (NEW_TOKENS - 2) - 1)
    assert state.worth_dropping(2, 1)
    monkeypatch.setattr(decoding_module, "CAPTURE_BYTES", round(slot * (sum(LENGTHS) / 4 + 2)) * (NEW_TOKENS - 2))
    assert not state.worth_dropping(2, 1)


def test_replayed_steps_draw_the_tokens_of_plain_ones(monkeypatch, read):
    """What a CUDA graph replays: the lengths are tensors that a step changes in place, also those of a window."""
    model = models.model("mistral", VOCABULARY).requires_grad_(False)
    expected = drawn(model, copies=3)
    tapes = capture_on_cpu(monkeypatch)
    assert torch.equal(drawn(model, copies=3).tokens, expected.tokens)
    assert len(tapes) == 1, "one capture serves the whole response"


def reads_own_tokens(model: Any) -> bool:
    with using_attention(model, own_tokens.attention_of_steps(model)), torch.no_grad():
        return decoding(model).own_tokens


def test_elsewhere_a_window_is_read_through_a_mask(monkeypatch, read):
    """Where the device has no such kernel, it fails, or it does not take the type or the size of a head."""
    model = models.model("llama", VOCABULARY).requires_grad_(False)
    assert reads_own_tokens(model)
    for place, name, value in (
        (flash, "DTYPES", (torch.bfloat16,)),
        (spans, "kernel_works", lambda *_: False),
        (flash, "HEAD_MULTIPLE", 64),
        (flash, "LARGEST_HEAD", 4),
        (own_tokens, "TESTED", ()),
        (model.config, "_attn_implementation_internal", "eager"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(place, name, value)
            assert not reads_own_tokens(model), name
            responses = drawn(model)
        assert torch.equal(responses.tokens, drawn(model).tokens), name
    with monkeypatch.context() as patch:
        patch.setitem(own_tokens.BY_DEVICE, "cpu", False)
        assert not reads_own_tokens(model)


def test_windows_stay_narrow_where_they_are_read(monkeypatch, read):
    monkeypatch.setattr(spans, "kernel_works", lambda *_: False)
    monkeypatch.setitem(WINDOW_BY_DEVICE, "cpu", library_decoding.Window(0, 4, 1))
    model = models.model("llama", VOCABULARY).requires_grad_(False)
    with using_attention(model, own_tokens.NAME), torch.no_grad():
        state = decoding(model)
        assert state.open_window(1)
    assert state.layers[0].window == 24 < state.layers[0].slots


def no_lengths(*args: Any, seqused_k: Tensor, **options: Any) -> tuple[Tensor, ...]:
    return kernels.flash_attention(*args, seqused_k=torch.full_like(seqused_k, 300), **options)


def no_starts(
    query: Tensor, key: Tensor, value: Tensor, rows: Tensor, first: Tensor, *args: Any, **options: Any
) -> tuple[Tensor, ...]:
    return kernels.flash_attention(query, key, value, rows, first // 300 * 300, *args, **options)


def refuses(*args: Any, **options: Any) -> tuple[Tensor, ...]:
    raise RuntimeError("FlashAttention only supports Ampere GPUs or newer.")


def test_a_kernel_is_tried_before_it_is_used(monkeypatch, capsys):
    tried = spans.kernel_works.__wrapped__
    device = torch.device("cpu")
    for dtype in flash.DTYPES:
        for size in (8, 64, 256):
            monkeypatch.setattr(spans, "flash_attention", kernels.flash_attention)
            assert tried(device, dtype, size)
    assert capsys.readouterr() == ("", "")
    for faulty, reason in ((no_lengths, "its results differ"), (no_starts, "its results differ"), (refuses, "Ampere")):
        monkeypatch.setattr(spans, "flash_attention", faulty)
        assert not tried(device, torch.bfloat16, 64)
        assert reason in "".join(capsys.readouterr())
