"""Run several stages in the processes of one launcher: `ranks.py FILE`, a list of [stage, root of the runs, changes].

Starting Python with all libraries takes longer than such a small stage. `rlhf run` starts processes for each stage.
"""

import json
import sys
from pathlib import Path

from rlhf.process import distributed, meeting
from rlhf.recipe import stage_name
from rlhf.stages import runner
from tests.helpers import small


def main(file: Path) -> None:
    meeting._leave = distributed.barrier  # the processes stay together until the last stage
    for stage, out, changes in json.loads(file.read_text()):
        loaded = small(**{key.replace(".", "__"): value for key, value in changes.items()})
        runner.execute(stage_name(stage), loaded, Path(out))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
