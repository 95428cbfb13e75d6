"""Sampling by transformers' own `generate`: its caches and masks serve every type of causal language model."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList

from rlhf.data.tokenize import SpecialIds, pad_right
from rlhf.models.precision import Model
from rlhf.rollout.decoding import Sampling, draw_tokens, repeated


class Generating:
    """Decoding of the responses to one batch of prompts by `generate`.

    uniforms (B, R): the numbers in [0, 1) by which tokens are drawn, in equal parts for the responses to each prompt.
    """

    def __init__(
        self, model: Model, prompts: Sequence[list[int]], uniforms: Tensor, sampling: Sampling, tokenizer: SpecialIds
    ):
        self.model, self.tokenizer, self.uniforms, self.sampling = model, tokenizer, uniforms, sampling
        ids = pad_right([prompt[::-1] for prompt in prompts], tokenizer.pad_id).flip(1)  # prompts end together
        lengths = torch.tensor([len(prompt) for prompt in prompts])
        mask = torch.arange(ids.shape[1]) >= ids.shape[1] - lengths[:, None]
        self.ids, self.mask = (x.to(uniforms.device) for x in (ids, mask.long()))

    def run(self) -> list[Tensor]:
        """Return tokens and their log-probabilities, each (B, R); after EOS they have no meaning."""
        rows, room = self.uniforms.shape
        ids, mask = (repeated(x, rows // len(self.ids)) for x in (self.ids, self.mask))
        draw = _Draw(self.uniforms, self.sampling)
        run: Any = self.model.generate
        sequences: Tensor = run(
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=room,
            do_sample=False,  # `draw` leaves one token
            eos_token_id=self.tokenizer.eos_id,
            pad_token_id=self.tokenizer.pad_id,
            logits_processor=LogitsProcessorList([draw]),
        )
        new = sequences[:, ids.shape[1] :]
        return [F.pad(new, (0, room - new.shape[1]), value=self.tokenizer.pad_id), draw.logprobs]


class _Draw(LogitsProcessor):
    """Draws the next token of each row by its own number, and leaves no other."""

    def __init__(self, uniforms: Tensor, sampling: Sampling):
        self.uniforms, self.sampling, self.step = uniforms, sampling, 0
        self.logprobs = torch.zeros_like(uniforms)

    def __call__(self, _ids: Tensor, scores: Tensor) -> Tensor:
        drawn = self.uniforms[:, self.step]
        ids, self.logprobs[:, self.step] = draw_tokens(scores, drawn, self.sampling.temperature, self.sampling.top_p)
        self.step += 1
        return torch.full_like(scores, -torch.inf).scatter_(1, ids[:, None], 0.0)
