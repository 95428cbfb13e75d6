"""The rollout engine: the tokens of `generate`, the distribution of the model, the log-probabilities of training."""

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from rlhf.data.batch import Rollout
from rlhf.rollout.decoding import CAPTURES_BY_DEVICE, STEPS_BETWEEN_CHECKS_BY_DEVICE, Sampling, draw_tokens
from rlhf.rollout.engine import ready, sample
from rlhf.rollout.library_decoding import (
    FEW_KERNELS_BY_DEVICE,
    WINDOW_BY_DEVICE,
    CacheLayer,
    LibraryDecoding,
    Window,
    round_up,
    using_attention,
)
from tests.decoding_models import activated, adapted
from tests.oracle.dense import token_logprobs
from tests.tape import capture_on_cpu

VOCAB, EOS, PAD = 50, 2, 0
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}


class Ids:
    """What sampling needs of a tokenizer."""

    pad_id, eos_id = PAD, EOS


@pytest.fixture(scope="module", params=["llama", "mistral"])
def model(request) -> LlamaForCausalLM | MistralForCausalLM:
    """Random weights, large enough that the choice of token depends on the context."""
    torch.manual_seed(0)
    kind = {"llama": (LlamaConfig, LlamaForCausalLM), "mistral": (MistralConfig, MistralForCausalLM)}[request.param]
    loaded: LlamaForCausalLM | MistralForCausalLM = kind[1](
        kind[0](**SIZES, initializer_range=0.3, pad_token_id=PAD, eos_token_id=EOS)
    ).eval()
    loaded.requires_grad_(False)
    return loaded


def prompts(count: int, longest: int = 20) -> list[list[int]]:
    draw = torch.Generator().manual_seed(count)
    lengths = torch.randint(1, longest + 1, (count,), generator=draw)
    return [torch.randint(3, VOCAB, (int(n),), generator=draw).tolist() for n in lengths]


def drawn(model, rows: list[list[int]], seed: int = 0, **changes) -> Rollout:
    torch.manual_seed(seed)
    settings = {"max_prompt_length": 64, "response_length": 40, "temperature": 1.0, "batch_size": 8} | changes
    return sample(model, rows, Ids(), Sampling(**settings))


def test_sampling_tells_how_much_of_it_is_done(model):
    shares: list[float] = []
    settings = Sampling(max_prompt_length=30, response_length=8, temperature=1.0, batch_size=2)
    sample(model, [[5] * 4] * 5, Ids(), settings, done=shares.append)
    assert shares == [0.4, 0.8, 1.0]


def logprobs(rollout: Rollout) -> torch.Tensor:
    assert rollout.logprobs is not None
    return rollout.logprobs


def responses(rollout: Rollout) -> list[list[int]]:
    return [row[mask].tolist() for row, mask in zip(rollout.tokens, rollout.mask, strict=True)]


@pytest.mark.parametrize("window", [Window(0, 1, 1), Window(0, 7, 1), Window(0, 64, 1), WINDOW_BY_DEVICE["cuda"]])
def test_greedy_tokens_are_those_of_generate(model, monkeypatch, window):
    """One prompt at a time there, all together here: with padding before them, and rows that end early."""
    monkeypatch.setitem(WINDOW_BY_DEVICE, "cpu", window)
    rows = prompts(12)
    settings = GenerationConfig(do_sample=False, max_new_tokens=40, eos_token_id=EOS, pad_token_id=PAD)
    expected = []
    for row in rows:
        ids = torch.tensor([row])
        new = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), generation_config=settings)
        expected.append(new[0, len(row) :].tolist())
    assert responses(drawn(model, rows, temperature=0.0, batch_size=12)) == expected
    assert len({len(row) for row in expected}) > 2, "rows that end early belong to this test"


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("few_kernels", [False, True])
def test_padding_is_left_out_by_every_attention(model, monkeypatch, attention, few_kernels):
    """Also where the mask is a bias that is added to scores, as eager attention and CUDA take it."""
    rows = prompts(12)
    expected = responses(drawn(model, rows, batch_size=1))
    monkeypatch.setitem(FEW_KERNELS_BY_DEVICE, "cpu", few_kernels)
    monkeypatch.setattr(model.config, "_attn_implementation_internal", attention)
    assert responses(drawn(model, rows, batch_size=12)) == expected


def test_a_response_does_not_depend_on_its_neighbours(model):
    """Other batches, another order of decoding and other prompts beside it: the same tokens, from the same numbers."""
    rows = prompts(12)
    together = drawn(model, rows, batch_size=12)
    assert responses(drawn(model, rows, batch_size=5)) == responses(together)
    assert responses(drawn(model, rows, batch_size=1)) == responses(together)
    longer = [*rows[:4], *([9] * 30 for _ in range(8))]  # the short ones are now padded far to the left
    assert responses(drawn(model, longer, batch_size=12))[:4] == responses(together)[:4]


def test_log_probabilities_are_those_of_a_training_forward(model):
    """The tolerance that docs/methods.md states for float32."""
    for temperature in (1.0, 0.6):
        rollout = drawn(model, prompts(12), temperature=temperature)
        states = model.model(input_ids=rollout.ids, use_cache=False).last_hidden_state
        picked = states.gather(1, rollout.predictors[..., None].expand(-1, -1, states.shape[-1]))
        expected = token_logprobs(model.lm_head(picked) / temperature, rollout.tokens)
        assert logprobs(rollout).shape == rollout.mask.shape
        assert (logprobs(rollout) - expected)[rollout.mask].abs().max() < 2e-5


def test_rows_that_ended_are_no_longer_decoded(model, monkeypatch):
    sizes = []
    forward = LibraryDecoding._forward

    def counted(self, ids, positions, mask):
        sizes.append(len(ids))
        return forward(self, ids, positions, mask)

    monkeypatch.setattr(LibraryDecoding, "_forward", counted)
    rows = prompts(32)
    rollout = drawn(model, rows, batch_size=32, response_length=200)
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] <= 16 < sizes[0] == 32
    longest = int(rollout.response_length.max())
    assert len(sizes) == longest  # and nothing is decoded after the last row has ended


@pytest.mark.parametrize(("width", "windows"), [(384, {512}), (380, {512}), (1, {272, 528}), (17, {288, 544})])
def test_windows_on_cuda(width, windows):
    """One for 128 or 256 steps of a prompt that is padded to 384, and for any prompt one every 256 steps."""
    room = 128 if width > 100 else 528
    rule = WINDOW_BY_DEVICE["cuda"]
    decoding: Any = SimpleNamespace(width=width, room=room, window_rule=rule)
    decoding.layers = [CacheLayer(round_up(width + room, rule.whole))]
    decoding.layers[0].window = width
    opened = [step for step in range(1, room) if LibraryDecoding.open_window(decoding, step)]
    assert len(opened) == len(windows)
    assert decoding.layers[0].window == max(windows)


def test_rows_are_dropped_for_a_capture_only_if_many_steps_are_left(model):
    decoding = LibraryDecoding(model, [[5] * 20] * 8, torch.rand(8, 200), Sampling(20, 200, 1.0, 8), Ids())
    assert not decoding.worth_dropping(10, 5)
    assert decoding.worth_dropping(199, 4)
    decoding.captures = True
    assert decoding.worth_dropping(10, 4)
    assert not decoding.worth_dropping(100, 4)


@pytest.mark.parametrize("role", ["policy", "reference", "base"])
@pytest.mark.parametrize("nf4", [False, True])
def test_cheaper_forward_passes_sample_the_same_tokens(monkeypatch, role, nf4):
    """In float32, with the adapter of each role."""
    adapted_model = adapted(torch.float32, nf4=nf4)
    rows = prompts(9, longest=12)
    base = activated(adapted_model, role)
    how = {"response_length": 24, "batch_size": 9}
    for temperature in (0.0, 1.0):
        expected = drawn(base, rows, temperature=temperature, **how)
        with monkeypatch.context() as patch:
            patch.setitem(FEW_KERNELS_BY_DEVICE, "cpu", True)
            rollout = drawn(base, rows, temperature=temperature, **how)
        assert responses(rollout) == responses(expected)
        assert (logprobs(rollout) - logprobs(expected))[rollout.mask].abs().max() < 1e-4
        if role != "base":
            assert not torch.equal(logprobs(rollout), logprobs(expected)), "another path was taken"
    assert not any("forward" in module.__dict__ for module in base.modules())


def test_divided_weights_are_left_alone(monkeypatch):
    """What an engine of transformers' Trainer has divided among ranks is not whole outside its own forward passes."""
    base = activated(adapted(torch.float32), "policy")
    monkeypatch.setitem(FEW_KERNELS_BY_DEVICE, "cpu", True)
    for whole in (True, False):
        with ready(base, whole=whole):
            assert any("forward" in module.__dict__ for module in base.modules()) == whole


@pytest.mark.parametrize("every", [3, 8])
def test_looking_less_often_changes_nothing(model, monkeypatch, every):
    """On CUDA the engine looks every 8 steps whether rows have ended."""
    rows = prompts(32)
    often = drawn(model, rows, batch_size=32, response_length=60)
    monkeypatch.setitem(STEPS_BETWEEN_CHECKS_BY_DEVICE, "cpu", every)
    assert responses(drawn(model, rows, batch_size=32, response_length=60)) == responses(often)


@pytest.mark.parametrize("window", [Window(15, 16, 1), Window(255, 16, 16)])
def test_replayed_steps_draw_the_tokens_of_plain_ones(model, monkeypatch, window):
    """A tape does a step's operations again on the same tensors, as a graph does. Rows end, windows open."""
    rows = prompts(16)
    expected = responses(drawn(model, rows, batch_size=16, response_length=60))
    monkeypatch.setitem(WINDOW_BY_DEVICE, "cpu", window)
    tapes = capture_on_cpu(monkeypatch)
    assert responses(drawn(model, rows, batch_size=16, response_length=60)) == expected
    assert len(tapes) == 1 if window.ahead == 255 else len(tapes) > 2


@pytest.mark.gpu
def test_captured_steps_draw_the_tokens_of_plain_ones(model, monkeypatch):
    on_gpu = copy.deepcopy(model).cuda()
    rows = prompts(32)
    captured = responses(drawn(on_gpu, rows, batch_size=32, response_length=200))
    monkeypatch.setitem(CAPTURES_BY_DEVICE, "cuda", False)
    assert responses(drawn(on_gpu, rows, batch_size=32, response_length=200)) == captured


def test_greedy_decoding_of_one_row_and_one_token(model):
    rollout = drawn(model, [[5]], response_length=1, temperature=0.0)
    logits = model(input_ids=torch.tensor([[5]])).logits[0, -1]
    assert responses(rollout) == [[int(logits.argmax())]]


def test_drawing_inverts_the_distribution_function():
    logits = torch.tensor([0.1, 0.2, 0.0, 0.7]).log().expand(6, 4)
    numbers = torch.tensor([0.0, 0.05, 0.15, 0.31, 0.999, 1 - 2**-24])
    ids, logp = draw_tokens(logits, numbers, 1.0)
    assert ids.tolist() == [0, 0, 1, 3, 3, 3]
    assert logp.exp().tolist() == pytest.approx([0.1, 0.1, 0.2, 0.7, 0.7, 0.7])


def test_drawing_follows_the_distribution():
    """100,000 draws at two temperatures, every token within 4.5 standard errors."""
    logits = 3 * torch.randn(30, generator=torch.Generator().manual_seed(0))
    numbers = torch.rand(100_000, generator=torch.Generator().manual_seed(1))
    for temperature in (1.0, 0.5):
        expected = (logits / temperature).softmax(-1)
        ids, _ = draw_tokens(logits.expand(len(numbers), -1), numbers, temperature)
        share = torch.bincount(ids, minlength=30) / len(numbers)
        error = (expected * (1 - expected) / len(numbers)).sqrt()
        assert ((share - expected).abs() <= 4.5 * error + 1e-5).all()


def test_the_usual_attention_comes_back_after_sampling(model, monkeypatch):
    """LibraryDecoding with padding on the left needs an attention that takes a mask; training keeps the recipe's."""
    used: list[str] = []
    monkeypatch.setattr(model, "set_attn_implementation", used.append)
    monkeypatch.setattr(model.config, "_attn_implementation_internal", "flash_attention_2")
    with using_attention(model, "sdpa"):
        assert used == ["sdpa"]
    assert used == ["sdpa", "flash_attention_2"]
