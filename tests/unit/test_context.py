"""No sequence is longer than the context of the model: refused by new, plan and run."""

from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf import recipe
from rlhf.errors import UserError
from rlhf.models.loading import load_base
from rlhf.recipe.context import context_length
from rlhf.run.directory import StageRun
from tests import models
from tests.helpers import small

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"max_position_embeddings": 32}, 32),
        ({"n_positions": 1024}, 1024),  # GPT-2's learned positions
        ({"max_position_embeddings": 4096, "sliding_window": 64}, 4096),
        ({"max_position_embeddings": 4096, "rope_scaling": {"type": "linear", "factor": 4.0}}, 16384),
        ({"max_position_embeddings": 40960, "rope_parameters": models.YARN_ROPE}, 40960),
        ({"max_position_embeddings": 128, "rope_parameters": models.YARN_ROPE}, 512),
        ({"max_position_embeddings": 512, "rope_parameters": {"full_attention": {"factor": 8.0}}}, 512),
        ({"max_position_embeddings": 512, "rope_scaling": "odd"}, 512),
    ],
)
def test_the_context_is_that_of_the_config_with_its_ropes_scaling(config, expected):
    assert context_length(config) == expected


@pytest.fixture(scope="module")
def short(tmp_path_factory) -> Path:
    """A checkpoint whose context is as long as the longest row of the small recipe, which no key repeats."""
    folder: Path = tmp_path_factory.mktemp("short")
    models.checkpoint(folder, "llama", max_position_embeddings=small().recipe.longest(), rope_parameters=None)
    return folder


def loaded_for(folder: Path, **changes: Any) -> recipe.PinnedRecipe:
    fields: dict[str, Any] = {"data__source": "files", "data__files": ["none.jsonl"], "model__architecture": None}
    return models.recipe_of(str(folder), **fields | changes)


@pytest.mark.parametrize("key", ["sft__max_length", "ppo__response_length", "evaluate__max_prompt_length"])
def test_recipe_and_base_refuse_what_the_architecture_does_not_repeat(short, tmp_path, key):
    fits, context = loaded_for(short), small().recipe.longest()
    load_base(StageRun(tmp_path, fits, "sft").base, CPU)
    long = loaded_for(short, **{key: context + 1})
    said = key.replace("__", r"\.") + rf".*: \d+ tokens are more than the model's context of {context}"
    for attempt in (
        lambda: load_base(StageRun(tmp_path, long, "sft").base, CPU),
        lambda: loaded_for(short, **{key: context + 1, "model__architecture": models.described(str(short))}),
    ):
        with pytest.raises(UserError, match=said) as caught:
            attempt()
        assert "\n" not in str(caught.value)
