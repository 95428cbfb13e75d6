"""The keys of a recipe about the machine and the model: hardware, base, tokenizer and adapters."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import ConfigDict, Field

from rlhf.files import JsonObject
from rlhf.recipe.bounds import Fraction, Name, Parts, Positive, Tokens, Width
from rlhf.recipe.choices import Device, Template, Trunk
from rlhf.recipe.model_types import TYPES
from rlhf.recipe.strict import AsTuple, Section, problems_of_source

MOST_HEAD_DIM = 2**20
SMALLEST_TRAINED = 261  # tokens: 256 bytes, padding, beginning, end and the marks of the two speakers

VariableName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,63}$")]  # of a chat template


class Hardware(Section):
    """The device that the recipe is made for, and the processes that train together."""

    name: Name  # the name for `--hw`: cpu, 4090, h100
    device: Device
    memory_gb: Positive | None = None  # of the card; null on a CPU
    threads: Parts | None = None  # pinned on a CPU: results are bit-equal only at equal thread counts
    count: Parts = 1  # devices, each with a process that works on its part of every batch
    engine: Literal["ddp", "fsdp"] = "ddp"  # ddp: all weights on each device; fsdp: shards
    trunk: Trunk = "library"  # forward and backward passes; lean: rlhf/models/lean/trunk.py
    joined_rows: bool = False  # the lean trunk joins rows without padding, and on a card samples

    @property
    def divides_weights(self) -> bool:
        """Return whether each process holds only a part of the weights."""
        return self.count > 1 and self.engine != "ddp"


class Architecture(Section):
    """The shape of the model, in the keys of transformers' configuration of its type (`transformers.LlamaConfig` …).

    Every architecture has these keys. Any other key of that configuration may be added (head_dim, rope_parameters, …)
    and is checked against it when the model is built. A base that is built here gets this shape.
    One that is loaded must have it, so that memory can be predicted before anything is downloaded.
    """

    model_config = ConfigDict(extra="allow", frozen=True, strict=True, protected_namespaces=())

    model_type: Annotated[str, Field(pattern=r"^[a-z][a-z0-9_-]{0,63}$")] = "llama"
    vocab_size: Width | None = None  # null: the tokenizer's
    sliding_window: Tokens | None = None
    hidden_size: Width
    intermediate_size: Width
    num_hidden_layers: Parts
    num_attention_heads: Parts
    num_key_value_heads: Parts
    max_position_embeddings: Annotated[int, Field(gt=0, le=2**24)]
    tie_word_embeddings: bool

    def problems(self) -> Iterator[str]:
        yield from self.not_multiple("num_attention_heads", "num_key_value_heads")
        head_dim = self.others().get("head_dim")
        if head_dim is None:
            yield from self.not_multiple("hidden_size", "num_attention_heads")
        elif type(head_dim) is not int or not 1 <= head_dim <= MOST_HEAD_DIM:
            yield f"head_dim: {head_dim!r} must be a whole number from 1 to {MOST_HEAD_DIM:,}"

    @classmethod
    def required_keys(cls) -> tuple[str, ...]:
        """Return the keys that every architecture has."""
        return tuple(key for key in cls.model_fields if key != "sliding_window")

    def others(self) -> dict[str, Any]:
        """Return the keys of transformers' configuration beside those that every architecture has."""
        return dict(self.model_extra or {})

    @property
    def head_width(self) -> int:
        """Return the width of an attention head: `head_dim`, or what transformers takes where that is left out."""
        known = TYPES.get(self.model_type)
        default = known.head_dim if known else None
        return int(self.others().get("head_dim") or default or self.hidden_size // self.num_attention_heads)

    @property
    def cached_per_token(self) -> int:
        """Return the count of numbers, keys and values, that a cache holds for a token."""
        return 2 * self.num_hidden_layers * self.num_key_value_heads * self.head_width

    def config_keys(self) -> JsonObject:
        """Return the keys for transformers' configuration, model_type among them.

        `sliding_window` is left out where it is null, except for Mistral, where null means that there is no window:
        transformers' own default is one of 4,096 tokens.
        """
        keys = self.model_dump()
        if self.sliding_window is None and self.model_type != "mistral":
            keys.pop("sliding_window")
        if keys["vocab_size"] is None:
            keys.pop("vocab_size")
        return keys


class PackageFile(Section):
    """A file in a Python package of an exact version."""

    package: Annotated[str, Field(pattern=r"^[A-Za-z0-9]([A-Za-z0-9._-]{0,98}[A-Za-z0-9])?$")]
    version: Annotated[str, Field(pattern=r"^[0-9A-Za-z][0-9A-Za-z.!+_-]{0,98}$")]
    file: Name  # its path in the package's wheel

    @property
    def words(self) -> str:
        """Return the package with its version, as pip's requirements have them."""
        return f"{self.package}=={self.version}"


class Model(Section):
    """The base model: its source, shape, precision and attention."""

    source: Literal["pretrain", "hub", "local", "package", "random"]  # random: the architecture without its weights
    name: Name | None = None  # hub id, or folder of a local checkpoint, or GGUF file
    revision: Name | None = None  # 40-digit commit of the hub repository
    # package: files that are one GGUF file when they are joined in this order, and the SHA-256 of that file
    files: Annotated[tuple[PackageFile, ...] | None, AsTuple] = None
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")] | None = None
    architecture: Architecture | None = None
    dtype: Literal["float32", "bfloat16"]
    quantization: Literal["none", "nf4"] = "none"
    attention: Literal["auto", "sdpa", "eager", "flash_attention_2"] = "auto"

    def problems(self) -> Iterator[str]:
        needs = {"hub": ("name",), "local": ("name",), "package": ("files", "sha256")}
        needs |= {"pretrain": ("architecture",), "random": ("architecture",)}
        only = {"revision": ("hub",), "files": ("package",), "sha256": ("package",)}
        yield from problems_of_source(self, needs, only)


class Tokenizer(Section):
    """The tokenizer and the template of dialogues."""

    # package: in the model's GGUF file; words: a stand-in that knows the words of data.source: lengths
    source: Literal["train", "hub", "local", "package", "words"]
    name: Name | None = None
    revision: Name | None = None
    vocab_size: Width | None = None  # of a trained tokenizer or a stand-in
    pad_token: Name | None = None  # a token of the vocabulary; null: the tokenizer's own, or its unknown token
    eos_token: Name | None = None  # the token that ends an answer; null: the tokenizer's own
    # hh: "\n\nHuman: …\n\nAssistant:"; plain: each message's text on a line; chat: the tokenizer's own chat template
    template: Template
    system_prompt: Annotated[str, Field(max_length=10_000)] | None = None  # of conversations that have none
    chat_template_kwargs: dict[VariableName, bool | int | Annotated[float, Field(allow_inf_nan=False)] | str] | None = (
        None  # enable_thinking: false
    )

    def problems(self) -> Iterator[str]:
        needs = {"hub": ("name",), "local": ("name",), "train": ("vocab_size",), "words": ("vocab_size",)}
        loaded = ("hub", "local", "package")
        yield from problems_of_source(self, needs, {"revision": ("hub",), "pad_token": loaded, "eos_token": loaded})
        if self.source == "train" and (self.vocab_size or 0) < SMALLEST_TRAINED:
            yield f"vocab_size: {self.vocab_size} holds no token for every byte: {SMALLEST_TRAINED} or more"
        if self.source not in loaded and self.template == "chat":
            yield "a tokenizer that is made here has no chat template; use template: hh"
        reserved = {"messages", "tools", "add_generation_prompt", "bos_token", "eos_token"}
        if given := reserved.intersection(self.chat_template_kwargs or ()):
            yield f"chat_template_kwargs: {given.pop()} is set for every conversation; leave it out"
        for key in ("system_prompt", "chat_template_kwargs"):
            if self.template != "chat" and getattr(self, key) is not None:
                yield f"{key} is set, but template is {self.template}: set template: chat, or remove {key}"


class Lora(Section):
    """One adapter shape for all roles, so that the reward model can start from the SFT adapter."""

    r: Width
    lora_alpha: Width
    lora_dropout: Fraction  # in SFT only: TRL switches it off for RM, DPO and KTO; PPO trains the policy it samples
    target_modules: Annotated[tuple[Name, ...], AsTuple, Field(min_length=1)] | Literal["all-linear"]

    def problems(self) -> Iterator[str]:
        shared = {"lm_head", "embed_tokens"} & {name.split(".")[-1] for name in self.target_modules}
        if shared and self.target_modules != "all-linear":
            yield f"target_modules: {shared.pop()} stays as it is, because all roles share it; leave it out"


class BaseSpec(NamedTuple):
    """A base with its tokenizer, and what is asked of it: a recipe has all of it, and a program may have no recipe."""

    model: Model
    tokenizer: Tokenizer
    pretrained: Path | None = None  # the result of the stage pretrain, for `source: pretrain` and `source: train`
    seed: int = 0  # of random weights
    trunk: Trunk = "library"  # lean: the base must be one that the lean trunk runs
    lengths: Mapping[str, int] = MappingProxyType({})  # longest sequences in tokens, by the keys that set them


def is_gguf(name: str) -> bool:
    """Return whether a name is that of a GGUF file."""
    return name.lower().endswith(".gguf")
