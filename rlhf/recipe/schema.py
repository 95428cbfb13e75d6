"""The keys of a recipe: one frozen, strictly typed class for each section of recipe.yaml.

Unknown keys, wrong types and impossible combinations are refused in one line that names the file, the key and the way
out. Keys have the names of TRL and transformers where those exist. Lengths are in tokens, learning rates per optimizer
step, memory in GB (10^9 bytes). docs/recipes.md explains every key.

Every whole number has an upper bound far above what one machine can use. A number beyond it is a typing error that
would otherwise hang, fill the memory or crash a library. docs/recipes.md lists the bounds.
"""

import math
import re
from typing import Annotated, Any, Literal, Self

from pydantic import ConfigDict, Field, model_validator

from rlhf.recipe.bounds import (
    BatchRows,
    Decay,
    Devices,
    Epochs,
    Fraction,
    LayerNumber,
    Layers,
    MadeRows,
    MadeRowsOrNone,
    Name,
    NonNegative,
    Passes,
    Positive,
    Rows,
    Seed,
    Steps,
    Temperature,
    Threads,
    Tokens,
    Vocabulary,
    Width,
)
from rlhf.recipe.schema_online import GROUPS, ONLINE, Grpo, OnlineOptions, Ppo, Rloo
from rlhf.recipe.strict import AsTuple, Section

SHARED = ("sft", "rm", *ONLINE, "dpo")  # stages that `hardware.count` processes work on together
SMALLEST_TRAINED = 261  # tokens: 256 bytes, padding, beginning, end and the marks of the two speakers


VariableName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,63}$")]  # of a chat template


class Hardware(Section):
    """The device that the recipe is made for, and the processes that train together."""

    name: Name  # the name for `--hw`: cpu, 4090, h100
    device: Literal["cpu", "cuda"]
    memory_gb: Positive | None = None  # of the card; null on a CPU
    threads: Threads | None = None  # pinned on a CPU: results are bit-equal only at equal thread counts
    count: Devices = 1  # devices, each with a process that works on its part of every batch
    engine: Literal["ddp", "fsdp", "deepspeed"] = "ddp"  # ddp: all weights on each; others: shards
    deterministic: bool = False  # on CUDA; a CPU always is (docs/reproducibility.md)
    trunk: Literal["library", "lean"] = "library"  # passes of PPO, RLOO and GRPO; lean: rlhf/models/trunk.py


class Architecture(Section):
    """The shape of the model, in the keys of transformers' configuration of its type (`transformers.LlamaConfig` …).

    These keys every architecture has; any other key of that configuration may stand beside them (head_dim,
    rope_parameters, …) and is checked against it when the model is built. A base that is built here gets this shape.
    One that is loaded must have it, so that memory can be predicted before anything is downloaded.
    """

    model_config = ConfigDict(extra="allow", frozen=True, strict=True, protected_namespaces=())

    model_type: Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]{0,63}$")] = "llama"
    vocab_size: Vocabulary | None = None  # null: the tokenizer's
    sliding_window: Tokens | None = None
    hidden_size: Width
    intermediate_size: Width
    num_hidden_layers: Layers
    num_attention_heads: Layers
    num_key_value_heads: Layers
    max_position_embeddings: Annotated[int, Field(gt=0, le=2**24)]
    tie_word_embeddings: bool

    @model_validator(mode="after")
    def _divides(self) -> Self:
        own = self.others().get("head_dim") is not None  # heads may be as wide as they like then
        if (self.hidden_size % self.num_attention_heads and not own) or (
            self.num_attention_heads % self.num_key_value_heads
        ):
            raise ValueError("hidden_size must be a multiple of num_attention_heads, and these of num_key_value_heads")
        return self

    @classmethod
    def required_keys(cls) -> tuple[str, ...]:
        """Return the keys that every architecture has."""
        return tuple(key for key in cls.model_fields if key != "sliding_window")

    def others(self) -> dict[str, Any]:
        """Return the keys of transformers' configuration beside those that every architecture has."""
        return dict(self.model_extra or {})

    def config_keys(self) -> dict[str, Any]:
        """Return the keys for transformers' configuration, model_type among them.

        `sliding_window` is left out where it is not written and where Llama, which has none, would be given one. For
        Mistral null is a value: transformers' own default is a window of 4,096 tokens.
        """
        keys = self.model_dump()
        if self.model_type == "llama" or (
            self.model_type != "mistral" and "sliding_window" not in self.model_fields_set
        ):
            keys.pop("sliding_window")
        if keys["vocab_size"] is None:
            keys.pop("vocab_size")
        return keys


class Model(Section):
    """The base model: its source, shape, precision and attention."""

    source: Literal["pretrain", "hub", "local", "random"]  # random: the architecture without its weights
    name: Name | None = None  # hub id, or folder of a local checkpoint
    revision: Name | None = None  # 40-digit commit of the hub repository
    architecture: Architecture | None = None
    dtype: Literal["float32", "bfloat16"]
    quantization: Literal["none", "nf4"] = "none"
    attention: Literal["auto", "sdpa", "eager", "flash_attention_2"] = "auto"

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if self.source in ("hub", "local") and not self.name:
            raise ValueError(f"source: {self.source} needs a name")
        if self.source == "hub" and not re.fullmatch(r"[0-9a-f]{40}", self.revision or ""):
            raise ValueError("source: hub needs revision: the 40-digit commit, so that the weights can never change")
        if self.source in ("pretrain", "random") and self.architecture is None:
            raise ValueError(f"source: {self.source} needs an architecture")
        if self.source == "random" and self.architecture and not self.architecture.vocab_size:
            raise ValueError("source: random needs architecture.vocab_size")
        return self


class Tokenizer(Section):
    """The tokenizer and the template of dialogues."""

    source: Literal["train", "hub", "local", "words"]  # words: a stand-in that knows the words of data.source: lengths
    name: Name | None = None
    revision: Name | None = None
    vocab_size: Vocabulary | None = None  # of a trained tokenizer or a stand-in
    pad_token: Name | None = None  # a token of the vocabulary; null: the tokenizer's own, or its unknown token
    eos_token: Name | None = None  # the token that ends an answer; null: the tokenizer's own
    # hh: "\n\nHuman: …\n\nAssistant:"; plain: each message's text on a line; chat: the tokenizer's own chat template
    template: Literal["hh", "plain", "chat"]
    system_prompt: Annotated[str, Field(max_length=10_000)] | None = None  # of conversations that have none
    chat_template_kwargs: dict[VariableName, bool | int | float | str] | None = None  # enable_thinking: false

    @model_validator(mode="after")
    def _complete(self) -> Self:
        made_here = self.source in ("train", "words")
        if made_here and not self.vocab_size:
            raise ValueError(f"source: {self.source} needs vocab_size")
        smallest, content = {
            "words": (8, "the marks of a dialogue"),
            "train": (SMALLEST_TRAINED, "every byte and the marks of a dialogue"),
        }.get(self.source, (1, ""))
        if self.vocab_size and self.vocab_size < smallest:
            raise ValueError(f"vocab_size: {self.vocab_size} is too small for {content}; {smallest} or more")
        if made_here and self.template == "chat":
            raise ValueError("a tokenizer that is made here has no chat template; use template: hh")
        for key in ("pad_token", "eos_token"):
            if made_here and getattr(self, key) is not None:
                raise ValueError(f"a tokenizer that is made here has special tokens of its own; leave out {key}")
        for key in ("system_prompt", "chat_template_kwargs"):
            if self.template != "chat" and getattr(self, key) is not None:
                raise ValueError(f"{key} belongs to template: chat, but template is {self.template}")
        if not made_here and not self.name:
            raise ValueError(f"source: {self.source} needs a name")
        if self.source == "hub" and not re.fullmatch(r"[0-9a-f]{40}", self.revision or ""):
            raise ValueError("source: hub needs revision: the 40-digit commit")
        return self


class Toy(Section):
    """The toy world: synthetic dialogues with a known true reward."""

    documents: MadeRows  # pretraining transcripts
    pairs: MadeRows  # labelled preference pairs, train and held-out together
    bayes_accuracy: Annotated[float, Field(gt=0.5, le=0.9)]  # of the best possible reward model
    corpus: Literal["tutors", "web"] = "tutors"  # the authors of the transcripts: rlhf/data/worlds/toy.py
    demonstrations: MadeRowsOrNone = 0  # instruction rows for SFT; 0: SFT imitates the chosen answers
    subjects: Annotated[int, Field(ge=2, le=8)] = 8  # most subjects of a family of questions


class Sums(Section):
    """Questions with answers that can be checked: rlhf/data/worlds/sums.py."""

    documents: MadeRows  # pretraining transcripts
    demonstrations: MadeRows  # instruction rows for SFT
    pairs: MadeRows  # each of a right and a wrong answer
    accuracy: Annotated[float, Field(gt=0, lt=1)]  # share of right answers in documents and demonstrations
    largest: Annotated[int, Field(gt=0, le=99)]  # largest number in a question


class Lengths(Section):
    """Preference pairs of meaningless words: only their lengths are real."""

    pairs: MadeRows
    shape: Literal["hh", "longest"]  # hh: as long as dialogues of HH-RLHF; longest: as long as every stage admits


# Flaws of rows that `rlhf data check` counts under these names and that data.drop can leave out.
Flaw = Literal[
    "near_identical",
    "contradictory",
    "duplicates",
    "one_word",
    "unfinished",
    "other_script",
    "replaced",
    "mojibake",
    "control",
    "invisible",
    "html",
    "leaked",
]


class Data(Section):
    """The data: its source, its format, its held-out part and the flawed rows to leave out."""

    source: Literal["toy", "sums", "files", "hub", "lengths"]
    files: Annotated[tuple[Name, ...], AsTuple] = ()
    name: Name | None = None
    revision: Name | None = None
    data_dir: Name | None = None
    split: Name | None = None  # of the hub's set; null: train
    format: Literal[
        "auto", "text", "hh", "instruction", "preference", "completion", "question", "messages", "prompt"
    ] = "auto"
    on_bad_row: Literal["stop", "skip"]
    heldout_fraction: Annotated[float, Field(gt=0, lt=1)]
    # Share of all conversations that only choose checkpoints. They are held out; results are reported on the other
    # held-out rows. null: all held-out rows serve both purposes.
    validation_fraction: Annotated[float | None, Field(gt=0, lt=1)] = None
    drop: Annotated[tuple[Flaw, ...] | None, AsTuple] = None  # rows to leave out: docs/data.md; null: none
    toy: Toy | None = None
    sums: Sums | None = None
    lengths: Lengths | None = None

    @model_validator(mode="after")
    def _complete(self) -> Self:
        for source, key in (
            ("toy", "toy"),
            ("sums", "sums"),
            ("files", "files"),
            ("hub", "name"),
            ("lengths", "lengths"),
        ):
            if self.source == source and not getattr(self, key):
                raise ValueError(f"source: {source} needs {key}")
        if self.files and self.source != "files":
            raise ValueError(f"files: belongs to source: files, but source is {self.source}; change one of them")
        if self.source == "hub" and not re.fullmatch(r"[0-9a-f]{40}", self.revision or ""):
            raise ValueError("source: hub needs revision: the 40-digit commit, so that the data can never change")
        if self.split is not None and not re.fullmatch(r"[\w.-]+", self.split):
            raise ValueError(f"split: {self.split!r} is not the name of one split, such as train_prefs")
        if self.validation_fraction is not None and self.validation_fraction >= self.heldout_fraction:
            raise ValueError(
                f"validation_fraction: {self.validation_fraction} must be below heldout_fraction: "
                f"{self.heldout_fraction}, of which it is a part"
            )
        return self


class Lora(Section):
    """One adapter shape for all roles, so that the reward model can start from the SFT adapter."""

    r: Width
    lora_alpha: Width
    lora_dropout: Fraction  # in SFT only: TRL switches it off for RM and DPO; PPO trains the policy it samples
    target_modules: Annotated[tuple[Name, ...], AsTuple, Field(min_length=1)] | Literal["all-linear"]
    # layers with adapters; [8, 16]: from number 8, counted from 0, up to but without number 16
    layers: Literal["all", "upper_half", "upper_third"] | Annotated[tuple[LayerNumber, LayerNumber], AsTuple] = "all"

    def layer_numbers(self, count: int) -> list[int] | None:
        """Return the numbers of the layers that have adapters, of a model with `count` layers; None for all.

        A half or a third is rounded up. Raises ValueError for a range that the model does not have.
        """
        if self.layers == "all":
            return None
        if isinstance(self.layers, str):
            parts = {"upper_half": 2, "upper_third": 3}[self.layers]
            return list(range(count - math.ceil(count / parts), count))
        first, end = self.layers
        if not first < end <= count:
            raise ValueError(f"lora.layers: [{first}, {end}] is no range of layers of a model with {count}")
        return list(range(first, end))

    @model_validator(mode="after")
    def _inside(self) -> Self:
        outside = {"lm_head", "embed_tokens"} & {name.split(".")[-1] for name in self.target_modules}
        if outside and self.target_modules != "all-linear":
            raise ValueError(f"target_modules: {outside.pop()} is shared by all roles and stays as it is")
        return self


class Optimization(Section):
    """The keys that all supervised stages share; they are named as in `transformers.TrainingArguments`."""

    learning_rate: Positive
    lr_scheduler_type: Literal["linear", "cosine", "constant", "constant_with_warmup"]
    warmup_ratio: Fraction
    weight_decay: NonNegative
    adam_beta1: Decay = 0.9
    adam_beta2: Decay
    adam_epsilon: Positive = 1e-8
    max_grad_norm: Positive
    optim: Literal["adamw_torch", "adamw_torch_fused", "adamw_8bit", "paged_adamw_8bit", "paged_adamw_32bit"]
    num_train_epochs: Epochs
    max_steps: Steps | None = None  # stops earlier than num_train_epochs
    per_device_train_batch_size: BatchRows  # times gradient_accumulation_steps: rows of a step, on all devices together
    gradient_accumulation_steps: BatchRows
    gradient_checkpointing: bool
    group_by_length: bool
    max_samples: Rows | None  # first training rows in the seed's order; null: all
    max_eval_samples: Rows
    logging_steps: Steps
    save_steps: Steps
    max_length: Tokens

    @model_validator(mode="after")
    def _aligned(self) -> Self:
        if self.save_steps % self.logging_steps:  # a logging window that spans a resume would log another mean
            raise ValueError("save_steps must be a multiple of logging_steps")
        return self

    def share(self, count: int) -> tuple[int, int]:
        """Return the rows of a micro-batch and the micro-batches of a step on each of `count` devices.

        Together the devices make the same step as one. Raises ValueError if a step cannot be divided evenly.
        """
        fewer = math.gcd(self.gradient_accumulation_steps, count)
        rows, rest = divmod(self.per_device_train_batch_size, count // fewer)
        if rest:
            raise ValueError(
                f"gradient_accumulation_steps: {self.gradient_accumulation_steps} or per_device_train_batch_size: "
                f"{self.per_device_train_batch_size} must be divisible by hardware.count: {count}"
            )
        return rows, self.gradient_accumulation_steps // fewer


class Pretrain(Optimization):
    """The pretraining of a small base from scratch."""

    max_length: Annotated[int, Field(gt=1, le=1_048_576)]  # a token is predicted from the ones before it


class Dialogues(Optimization):
    """The keys that SFT, reward model and DPO share."""

    max_prompt_length: Tokens
    eval_steps: Steps | None = None  # steps between held-out losses; null: only after training
    adapter: Literal["last", "best"] = "last"  # the weights that are kept; best: those with the lowest held-out loss

    @model_validator(mode="after")
    def _evaluated(self) -> Self:
        if self.eval_steps and (self.save_steps % self.eval_steps or self.eval_steps % self.logging_steps):
            raise ValueError(
                f"eval_steps: {self.eval_steps} must divide save_steps: {self.save_steps} and be a multiple of "
                f"logging_steps: {self.logging_steps}"
            )
        if self.adapter == "best" and not self.eval_steps:
            raise ValueError("adapter: best needs eval_steps, by which checkpoints are compared")
        return self

    @model_validator(mode="after")
    def _room(self) -> Self:
        if self.max_prompt_length >= self.max_length:
            raise ValueError("max_prompt_length must leave room for a response below max_length")
        return self


class Sft(Dialogues):
    """Supervised fine-tuning on demonstrations or chosen answers."""


class Rm(Dialogues):
    """The reward model."""

    loss_type: Literal["bradley_terry", "margin_ranking"]  # the default of TRL; MarginRankingLoss of torch.nn
    margin: NonNegative  # subtracted from the difference of scores
    center_rewards_coefficient: NonNegative

    @model_validator(mode="after")
    def _ranking(self) -> Self:
        if self.loss_type == "margin_ranking" and (not self.margin or self.center_rewards_coefficient):
            raise ValueError("loss_type: margin_ranking needs a margin above 0 and center_rewards_coefficient: 0")
        return self


class Dpo(Dialogues):
    """Direct preference optimization."""

    beta: Positive
    max_completion_length: Tokens | None = None  # tokens of a response, EOS included; null: max_length alone cuts


class Evaluate(Section):
    """The comparison of policies with SFT on held-out prompts."""

    max_samples: Rows
    batch_size: BatchRows
    response_length: Tokens
    max_prompt_length: Tokens
    temperature: Temperature
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0  # sample from the fewest tokens with this total probability
    num_samples: Passes = 1  # answers of each policy to each prompt
    bertscore_model: Name | None = None  # folder of a BERT-like encoder; null: no BERTScore


class Merge(Section):
    """The merging of an adapter into the base."""

    stage: Literal["sft", "ppo", "rloo", "grpo", "dpo"]
    base: Literal["full", "dequantized"] = "full"  # dequantized: as NF4 rounds the weights in training


StageOptions = Pretrain | Sft | Rm | OnlineOptions | Dpo | Evaluate | Merge  # a section of one stage


class Recipe(Section):
    """All settings of a chain of stages."""

    status: Literal["draft", "released"]
    default: bool  # true: `--hw` picks this one of the recipes of its hardware
    description: Annotated[str, Field(max_length=1000)]
    hardware: Hardware
    seed: Seed
    model: Model
    tokenizer: Tokenizer
    data: Data
    lora: Lora
    pretrain: Pretrain | None = None
    sft: Sft
    rm: Rm
    ppo: Ppo
    rloo: Rloo | None = None
    grpo: Grpo | None = None
    dpo: Dpo
    evaluate: Evaluate
    merge: Merge

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        self._check_sources()
        self._check_model()
        self._check_supervised()
        self._check_online()
        self._check_merge()
        self._check_lengths()
        return self

    def _check_sources(self) -> None:
        if (self.model.source == "pretrain") != (self.pretrain is not None):
            raise ValueError("model.source: pretrain and a pretrain section belong together")
        if (self.tokenizer.source == "train") != (self.pretrain is not None):
            raise ValueError("tokenizer.source: train and a pretrain section belong together")
        if self.data.source in ("toy", "sums", "lengths") and self.tokenizer.template != "hh":
            raise ValueError(f"data.source: {self.data.source} writes HH transcripts and needs tokenizer.template: hh")
        if (self.tokenizer.source == "words") != (self.data.source == "lengths"):
            raise ValueError("tokenizer.source: words and data.source: lengths belong together")

    def _check_model(self) -> None:
        shape, words = self.model.architecture, self.tokenizer.vocab_size
        if self.tokenizer.source == "words" and shape and shape.vocab_size and words != shape.vocab_size:
            raise ValueError(
                f"tokenizer.vocab_size: {words} and model.architecture.vocab_size: {shape.vocab_size} differ"
            )
        if self.model.attention == "flash_attention_2":
            if self.hardware.device != "cuda":
                raise ValueError("model.attention: flash_attention_2 has kernels for CUDA only: use auto")
            if self.model.dtype != "bfloat16":
                raise ValueError("model.attention: flash_attention_2 needs model.dtype: bfloat16")
        if shape:
            self.lora.layer_numbers(shape.num_hidden_layers)
        if shape and self.lora.r > shape.hidden_size:
            raise ValueError(f"lora.r: {self.lora.r} is more than model.architecture.hidden_size: {shape.hidden_size}")

    def _check_supervised(self) -> None:
        for stage, options in (("sft", self.sft), ("rm", self.rm), ("dpo", self.dpo)):
            try:
                options.share(self.hardware.count)
            except ValueError as error:
                raise ValueError(f"{stage}: {error}") from None
            if options.eval_steps and self.hardware.count > 1 and self.hardware.engine != "ddp":
                raise ValueError(
                    f"{stage}.eval_steps needs hardware.engine: ddp or hardware.count: 1, not engine: "
                    f"{self.hardware.engine}, which divides the weights"
                )

    def _check_online(self) -> None:
        if self.hardware.trunk == "lean":
            if self.model.quantization != "none":
                raise ValueError("hardware.trunk: lean needs model.quantization: none")
            if self.hardware.count > 1 and self.hardware.engine != "ddp":
                raise ValueError("hardware.trunk: lean needs hardware.engine: ddp, whose processes hold all weights")
        for stage, options in self.online().items():
            rows = options.batch_size // options.num_mini_batches
            if rows % self.hardware.count:
                raise ValueError(
                    f"{stage}: batch_size / num_mini_batches, {rows}, must be divisible by hardware.count: "
                    f"{self.hardware.count}"
                )
            if options.batch_size // options.samples_per_prompt % self.hardware.count:
                raise ValueError(
                    f"{stage}: batch_size / num_generations must be divisible by hardware.count: {self.hardware.count}"
                )
            if options.rollout_4bit != "library" and self.model.quantization == "none":
                raise ValueError(f"{stage}.rollout_4bit: {options.rollout_4bit} needs model.quantization: nf4")
            if self.hardware.trunk == "lean" and options.gradient_checkpointing:
                raise ValueError(f"hardware.trunk: lean needs {stage}.gradient_checkpointing: false")
            if options.vllm_url is not None and self.hardware.count > 1:
                raise ValueError(f"{stage}.vllm_url needs hardware.count: 1: one server has one set of adapters")

    def _check_merge(self) -> None:
        if self.merge.stage in GROUPS and self.section(self.merge.stage) is None:
            raise ValueError(f"merge.stage: {self.merge.stage} needs a section {self.merge.stage}")
        if self.merge.base == "dequantized" and self.model.quantization == "none":
            raise ValueError("merge.base: dequantized needs model.quantization: nf4")

    def _check_lengths(self) -> None:
        if self.model.architecture is not None:
            room = self.model.architecture.max_position_embeddings
            for stage, need in self.lengths().items():
                if need > room:
                    raise ValueError(f"{stage}: {need} tokens do not fit max_position_embeddings: {room}")

    def section(self, stage: str) -> StageOptions | None:
        """Return the section of a stage, None where the recipe has none. Raises KeyError for what is not a stage."""
        sections: dict[str, StageOptions | None] = {
            "pretrain": self.pretrain,
            "sft": self.sft,
            "rm": self.rm,
            "ppo": self.ppo,
            "rloo": self.rloo,
            "grpo": self.grpo,
            "dpo": self.dpo,
            "evaluate": self.evaluate,
            "merge": self.merge,
        }
        return sections[stage]

    def online(self) -> "dict[str, OnlineOptions]":
        """Return the sections of the stages that learn from their own samples and that the recipe has."""
        sections = {"ppo": self.ppo, "rloo": self.rloo, "grpo": self.grpo}
        return {stage: options for stage, options in sections.items() if options is not None}

    def processes(self, stage: str) -> int:
        """Return the number of processes that work on a stage."""
        return self.hardware.count if stage in SHARED else 1

    def lengths(self) -> dict[str, int]:
        """Return the length in tokens of each stage's longest sequence, by the keys that set it."""
        return {
            "pretrain.max_length": self.pretrain.max_length if self.pretrain else 0,
            "sft.max_length": self.sft.max_length,
            "rm.max_length": self.rm.max_length,
            "dpo.max_length": self.dpo.max_length,
            "ppo.max_prompt_length + ppo.response_length": self.ppo.max_prompt_length + self.ppo.response_length,
            **{
                f"{stage}.max_prompt_length + {stage}.max_completion_length": o.max_prompt_length + o.response_length
                for stage, o in self.online().items()
                if stage in GROUPS
            },
            "evaluate.max_prompt_length + evaluate.response_length": self.evaluate.max_prompt_length
            + self.evaluate.response_length,
        }
