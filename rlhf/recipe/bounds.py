"""What sections of a recipe share: types of numbers and names with their bounds, and the keys of every optimizer."""

from typing import Annotated

from pydantic import Field

from rlhf.recipe.choices import Optimizer, Schedule
from rlhf.recipe.stages import SEED_COUNT
from rlhf.recipe.strict import Section

# Counts, by what they count; bounds as in docs/keys.yaml.
Parts = Annotated[int, Field(gt=0, le=1024)]  # threads, devices, layers, attention heads
Width = Annotated[int, Field(gt=0, le=1_048_576)]  # of a layer or a vocabulary; rank of an adapter, and its lora_alpha
Tokens = Annotated[int, Field(gt=0, le=1_048_576)]  # of a sequence
Steps = Annotated[int, Field(gt=0, le=10_000_000)]
StepsOrZero = Annotated[int, Field(ge=0, le=10_000_000)]
Epochs = Annotated[float, Field(gt=0, le=10_000)]
Passes = Annotated[int, Field(gt=0, le=1_000)]  # over the same rows; answers to a prompt
BatchRows = Annotated[int, Field(gt=0, le=65_536)]  # of one forward pass or one optimizer step
RowCount = Annotated[int, Field(gt=0, le=1_000_000_000)]  # of a data set
MadeRows = Annotated[int, Field(gt=0, le=10_000_000)]  # generated rows, held in memory
MadeRowsOrZero = Annotated[int, Field(ge=0, le=10_000_000)]
Seed = Annotated[int, Field(ge=0, lt=SEED_COUNT)]

NonNegative = Annotated[float, Field(ge=0, le=1e30, allow_inf_nan=False)]  # float32 holds it
Finite = Annotated[float, Field(ge=-1e30, le=1e30, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, le=1e30, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Rate = Annotated[float, Field(gt=0, le=1)]  # by which an optimizer learns
Decay = Annotated[float, Field(ge=0, lt=1)]  # of a running mean: AdamW's betas
ClipRange = Annotated[float, Field(gt=0, lt=1)]  # of a ratio, which stays above 0: 1 - cliprange to 1 + cliprange
Temperature = Annotated[float, Field(ge=0.01, le=100)]  # outside, logits overflow or all tokens are equally likely
Name = Annotated[str, Field(max_length=4096)]  # the longest path of Linux


class Training(Section):
    """The keys of every stage that trains; they are named as in `transformers.TrainingArguments`."""

    learning_rate: Rate
    lr_scheduler_type: Schedule
    weight_decay: NonNegative = 0.0
    adam_beta1: Decay = 0.9
    adam_beta2: Decay = 0.999
    adam_epsilon: Positive = 1e-8
    max_grad_norm: Positive = 1.0
    optim: Optimizer
    per_device_train_batch_size: BatchRows  # rows of a micro-batch
    gradient_checkpointing: bool
    max_samples: RowCount | None = None  # first training rows in the seed's order; null: all
    max_eval_samples: RowCount
    logging_steps: Steps
    save_steps: Steps
