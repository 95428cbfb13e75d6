"""One stage on a Ray cluster: python cloud/ray_train.py 8 ppo --hw 8xh100 --out /shared/runs

Ray Train starts the workers, one for each GPU, and tells them their ranks as torchrun would; accelerate, in the stage,
joins the group. Paths are absolute or the same on every machine; OUT is on a disk that all of them share.
"""

import os
import sys
from typing import Any


def work(options: dict[str, Any]) -> None:
    """Run one rank."""
    from rlhf import cli

    os.environ |= {"RLHF_RUNTIME": "local"}
    os.chdir(options["folder"])
    sys.argv = ["rlhf", "run", *options["arguments"]]
    cli.main()


def main() -> None:
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    count, *arguments = sys.argv[1:]
    TorchTrainer(
        work,
        train_loop_config={"folder": os.getcwd(), "arguments": arguments},
        scaling_config=ScalingConfig(num_workers=int(count), use_gpu=True),
        run_config=RunConfig(name="rlhf"),
    ).fit()


if __name__ == "__main__":
    main()
