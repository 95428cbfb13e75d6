"""Every tensor of a checkpoint has a place in the model, and every parameter of the model a source.

Without this another model than the checkpoint's is trained: transformers leaves out layers and biases that config.json
does not announce, and draws weights that the checkpoint lacks. Two kinds of tensors are exceptions: weights that are
tied to one that is there, which the library's report does not list, and the buffers of `COMPUTED`. What a model's class
in transformers ignores by name (layers that predict further tokens, towers of other inputs) is none.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

from transformers import PreTrainedModel

from rlhf.errors import UserError

# Buffers that a model's code computes, and old checkpoints have: rotary frequencies, positions, causal masks.
COMPUTED = re.compile(r"(^|\.)(rotary_emb\.inv_freq|position_ids|(attn|attention)\.(masked_)?bias)$")
NAMED = 3  # tensors in a message


@contextmanager
def whole_report() -> Iterator[None]:
    """Let transformers report all names inside the block, also those that a model's class ignores.

    A weight that is made of several tensors counts as missing where one of them is.
    """

    def kept(model: PreTrainedModel, report: Any) -> None:
        report.missing_keys.update(report.conversion_errors)
        report.conversion_errors.clear()

    with mock.patch.object(PreTrainedModel, "_adjust_missing_and_unexpected_keys", kept):
        yield


def check_sources(report: Mapping[str, Any], name: str, *unneeded: str) -> None:
    """Raise UserError where a checkpoint lacks weights, which transformers would draw at random.

    Those whose names begin with one of `unneeded` may be missing: a new scalar head, or a part that is not used.
    """
    missing = [key for key in report["missing_keys"] if not key.startswith(unneeded)]
    mismatched = [str(key[0] if isinstance(key, tuple) else key) for key in report["mismatched_keys"]]
    for keys, problem in ((_uncomputed(missing), "lacks"), (sorted(mismatched), "has another shape of")):
        if keys:
            raise UserError(f"{name} {problem} {named(keys)}: it is damaged, or not a checkpoint of this architecture")


def check_places(report: Mapping[str, Any], name: str) -> None:
    """Raise UserError where a checkpoint has tensors that the model has no place for."""
    if keys := _uncomputed(report["unexpected_keys"]):
        raise UserError(
            f"{name} has {named(keys)}, but its config.json has no place for them: take the config.json of these "
            "weights, or a copy of the weights without the parts that a language model does not need"
        )


def named(keys: Sequence[str]) -> str:
    """Return the first of some names, and how many others there are."""
    others = f" and {len(keys) - NAMED} more weights" if len(keys) > NAMED else ""
    return ", ".join(keys[:NAMED]) + others


def _uncomputed(keys: Iterable[str]) -> list[str]:
    """Return those names, sorted, that are not of buffers that the code computes."""
    return sorted(key for key in keys if not COMPUTED.search(key))
