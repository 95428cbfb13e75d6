"""Sampled responses to held-out prompts and their worth: score, divergence, length, and in the toy world the truth."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rlhf import distributed
from rlhf.console import working
from rlhf.data import toy
from rlhf.data.load import Prompt
from rlhf.data.tokenize import Codec
from rlhf.models.shared_base import SharedBase
from rlhf.recipe import Evaluate
from rlhf.rollout import Rollout, Sampling, sample

KL_CHUNK = 1024  # response tokens whose two distributions exist at the same time
EVALUATION_SEED = 7_000  # held-out sampling has a stream of its own and leaves the training stream alone


@dataclass(frozen=True)
class Measured:
    """One policy's responses to the same prompts; per-response tensors (N,) on the CPU."""

    texts: list[str]
    lengths: Tensor
    ended: Tensor
    kl: float  # nats per token to the reference, from full distributions at every response token
    scores: Tensor | None
    truths: Tensor | None

    def metrics(self) -> dict[str, float]:
        found: dict[str, float] = {
            "response_length": self.lengths.float().mean().item(),
            "eos_rate": self.ended.float().mean().item(),
            "kl_per_token": self.kl,
        }
        if self.scores is not None:
            found["score"] = self.scores.mean().item()
        if self.truths is not None:
            found["true_reward"] = self.truths.mean().item()
        return found


def sampling(options: Evaluate, at_once: int | None = None) -> Sampling:
    """How held-out responses are drawn; `at_once` limits the prompts that are decoded together."""
    return Sampling(
        max_prompt_length=options.max_prompt_length,
        response_length=options.response_length,
        temperature=options.temperature,
        batch_size=min(at_once or options.batch_size, options.batch_size),
        top_p=options.top_p,
    )


@torch.no_grad()
def measure(
    shared: SharedBase, role: str, codec: Codec, prompts: Sequence[Prompt], how: Sampling, *, seed: int, truth: bool
) -> Measured:
    """Sample one response per prompt from a role and measure it; `truth` asks the toy world for the true reward."""
    ids, _ = codec.encode_prompts(prompts, how.max_prompt_length)
    with (
        working("evaluating on held-out prompts"),
        torch.random.fork_rng([shared.device] if shared.device.type == "cuda" else []),
    ):
        torch.manual_seed(seed + EVALUATION_SEED)
        shared.activate(role)
        rollout = sample(shared.base, ids, codec, how)
        texts = [codec.decode(r[m].tolist()) for r, m in zip(rollout.tokens, rollout.mask, strict=True)]
        scores = torch.zeros(len(ids), device=shared.device)
        divergence = torch.zeros((), dtype=torch.float64, device=shared.device)
        for index in rollout.dealt(how.batch_size):
            part = rollout.rows(index)
            if role != "reference":
                divergence += exact_kl(shared, role, part, how.temperature)
            if shared.score_head is not None:
                scores[index] = shared.scores(part)
        distributed.all_sum(scores, divergence)
    truths = None
    if truth:
        written = [codec.prompt_text(prompt) for prompt in prompts]
        truths = torch.tensor([toy.true_reward(p, t) for p, t in zip(written, texts, strict=True)])
    return Measured(
        texts=texts,
        lengths=rollout.response_length.cpu(),
        ended=rollout.ended.cpu(),
        kl=divergence.item() / int(rollout.response_length.sum()),
        scores=scores.cpu() if shared.score_head is not None else None,
        truths=truths,
    )


@torch.no_grad()
def exact_kl(shared: SharedBase, role: str, rollout: Rollout, temperature: float) -> float:
    """Σ_t KL(π_role(·|s_t) || π_reference(·|s_t)) in nats over the response tokens of a batch."""
    mask = rollout.mask
    shared.activate(role)
    ours = shared.response_hidden(rollout)[mask]
    shared.activate("reference")
    theirs = shared.response_hidden(rollout)[mask]
    total = 0.0
    for a, b in zip(ours.split(KL_CHUNK), theirs.split(KL_CHUNK), strict=True):
        logp = (shared.logits(a).float() / temperature).log_softmax(-1)
        logq = (shared.logits(b).float() / temperature).log_softmax(-1)
        total += (logp.exp() * (logp - logq)).sum(dtype=torch.float64).item()
    return total


def compare(before: Measured, after: Measured) -> dict[str, float]:
    """What changed from SFT to a trained policy; gains in standard deviations of SFT's own samples."""
    metrics = after.metrics() | {"response_length_sft": before.metrics()["response_length"]}
    for name, old, new in (("score", before.scores, after.scores), ("true_reward", before.truths, after.truths)):
        if old is not None and new is not None:
            metrics[f"{name}_sft"] = old.mean().item()
            metrics[f"{name}_gain_sd"] = ((new.mean() - old.mean()) / old.std()).item()
    if before.scores is not None and after.scores is not None:
        metrics |= win_rate(after.scores - before.scores)
    return metrics


def win_rate(differences: Tensor) -> dict[str, float]:
    """Share of prompts with the higher score, ties counted half, and the half-width of its 95 % interval (normal)."""
    wins = (differences > 0).double() + 0.5 * (differences == 0).double()
    return {
        "win_rate_vs_sft": wins.mean().item(),
        "win_rate_vs_sft_ci95": 1.96 * wins.std().item() / math.sqrt(len(wins)),
    }


def sample_of(codec: Codec, prompts: Sequence[Prompt], before: Measured, after: Measured) -> tuple[str, dict[str, str]]:
    """The first prompt whose answer changed, with both answers."""
    changed = (i for i, (a, b) in enumerate(zip(before.texts, after.texts, strict=True)) if a != b)
    at = next(changed, 0)
    return codec.prompt_text(prompts[at]), {"SFT": before.texts[at], "now": after.texts[at]}
