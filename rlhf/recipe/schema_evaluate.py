"""The keys of a recipe about the evaluation of its policies."""

from typing import Annotated

from pydantic import Field

from rlhf.recipe.bounds import BatchRows, Name, RowCount, Samples, Temperature, Tokens
from rlhf.recipe.strict import Section


class Evaluate(Section):
    """The comparison of policies with SFT on held-out prompts."""

    max_samples: RowCount
    batch_size: BatchRows
    response_length: Tokens
    max_prompt_length: Tokens
    temperature: Temperature = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0  # sample from the fewest tokens with this total probability
    num_samples: Samples = 1  # answers of each policy to each prompt
    bertscore_model: Name | None = None  # folder of a BERT-like encoder; null: no BERTScore
