"""The bits of the lean trunk in float32 on a CPU: its arithmetic at a released record's commit, written out.

Recipe cpu-smollm2-sums/v1 has a record of commit 58447a2f. Here are its operations on numbers in the order of that
commit, with the tensors' layout in memory, and without the trunk's code. So both sides run the same kernels of torch,
which the processor chooses. Adapters are merged and their scaling is 2, as wherever that recipe uses them. Not pinned:
products that stay apart from their adapters, and other scalings, which round differently since 6acf562a.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rlhf.data.batch import collate
from rlhf.models.lean.trunk import LeanTrunk, RoleTrunk
from rlhf.models.matmul import ONEDNN
from rlhf.models.output_layer import response_statistics
from rlhf.recipe.stages import Role
from rlhf.rollout.decoding import Sampling
from rlhf.rollout.engine import sample
from tests.decoding_models import SIZES, activated
from tests.trunk_models import trunk_model

SCALING = 2.0
HEADS, KV_HEADS, HEAD_DIM = 9, 3, 64
WIDTHS = {  # of that recipe's layers: torch chooses kernels by them
    "hidden_size": HEADS * HEAD_DIM,
    "intermediate_size": 1536,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "initializer_range": 0.08,
}
EOS, PAD = 1, 0


def adapted(role: str) -> tuple[Any, Any]:
    """A model of two layers with adapters, and its base with that of a role."""
    peft = trunk_model(sizes=SIZES | WIDTHS, r=16, lora_alpha=32)
    for name, weight in peft.named_parameters():
        if "lora_" in name:
            weight.data /= 4
    return peft, activated(peft, role)


def rounded_up(count: int) -> int:
    """The number of tokens with padding, of less than 128."""
    return -(-count // 4) * 4


# -- a group of linear layers ----------------------------------------------------------------------------------------


def product(x: Tensor, y: Tensor, out: Tensor | None = None) -> Tensor:
    if not ONEDNN:
        return torch.mm(x, y) if out is None else torch.mm(x, y, out=out)
    found: Tensor = torch.ops.mkldnn._linear_pointwise(x, y.t(), None, "none", [], "")
    return found if out is None else out.copy_(found)


def normed(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    squares = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square()
    scale = (squares / x.shape[-1] + eps).rsqrt()
    return x * scale * weight, scale


def normed_backward(dz: Tensor, x: Tensor, scale: Tensor, weight: Tensor) -> Tensor:
    weighted = dz * weight
    mean = (torch.linalg.vecdot(weighted, x) / x.shape[-1]).unsqueeze(-1)
    return weighted.addcmul(x, mean * scale * scale, value=-1) * scale


def gated_backward(dz: Tensor, x: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    dx = torch.empty_like(x)
    to_gate, to_up = dx.chunk(2, -1)
    to_up.copy_(dz * F.silu(gate))
    to_gate.copy_(torch.ops.aten.silu_backward(dz * up, gate))
    return dx


class Turn(NamedTuple):
    """Rotary embedding of the first heads of each token, by angles whose cosines and sines are (1 or B, T, D/2)."""

    cos: Tensor
    sin: Tensor
    heads: int

    def apply_(self, y: Tensor, sign: int) -> Tensor:
        cos, sin = self.cos.unsqueeze(2), self.sin.unsqueeze(2)
        first, second = y.view(*y.shape[:2], -1, HEAD_DIM)[:, :, : self.heads].chunk(2, -1)
        turned = first * sin
        first.mul_(cos).addcmul_(second, sin, value=-sign)
        second.mul_(cos).add_(turned, alpha=sign)
        return y


class Group(NamedTuple):
    """Linear layers with the same input: their weights and adapters, and what comes before and after the product."""

    weights: list[Tensor]
    adapters: list[tuple[Tensor, Tensor]]  # A and B of each, or none at all
    norm: tuple[Tensor, float] | None
    gate: bool
    turn: Turn | None

    def z(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if self.norm:
            return normed(x, *self.norm)
        if self.gate:
            gate, up = x.chunk(2, -1)
            return F.silu(gate) * up, x
        return x, x

    def merged(self) -> Tensor:
        pairs = zip(self.weights, self.adapters, strict=True)
        return torch.cat([torch.addmm(weight, b, a, alpha=SCALING) for weight, (a, b) in pairs]).detach()


class Node(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, residual: Tensor | None, *_adapters: Tensor) -> Tensor:
        ctx.group, ctx.x = group, x
        z, _ = group.z(x.flatten(0, -2))
        if group.adapters:
            y = product(z, group.merged().t())
        else:
            y = z.new_empty(len(z), sum(map(len, group.weights)))
            for weight, own in zip(group.weights, y.split([*map(len, group.weights)], 1), strict=True):
                product(z, weight.t(), out=own)
        y = y.view(*x.shape[:-1], -1)
        if group.turn:
            group.turn.apply_(y, 1)
        return y if residual is None else y + residual

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        group, x, dy = ctx.group, ctx.x.flatten(0, -2), gradients[0]
        to_residual = dy
        if group.turn:
            dy = group.turn.apply_(dy.clone(memory_format=torch.contiguous_format), -1)
        dy = dy.flatten(0, -2)
        z, saved = group.z(x)
        columns = dy.split([*map(len, group.weights)], 1)
        low_gradients = [
            torch.mm(b.t(), own.t()) * SCALING for own, (_, b) in zip(columns, group.adapters, strict=True)
        ]
        ranks = [len(a) for a, _ in group.adapters]
        to_a = torch.mm(torch.cat(low_gradients), z).split(ranks)
        low = torch.mm(torch.cat([a for a, _ in group.adapters]), z.t()).split(ranks)
        to_b = [(torch.mm(one, own) * SCALING).t() for one, own in zip(low, columns, strict=True)]
        dx = None
        if ctx.needs_input_grad[0]:
            dx = product(dy, group.merged())
            if group.norm:
                dx = normed_backward(dx, x, saved, group.norm[0])
            elif group.gate:
                dx = gated_backward(dx, x)
            dx = dx.view(ctx.x.shape)
        to_adapters = [gradient for pair in zip(to_a, to_b, strict=True) for gradient in pair]
        return dx, None, to_residual if ctx.needs_input_grad[2] else None, *to_adapters


def linear(x: Tensor, role: str, layers: Sequence[nn.Module], **steps: Any) -> Tensor:
    """The results of layers with the same input, side by side. `steps`: fields of `Group`, and `residual`."""
    adapters, weights = [], []
    for layer in layers:
        peft: Any = layer
        weights.append(peft.base_layer.weight)
        if role != "base":
            adapters.append((peft.lora_A[role].weight, peft.lora_B[role].weight))
    residual = steps.pop("residual", None)
    group = Group(weights, adapters, **{"norm": None, "gate": False, "turn": None} | steps)
    found: Tensor = Node.apply(x, group, residual, *(weight for pair in adapters for weight in pair))
    return found


# -- decoder layers --------------------------------------------------------------------------------------------------


Attend = Callable[[int, Tensor, Tensor, Tensor, bool], Tensor]


class Places(NamedTuple):
    """Where tokens (1 or B, T) stand, which of them the last layer needs, and how they attend to each other."""

    positions: Tensor
    attend: Attend
    needed: Tensor | None = None  # positions of those that the last layer needs; None for all
    select: Callable[[Tensor], Tensor] | None = None


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    mask = None if mask is None else mask[:, None]
    return F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, enable_gqa=True).transpose(1, 2)


def final_states(base: Any, role: str, x: Tensor, places: Places) -> Tensor:
    """Hidden states after the final norm, of the tokens that the last layer needs."""
    decoder, eps = base.model, base.config.rms_norm_eps
    tables = decoder.rotary_emb(x, torch.arange(64)[None])
    cos, sin = (table[0].chunk(2, -1)[0] for table in tables)

    def turn(positions: Tensor, heads: int) -> Turn:
        return Turn(cos[positions], sin[positions], heads)

    for number, layer in enumerate(decoder.layers):
        own, mlp, norm = layer.self_attn, layer.mlp, (layer.input_layernorm.weight, eps)
        last = number == len(decoder.layers) - 1 and places.needed is not None
        if last:
            assert places.select and places.needed is not None
            heads = turn(places.positions, KV_HEADS)
            kv = linear(x, role, [own.k_proj, own.v_proj], norm=norm, turn=heads)
            k, v = kv.unflatten(-1, (-1, HEAD_DIM)).chunk(2, 2)
            x = places.select(x)
            q = linear(x, role, [own.q_proj], norm=norm, turn=turn(places.needed, HEADS)).unflatten(-1, (-1, HEAD_DIM))
        else:
            heads = turn(places.positions, HEADS + KV_HEADS)
            qkv = linear(x, role, [own.q_proj, own.k_proj, own.v_proj], norm=norm, turn=heads)
            q, k, v = qkv.unflatten(-1, (-1, HEAD_DIM)).split([HEADS, KV_HEADS, KV_HEADS], 2)
        mixed = places.attend(number, q, k, v, last)
        x = linear(mixed.flatten(2), role, [own.o_proj], residual=x)
        gate_up = linear(x, role, [mlp.gate_proj, mlp.up_proj], norm=(layer.post_attention_layernorm.weight, eps))
        x = linear(gate_up, role, [mlp.down_proj], gate=True, residual=x)
    found: Tensor = decoder.norm(x)
    return found


def chosen(x: Tensor, positions: Tensor) -> Tensor:
    return x.gather(1, positions[..., None].expand(-1, -1, x.shape[-1]))


def padded(x: Tensor) -> Tensor:
    """States or positions (B, T, …) with zeros up to the length that the trunk takes."""
    return torch.cat([x, x.new_zeros(len(x), rounded_up(x.shape[1]) - x.shape[1], *x.shape[2:])], 1)


# -- an update -------------------------------------------------------------------------------------------------------

PROMPTS = [[5, 9, 3, 7, 12], [11, 4], [8, 8, 21]]
NUMBERS = [0, 0, 1, 1, 1, 2]
RESPONSES = [[20, 31, 1], [7, 7, 19, 40, 2], [33], [50, 61, 1], [9, 14, 22, 1], [3, 28]]
WIDTH = max(map(len, RESPONSES))


def rows_of_their_own(base: Any, ids: Tensor) -> Tensor:
    """Hidden states (B, R, H) before the response tokens, of rows (B, T) with a prompt in each."""
    before = torch.tensor([len(PROMPTS[number]) - 1 for number in NUMBERS])[:, None] + torch.arange(WIDTH)
    needed = padded(before.clamp(max=ids.shape[1] - 2))
    states = padded(base.model.embed_tokens(ids).detach())
    mask = torch.arange(states.shape[1]) <= needed[..., None]

    def attend(_number: int, q: Tensor, k: Tensor, v: Tensor, last: bool) -> Tensor:
        return attention(q, k, v, mask if last else None)

    positions = torch.arange(states.shape[1])[None]
    places = Places(positions, attend, needed, lambda x: chosen(x, needed))
    return final_states(base, "policy", states, places)[:, :WIDTH]


def shared_prompts(base: Any, ids: Tensor) -> Tensor:
    """The same, with each prompt once: all prompts (P, S), then all responses (B, R - 1), in one row of tokens."""
    lengths = torch.tensor([*map(len, PROMPTS)])
    longest, slots, numbers = int(lengths.max()), torch.arange(WIDTH - 1), torch.tensor(NUMBERS)
    in_rows = (lengths[numbers, None] + slots).clamp(max=ids.shape[1] - 1)
    in_prompt = torch.arange(longest)
    last_of_prompt = lengths[:, None] - 1

    def in_one_row(prompts: Tensor, responses: Tensor) -> Tensor:
        return padded(torch.cat([prompts.flatten(0, 1), responses.flatten(0, 1)])[None])

    def parts(x: Tensor, length: int) -> tuple[Tensor, Tensor]:
        border = len(PROMPTS) * length
        responses = x[0, border : border + len(NUMBERS) * len(slots)]
        return x[0, :border].unflatten(0, (-1, length)), responses.unflatten(0, (-1, len(slots)))

    of_prompt = in_prompt <= last_of_prompt[..., None]
    to_prompt = (in_prompt < lengths[numbers, None])[:, None].expand(-1, len(slots), -1)
    to_own = (slots <= slots[:, None]).expand(len(NUMBERS), -1, -1)
    of_response = torch.cat([to_prompt, to_own], 2)

    def attend(_number: int, q: Tensor, k: Tensor, v: Tensor, last: bool) -> Tensor:
        (k_prompt, k_own), (v_prompt, v_own) = parts(k, longest), parts(v, longest)
        q_prompt, q_own = parts(q, 1 if last else longest)
        prompts = attention(q_prompt, k_prompt, v_prompt, of_prompt if last else None)
        k_all = torch.cat([k_prompt[numbers], k_own], 1)
        v_all = torch.cat([v_prompt[numbers], v_own], 1)
        return in_one_row(prompts, attention(q_own, k_all, v_all, of_response))

    def select(x: Tensor) -> Tensor:
        prompts, responses = parts(x, longest)
        return in_one_row(chosen(prompts, last_of_prompt), responses)

    first_rows = torch.tensor([NUMBERS.index(number) for number in range(len(PROMPTS))])
    states = base.model.embed_tokens(ids).detach()
    tokens = in_one_row(states[first_rows, :longest], chosen(states, in_rows))
    positions = in_one_row(in_prompt.repeat(len(PROMPTS), 1), in_rows)
    needed = in_one_row(last_of_prompt, in_rows)
    before, inside = parts(final_states(base, "policy", tokens, Places(positions, attend, needed, select)), 1)
    return torch.cat([before[numbers], inside], 1)


@pytest.mark.parametrize("states_of", [rows_of_their_own, shared_prompts])
def test_an_update_has_the_released_bits(states_of):
    """Hidden states, log-probabilities, entropies, and the gradients of all A and B."""
    peft, base = adapted("policy")
    policy = {name: weight for name, weight in peft.named_parameters() if ".policy." in name}
    rollout = collate([PROMPTS[number] for number in NUMBERS], RESPONSES, PAD, EOS)
    if states_of is shared_prompts:
        rollout = replace(rollout, prompt_numbers=torch.tensor(NUMBERS))
    weights = torch.randn(len(NUMBERS), WIDTH, generator=torch.Generator().manual_seed(0))

    lean = LeanTrunk(base)
    with lean.merging("policy"):
        states = lean.response_hidden("policy", rollout)
        found = response_statistics(base, states, rollout, 1.0, "value", few_sizes=True)
        (found.logp * weights).sum().backward()
    gradients = {name: weight.grad for name, weight in policy.items()}
    for weight in policy.values():
        weight.grad = None

    expected = states_of(base, rollout.ids)
    mask, output = rollout.mask, base.lm_head.weight
    count, tokens = int(mask.sum()), rollout.tokens[mask]
    extra = rounded_up(count) - count
    tokens, slopes = F.pad(tokens, (0, extra)), F.pad(weights[mask], (0, extra))
    logits = product(F.pad(expected.detach()[mask], (0, 0, 0, extra)), output.t())
    normaliser = logits.logsumexp(1)
    logp = logits.gather(1, tokens[:, None]).squeeze(1) - normaliser
    every_logp = logits - normaliser[:, None]
    p = every_logp.exp()
    entropies = -(every_logp * p).sum(1)
    slope = p.neg().scatter_add(1, tokens[:, None], torch.ones(len(tokens), 1))
    expected[mask].backward((slopes[:, None] * product(slope, output))[:count])

    assert torch.equal(states[mask], expected[mask])
    assert torch.equal(found.logp[mask], logp[:count])
    assert found.entropy is not None and torch.equal(found.entropy[mask], entropies[:count])
    assert len(gradients) == 2 * 2 * 7
    for name, weight in policy.items():
        gradient = gradients[name]
        assert gradient is not None and weight.grad is not None and gradient.abs().sum() > 0
        assert torch.equal(gradient, weight.grad), name


# -- sampling --------------------------------------------------------------------------------------------------------

ROOM, COPIES = 16, 4


def drawn(logits: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    logp = logits.log_softmax(-1)
    heights = logp.exp().cumsum(-1)
    ids = torch.searchsorted(heights, uniforms[:, None] * heights[:, -1:], right=True).clamp(max=logits.shape[1] - 1)
    return ids.squeeze(1), logp.gather(1, ids).squeeze(1)


class Cache:
    """Keys and values of prompts (P, heads, D, S) and of responses (B, heads, D, room)."""

    def __init__(self, lengths: Tensor):
        self.lengths, self.copies = lengths.repeat_interleave(COPIES), COPIES
        self.padding = torch.empty(0)
        self.prompts: list[list[Tensor]] = []
        self.responses: list[list[Tensor]] = []
        self.filled = 0

    def add_prompts(self, k: Tensor, v: Tensor) -> None:
        self.prompts.append([x.permute(0, 2, 3, 1).contiguous() for x in (k, v)])
        shape = len(self.lengths), *self.prompts[-1][0].shape[1:3], ROOM
        self.responses.append([torch.empty(shape), torch.empty(shape)])
        self.padding = torch.arange(k.shape[1]) >= self.lengths[::COPIES, None]

    def keep(self, rows: Tensor) -> None:
        own = rows // self.copies
        self.prompts = [[x[own] for x in pair] for pair in self.prompts]
        self.responses = [[x[rows] for x in pair] for pair in self.responses]
        self.padding, self.lengths, self.copies = self.padding[own], self.lengths[rows], 1

    def attend(self, number: int, q: Tensor, k: Tensor, v: Tensor, _last: bool) -> Tensor:
        """The attention of one new token of each response; the queries of several heads share a key."""
        for cached, new in zip(self.responses[number], (k, v), strict=True):
            cached[..., self.filled] = new[:, 0]
        (prompt_k, prompt_v), filled = self.prompts[number], self.filled + 1
        own_k, own_v = (x[..., :filled] for x in self.responses[number])
        prompts, width = len(prompt_k), prompt_k.shape[-1]
        form = prompts, self.copies, KV_HEADS, HEADS // KV_HEADS

        def by_prompt(x: Tensor) -> Tensor:
            return x.transpose(1, 2).flatten(2, 3)

        def by_response(x: Tensor) -> Tensor:
            return x.view(prompts, KV_HEADS, self.copies, HEADS // KV_HEADS, -1).transpose(1, 2)

        queries = (q * HEAD_DIM**-0.5).reshape(*form, HEAD_DIM)
        to_prompt = torch.matmul(by_prompt(queries), prompt_k)
        to_prompt = to_prompt.masked_fill(self.padding[:, None, None], -torch.inf)
        to_own = torch.matmul(queries.flatten(0, 1), own_k).view(*form, filled)
        weights = torch.cat([by_response(to_prompt), to_own], -1).softmax(-1)
        of_prompt, of_own = weights.split([width, filled], -1)
        mixed = torch.matmul(of_own.flatten(0, 1), own_v.transpose(2, 3)).view(*form, HEAD_DIM)
        mixed = mixed + by_response(torch.matmul(by_prompt(of_prompt), prompt_v.transpose(2, 3)))
        return mixed.view(len(q), 1, -1, HEAD_DIM)


@torch.no_grad()
def responses(base: Any, role: str, prompts: list[list[int]], uniforms: Tensor) -> tuple[Tensor, Tensor, list[int]]:
    """Tokens and their log-probabilities (B, room), and how many rows each step had. `prompts` are in order of length.

    When at most half of the rows have not ended, a half with all of them goes on.
    """
    longest = max(map(len, prompts))
    ids = torch.tensor([prompt + [PAD] * (longest - len(prompt)) for prompt in prompts])
    lengths = torch.tensor([*map(len, prompts)])
    cache, last = Cache(lengths), lengths[:, None] - 1
    states = padded(base.model.embed_tokens(ids))
    mask = torch.arange(states.shape[1]) <= last[..., None]

    def attend(_number: int, q: Tensor, k: Tensor, v: Tensor, only_last: bool) -> Tensor:
        cache.add_prompts(k, v)
        return attention(q, k, v, mask if only_last else None)

    places = Places(torch.arange(states.shape[1])[None], attend, last, lambda x: chosen(x, last))
    hidden = final_states(base, role, states, places).squeeze(1).repeat_interleave(COPIES, 0)
    tokens, logprobs = torch.full(uniforms.shape, PAD), torch.zeros(uniforms.shape)
    rows, ended, counts = torch.arange(len(uniforms)), torch.zeros(len(uniforms), dtype=torch.bool), []
    for step in range(ROOM):
        counts.append(len(rows))
        new, logp = drawn(product(hidden, base.lm_head.weight.t()), uniforms[rows, step])
        tokens[rows, step], logprobs[rows, step] = new.where(~ended[rows], PAD), logp
        ended[rows] |= tokens[rows, step] == EOS
        left = int((~ended[rows]).sum())
        if left == 0:
            break
        if left <= (half := len(rows) // 2):
            kept = ended[rows].sort(stable=True).indices[:half].sort().values
            rows = rows[kept]
            cache.keep(kept)
        places = Places((cache.lengths + cache.filled)[:, None], cache.attend)
        hidden = final_states(base, role, base.model.embed_tokens(tokens[rows, step, None]), places).squeeze(1)
        cache.filled += 1
    return tokens, logprobs, counts


@pytest.mark.parametrize("role", ["policy", "base"])
def test_sampling_has_the_released_bits(role: Role):
    """Tokens and log-probabilities of several responses to prompts of several lengths; rows that end are dropped."""
    _, base = adapted(role)
    prompts = sorted(PROMPTS, key=len)
    torch.manual_seed(0)
    uniforms = torch.rand(len(prompts) * COPIES, ROOM)
    with torch.no_grad():
        base.lm_head.weight[EOS] *= 2  # likelier than others where it is likely at all
    tokens, logprobs, counts = responses(base, role, prompts, uniforms)
    assert len(set(counts)) > 2, "rows must be dropped twice for this test"

    lean, sampling = LeanTrunk(base), Sampling(8, ROOM, 1.0, 32, COPIES)
    tokenizer: Any = SimpleNamespace(pad_id=PAD, eos_id=EOS)
    torch.manual_seed(0)
    with lean.merging(role):
        found = sample(base, prompts, tokenizer, sampling, trunk=RoleTrunk(lean, role))
    mask, logp = found.mask, found.logprobs
    assert logp is not None and found.ended.any()
    assert torch.equal(found.tokens[mask], tokens[:, : mask.shape[1]][mask])
    assert torch.equal(logp[mask], logprobs[:, : mask.shape[1]][mask])
