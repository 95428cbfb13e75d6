"""The overrides with which a large recipe runs for a moment: random weights, and few steps.

Whoever makes a recipe small takes these and adds what it wants else: a dress rehearsal shorter rows and batches, a
prediction of memory fewer layers.
"""

from rlhf.errors import UserError
from rlhf.recipe.choices import LengthsShape
from rlhf.recipe.schema import Recipe
from rlhf.recipe.stages import PRETRAIN
from rlhf.recipe.strict import Changes


def random_weights_changes(recipe: Recipe, pairs: int, shape: LengthsShape) -> Changes:
    """Return the changes with which a recipe needs no download and no files.

    The model has its own architecture and random weights; tokenizer and dialogues are stand-ins. Memory and speed are
    those of the real ones; the results mean nothing. `shape` is as in `data.lengths`. Raises UserError for a recipe
    without `model.architecture`.
    """
    architecture = recipe.model.architecture
    if architecture is None:
        raise UserError("random weights need model.architecture, which this recipe does not have")
    vocabulary = architecture.vocab_size or recipe.tokenizer.vocab_size
    return {
        "model.source": "random",
        **{f"model.{key}": None for key in ("revision", "files", "sha256") if getattr(recipe.model, key)},
        "model.architecture.vocab_size": vocabulary,
        "tokenizer": {"source": "words", "vocab_size": vocabulary, "template": "hh"},
        PRETRAIN: None,
        "data.source": "lengths",
        **({"data.files": []} if recipe.data.files else {}),
        **{f"data.{key}": None for key in recipe.data.own_keys()},
        "data.lengths": {"pairs": pairs, "shape": shape},
    }


def few_steps_changes(
    recipe: Recipe, steps: int, supervised_steps: int | None = None, save_steps: int | None = None
) -> Changes:
    """Return the changes with which every stage that trains takes `steps` steps, logs each, and needs no server.

    A checkpoint and, in stages that sample, an evaluation follow every `save_steps` steps, None: the last step.
    `supervised_steps`: the steps of stages that do not sample, if others.
    """
    supervised = supervised_steps or steps
    taken = [(stage, "steps", steps) for stage in recipe.online()]
    taken += [(stage, "max_steps", supervised) for stage in recipe.dialogues()]
    changes: Changes = {}
    for stage, key, number in taken:
        section = {key: number, "logging_steps": 1, "save_steps": save_steps or number}
        changes |= {f"{stage}.{name}": value for name, value in section.items()}
    for stage in recipe.online():
        changes |= {f"{stage}.eval_steps": save_steps or steps, f"{stage}.vllm_url": None}
    return changes
