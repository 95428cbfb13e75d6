"""The process that rehearses: `python -m rlhf.plan.rehearsal.worker`.

It is a process of its own, so that patches and stand-ins end with it. From its input it reads one pickled question
after another: a recipe's folder and its overrides, the name of a stage, and whether the allocator has expandable
segments. It writes a pickled PredictedStage to each, or the reason why there is none.
"""

import gc
import os
import pickle
import sys
import traceback

from rlhf import recipe as recipes
from rlhf.errors import UserError
from rlhf.plan.phases import PredictedStage
from rlhf.plan.rehearsal.meta_runs import RehearsalsAtDepths
from rlhf.plan.rehearsal.seams import with_seams
from rlhf.process.libraries import import_bitsandbytes, quiet_libraries


def main() -> None:
    """Answer questions until there are no more."""
    gc.disable()  # collections take a tenth of the time; what is predicted is the same with them
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever a library prints shall not stand between the answers
    with quiet_libraries():
        import_bitsandbytes()
    with quiet_libraries(), with_seams():
        rehearse = RehearsalsAtDepths()
        while True:
            try:
                folder, overrides, stage, expandable = pickle.load(sys.stdin.buffer)
            except EOFError:
                return
            answer: PredictedStage | str
            try:
                answer = rehearse(recipes.load(folder, overrides), stage, expandable)
            except Exception as error:
                traceback.print_exc()
                ours = isinstance(error, UserError)  # a sentence for people, complete by itself
                answer = str(error) if ours else f"{type(error).__name__}: {error}"
            pickle.dump(answer, out)
            out.flush()


if __name__ == "__main__":
    main()
