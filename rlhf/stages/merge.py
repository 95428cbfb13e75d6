"""Merging of an adapter into its base: a plain checkpoint that transformers loads without peft."""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from rlhf.data.corpus import Corpus
from rlhf.data.pairs import encode_pairs
from rlhf.data.rows import Message
from rlhf.data.tokenize import DialogueTokenizer
from rlhf.errors import UserError
from rlhf.models.folders import share_weights
from rlhf.models.loading import load_base
from rlhf.models.precision import Model, dtype_of, mixed_precision
from rlhf.models.weights import attach_adapter
from rlhf.observe.telemetry import Telemetry
from rlhf.recipe import Recipe, StageName
from rlhf.recipe.schema import Merge, Rm
from rlhf.recipe.stages import REWARD_MODELS
from rlhf.run.directory import StageRun
from rlhf.run.finished import read_summary
from rlhf.run.layout import MODEL
from rlhf.stages.result import Result
from rlhf.terminal import say

ROWS, TOKENS = 4, 128  # held-out texts, and tokens of each, for comparing the models
EOS_OF_ANSWER = "{% if messages[-1]['role'] == 'assistant' %}{{ eos_token }}{% endif %}"
ROUNDING = {"float32": 1e-6, "bfloat16": 1e-2}  # nats per token, or score, that rounding the weights may cost


def run_stage(run: StageRun, device: torch.device, tokenizer: DialogueTokenizer, corpus: Corpus) -> Result:
    """Merge an adapter into its base and compare the two. Raises UserError if the merged model lost the adapter."""
    recipe = run.loaded.recipe
    options = recipe.options(Merge)
    if device.type == "cuda":
        device = torch.device("cpu")  # in full precision the base may not fit the card; a CPU is fast enough
    telemetry = Telemetry(device)
    is_reward = options.stage in REWARD_MODELS
    outputs, distance = (_scores, _rms) if is_reward else (_logprobs, _kl)
    heldout = _heldout_answers if is_reward else _heldout
    texts = [torch.tensor([text], device=device) for text in heldout(tokenizer, corpus, recipe)]

    with telemetry.phase("merge"):
        # Merging into 4-bit weights would round the adapter away, so 16-bit ones are merged.
        base = load_base(run.base, device, head="score" if is_reward else "lm", quantize=False)
        if is_reward:
            base.config.pad_token_id = tokenizer.pad_id  # the classifier reads the last token that is none
        base_bytes = sum(p.numel() * p.element_size() for p in base.parameters())  # merging changes none of the sizes
        of_base = outputs(base, texts)
        model = attach_adapter(base, run.parents.folder(options.stage))
        expected = outputs(model, texts)
        merged = model.merge_and_unload()
        if is_reward:
            merged = merged.to(dtype_of(base))  # as transformers loads it: the trained head is float32
        of_merged = outputs(merged, texts)
        effect, divergence = distance(expected, of_base), distance(expected, of_merged)
        _check_merged(effect, divergence, ROUNDING[recipe.model.dtype], "of score" if is_reward else "nats per token")
        if is_reward:
            _write_normalisation(merged, run, options.stage)
        _save(run, merged, tokenizer)
    size = sum(f.stat().st_size for f in (run.path / MODEL).glob("*.safetensors"))
    largest = (expected - of_merged).abs().max().item()
    metrics = {
        "adapter_effect": effect.item(),
        "base_bytes": base_bytes,
        "model_bytes": size,
    }
    if is_reward:
        metrics |= {"score_change_of_merging": divergence.item(), "largest_score_difference": largest}
    else:
        metrics |= {
            "kl_of_merging": divergence.item(),
            "top1_agreement": (expected.argmax(-1) == of_merged.argmax(-1)).float().mean().item(),
            "largest_logprob_difference": largest,
        }
    return Result(metrics, telemetry.costs())


def _check_merged(effect: Tensor, divergence: Tensor, rounding: float, unit: str) -> None:
    """Raise UserError if the merged model lost the adapter; say so where `rounding` may hide that.

    From base and adapter: `effect` is the distance to the base alone, `divergence` to the merged model, KL or root mean
    square in the `unit`.
    """
    if not divergence <= (0.1 * effect).clamp(min=rounding):  # NaN fails too
        raise UserError(
            f"merging lost the adapter: the merged model is {divergence:.2g} {unit} away from base and adapter, the "
            f"base alone {effect:.2g}"
        )
    if effect.item() < rounding:
        say(
            f"merge: the adapter changes the base by {effect:.2g} {unit}; rounding may hide so little, so this "
            "cannot tell whether the merged model has it"
        )


def _write_normalisation(merged: PreTrainedModel, run: StageRun, stage: StageName) -> None:
    """Write into config.json the mean and standard deviation of a reward model's scores of held-out answers."""
    summary = read_summary(run.parents.folder(stage))
    assert summary is not None  # a stage's parents are finished
    for key in ("score_mean", "score_sd"):
        setattr(merged.config, key, summary.metrics.get(f"member_1_{key}", summary.metrics[key]))


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


def _heldout(tokenizer: DialogueTokenizer, corpus: Corpus, recipe: Recipe) -> list[list[int]]:
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
    return [text[-TOKENS:] for text in texts]


def _heldout_answers(tokenizer: DialogueTokenizer, corpus: Corpus, recipe: Recipe) -> list[list[int]]:
    """Return the first held-out answers that reward models are measured on, with their prompts."""
    options = recipe.options(Rm, recipe.options(Merge).stage)
    pairs, _, _ = encode_pairs(tokenizer, corpus.pairs.test[: options.max_eval_samples], options)
    return [side.prompt + side.response for pair in pairs[:ROWS] for side in pair]


@torch.no_grad()
def _logprobs(model: Model, texts: Sequence[Tensor]) -> Tensor:
    """Return log-probabilities (tokens, V), float32, of the token after each token."""
    with mixed_precision(model):
        return torch.cat([model(input_ids=ids).logits[0].float().log_softmax(-1) for ids in texts])


@torch.no_grad()
def _scores(model: Model, texts: Sequence[Tensor]) -> Tensor:
    """Return a reward model's scores (texts,), float32."""
    with mixed_precision(model):
        return torch.cat([model(input_ids=ids).logits[:, 0].float() for ids in texts])


def _rms(a: Tensor, b: Tensor) -> Tensor:
    """Return the root mean square of the differences."""
    return (a - b).square().mean().sqrt()


def _kl(p: Tensor, q: Tensor) -> Tensor:
    """Return KL(p || q) in nats per token, from log-probabilities (tokens, V)."""
    return (p.exp() * (p - q)).sum(-1).mean()
