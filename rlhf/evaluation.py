"""Sampled responses to held-out prompts and their worth: score, divergence, length, and in the toy world the truth."""

import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from rlhf.data import toy
from rlhf.data.load import Prompt
from rlhf.data.tokenize import Codec
from rlhf.models.loading import load_base
from rlhf.models.shared_base import SharedBase
from rlhf.rollout import Rollout, sample
from rlhf.run import Run

EVALUATION_SEED = 7_000  # held-out sampling has a stream of its own and leaves the training stream alone


@dataclass(frozen=True)
class Measured:
    """One policy's responses to the same prompts; per-response tensors (N,) on the CPU."""

    texts: list[str]
    lengths: Tensor
    ended: Tensor
    kl: float | None  # nats per token to the reference, from full distributions at every response token
    scores: Tensor | None
    truths: Tensor | None

    def metrics(self) -> dict[str, float]:
        found: dict[str, float] = {
            "response_length": self.lengths.float().mean().item(),
            "eos_rate": self.ended.float().mean().item(),
        }
        if self.kl is not None:
            found["kl_per_token"] = self.kl
        if self.scores is not None:
            found["score"] = self.scores.mean().item()
        if self.truths is not None:
            found["true_reward"] = self.truths.mean().item()
        return found


@torch.no_grad()
def measure(
    shared: SharedBase,
    role: str,
    codec: Codec,
    prompts: Sequence[Prompt],
    *,
    seed: int,
    max_prompt_length: int,
    response_length: int,
    temperature: float,
    batch_size: int,
    truth: bool,
) -> Measured:
    """Sample one response per prompt from `role` (a role of `shared`, or "base") and measure it."""
    ids, _ = codec.encode_prompts(prompts, max_prompt_length)
    with torch.random.fork_rng():
        torch.manual_seed(seed + EVALUATION_SEED)
        shared.activate("policy" if role == "base" else role)
        with shared.without_adapters() if role == "base" else nullcontext():
            rollout = sample(
                shared.base,
                ids,
                max_new_tokens=response_length,
                temperature=temperature,
                pad_id=codec.pad_id,
                eos_id=codec.eos_id,
                batch_size=batch_size,
            )
    texts = [codec.decode(r[m].tolist()) for r, m in zip(rollout.tokens, rollout.mask, strict=True)]
    scores = torch.empty(len(ids)) if shared.score_head is not None else None
    divergence, tokens = 0.0, 0
    for index in rollout.by_length(batch_size):
        part = rollout.rows(index)
        if role not in ("base", "reference"):
            divergence += exact_kl(shared, role, part, temperature)
            tokens += int(part.mask.sum())
        if scores is not None:
            scores[index.cpu()] = shared.scores(part).cpu()
    truths = None
    if truth:
        written = [codec.prompt_text(prompt) for prompt in prompts]
        truths = torch.tensor([toy.true_reward(p, t) for p, t in zip(written, texts, strict=True)])
    return Measured(
        texts=texts,
        lengths=rollout.response_length.cpu(),
        ended=rollout.ended.cpu(),
        kl=divergence / tokens if tokens else None,
        scores=scores,
        truths=truths,
    )


def exact_kl(shared: SharedBase, role: str, rollout: Rollout, temperature: float) -> float:
    """Σ_t KL(π_role(·|s_t) || π_reference(·|s_t)) in nats over the response tokens of a batch."""
    mask = rollout.mask
    shared.activate(role)
    ours = shared.response_hidden(rollout)[mask]
    shared.activate("reference")
    theirs = shared.response_hidden(rollout)[mask]
    total = 0.0
    for a, b in zip(ours.split(1024), theirs.split(1024), strict=True):
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


def compare_with_sft(
    run: Run, codec: Codec, prompts: Sequence[Prompt], device: torch.device
) -> tuple[dict[str, float], tuple[str, dict[str, str]]]:
    """Load the adapter that a stage has just written and compare it with SFT on held-out prompts."""
    recipe = run.loaded.recipe
    options = recipe.evaluate
    shared = SharedBase(load_base(run, device), run.path, run.parent("sft"))
    chosen = list(prompts)[: options.max_samples]
    measured = [
        measure(
            shared,
            role,
            codec,
            chosen,
            seed=recipe.seed,
            max_prompt_length=options.max_prompt_length,
            response_length=options.response_length,
            temperature=options.temperature,
            batch_size=options.batch_size,
            truth=recipe.data.source == "toy",
        )
        for role in ("reference", "policy")
    ]
    return compare(*measured), sample_of(codec, chosen, *measured)


def sample_of(codec: Codec, prompts: Sequence[Prompt], before: Measured, after: Measured) -> tuple[str, dict[str, str]]:
    """The first prompt whose answer changed, with both answers."""
    changed = (i for i, (a, b) in enumerate(zip(before.texts, after.texts, strict=True)) if a != b)
    at = next(changed, 0)
    return codec.prompt_text(prompts[at]), {"SFT": before.texts[at], "now": after.texts[at]}
