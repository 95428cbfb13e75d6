"""What all ways to decode share: settings, steps that are captured on CUDA, the draw of a token, and what is kept."""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from rlhf.data.tokenize import SpecialIds
from rlhf.models.output_layer import logits_of
from rlhf.models.precision import Model
from rlhf.rollout.graphs import capturing
from rlhf.terminal import message_of, say

STEPS_BETWEEN_CHECKS_BY_DEVICE = {"cpu": 1, "cuda": 8}  # to look for ended rows, the host waits for the device
CAPTURES_BY_DEVICE = {"cpu": False, "cuda": True, "meta": False}  # most steps replay a graph; a rehearsal marks one
WORTH_A_GRAPH = 8  # replays below which a capture costs more than it saves
# Steps that must be left for a capture with fewer rows. Estimated, not measured: a capture takes 0.15 s, and half of 20
# rows of Llama-2-7B read as much less of keys and values in 100 steps on a card of 1.3 TB/s.
WORTH_DROPPING = 128


@dataclass(frozen=True)
class Sampling:
    """Settings of sampling: responses are drawn from softmax(logits / temperature).

    At temperature 0 the most likely token is taken, and log-probabilities are those of temperature 1.
    """

    max_prompt_length: int
    response_length: int
    temperature: float
    batch_size: int  # responses decoded together; changes memory, speed and rounding
    samples_per_prompt: int = 1  # responses to each prompt
    top_p: float = 1.0  # below 1: draw from the fewest tokens that together have this probability


@dataclass
class Rows:
    """The rows that are still decoded, n of a batch, with R slots for tokens. Steps change these tensors in place."""

    places: Tensor  # (n,) int64, in the batch
    uniforms: Tensor  # (n, R), the numbers in [0, 1) by which tokens are drawn
    tokens: Tensor  # (n, R) int64, padding in slots that are not filled
    logprobs: Tensor  # (n, R)
    ended: Tensor  # (n,) bool

    def __len__(self) -> int:
        return len(self.places)

    def select(self, index: Tensor) -> "Rows":
        """Return copies of some of the rows."""
        return Rows(**{name: tensor[index] for name, tensor in vars(self).items()})


class Decoding(ABC):
    """Decoding of the responses to one batch of prompts. All state lives in tensors that steps change in place.

    With several rows of `uniforms` for each prompt, as many responses to it are decoded side by side.
    """

    def __init__(self, model: Model, uniforms: Tensor, sampling: Sampling, tokenizer: SpecialIds):
        self.model, self.sampling = model, sampling
        self.eos_id, self.pad_id = tokenizer.eos_id, tokenizer.pad_id
        self.captures = CAPTURES_BY_DEVICE[uniforms.device.type]
        batch_size, self.room = uniforms.shape
        device = uniforms.device
        self.step = torch.zeros(1, dtype=torch.int64, device=device)
        ended = torch.zeros(batch_size, dtype=torch.bool, device=device)
        tokens = torch.full((batch_size, self.room), self.pad_id, device=device)
        logprobs = torch.zeros(batch_size, self.room, device=device)
        self.rows = Rows(torch.arange(batch_size, device=device), uniforms, tokens, logprobs, ended)
        self.results = [x.clone() for x in (tokens, logprobs)]  # of the whole batch

    def run(self) -> list[Tensor]:
        """Decode to the end. Return tokens and their log-probabilities.

        Each is (B, R). After EOS tokens are padding, and log-probabilities have no meaning. On CUDA most
        steps replay a captured graph.
        """
        graph: torch.cuda.CUDAGraph | None = None
        for step in self.steps():
            if step % STEPS_BETWEEN_CHECKS_BY_DEVICE[self.step.device.type] == 0:
                left = int((~self.rows.ended).sum())
                if left == 0:
                    break
                if self.worth_dropping(step, left):
                    self.drop_ended()
                    graph = None
            if self.open_window(step):
                self._wait()
                graph = None
            if graph is not None:
                graph.replay()
            else:
                self.advance()
                # The eager step above did the set-up that a capture must not.
                if self.captures and self.alike(step) >= WORTH_A_GRAPH:
                    graph = self._captured()
        self._wait()
        self.deliver()
        return self.results

    def _wait(self) -> None:
        """Wait for the replays of a graph that is dropped.

        Where memory is short, that of the graph goes back to the driver, and torch waits for the stream of the capture
        alone, not for the one of the replays.
        """
        if self.captures:
            self.step.item()

    def _captured(self) -> torch.cuda.CUDAGraph | None:
        """Return a step as a graph; None where it cannot be one, and then there are none in this process any more.

        Each graph has a separate memory pool. A shared pool outlives a dropped graph while a block in it lives, such as
        cuBLAS's workspace, and torch 2.11 asserts when the next capture enters it.
        """
        graph = torch.cuda.CUDAGraph()
        try:
            with capturing(graph):
                self.advance()
        except RuntimeError as error:  # among them those of CUDA
            say(f"note: decoding launches each kernel from now on: {message_of(error)}")
            self.captures = CAPTURES_BY_DEVICE[self.step.device.type] = False
            return None
        return graph

    def advance(self) -> None:
        """Feed the newest token of every row and draw the next one."""
        newest = self.rows.tokens.index_select(1, self.step)
        self.step += 1
        self._draw(self.states(newest))

    @abstractmethod
    def states(self, newest: Tensor) -> Tensor:
        """Return the hidden states (B, H) of the newest tokens (B, 1), from which the next ones are drawn."""

    @abstractmethod
    def drop_ended(self) -> None:
        """Continue without rows that have ended, of which there are at least half."""

    def open_window(self, step: int) -> bool:
        """Prepare what `step` reads; return whether that changed the shapes of a step."""
        return False

    def alike(self, step: int) -> int:
        """Return how many steps after this one have its shapes."""
        return self.room - 1 - step

    def worth_dropping(self, step: int, left: int) -> bool:
        """Return whether to continue without rows that have ended, if `left` have not.

        True when at most half of the rows are left, and where steps are captured, enough steps for another capture.
        """
        return left <= len(self.rows) // 2 and (not self.captures or self.room - step > WORTH_DROPPING)

    def steps(self) -> Iterable[int]:
        """Return the numbers of the decoding steps: the slots after the first, which the prefill has filled."""
        return range(1, self.room)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits (B, V) of hidden states (B, H)."""
        return logits_of(self.model, hidden)

    def _draw(self, hidden: Tensor) -> None:
        """Draw the token of this step for every row, from its hidden state (n, H)."""
        rows = self.rows
        uniforms = rows.uniforms.index_select(1, self.step).squeeze(1)
        ids, logp = draw_tokens(self.logits(hidden), uniforms, self.sampling.temperature, self.sampling.top_p)
        ids = ids.where(~rows.ended, self.pad_id)
        rows.tokens.index_copy_(1, self.step, ids.unsqueeze(1))
        rows.logprobs.index_copy_(1, self.step, logp.unsqueeze(1))
        rows.ended |= ids == self.eos_id

    def keep(self, index: Tensor) -> None:
        """Store the results of all rows, and continue with some of them."""
        self.deliver()
        self.rows = self.rows.select(index)

    def deliver(self) -> None:
        """Copy what the rows that are still decoded have so far into the results of the whole batch."""
        rows = self.rows
        for whole, part in zip(self.results, (rows.tokens, rows.logprobs), strict=True):
            whole[rows.places] = part


def draw_tokens(logits: Tensor, uniforms: Tensor, temperature: float, top_p: float = 1.0) -> tuple[Tensor, Tensor]:
    """Draw from softmax(logits / temperature) by inverting its distribution function at given numbers in [0, 1).

    Shapes: logits (B, V), uniforms (B,); returns ids (B,) int64 and their log-probabilities (B,) float32. At
    temperature 0 the ids are the most likely ones, with their log-probabilities at temperature 1. With `top_p` below 1
    only the fewest most likely tokens that together reach it are drawn (arXiv 1904.09751, section 3.1), and the
    log-probabilities are those among them.
    """
    logp = (logits.float() / (temperature or 1.0)).log_softmax(-1)
    if top_p < 1.0:
        logp = _nucleus(logp, top_p)
    if temperature:
        heights = logp.exp().cumsum(-1)
        ids = torch.searchsorted(heights, uniforms.unsqueeze(1) * heights[:, -1:], right=True)
        ids = ids.clamp(max=logits.shape[1] - 1)
    else:
        ids = logp.argmax(-1, keepdim=True)
    return ids.squeeze(1), logp.gather(1, ids).squeeze(1)


def _nucleus(logp: Tensor, top_p: float) -> Tensor:
    """Return log-probabilities (B, V) among the fewest most likely tokens that together reach `top_p`, others -inf."""
    ordered, order = logp.sort(descending=True)
    likelier = ordered.exp().cumsum(-1) - ordered.exp()  # probability of the tokens that are likelier
    kept = torch.full_like(logp, -torch.inf).scatter_(1, order, ordered.masked_fill(likelier >= top_p, -torch.inf))
    return kept.log_softmax(-1)


def repeated(x: Tensor, copies: int) -> Tensor:
    """Return each row `copies` times, side by side; x itself if that is once."""
    return x if copies == 1 else x.repeat_interleave(copies, 0)
