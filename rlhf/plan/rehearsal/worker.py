"""The process that rehearses: it answers questions, one JSON object a line, until there are no more.

It is a process of its own, so that patches and stand-ins end with it: `python -m rlhf.plan.rehearsal.worker`. From
each line of its input it reads a Question, and it writes {"result": a RehearsedStage} or {"error": MESSAGE}
(rlhf/plan/phases.py).
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
from rlhf.plan.phases import QUESTION_TYPE, STAGE_ANSWER
from rlhf.plan.rehearsal.meta_runs import RehearsalsAtDepths
from rlhf.plan.rehearsal.seams import with_seams
from rlhf.process.libraries import import_bitsandbytes


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
                result = STAGE_ANSWER.dump_python(rehearse(loaded, question.name, question.expandable))
                answer = {"result": result}
            except Exception as error:
                traceback.print_exc()
                ours = isinstance(error, UserError)  # a sentence for people, complete by itself
                answer = {"error": str(error) if ours else f"{type(error).__name__}: {error}"}
            print(json.dumps(answer), file=out, flush=True)


if __name__ == "__main__":
    main()
