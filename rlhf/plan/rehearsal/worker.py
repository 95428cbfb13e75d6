"""The process that rehearses: it answers questions, one JSON object a line, until there are no more.

It is a process of its own, so that patches and stand-ins end with it: `python -m rlhf.plan.rehearsal.worker`. From
each line of its input it reads a Question, and it writes {"result": ANSWER} or {"error": MESSAGE}. An answer is a
RehearsedStage, for DECODING_STEP a RehearsedStep, for UPDATE_PASS a RehearsedPasses (all in rlhf/plan/phases.py).
"""

import gc
import json
import os
import sys
import traceback
from pathlib import Path

from rlhf import recipe as recipes
from rlhf.errors import UserError
from rlhf.files import JsonObject
from rlhf.plan.phases import (
    DECODING_STEP,
    PASSES_ANSWER,
    QUESTION_TYPE,
    STAGE_ANSWER,
    STEP_ANSWER,
    UPDATE_PASS,
    RehearsedPasses,
    RehearsedRole,
    RehearsedStep,
)
from rlhf.plan.rehearsal.meta_runs import RehearsalsAtDepths
from rlhf.plan.rehearsal.seams import with_seams
from rlhf.process.libraries import import_bitsandbytes
from rlhf.recipe import PinnedRecipe


def _operations(loaded: PinnedRecipe) -> RehearsedStep:
    """Return what a decoding step of each role launches, and what no captured graph may hold."""
    from rlhf.plan.rehearsal.decoding_step import decoding_steps

    roles = {
        role: RehearsedRole(
            per_layer=len(step.per_layer),
            per_plain_layer=None if step.per_plain_layer is None else len(step.per_plain_layer),
            outside=len(step.outside),
            unsafe=[f"{operation.name} {operation.unsafe}" for operation in step.unsafe],
        )
        for role, step in decoding_steps(loaded).items()
    }
    return RehearsedStep(roles)


def _passes(loaded: PinnedRecipe) -> RehearsedPasses:
    """Return what a layer launches in the passes of an update."""
    from rlhf.plan.rehearsal.update_pass import update_passes

    return RehearsedPasses(update_passes(loaded))


def main() -> None:
    """Answer questions, one JSON object a line, until there are no more."""
    gc.disable()  # collections take a tenth of the time; what is predicted is the same with them
    os.environ.update(CUDA_VISIBLE_DEVICES="", HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints shall not stand between the answers
    from rlhf.process.libraries import quiet_libraries

    with quiet_libraries():
        import_bitsandbytes()
    with quiet_libraries(), with_seams():
        rehearse = RehearsalsAtDepths()
        for line in sys.stdin:
            question = QUESTION_TYPE.validate_json(line)
            answer: JsonObject
            try:
                loaded = recipes.load(Path(question.recipe), question.overrides)
                if question.name == DECODING_STEP:
                    result = STEP_ANSWER.dump_python(_operations(loaded))
                elif question.name == UPDATE_PASS:
                    result = PASSES_ANSWER.dump_python(_passes(loaded))
                else:
                    result = STAGE_ANSWER.dump_python(rehearse(loaded, question.name, question.expandable))
                answer = {"result": result}
            except Exception as error:
                traceback.print_exc()
                ours = isinstance(error, UserError)  # a sentence for people, complete by itself
                answer = {"error": str(error) if ours else f"{type(error).__name__}: {error}"}
            print(json.dumps(answer), file=out, flush=True)


if __name__ == "__main__":
    main()
