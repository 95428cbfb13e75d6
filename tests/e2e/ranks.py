"""Run several stages in the processes of one launcher: `ranks.py FILE`, a list of [stage, root of the runs, changes].

Before that, the ranks check what they have of each other, and leave a file each. Starting Python with all libraries
takes longer than such a small stage. `rlhf run` starts processes for each stage.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from peft import LoraConfig
from transformers import LlamaConfig, LlamaForCausalLM

from rlhf.errors import UserError
from rlhf.models.shared_base import SharedBase
from rlhf.process import distributed, launching
from rlhf.process.task import task_of
from rlhf.recipe.stages import stage_name
from rlhf.stages import runner
from tests.helpers import small


def check_numbers(me: int) -> None:
    """What ranks make, add up and compare together."""
    assert distributed.world() == 2
    assert distributed.from_main(lambda: f"made by {me}") == "made by 0"
    assert distributed.own_rows([1, 2, 3, 4, 5]) == [[1, 3, 5], [2, 4]][me]
    assert distributed.sum_of({"a": 1.5, "b": me}, torch.device("cpu")) == {"a": 3.0, "b": 1.0}
    gradients = [torch.nn.Parameter(torch.zeros(2, 3)), torch.nn.Parameter(torch.zeros(4))]
    gradients[0].grad = torch.full((2, 3), 1.0 + me)
    distributed.reduce_gradients(gradients)
    assert gradients[0].grad.tolist() == [[3.0] * 3] * 2 and gradients[1].grad is None
    distributed.agree("recipe", "same")
    try:
        distributed.agree("data", me)
    except UserError as error:
        assert str(error).startswith("rank 1 (on ") and "another data than rank 0" in str(error), error
    else:
        raise AssertionError("a rank with other data was let in")


def check_shards(me: int) -> None:
    """A model whose layers are divided computes what it did, also where a rank goes through it alone."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, vocab_size=50
    )
    model: Any = LlamaForCausalLM(config).requires_grad_(False)
    ids = torch.arange(12).view(2, 6)
    before = model(input_ids=ids).logits
    shared = SharedBase(model, {"policy": LoraConfig(r=2, target_modules=["q_proj"])})
    shared.shard()
    with shared.role("policy"):
        if me == 0:
            assert torch.equal(model(input_ids=ids).logits, before)
        shared.scatter()
        assert torch.equal(model(input_ids=ids).logits, before)
    layer = model.model.layers[1].self_attn
    assert layer.k_proj.weight.to_local().numel() == 16 * 16 // 2
    assert layer.q_proj.lora_A["policy"].weight.numel() == 2 * 16


def main(file: Path) -> None:
    PartialState(cpu=True)
    launching._leave = distributed.barrier  # the processes stay together until the last stage
    me = distributed.rank()
    check_numbers(me)
    check_shards(me)
    (file.parent / f"gathered-{me}").touch()
    for stage, out, changes in json.loads(file.read_text()):
        loaded = small(**{key.replace(".", "__"): value for key, value in changes.items()})
        runner.execute(task_of(loaded, stage_name(stage), Path(out)), loaded)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
