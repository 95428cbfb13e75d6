"""Types of the numbers and names in a recipe, each with its bounds, which docs/keys.yaml lists."""

from typing import Annotated

from pydantic import Field

from rlhf.recipe.stages import SEED_COUNT

# Counts, by what they count; bounds as in docs/keys.yaml.
Threads = Annotated[int, Field(gt=0, le=1024)]
Devices = Annotated[int, Field(gt=0, le=1024)]
Steps = Annotated[int, Field(gt=0, le=10_000_000)]
StepsOrZero = Annotated[int, Field(ge=0, le=10_000_000)]
Epochs = Annotated[float, Field(gt=0, le=10_000)]
Passes = Annotated[int, Field(gt=0, le=1_000)]  # over the same rows
Samples = Annotated[int, Field(gt=0, le=1_000)]  # answers to a prompt
BatchRows = Annotated[int, Field(gt=0, le=65_536)]  # of one forward pass or one optimizer step
RowCount = Annotated[int, Field(gt=0, le=1_000_000_000)]  # of a data set
MadeRows = Annotated[int, Field(gt=0, le=10_000_000)]  # generated rows, held in memory
MadeRowsOrZero = Annotated[int, Field(ge=0, le=10_000_000)]
Tokens = Annotated[int, Field(gt=0, le=1_048_576)]  # of a sequence
Vocabulary = Annotated[int, Field(gt=0, le=1_048_576)]
Width = Annotated[int, Field(gt=0, le=1_048_576)]  # of a layer
Rank = Annotated[int, Field(gt=0, le=1_048_576)]  # of an adapter, and its lora_alpha
Layers = Annotated[int, Field(gt=0, le=1_024)]
Heads = Annotated[int, Field(gt=0, le=1_024)]  # of an attention layer
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
