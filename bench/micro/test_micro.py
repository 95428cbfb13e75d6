"""Times of small functions that run once per batch or per file: `make bench-micro`, with pytest-benchmark.

Each is also checked, so that a fast wrong answer fails. No test here depends on absolute time.
"""

import json
from pathlib import Path

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture
from torch import Tensor

from rlhf.data import formats
from rlhf.data.batch import Rollout, collate
from rlhf.data.formats import AS_THEY_ARE
from rlhf.data.rows import PreferencePair, of_kind
from rlhf.data.tokenize import DialogueTokenizer, words
from rlhf.data.worlds import lengths
from rlhf.models.lean.packed import Packed, pieces_of
from rlhf.objectives.logprobs import linear_token_logprobs
from rlhf.rollout.decoding import draw_tokens

ROWS, LENGTH = 64, 128  # a batch of responses
SKIPPING = AS_THEY_ARE.model_copy(update={"on_bad_row": "skip"})
VOCABULARIES = [32_000, 151_936, 262_144]  # of Llama 2, Qwen3 and Gemma 3


def zipf(vocabulary: int) -> Tensor:
    """Return logits (16, V) of tokens whose probabilities fall with the power 1.5 of their rank, in any order."""
    torch.manual_seed(0)
    ranks = torch.stack([torch.randperm(vocabulary) for _ in range(16)])
    return -1.5 * (ranks + 1.0).log()


@pytest.mark.parametrize("top_p", [1.0, 0.9])
@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_draw_a_token(benchmark: BenchmarkFixture, vocabulary: int, top_p: float) -> None:
    """Time the sampling of one token for each of 16 rows, without the model."""
    torch.manual_seed(0)
    logits, uniforms = zipf(vocabulary), torch.rand(16)
    ids, logp = benchmark(draw_tokens, logits, uniforms, 1.0, top_p)
    assert ids.shape == logp.shape == (16,) and bool((logp <= 0).all())


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_logprobs_of_a_large_vocabulary(benchmark: BenchmarkFixture, vocabulary: int) -> None:
    """Time a chunk of 2^24 logits, as scoring computes it, with narrow hidden states so that the vocabulary decides."""
    torch.manual_seed(0)
    tokens = 2**24 // vocabulary
    hidden, weight = torch.randn(tokens, 64), torch.randn(vocabulary, 64) / 8
    targets = torch.randint(0, vocabulary, (tokens,))
    logp, *_ = benchmark(linear_token_logprobs, hidden, weight, targets, 1.0, tokens, "none")
    assert logp.shape == (tokens,) and bool((logp < 0).all())


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    (file,) = lengths.write(tmp_path, pairs=1000, shape="hh", longest=512, seed=0)
    return file


def test_read_preference_rows(benchmark: BenchmarkFixture, rows: Path) -> None:
    rows_read = benchmark(formats.read, [rows], SKIPPING)
    assert len(rows_read.rows) > 950  # a few have the same short answer twice


def test_read_hh_transcripts(benchmark: BenchmarkFixture, tmp_path: Path) -> None:
    turn = "\n\nHuman: {}\n\nAssistant:"
    file = tmp_path / "hh.jsonl"
    texts = [{"chosen": turn.format(i) + f" {i}", "rejected": turn.format(i) + f" {-i - 1}"} for i in range(1000)]
    file.write_text("".join(json.dumps(row) + "\n" for row in texts))
    assert len(benchmark(formats.read, [file]).rows) == 1000


def test_encode_dialogues(benchmark: BenchmarkFixture, rows: Path) -> None:
    pairs = of_kind(formats.read([rows], SKIPPING).rows, PreferencePair)
    tokenizer = DialogueTokenizer(words(20_000), "hh")
    encoded, _ = benchmark(tokenizer.encode, [(p.prompt, p.chosen) for p in pairs], 384, 512)
    assert all(row and row.response[-1] == tokenizer.eos_id for row in encoded if row and len(row.response) < 100)


def test_collate_rollouts(benchmark: BenchmarkFixture) -> None:
    torch.manual_seed(0)
    sizes = torch.randint(1, LENGTH, (2, ROWS)).tolist()
    prompts, responses = ([[5] * size for size in sizes[side]] for side in (0, 1))
    rollout = benchmark(collate, prompts, responses, 0, 2)
    assert rollout.ids.shape == (ROWS, max(a + b for a, b in zip(*sizes, strict=True)))


def rollout_of_rows() -> Rollout:
    """Return responses to prompts of any length, four to each prompt."""
    torch.manual_seed(0)
    prompts = [[5] * size for size in torch.randint(1, LENGTH, (ROWS // 4,)).tolist() for _ in range(4)]
    return collate(prompts, [[6] * size for size in torch.randint(1, LENGTH, (ROWS,)).tolist()], 0, 2)


def test_micro_batches_by_length(benchmark: BenchmarkFixture) -> None:
    rollout = rollout_of_rows()
    parts = benchmark(lambda: [rollout.rows(rows) for rows in rollout.by_length(16)])
    assert sum(len(part.ids) for part in parts) == ROWS


def test_pack_rows_without_padding(benchmark: BenchmarkFixture) -> None:
    """Time the joining of rows into one as a card trains on them; what attends to it needs a card."""
    rollout = rollout_of_rows()
    tables = torch.randn(2 * LENGTH, 64), torch.randn(2 * LENGTH, 64)

    def packed() -> Tensor:
        pieces, _ = pieces_of(rollout.lengths)
        return Packed(tables, rollout.ids.shape[1], pieces).join(rollout.ids)

    joined = benchmark(packed)
    lengths = rollout.lengths
    assert joined.numel() == sum(a + b - 1 for a, b in zip(lengths.prompt, lengths.response, strict=True))
