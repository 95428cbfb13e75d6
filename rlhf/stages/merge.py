"""Merging of an adapter into its base: a plain checkpoint that transformers loads without peft."""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from rlhf.data.corpus import Corpus
from rlhf.data.tokenize import DialogueTokenizer
from rlhf.errors import UserError
from rlhf.models.folders import share_weights
from rlhf.models.loading import load_base, load_tokenizer
from rlhf.models.nf4 import round_to_nf4
from rlhf.models.precision import Model, mixed_precision
from rlhf.models.weights import attach_adapter
from rlhf.observe.telemetry import Telemetry
from rlhf.recipe import Merge, Recipe
from rlhf.run.directory import StageRun
from rlhf.run.layout import MODEL
from rlhf.stages.corpus import load_corpus
from rlhf.stages.result import Result
from rlhf.terminal import say

ROWS, TOKENS = 4, 128  # held-out texts, and tokens of each, for comparing the models
ROUNDING = {"float32": 1e-6, "bfloat16": 1e-2}  # nats per token that rounding the merged weights may cost


def run_stage(run: StageRun, device: torch.device) -> Result:
    """Merge an adapter into its base and compare the two. Raises UserError if the merged model lost the adapter."""
    recipe = run.loaded.recipe
    options = recipe.options(Merge)
    if device.type == "cuda":
        device = torch.device("cpu")  # in full precision the base may not fit the card; a CPU is fast enough
    telemetry = Telemetry(device)
    tokenizer = load_tokenizer(run.base)
    texts = _heldout(tokenizer, load_corpus(run, tokenizer), recipe, device)

    with telemetry.phase("merge"):
        # Merging into 4-bit weights would round the adapter away, so 16-bit ones are merged.
        base = load_base(run.base, device, quantize=False)
        if options.base == "dequantized":
            round_to_nf4(base)
        base_bytes = sum(p.numel() * p.element_size() for p in base.parameters())  # merging changes none of the sizes
        base_logprobs = _logprobs(base, texts)
        model = attach_adapter(base, run.parents.folder(options.stage))
        expected = _logprobs(model, texts)
        merged = model.merge_and_unload()
        merged_logprobs = _logprobs(merged, texts)
        effect, divergence = _kl(expected, base_logprobs), _kl(expected, merged_logprobs)
        _check_merged(effect, divergence, ROUNDING[recipe.model.dtype])
        _save(run, merged, tokenizer)
    size = sum(f.stat().st_size for f in (run.path / MODEL).glob("*.safetensors"))
    metrics = {
        "kl_of_merging": divergence.item(),
        "adapter_effect": effect.item(),
        "top1_agreement": (expected.argmax(-1) == merged_logprobs.argmax(-1)).float().mean().item(),
        "largest_logprob_difference": (expected - merged_logprobs).abs().max().item(),
        "base_bytes": base_bytes,
        "model_bytes": size,
    }
    return Result(metrics, telemetry.costs())


def _check_merged(effect: Tensor, divergence: Tensor, rounding: float) -> None:
    """Raise UserError if the merged model lost the adapter; say so where `rounding` may hide that.

    In nats per token, from base and adapter: `effect` is the KL to the base alone, `divergence` to the merged model.
    """
    if not divergence <= (0.1 * effect).clamp(min=rounding):  # NaN fails too
        raise UserError(
            f"merging lost the adapter: KL of the merged model to base and adapter is {divergence:.2g} nats per "
            f"token, that of the base alone {effect:.2g}"
        )
    if effect.item() < rounding:
        say(
            f"merge: the adapter changes the base by {effect:.2g} nats per token, which rounding may hide: "
            "whether the merged model has it cannot be told from that"
        )


def _save(run: StageRun, merged: PreTrainedModel, tokenizer: DialogueTokenizer) -> None:
    """Write the merged model with its tokenizer, and with the settings by which evaluations sample."""
    options, folder = run.loaded.recipe.evaluate, run.path / MODEL
    ids = {
        "bos_token_id": tokenizer.hf.bos_token_id,
        "eos_token_id": tokenizer.eos_id,
        "pad_token_id": tokenizer.pad_id,
    }
    sampling = {"temperature": options.temperature, "top_p": options.top_p, "top_k": 0}
    merged.generation_config = GenerationConfig(do_sample=True, **sampling, **ids)
    merged.save_pretrained(folder)
    share_weights(folder / "config.json")
    if not tokenizer.write_chat_template():
        say("merge: a chat interface will tokenize prompts otherwise than training did")
    tokenizer.hf.save_pretrained(folder)


def _heldout(tokenizer: DialogueTokenizer, corpus: Corpus, recipe: Recipe, device: torch.device) -> list[Tensor]:
    """Return the ends of the first held-out dialogues that fit SFT's limits; SFT has checked that some do.

    A recipe without SFT has held-out prompts in their place.
    """
    if recipe.sft is None:
        prompts = corpus.prompts("merge").test[:ROWS]
        texts, _ = tokenizer.encode_prompts(prompts, recipe.evaluate.max_prompt_length)
    else:
        options = recipe.sft
        rows = [(row.prompt, row.response) for row in corpus.demonstrations().test[: options.max_eval_samples]]
        encoded = tokenizer.encode(rows, options.max_prompt_length, options.max_length)[0]
        texts = [row.prompt + row.response for row in encoded if row][:ROWS]
    return [torch.tensor([text[-TOKENS:]], device=device) for text in texts]


@torch.no_grad()
def _logprobs(model: Model, texts: Sequence[Tensor]) -> Tensor:
    """Return log-probabilities (tokens, V), float32, of the token after each token."""
    with mixed_precision(model):
        return torch.cat([model(input_ids=ids).logits[0].float().log_softmax(-1) for ids in texts])


def _kl(p: Tensor, q: Tensor) -> Tensor:
    """Return KL(p || q) in nats per token, from log-probabilities (tokens, V)."""
    return (p.exp() * (p - q)).sum(-1).mean()
