"""The keys of a recipe: one frozen, strictly typed class for each section of recipe.yaml.

Unknown keys, wrong types and impossible combinations are refused in one line that names the file, the key and the way
out. So is a pinned revision that nothing would check. Sizes of data or tokenizers that are made here may stay in a
recipe that takes others instead. Keys have the names of TRL and transformers where those exist. Lengths are in tokens,
learning rates per optimizer step, memory in GB (10^9 bytes). docs/keys.yaml explains every key.

Every whole number among these keys has an upper bound far above what one machine can use. A number beyond it is a
typing error that would otherwise hang, fill the memory or crash a library. docs/keys.yaml lists the bounds.
"""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal, TypeVar

from pydantic import Field

from rlhf.errors import UserError
from rlhf.objectives.choices import DpoLoss
from rlhf.recipe.bounds import (
    BatchRows,
    Epochs,
    Name,
    NonNegative,
    Passes,
    Positive,
    RowCount,
    Seed,
    Steps,
    Temperature,
    Tokens,
    Training,
)
from rlhf.recipe.choices import KeptWeights
from rlhf.recipe.context import context_length, too_long
from rlhf.recipe.model_types import LEAN_TYPES
from rlhf.recipe.schema_data import Data
from rlhf.recipe.schema_model import BaseSpec, Hardware, Lora, Model, Tokenizer
from rlhf.recipe.schema_online import GroupOptions, Grpo, OnlineOptions, Ppo, Rloo
from rlhf.recipe.stages import (
    POLICIES,
    PRETRAIN,
    SFT,
    STAGE_TABLE,
    STAGES,
    TRAINING_STAGES,
    PolicyName,
    PolicyStart,
    RewardModelName,
    StageName,
    TrainingName,
    derived_seed,
)
from rlhf.recipe.strict import Section


class Optimization(Training):
    """The keys that all supervised stages share."""

    warmup_ratio: Annotated[float, Field(ge=0, lt=1)]  # transformers takes 1 for one step, not for all of them
    num_train_epochs: Epochs
    max_steps: Steps | None = None  # stops earlier than num_train_epochs
    gradient_accumulation_steps: BatchRows  # micro-batches of a step, on all devices together
    group_by_length: bool
    max_length: Tokens

    def problems(self) -> Iterator[str]:
        # A logging window that spans a resume would log another mean.
        yield from self.not_multiple("save_steps", "logging_steps")

    def per_device(self, count: int) -> tuple[int, int]:
        """Return the rows of a micro-batch and the micro-batches of a step on each of `count` devices.

        Together the devices make the same step as one. `count` is the recipe's, which divides a step evenly, or 1.
        """
        common = math.gcd(self.gradient_accumulation_steps, count)
        return self.per_device_train_batch_size * common // count, self.gradient_accumulation_steps // common


class Pretrain(Optimization):
    """The pretraining of a small base from scratch."""

    max_length: Annotated[int, Field(gt=1, le=1_048_576)]  # a token is predicted from the ones before it


class Dialogues(Optimization):
    """The keys that SFT, reward model, DPO and KTO share."""

    max_prompt_length: Tokens
    eval_steps: Steps | None = None  # steps between held-out losses; null: only after training
    adapter: KeptWeights = "last"  # the weights that are kept; best: those with the lowest held-out loss

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if self.eval_steps:
            yield from self.not_multiple("save_steps", "eval_steps")
            yield from self.not_multiple("eval_steps", "logging_steps")
        elif self.adapter == "best":
            yield "adapter: best needs eval_steps: evaluations show which checkpoint is best"
        if self.max_prompt_length >= self.max_length:
            yield "max_prompt_length must leave room for a response below max_length"


class Sft(Dialogues):
    """Supervised fine-tuning on demonstrations or chosen answers."""


class Rm(Dialogues):
    """The reward model."""

    loss_type: Literal["bradley_terry", "margin_ranking"] = (
        "bradley_terry"  # the default of TRL; MarginRankingLoss of torch.nn
    )
    margin: NonNegative = 0.0  # subtracted from the difference of scores
    center_rewards_coefficient: NonNegative = 0.0

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if self.loss_type == "margin_ranking" and (not self.margin or self.center_rewards_coefficient):
            yield "loss_type: margin_ranking needs a margin above 0 and center_rewards_coefficient: 0"


class Dpo(Dialogues):
    """Direct preference optimization; keys are named as in TRL's DPOConfig where it has them."""

    beta: Positive
    loss_type: DpoLoss = "sigmoid"  # as in TRL
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0  # share of flipped labels: TRL's loss `robust`
    sft_weight: NonNegative = 0.0  # of the mean negative log-likelihood of chosen tokens: TRL's loss `sft`
    max_completion_length: Tokens | None = None  # tokens of a response, EOS included; null: max_length alone cuts

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if self.label_smoothing and self.loss_type != "sigmoid":
            yield f"label_smoothing needs loss_type: sigmoid, not {self.loss_type}"


class Kto(Dialogues):
    """Kahneman–Tversky optimization on answers that are labelled good or bad, or on both sides of pairs."""

    beta: Positive
    desirable_weight: Positive = 1.0  # of the loss of good answers
    undesirable_weight: Positive = 1.0  # of the loss of bad answers

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if self.group_by_length:
            yield "group_by_length: kto keeps the rows of a micro-batch together; set it to false"


class Evaluate(Section):
    """The comparison of policies with SFT on held-out prompts."""

    max_samples: RowCount
    batch_size: BatchRows
    response_length: Tokens
    max_prompt_length: Tokens
    temperature: Temperature = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0  # sample from the fewest tokens with this total probability
    num_samples: Passes = 1  # answers of each policy to each prompt
    bertscore_model: Name | None = None  # folder of a BERT-like encoder; null: no BERTScore


class Merge(Section):
    """The merging of an adapter into the base."""

    stage: Literal["sft", PolicyName, RewardModelName]


StageOptions = Pretrain | Sft | Rm | OnlineOptions | Dpo | Kto | Evaluate | Merge  # a section of one stage
OptionsT = TypeVar("OptionsT", bound=Section)


class Recipe(Section):
    """All settings of a chain of stages. A recipe has an evaluation, and of the other stages those with a section."""

    status: Literal["draft", "released"]
    default: bool | Literal["own_data"]  # `--hw` picks this one of its hardware; own_data: with --data
    description: Annotated[str, Field(max_length=1000)]
    hardware: Hardware
    seed: Seed
    model: Model
    tokenizer: Tokenizer
    data: Data
    lora: Lora
    pretrain: Pretrain | None = None
    sft: Sft | None = None  # null: policies start at the base, which is then the reference
    rm: Rm | None = None
    second_rm: Rm | None = None  # only measures: it learns from pairs that no other stage sees
    ppo: Ppo | None = None
    rloo: Rloo | None = None
    grpo: Grpo | None = None
    dpo: Dpo | None = None
    kto: Kto | None = None
    evaluate: Evaluate  # SFT, DPO and KTO sample with its keys too
    merge: Merge | None = None

    def problems(self) -> Iterator[str]:
        yield from self._problems_of_sources()
        yield from self._problems_of_supervised()
        yield from self._problems_of_trunk()
        yield from self._problems_of_online()
        yield from self._problems_of_model()

    def _problems_of_sources(self) -> Iterator[str]:
        """Yield where model, tokenizer, data and stages do not belong together."""
        pretrain, second_rm = self.pretrain is not None, self.second_rm is not None
        stand_in = self.data.source == "lengths"
        both = [
            ("model.source: pretrain", self.model.source == PRETRAIN, "a pretrain section", pretrain),
            ("tokenizer.source: train", self.tokenizer.source == "train", "a pretrain section", pretrain),
            ("tokenizer.source: words", self.tokenizer.source == "words", "data.source: lengths", stand_in),
            ("data.second_rm_fraction", self.data.second_rm_fraction is not None, "a second_rm section", second_rm),
        ]
        for one, has_one, other, has_other in both:
            if has_one != has_other:
                yield f"a recipe has both {one} and {other}, or neither"
        if self.tokenizer.source == "package" and self.model.source != "package":
            yield "tokenizer.source: package, which is in the model's file, needs model.source: package"
        if self.data.source in ("toy", "sums", "lengths") and self.tokenizer.template != "hh":
            yield f"data.source: {self.data.source} writes HH transcripts and needs tokenizer.template: hh"
        if second_rm and self.rm is None:
            yield "second_rm needs a section rm: it is held against that reward model"
        if self.sft is None and not self.policies():
            yield f"a recipe without sft needs one of {', '.join(POLICIES)}, which then starts at the base"
        if self.merge is not None and self.section(self.merge.stage) is None:
            yield f"merge.stage: {self.merge.stage} needs a section {self.merge.stage}, or leave out merge"

    def _problems_of_model(self) -> Iterator[str]:
        """Yield where attention or context do not suit the model."""
        on_card = self.hardware.device == "cuda" and self.model.dtype == "bfloat16"
        if self.model.attention == "flash_attention_2" and not on_card:
            yield "model.attention: flash_attention_2 needs hardware.device: cuda and model.dtype: bfloat16"
        shape = self.model.architecture
        if shape and (problem := too_long(self.lengths(), context_length(shape.config_keys()))):
            yield f"{problem} (model.architecture.max_position_embeddings)"

    def _problems_of_supervised(self) -> Iterator[str]:
        """Yield where `hardware.count` processes cannot share a supervised stage."""
        count = self.hardware.count
        for stage, options in self.dialogues().items():
            row = STAGE_TABLE[stage]
            if count > 1 and not row.shared:
                yield f"{stage} needs hardware.count: 1: its trainer keeps the rows of a step together"
            batch, batches = options.per_device_train_batch_size, options.gradient_accumulation_steps
            rows, accumulated = options.per_device(count)
            if rows * accumulated * count != batch * batches:
                keys = f"gradient_accumulation_steps: {batches} or per_device_train_batch_size: {batch}"
                yield f"{stage}: {keys} must be divisible by hardware.count: {count}"
            if rows < row.least_rows:
                yield f"{stage}.per_device_train_batch_size: {stage} needs at least {row.least_rows}"
            if options.eval_steps and self.hardware.divides_weights:
                yield f"{stage}.eval_steps needs hardware.engine: ddp, whose processes hold all weights"

    def _problems_of_trunk(self) -> Iterator[str]:
        """Yield why the lean trunk cannot compute the passes of this recipe."""
        if self.hardware.trunk == "library":
            if self.hardware.joined_rows:
                yield "hardware.joined_rows needs hardware.trunk: lean"
            return
        if self.hardware.divides_weights:
            yield "hardware.trunk: lean needs hardware.engine: ddp, whose processes hold all weights"
        if self.lora.lora_dropout:
            yield "hardware.trunk: lean needs lora.lora_dropout: 0"
        if self.model.architecture and self.model.architecture.model_type not in LEAN_TYPES:
            yield f"hardware.trunk: lean needs a model of type {', '.join(LEAN_TYPES)}: use library"

    def _problems_of_online(self) -> Iterator[str]:
        """Yield where a stage with samples of its own does not suit hardware or other sections."""
        count = self.hardware.count
        for stage, options in self.online().items():
            if options.model_scores and self.rm is None:
                yield f"{stage} needs a section rm: the reward model scores its responses"
            shares = {"num_mini_batches": options.num_mini_batches, "num_generations": options.samples_per_prompt}
            for key, number in shares.items():
                if options.batch_size // number % count:
                    yield f"{stage}: batch_size / {key} must be divisible by hardware.count: {count}"
            if options.vllm_url is not None and count > 1:
                yield f"{stage}.vllm_url needs hardware.count: 1: one server has one set of adapters"

    def sections(self) -> dict[StageName, StageOptions]:
        """Return the sections of all stages that the recipe has."""
        sections: dict[StageName, StageOptions | None] = {stage: getattr(self, stage) for stage in STAGES}
        return {stage: options for stage, options in sections.items() if options is not None}

    def section(self, stage: StageName) -> StageOptions | None:
        """Return the section of a stage, None where the recipe has none."""
        return self.sections().get(stage)

    def options(self, kind: type[OptionsT], stage: StageName | None = None) -> OptionsT:
        """Return the section of a kind, for code of the stage that it belongs to; `stage` says which of several.

        Without `stage` it is the first. Raises UserError if there is none.
        """
        of_kind = {name: options for name, options in self.sections().items() if isinstance(options, kind)}
        section = next(iter(of_kind.values()), None) if stage is None else of_kind.get(stage)
        if section is None:
            raise UserError(f"this needs a recipe with a section {kind.__name__.lower()}")
        return section

    def dialogues(self) -> dict[StageName, Dialogues]:
        """Return the sections of SFT, reward model, DPO and KTO, as far as the recipe has them."""
        return {stage: options for stage, options in self.sections().items() if isinstance(options, Dialogues)}

    def online(self) -> dict[StageName, OnlineOptions]:
        """Return the sections of the stages that learn from their own samples, as far as the recipe has them."""
        return {stage: options for stage, options in self.sections().items() if isinstance(options, OnlineOptions)}

    def policies(self) -> list[PolicyName]:
        """Return the stages of the recipe that train a policy."""
        return [stage for stage in POLICIES if self.section(stage) is not None]

    @property
    def start(self) -> PolicyStart:
        """Return where policies start, which is also their reference: SFT's adapter, or without SFT the base."""
        return "base" if self.sft is None else SFT

    def training_section(self, stage: TrainingName) -> Dialogues | OnlineOptions:
        """Return the section of a stage that trains an adapter. Raises KeyError if the recipe has none."""
        return (self.dialogues() | self.online())[stage]

    def seed_of(self, stage: StageName) -> int:
        """Return the seed with which a stage trains."""
        return derived_seed(self.seed, STAGE_TABLE[stage].seed_offset)

    def processes(self, stage: StageName) -> int:
        """Return the number of processes that work on a stage."""
        return self.hardware.count if stage in TRAINING_STAGES else 1

    def base(self, pretrained: Path | None = None) -> BaseSpec:
        """Return what loading the base needs to know. `pretrained`: the folder of the stage pretrain's model."""
        return BaseSpec(self.model, self.tokenizer, pretrained, self.seed, self.hardware.trunk, self.lengths())

    def lengths(self) -> dict[str, int]:
        """Return the length in tokens of each stage's longest sequence, by the keys that set it."""
        lengths = {}
        for stage, options in self.sections().items():
            if isinstance(options, Optimization):
                lengths[f"{stage}.max_length"] = options.max_length
            elif not isinstance(options, Merge):
                response = "max_completion_length" if isinstance(options, GroupOptions) else "response_length"
                keys = f"{stage}.max_prompt_length + {stage}.{response}"
                lengths[keys] = options.max_prompt_length + options.response_length
        return lengths

    def longest(self) -> int:
        """Return the length in tokens of the longest sequence that any stage admits."""
        return max(self.lengths().values())
