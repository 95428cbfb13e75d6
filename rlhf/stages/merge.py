"""Merging of an adapter into its base: a plain checkpoint that transformers loads without peft."""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from rlhf.data.corpus import Corpus
from rlhf.data.rows import Message
from rlhf.data.tokenize import DialogueTokenizer
from rlhf.errors import UserError
from rlhf.models.adapters import attach_adapter
from rlhf.models.checkpoints import share_weights
from rlhf.models.loading import load_base
from rlhf.models.precision import Model, dtype_of, mixed_precision
from rlhf.observe.telemetry import Telemetry
from rlhf.recipe.schema import Merge
from rlhf.recipe.stages import REWARD_MODELS
from rlhf.run.directory import StageRun
from rlhf.run.layout import ADAPTER, MODEL
from rlhf.terminal import say

ROWS, TOKENS = 4, 128  # held-out prompts, and tokens of each, for comparing the models
EOS_OF_ANSWER = "{% if messages[-1]['role'] == 'assistant' %}{{ eos_token }}{% endif %}"
ROUNDING = {"float32": 1e-6, "bfloat16": 1e-2}  # nats per token, or score, that rounding the weights may cost


def run_stage(run: StageRun, telemetry: Telemetry, tokenizer: DialogueTokenizer, corpus: Corpus) -> dict[str, float]:
    """Merge an adapter into its base and compare the two. Raises UserError if the merged model lost the adapter."""
    recipe = run.loaded.recipe
    stage = recipe.options(Merge).stage
    is_reward = stage in REWARD_MODELS
    distance = _rms if is_reward else _kl
    prompts, _ = tokenizer.encode_prompts(corpus.prompts("merge").test[:ROWS], recipe.evaluate.max_prompt_length)
    texts = [torch.tensor([prompt[-TOKENS:]], device=telemetry.device) for prompt in prompts]

    with telemetry.phase("merge"):
        # Merging into 4-bit weights would round the adapter away, so 16-bit ones are merged.
        base = load_base(run.base, telemetry.device, head="score" if is_reward else "lm", quantize=False)
        if is_reward:
            base.config.pad_token_id = tokenizer.pad_id  # the classifier reads the last token that is none
        base_bytes = sum(p.numel() * p.element_size() for p in base.parameters())  # merging changes none of the sizes
        of_base = _logits(base, texts)
        model = attach_adapter(base, run.folder(stage) / ADAPTER)
        expected = _logits(model, texts)
        merged = model.merge_and_unload()
        if is_reward:
            merged = merged.to(dtype_of(base))  # as transformers loads it: the trained head is float32
        effect, change = distance(expected, of_base), distance(expected, _logits(merged, texts))
        if not change <= (0.1 * effect).clamp(min=ROUNDING[recipe.model.dtype]):  # NaN fails too
            raise UserError(
                f"merging lost the adapter of {stage}: the merged model is {change:.2g} away from base and adapter, "
                f"the base alone {effect:.2g} ({'score' if is_reward else 'nats per token'})"
            )
        _save(run, merged, tokenizer)
    return {
        "adapter_effect": effect.item(),
        "score_change_of_merging" if is_reward else "kl_of_merging": change.item(),
        "base_bytes": base_bytes,
        "model_bytes": sum(file.stat().st_size for file in (run.path / MODEL).glob("*.safetensors")),
    }


def _save(run: StageRun, merged: PreTrainedModel, tokenizer: DialogueTokenizer) -> None:
    """Write the merged model with its tokenizer, and with the settings by which evaluations sample."""
    options, folder = run.loaded.recipe.evaluate, run.path / MODEL
    ids = {
        "bos_token_id": tokenizer.hf.bos_token_id,
        "eos_token_id": tokenizer.eos_id,
        "pad_token_id": tokenizer.pad_id,
    }
    sampling = {"temperature": options.temperature, "top_p": options.top_p, "top_k": 0}
    if merged.can_generate():
        merged.generation_config = GenerationConfig(do_sample=True, **sampling, **ids)
    merged.save_pretrained(folder)
    share_weights(folder / "config.json")
    if not tokenizer.write_chat_template():
        say("merge: a chat interface will give prompts other tokens than training did")
    elif not merged.can_generate() and not _end_answers(tokenizer):
        say("merge: the chat template does not end an answer as training did: score ids that end with EOS")
    tokenizer.hf.save_pretrained(folder)


def _end_answers(tokenizer: DialogueTokenizer) -> bool:
    """Let the chat template end a conversation's last answer as training did, with EOS. Return whether it does."""
    prompt, template = [Message("user", "Hello.")], tokenizer.hf.chat_template
    (row,), _ = tokenizer.encode([(prompt, "Yes?")], 1 << 20, 1 << 20)
    assert row and isinstance(template, str)
    messages = [{"role": "user", "content": "Hello."}, {"role": "assistant", "content": "Yes?"}]
    for ending in ("", EOS_OF_ANSWER):
        tokenizer.hf.chat_template = template + ending
        if tokenizer.hf.apply_chat_template(messages, return_dict=False) == row.prompt + row.response:
            return True
    tokenizer.hf.chat_template = template
    return False


@torch.no_grad()
def _logits(model: Model, texts: Sequence[Tensor]) -> Tensor:
    """Return logits, float32: (tokens, V) of the token after each token, or a reward model's scores (texts,)."""
    with mixed_precision(model):
        return torch.cat([model(input_ids=ids).logits[0].float() for ids in texts])


def _rms(a: Tensor, b: Tensor) -> Tensor:
    """Return the root mean square of the differences."""
    return (a - b).square().mean().sqrt()


def _kl(a: Tensor, b: Tensor) -> Tensor:
    """Return KL(p || q) in nats per token, of the distributions p and q that logits a and b (tokens, V) give."""
    log_p, log_q = a.log_softmax(-1), b.log_softmax(-1)
    return (log_p.exp() * (log_p - log_q)).sum(-1).mean()
