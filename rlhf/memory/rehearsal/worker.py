"""The process that rehearses: it answers requests, one JSON object a line, until there are no more.

It is a process of its own, so that patches and stand-ins end with it: `python -m rlhf.memory.rehearsal.worker`. From
each line of its input it reads {"recipe": DIR, "overrides": {…}, "name": NAME, "expandable": BOOL}. It writes
{"result": {"depths": [{phase: peak}, …], "reserved": {phase: [bytes, …]}}}, or {"error": MESSAGE}: peaks at each of
DEPTHS, and for a card what the allocator reserves at the recipe's depth, or null where the events of the two depths
could not be aligned. For DECODING_STEP it writes {"result": {"roles": {role: operations}}}.
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
from rlhf.memory.phases import DECODING_STEP, STAGE_ANSWER, STEP_ANSWER, RehearsedRole, RehearsedStep
from rlhf.memory.rehearsal.meta_runs import RehearsalsAtDepths
from rlhf.memory.rehearsal.seams import shortened
from rlhf.process.libraries import import_bitsandbytes
from rlhf.recipe import PinnedRecipe


def _operations(loaded: PinnedRecipe) -> RehearsedStep:
    """Return what a decoding step of each role launches, and what no captured graph may hold."""
    from rlhf.memory.rehearsal.decoding_step import decoding_steps

    roles = {
        role: RehearsedRole(
            per_layer=len(step.per_layer),
            outside=len(step.outside),
            unsafe=[f"{operation.name} {operation.unsafe}" for operation in step.unsafe],
        )
        for role, step in decoding_steps(loaded).items()
    }
    return RehearsedStep(roles)


def main() -> None:
    """Answer requests, one JSON object a line, until there are no more."""
    gc.disable()  # collections take a tenth of the time; what is predicted is the same with them
    os.environ.update(CUDA_VISIBLE_DEVICES="", HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints shall not stand between the answers
    from rlhf.process.libraries import quiet_libraries

    with quiet_libraries():
        import_bitsandbytes()
    with quiet_libraries(), shortened():
        rehearse = RehearsalsAtDepths()
        for line in sys.stdin:
            request = json.loads(line)
            answer: JsonObject
            try:
                loaded = recipes.load(Path(request["recipe"]), request["overrides"])
                if request["name"] == DECODING_STEP:
                    result = STEP_ANSWER.dump_python(_operations(loaded))
                else:
                    result = STAGE_ANSWER.dump_python(rehearse(loaded, request["name"], request["expandable"]))
                answer = {"result": result}
            except Exception as error:
                traceback.print_exc()
                ours = isinstance(error, UserError)  # a sentence for people, complete by itself
                answer = {"error": str(error) if ours else f"{type(error).__name__}: {error}"}
            print(json.dumps(answer), file=out, flush=True)


if __name__ == "__main__":
    main()
