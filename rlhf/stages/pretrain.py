"""Pretraining: a tokenizer and a small Llama from random weights, the base of recipes that must run anywhere.

LoRA on random weights learns nothing, so a recipe without pretrained weights trains its own. 7B recipes skip this
stage.
"""

import torch
from datasets import Dataset
from transformers import DataCollatorForLanguageModeling, TrainingArguments

from rlhf.data import tokenize
from rlhf.data.corpus import Corpus
from rlhf.data.tokenize import DialogueTokenizer, Encoded
from rlhf.evaluation.likelihood import perplexity
from rlhf.models.checkpoints import share_weights
from rlhf.models.loading import new_base
from rlhf.observe.telemetry import Telemetry
from rlhf.run.directory import StageRun
from rlhf.run.layout import MODEL
from rlhf.stages.supervised.trainer import RunTrainer
from rlhf.stages.supervised.training import arguments, train
from rlhf.terminal.progress import working


def run_stage(run: StageRun, telemetry: Telemetry, untrained: DialogueTokenizer, corpus: Corpus) -> dict[str, float]:
    """Train a tokenizer and a base model from scratch, and measure the perplexity of held-out texts."""
    recipe = run.loaded.recipe
    options, architecture = recipe.pretrain, recipe.model.architecture
    assert options and architecture

    assert recipe.tokenizer.vocab_size
    texts = corpus.texts(untrained.template)
    training = texts.train[: options.max_samples]
    with working("pretrain: training the tokenizer, encoding"):
        tokenizer = DialogueTokenizer(tokenize.train(training, recipe.tokenizer.vocab_size), untrained.template)
        documents = tokenizer.encode_texts(training, options.max_length)
        heldout = tokenizer.encode_texts(texts.test[: options.max_eval_samples], options.max_length)

    torch.manual_seed(recipe.seed)
    model = new_base(architecture, tokenizer, recipe.model.dtype)
    model.to(telemetry.device)  # type: ignore[arg-type]  # transformers' decorator hides the signature
    trainer = RunTrainer(
        model=model,
        args=arguments(TrainingArguments, run, options),
        train_dataset=Dataset.from_list([{"input_ids": ids} for ids in documents]),
        data_collator=DataCollatorForLanguageModeling(tokenizer.hf, mlm=False),
    )
    train(trainer, run, telemetry, [len(ids) for ids in documents])

    folder = run.path / MODEL
    model.save_pretrained(folder)
    share_weights(folder / "config.json")
    tokenizer.hf.save_pretrained(folder)
    batch_size = options.per_device_train_batch_size
    with telemetry.phase("evaluate"), working("pretrain: evaluating on held-out texts"):
        return {
            "perplexity": perplexity(model, [Encoded([], ids) for ids in heldout], tokenizer.pad_id, batch_size),
            "parameters": sum(p.numel() for p in model.parameters()),
            "vocab_size": len(tokenizer.hf),
            "train_documents": len(training),
            "train_tokens": sum(map(len, documents)),
        }
