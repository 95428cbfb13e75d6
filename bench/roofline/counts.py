"""What a step of PPO, RLOO or GRPO computes and moves at least, counted from a recipe and the sizes of its model.

Operations of products and attention, and bytes that have to cross the card's memory: weights once for each pass of a
micro-batch, keys and values, and each tensor between two products written and read once. Norms, softmax, rotary
embedding, activation functions, padding and launches of kernels are left out. So a time is the least for kernels that
pass tensors through the card's memory; one that fuses two products may take less.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

from peakmem import cards
from peakmem.cards import Rates
from rlhf.errors import UserError
from rlhf.plan.projection import decoding_step_bytes
from rlhf.plan.weights import ADAPTER_BYTES, NF4_BYTES, NUMBER_BYTES, Form, bytes_of_product, llama_layer
from rlhf.recipe import OnlineName, OnlineOptions, Ppo, Recipe

# Bytes that AdamW moves for a weight: weight and two moments read and written, gradient read; moments of 8 or 32 bits.
OPTIMIZER_BYTES = {"adamw_8bit": 16, "paged_adamw_8bit": 16}
ADAMW_BYTES = 28
INPUTS = ("q_proj", "k_proj", "v_proj")  # the products that read a layer's input


@dataclass(frozen=True)
class LeastWork:
    """Operations and bytes of a phase."""

    flops: float = 0.0
    moved: float = 0.0

    def __add__(self, other: "LeastWork") -> "LeastWork":
        return LeastWork(self.flops + other.flops, self.moved + other.moved)

    def times(self, count: float) -> "LeastWork":
        """Return this work `count` times."""
        return LeastWork(self.flops * count, self.moved * count)

    def seconds(self, card: Rates) -> float:
        """Return the least seconds at a card's rates."""
        return max(card.seconds(self.flops, self.moved))


class RowSizes(NamedTuple):
    """Tokens, pairs of a query and a key that attention forms, and the same of the tokens whose states are used."""

    tokens: float
    pairs: float
    wanted: float
    wanted_pairs: float

    @classmethod
    def of(cls, count: float, prompt: float, response: int, copies: int = 1, last_only: bool = False) -> "RowSizes":
        """Return the sizes of `count` responses with their prompts, each computed once for `copies` responses.

        The states before each response token are used, or with `last_only` those of the last token.
        """
        own = response * prompt + response * (response + 1) / 2  # a query at position t attends to t + 1 keys
        pairs = count * (prompt * (prompt + 1) / 2 / copies + own)
        tokens = count * (prompt / copies + response)
        if last_only:
            return cls(tokens, pairs, count, count * (prompt + response))
        return cls(tokens, pairs, count * response, count * (own - response))


@dataclass(frozen=True)
class Decoder:
    """Sizes of a decoder and of its adapters, and the form of its weights."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    rank: int = 0
    targets: frozenset[str] = frozenset()  # products with adapters
    adapted: range = range(0)  # layers with adapters
    size: int = 2  # bytes of a number
    packed: bool = False  # the layers' weights are NF4

    @classmethod
    def of(cls, recipe: Recipe) -> "Decoder":
        """Return the sizes in a recipe. Raises UserError where they are not those of a plain decoder."""
        shape = recipe.model.architecture
        vocab = shape and (shape.vocab_size or recipe.tokenizer.vocab_size)
        if shape is None or not vocab:
            raise UserError("the roofline needs model.architecture with vocab_size")
        if experts := sorted(key for key in shape.others() if "expert" in key):
            raise UserError(f"the roofline counts no mixture of experts (model.architecture.{experts[0]})")
        numbers = recipe.lora.layer_numbers(shape.num_hidden_layers) or range(shape.num_hidden_layers)
        decoder = cls(
            shape.hidden_size,
            shape.intermediate_size,
            shape.num_hidden_layers,
            shape.num_attention_heads,
            shape.num_key_value_heads,
            shape.head_width,
            vocab,
            rank=recipe.lora.r,
            adapted=range(numbers[0], numbers[-1] + 1),
            size=NUMBER_BYTES[recipe.model.dtype],
            packed=recipe.model.quantization == "nf4",
        )
        targets = recipe.lora.target_modules
        return replace(decoder, targets=frozenset(decoder.linear if targets == "all-linear" else targets))

    @property
    def linear(self) -> dict[str, tuple[int, int]]:
        """Return the inputs and outputs of a layer's weights."""
        width = self.head_dim
        return llama_layer(self.hidden, self.intermediate, self.heads * width, self.kv_heads * width)

    def rank_of(self, number: int, name: str) -> int:
        """Return the rank of the adapter of a product in layer `number`, 0 without one."""
        return self.rank if number in self.adapted and name in self.targets else 0

    def adapter_weights(self, number: int) -> int:
        """Return the number of the adapters' weights in layer `number`."""
        return sum(self.rank_of(number, name) * (a + b) for name, (a, b) in self.linear.items())

    def forward_flops(self, number: int, rows: RowSizes, narrow: bool = False, adapter: bool = True) -> float:
        """Return the operations of a layer; `narrow`: at the wanted tokens only, but for keys and values."""
        total = 4 * (rows.wanted_pairs if narrow else rows.pairs) * self.heads * self.head_dim
        for name, (a, b) in self.linear.items():
            per_token = a * b + self.rank_of(number, name) * (a + b) * adapter
            total += 2 * self._tokens(name, rows, narrow) * per_token
        return total

    def backward_flops(self, number: int, rows: RowSizes, narrow: bool = False) -> float:
        """Return the operations for the gradients of a layer's input and adapters; its weights are frozen.

        Nothing below the lowest layer with adapters needs a gradient.
        """
        total = 8 * (rows.wanted_pairs if narrow else rows.pairs) * self.heads * self.head_dim
        for name, (a, b) in self.linear.items():
            to_input = not (number == self.adapted.start and name in INPUTS)
            per_token = a * b * to_input + self.rank_of(number, name) * (a * (1 + to_input) + 2 * b)
            total += 2 * self._tokens(name, rows, narrow) * per_token
        return total

    def between_products(self, rows: RowSizes, narrow: bool = False) -> float:
        """Return the bytes of a layer's tensors between products, each written and read once."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        numbers = rows.tokens * (self.hidden + 2 * kv)
        numbers += (rows.wanted if narrow else rows.tokens) * (self.hidden + 2 * q + 2 * self.intermediate)
        return 2 * self.size * numbers

    def weight_bytes(self, number: int, tokens: float, card: cards.Gpu, form: Form, merged: bool = False) -> float:
        """Return the bytes of a layer's weights and adapters for one pass over `tokens`.

        `merged`: a weight with an adapter is multiplied with as a copy that holds it.
        """
        total = 0.0 if merged else float(self.adapter_weights(number) * ADAPTER_BYTES)
        for name, (a, b) in self.linear.items():
            own: Form = "copy" if merged and self.rank_of(number, name) else form
            total += bytes_of_product(a, b, math.ceil(tokens), self.size, self.packed, own, card)
        return total

    def head(self, tokens: float, passes: float, products: int = 1) -> LeastWork:
        """Return the work of the output matrix: logits, and with 2 `products` also the gradient of its input."""
        matrix = self.hidden * self.vocab
        return LeastWork(
            2.0 * products * tokens * matrix, self.size * products * (passes * matrix + tokens * self.hidden)
        )

    def _tokens(self, name: str, rows: RowSizes, narrow: bool) -> float:
        return rows.wanted if narrow and name not in ("k_proj", "v_proj") else rows.tokens


@dataclass(frozen=True)
class LayerPasses:
    """Passes of rows through layers on a card; the lean trunk computes the last layer at the wanted tokens only."""

    decoder: Decoder
    card: cards.Gpu
    lean: bool
    form: Form = "library"  # in which weights are multiplied with

    @property
    def upper(self) -> range:
        """Return the layers that each role computes by itself; in the lean trunk all roles share those below."""
        return range(self.decoder.adapted.start if self.lean else 0, self.decoder.layers)

    def forward(self, rows: RowSizes, count: float, numbers: range, adapter: bool = True) -> LeastWork:
        """Return the work of a forward pass through some layers of rows in `count` micro-batches."""
        return self._sum(
            rows, count, numbers, lambda n, narrow: self.decoder.forward_flops(n, rows, narrow, adapter), 1
        )

    def backward(self, rows: RowSizes, count: float, numbers: range) -> LeastWork:
        """Return the work of a backward pass: gradients move as much as forward, and its tensors are read again."""
        return self._sum(rows, count, numbers, lambda n, narrow: self.decoder.backward_flops(n, rows, narrow), 1.5)

    def _sum(
        self, rows: RowSizes, count: float, numbers: range, flops: Callable[[int, bool], float], between: float
    ) -> LeastWork:
        total = LeastWork()
        for number in numbers:
            narrow = self.lean and number == self.decoder.layers - 1
            weights = self.decoder.weight_bytes(number, rows.tokens / count, self.card, self.form)
            moved = count * weights + between * self.decoder.between_products(rows, narrow)
            total += LeastWork(flops(number, narrow), moved)
        return total


def phases(recipe: Recipe, stage: OnlineName, prompt: float, share_prompts: bool = True) -> dict[str, LeastWork]:
    """Return the work of each phase of one step, with prompts of `prompt` tokens and responses as long as allowed.

    `share_prompts`: the lean trunk computes a prompt once for the responses to it in a micro-batch. Here all of them
    are in one, although the minibatches of an update are drawn at random.
    """
    options = recipe.online()[stage]
    decoder, card = Decoder.of(recipe), cards.gpu_of(recipe.hardware.name)
    passes = LayerPasses(decoder, card, recipe.hardware.trunk == "lean")

    def rows(micro: int, last_only: bool = False) -> RowSizes:
        copies = min(options.samples_per_prompt, micro) if passes.lean and share_prompts else 1
        return RowSizes.of(options.batch_size, prompt, options.response_length, copies, last_only)

    work = {f"rollout/{name}": part for name, part in _rollout(decoder, card, recipe, stage, prompt).items()}
    ends = rows(options.score_rows, last_only=True)
    work |= {f"score/{name}": part for name, part in _score(passes, options, rows(options.score_rows), ends).items()}
    trained = rows(options.per_device_train_batch_size)
    return work | {f"update/{name}": part for name, part in _update(passes, options, trained).items()}


def _has_critic(options: OnlineOptions) -> bool:
    """Return whether a critic with an adapter is computed and trained beside the policy."""
    return isinstance(options, Ppo) and options.value_model == "adapter"


def _score(passes: LayerPasses, options: OnlineOptions, scored: RowSizes, ends: RowSizes) -> dict[str, LeastWork]:
    """Return the work of scoring: `scored` for log-probabilities and values, `ends` for the reward model."""
    count, upper = math.ceil(options.batch_size / options.score_rows), passes.upper
    work: dict[str, LeastWork] = {}
    if upper.start:
        work["shared layers"] = passes.forward(scored, count, range(upper.start))
    once = passes.forward(scored, count, upper)
    if options.old_logprobs == "recompute":
        work["policy"] = once + passes.decoder.head(scored.wanted, count)
    if isinstance(options, Ppo) or options.kl_coef:
        work["reference"] = once + passes.decoder.head(scored.wanted, count)
    if _has_critic(options):
        work["value"] = once
    if options.model_scores:
        work["reward"] = passes.forward(ends, count, upper)
    return work


def _update(passes: LayerPasses, options: OnlineOptions, batch: RowSizes) -> dict[str, LeastWork]:
    """Return the work of all passes of an update over a batch, and of its optimizer steps."""
    decoder = passes.decoder
    steps = options.passes * options.num_mini_batches
    count = steps * math.ceil(options.batch_size / options.num_mini_batches / options.per_device_train_batch_size)
    trained = RowSizes(*(options.passes * size for size in batch))
    changed = range(decoder.adapted.start, decoder.layers)
    roles = ("policy", "value") if _has_critic(options) else ("policy",)
    work: dict[str, LeastWork] = {}
    if decoder.packed and options.update_4bit == "unpacked":
        passes = replace(passes, form="copy")
        copied = decoder.layers * sum(a * b for a, b in decoder.linear.values())
        work["copy"] = LeastWork(moved=copied * (NF4_BYTES + decoder.size))
    for role in roles:
        forward = passes.forward(trained, count, passes.upper)
        if role == "policy":  # the forward pass also makes the gradient of the log-probabilities
            forward += decoder.head(trained.wanted, count, 2)
        work[f"{role} forward"] = forward
        work[f"{role} backward"] = passes.backward(trained, count, changed)
        if options.gradient_checkpointing:
            work[f"{role} recomputed"] = passes.forward(trained, count, changed)
    weights = sum(decoder.adapter_weights(number) for number in decoder.adapted) * len(roles)
    work["optimizer"] = LeastWork(moved=weights * steps * OPTIMIZER_BYTES.get(options.optim, ADAMW_BYTES))
    return work


def _rollout(
    decoder: Decoder, card: cards.Gpu, recipe: Recipe, stage: OnlineName, prompt: float
) -> dict[str, LeastWork]:
    """Return the work of sampling: a copy of the weights where the recipe asks for one, prefill and decoding."""
    options = recipe.online()[stage]
    merged = options.rollout_weights == "merged"
    unpacked = decoder.packed and options.rollout_4bit == "unpacked"
    batches = math.ceil(options.batch_size / options.rollout_batch_size)
    count = options.batch_size / batches
    read = NF4_BYTES if decoder.packed else decoder.size
    work: dict[str, LeastWork] = {}
    for number in range(decoder.layers):
        for name, (a, b) in decoder.linear.items():
            rank = decoder.rank_of(number, name) * merged
            if unpacked or rank:
                copy = LeastWork(2.0 * rank * a * b, a * b * (read + decoder.size))
                work["copy"] = work.get("copy", LeastWork()) + copy.times(batches)

    def forward(rows: RowSizes) -> LeastWork:
        """Return the work of the layers without the bytes of their weights."""
        flops = sum(decoder.forward_flops(number, rows, adapter=not merged) for number in range(decoder.layers))
        return LeastWork(flops, decoder.layers * decoder.between_products(rows))

    prompts = count / options.samples_per_prompt
    filled = RowSizes.of(prompts, prompt, 0)
    form: Form = "copy" if unpacked else "library"
    weights = sum(decoder.weight_bytes(n, filled.tokens, card, form, merged) for n in range(decoder.layers))
    work["prefill"] = (forward(filled) + LeastWork(moved=weights) + decoder.head(prompts, 1)).times(batches)
    steps = options.response_length - 1  # the prefill gives the first token
    keys = prompt + options.response_length / 2  # of a query in a mean step
    step = forward(RowSizes(count, count * keys, count, count * keys)) + decoder.head(count, passes=0)
    step += LeastWork(moved=decoding_step_bytes(recipe, stage, prompt))  # the output matrix among them
    work["decode"] = step.times(steps * batches)
    return work
