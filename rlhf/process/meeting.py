"""The meeting of the processes that share a stage: their number, and that all have one recipe and one code."""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from datetime import timedelta
from pathlib import Path

from rlhf import recipe as recipes
from rlhf.errors import UserError
from rlhf.process import distributed
from rlhf.recipe import PinnedRecipe, Recipe, StageName
from rlhf.recipe.stages import ONLINE, TRAINING_STAGES
from rlhf.run.packages import hash_of_modules
from rlhf.run.provenance import code_version
from rlhf.terminal import excerpt

TIMEOUT = timedelta(minutes=10)  # ranks wait this long for one that hangs; a dead one is noticed before


@contextmanager
def joined(loaded: PinnedRecipe, stage: StageName) -> Iterator[None]:
    """Join the recipe's processes: wait for the other ranks, compare recipe and code, and silence all ranks but 0.

    Raises UserError if the launcher started another number of processes than the recipe has, if they do not meet, or if
    one has another recipe or other code.
    """
    check_world(loaded.recipe, stage)
    if not distributed.launched():
        yield
        return
    from accelerate import PartialState

    with ExitStack() as quiet:
        if distributed.rank():
            null_device = quiet.enter_context(open(os.devnull, "w"))
            quiet.enter_context(redirect_stdout(null_device))
            quiet.enter_context(redirect_stderr(null_device))
        try:
            PartialState(cpu=loaded.recipe.hardware.device == "cpu", timeout=TIMEOUT)
        except RuntimeError as error:  # torch's DistError and its subclasses
            way_out = (
                "every machine starts the same command, with rank 0's machine as MASTER_ADDR and a free MASTER_PORT"
            )
            raise UserError(
                f"rank {distributed.rank()} did not meet the others: {way_out} ({excerpt(str(error))})"
            ) from error
        try:
            distributed.agree(
                "recipe",
                [loaded.sha256, recipes.deciding_settings(loaded.recipe, stage), loaded.recipe.hardware.engine],
            )
            distributed.agree("code", [code_version().commit, hash_of_modules(Path(__file__).parents[1])])
            yield
        except distributed.Disagreement:  # every rank raises it, so all can leave
            _leave()
            raise
        _leave()


def _leave() -> None:
    """Leave the group once all ranks are ready to: a rank that leaves earlier looks like one that died."""
    from accelerate import PartialState

    distributed.barrier()
    PartialState().destroy_process_group()


def check_world(recipe: Recipe, stage: StageName) -> None:
    """Raise UserError unless the number of ranks is the number that the recipe has for a stage."""
    expected, started = recipe.processes(stage), distributed.world()
    if started == expected:
        check_engine(recipe, stage)
        return
    if stage not in TRAINING_STAGES:
        raise UserError(f"{stage} runs in one process and {started} were started: start it without a launcher")
    raise UserError(
        f"hardware.count is {expected} and {started} {'process was' if started == 1 else 'processes were'} started: "
        "let `rlhf run` start them, or give the launcher the same number (`accelerate launch --cpu` starts only one)"
    )


def check_engine(recipe: Recipe, stage: StageName) -> None:
    """Raise UserError if a stage cannot run under the recipe's engine, or was not started for it."""
    engine = recipe.hardware.engine
    if recipe.processes(stage) == 1 or engine == "ddp" or stage in ONLINE:
        return
    if recipe.hardware.device == "cpu":
        raise UserError(f"{stage} under {engine} needs GPUs: on CPUs transformers would silently use ddp instead")
    if distributed.launched() and os.environ.get(f"ACCELERATE_USE_{engine.upper()}") != "true":
        raise UserError(
            f"{stage} under {engine} needs `accelerate launch` with accelerate-{engine}.yaml: another "
            "launcher does not tell transformers"
        )
