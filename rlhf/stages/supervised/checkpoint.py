"""Checks of a checkpoint of transformers' trainer, before a run resumes from it."""

from pathlib import Path

from peft import PeftModel
from torch import nn

from rlhf.errors import UserError
from rlhf.models import records
from rlhf.models import weights as stored
from rlhf.run import reader
from rlhf.run.checkpoints import checkpoint_step
from rlhf.run.layout import ADAPTER_FILE

_PICKLED_WEIGHTS = ("pytorch_model.bin", "pytorch_model.bin.index.json", "adapter_model.bin")  # transformers reads them


def check_step(folder: Path) -> None:
    """Raise UserError unless trainer_state.json is there and of the folder's step."""
    state = reader.read(folder / "trainer_state.json", records.TrainerState)
    if state is None or state.global_step != checkpoint_step(folder):
        raise UserError(f"{folder}/trainer_state.json is {'that of another step' if state else 'missing'}")


def check_parts(model: nn.Module, folder: Path) -> None:
    """Check the stored weights, optimizer and schedule against those of the model. Raises UserError."""
    for name in _PICKLED_WEIGHTS:
        if (folder / name).exists():
            raise UserError(f"{folder / name} is a pickle, and no run writes its weights as one")
    if isinstance(model, PeftModel):
        expected = stored.adapter_state(model)
        for file in (folder / ADAPTER_FILE, *sorted(folder.glob(f"*/{ADAPTER_FILE}"))):  # DPO's reference has a folder
            stored.adapter_config(file.parent)
            stored.check_shapes(stored.tensors(file), expected, str(file))
    else:
        file = folder / "model.safetensors"
        stored.check_shapes(stored.tensors(file), dict(model.named_parameters()), str(file))
    file = folder / "optimizer.pt"
    optimizer = reader.check(stored.unpickled(file), records.OptimizerState, str(file))
    count = sum(len(group.params) for group in optimizer.param_groups)
    trainable = sum(parameter.requires_grad for parameter in model.parameters())
    if count != trainable:
        raise UserError(f"{file} has the state of {count} parameters, but the model trains {trainable}")
    file = folder / "scheduler.pt"
    reader.check(stored.unpickled(file), records.SchedulerState, str(file))
