"""What a person is told when memory runs out."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlhf.errors import UserError
from rlhf.run.checkpoints import Checkpoints
from rlhf.stages.runner import _explained_errors


def test_running_out_of_memory_names_the_way_out(tmp_path):
    run: Any = SimpleNamespace(stage="sft", path=tmp_path, loaded=SimpleNamespace(directory="recipes/mine/v1"))
    run.run_directory, run.checkpoints = tmp_path, Checkpoints(tmp_path)
    way_out = r"sft: out of memory .*rlhf plan --recipe recipes/mine/v1 --fastest"
    with pytest.raises(UserError, match=way_out), _explained_errors(run):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB")
