"""torchtune's single-device PPO recipe on the files that bench/peer/inputs.py wrote; prints one JSON line.

Runs where torchtune 0.6.1 is, its last release. The recipe trains all weights of a policy and of a value model, and
keeps a reference and a reward model of its own; it has no adapters. Its code is used as it is, but it saves nothing at
the end. Seconds and memory are taken as in trl_ppo.py.
"""

import importlib.util
import json
import shutil
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torchtune  # type: ignore[import-not-found]  # in a separate environment
from omegaconf import OmegaConf  # type: ignore[import-not-found]
from safetensors.torch import load_file, save_file
from torch.utils.data import Dataset

from bench.peer.training import StepClock, timed


class Vocabulary:
    """What the recipe asks of a tokenizer: prompts are ids already."""

    def __init__(self, pad: int, bos: int, eos: int):
        self.pad_id, self.bos_id, self.eos_id, self.stop_tokens = pad, bos, eos, (eos,)


class Prompts(Dataset[dict[str, list[int]]]):
    """Prompts as token ids, in the form that the recipe's collator takes."""

    def __init__(self, file: str, tokenizer: Vocabulary):
        self.prompts = json.loads(Path(file).read_text())

    def __len__(self) -> int:
        return len(self.prompts)

    def __getitem__(self, number: int) -> dict[str, list[int]]:
        return {"tokens": self.prompts[number], "labels": self.prompts[number]}


def configuration(inputs: Path, work: Path, settings: Mapping[str, Any]) -> Any:
    """Return the recipe's configuration: settings are ours; what saves memory at the price of time is off."""
    ours = settings["options"]
    batch, micro = ours["batch_size"], ours["per_device_train_batch_size"]
    base = json.loads((inputs / "base" / "config.json").read_text())
    sizes = {
        "vocab_size": base["vocab_size"],
        "num_layers": base["num_hidden_layers"],
        "num_heads": base["num_attention_heads"],
        "num_kv_heads": base["num_key_value_heads"],
        "embed_dim": base["hidden_size"],
        "intermediate_dim": base["intermediate_size"],
        "max_seq_len": base["max_position_embeddings"],
        "norm_eps": base["rms_norm_eps"],
    }
    models = "torchtune.models.llama2._component_builders"

    def checkpoint(folder: Path, kind: str) -> dict[str, object]:
        return {
            "_component_": "torchtune.training.FullModelHFCheckpointer",
            "checkpoint_dir": str(folder),
            "checkpoint_files": ["model.safetensors"],
            "output_dir": str(work / "saved"),
            "model_type": kind,
        }

    policy, scorer = checkpoint(inputs / "base", "LLAMA2"), checkpoint(work / "reward", "REWARD")
    return OmegaConf.create(
        {
            "output_dir": str(work),
            "device": settings["device"],
            "dtype": {"float32": "fp32", "bfloat16": "bf16"}[settings["dtype"]],
            "seed": 0,
            "tokenizer": {"_component_": "bench.peer.torchtune_ppo.Vocabulary", **settings["tokens"]},
            "dataset": {"_component_": "bench.peer.torchtune_ppo.Prompts", "file": str(inputs / "prompts.json")},
            "shuffle": False,
            "policy_model": {"_component_": f"{models}.llama2", **sizes},
            "reward_and_value_model": {"_component_": f"{models}.llama2_classifier", "num_classes": 1, **sizes},
            "checkpointer": policy,
            "ref_policy_checkpointer": policy,
            "value_checkpointer": scorer,
            "reward_checkpointer": scorer,
            "resume_from_checkpoint": False,
            "batch_size": batch,
            "forward_batch_size": ours["rollout_batch_size"],
            "num_steps": batch * ours["steps"],
            "ppo_epochs": ours["num_ppo_epochs"],
            "ppo_batch_size": batch // ours["num_mini_batches"],
            "gradient_accumulation_steps": batch // ours["num_mini_batches"] // micro,
            "compile": False,
            "optimizer": {"_component_": "torch.optim.AdamW", "lr": ours["learning_rate"], "fused": True},
            "optimizer_in_bwd": False,
            "enable_activation_checkpointing": False,
            "enable_kv_cache": True,
            "max_generated_tokens": ours["response_length"],
            "temperature": ours["temperature"],
            "top_k": None,
            "min_response_length": None,
            "penalise_no_eos": False,
            "reward_penalty": 0,
            "stop_token_ids": [settings["tokens"]["eos"]],
            "whiten_rewards": False,
            "gamma": ours["gamma"],
            "lmbda": ours["lam"],
            "loss": {
                "_component_": "torchtune.rlhf.loss.PPOLoss",
                "epsilon": ours["cliprange"],
                "value_coeff": ours["vf_coef"],
                "value_clip_range": ours["cliprange_value"],
            },
            "kl_coeff": ours["kl_coef"],
            "metric_logger": {
                "_component_": "torchtune.training.metric_logging.DiskLogger",
                "log_dir": str(work / "logs"),
            },
        }
    )


def reward_checkpoint(base: Path, folder: Path) -> None:
    """Write a reward model in Hugging Face's format: the base with a random head of one class."""
    folder.mkdir()
    shutil.copy(base / "config.json", folder)
    weights: Mapping[str, torch.Tensor] = load_file(base / "model.safetensors")
    trunk = {name: weight for name, weight in weights.items() if name != "lm_head.weight"}
    torch.manual_seed(0)
    head = 0.02 * torch.randn_like(trunk["model.norm.weight"])[None]
    save_file({**trunk, "score.weight": head}, folder / "model.safetensors")


def recipe_class() -> Any:
    """Return the class of the recipe, whose file lies beside the package and cannot be imported by name."""
    file = Path(torchtune.__file__).parents[1] / "recipes" / "ppo_full_finetune_single_device.py"
    spec = importlib.util.spec_from_file_location("torchtune_ppo_recipe", file)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.PPOFullFinetuneRecipeSingleDevice


def main() -> None:
    """Run the recipe; print what its steps took as one JSON line."""
    asked: dict[str, Any] = json.loads(sys.argv[1])
    files = Path(asked["files"])
    settings = json.loads((files / "settings.json").read_text())
    if settings["threads"]:
        torch.set_num_threads(settings["threads"])
    clock = StepClock()

    class Timed(recipe_class()):  # type: ignore[misc]
        def cleanup_after_step(self, *arguments: Any, **named: Any) -> None:
            super().cleanup_after_step(*arguments, **named)
            clock.mark()

        def save_checkpoint(self, *arguments: Any, **named: Any) -> None:
            pass

    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        reward_checkpoint(files / "base", work / "reward")
        config = configuration(files, work, settings)
        trainer = Timed(config)
        trainer.setup(config)
        print(json.dumps(timed(trainer, clock, settings["device"] == "cuda", asked["warm_up"])))


if __name__ == "__main__":
    main()
