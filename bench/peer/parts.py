"""PPO's parts by transformers and peft as they are: a rollout by `generate`, four scoring passes, updates.

The batch, lengths, micro-batches and epochs are the recipe's, rows and weights those of our run. Nothing is learned
that makes sense: the rewards are zeros, for the work of a step does not depend on them.
"""

import json
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel, get_peft_model

from bench.peer.timing import StepClock
from rlhf import recipe as recipes
from rlhf.data.load import divide_rows
from rlhf.data.source import read_source
from rlhf.models.adapters import lora_config
from rlhf.models.loading import load_base, load_tokenizer
from rlhf.process.torch_setup import set_up_torch
from rlhf.recipe.schema_online import Ppo
from rlhf.run.directory import StageRun

STEPS = 4  # after the warm-up


class Parts:
    """A base with three more adapters, a head of one output, and the batch of a step."""

    def __init__(self, model: PeftModel, pad: int, options: Ppo):
        self.model: Any = model
        self.pad, self.options = pad, options
        self.head = torch.nn.Linear(model.config.hidden_size, 1).to(model.device)
        names = ("default", "value")
        trained = [p for n, p in model.named_parameters() if any(f".{name}." in n for name in names)]
        self.optimizer = torch.optim.AdamW([*trained, *self.head.parameters()], lr=options.learning_rate)

    def step(self, prompts: list[list[int]]) -> dict[str, float]:
        """Do one step of PPO on left-padded prompts. Return the CPU seconds of each part."""
        marks = [time.process_time()]
        ids, mask = self._rollout(prompts)
        marks.append(time.process_time())
        with torch.no_grad():
            for name in ("default", "reference", "reward", "value"):
                self.model.set_adapter(name)
                for rows in self._micro(len(ids)):
                    self._logprobs(ids[rows], mask[rows]) if name in ("default", "reference") else self._values(
                        ids[rows], mask[rows]
                    )
        marks.append(time.process_time())
        for _ in range(self.options.num_ppo_epochs):
            for minibatch in torch.arange(len(ids)).chunk(self.options.num_mini_batches):
                for name in ("default", "value"):
                    self.model.set_adapter(name)
                    for rows in minibatch.split(self.options.per_device_train_batch_size):
                        out = self._logprobs if name == "default" else self._values
                        out(ids[rows], mask[rows]).mean().backward()
                self.optimizer.step()
                self.optimizer.zero_grad()
        marks.append(time.process_time())
        return dict(zip(("rollout", "score", "update"), (b - a for a, b in pairwise(marks)), strict=True))

    def _micro(self, count: int) -> tuple[torch.Tensor, ...]:
        rows: tuple[torch.Tensor, ...] = torch.arange(count).split(self.options.score_rows)
        return rows

    def _rollout(self, prompts: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
        longest = max(map(len, prompts))
        rows = [[self.pad] * (longest - len(prompt)) + prompt for prompt in prompts]
        ids = torch.tensor(rows, device=self.model.device)
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=self.model.device)
        self.model.set_adapter("default")
        self.model.eval()
        length, pad = self.options.response_length, self.pad
        drawn = {"do_sample": True, "top_k": 0, "top_p": 1.0, "temperature": self.options.temperature}
        full = self.model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=length, pad_token_id=pad, **drawn)
        self.prompt = longest
        return full, torch.cat([mask, torch.ones_like(full[:, longest:])], 1)

    def _logprobs(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        logits = self.model(input_ids=ids, attention_mask=mask, logits_to_keep=ids.shape[1] - self.prompt + 1).logits
        labels = ids[:, self.prompt :, None]
        return torch.log_softmax(logits[:, :-1].float() / self.options.temperature, -1).gather(-1, labels)

    def _values(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        hidden = self.model.get_base_model().model(input_ids=ids, attention_mask=mask).last_hidden_state
        values: torch.Tensor = self.head(hidden[:, self.prompt :].float())
        return values


def main() -> None:
    """Read what is asked from the first argument as JSON (bench/peer/__main__.py); print what the steps took."""
    asked = json.loads(sys.argv[1])
    loaded = recipes.load(Path(asked["recipe"]), asked["overrides"])
    run = StageRun(Path(asked["out"]), loaded, "ppo")
    device, tokenizer, options = set_up_torch(loaded.recipe), load_tokenizer(run.base), loaded.recipe.options(Ppo)
    corpus = divide_rows(read_source(loaded.recipe, run.run_directory / "data"), loaded.recipe)
    prompts, _ = tokenizer.encode_prompts(corpus.prompts("ppo").train[: options.max_samples], options.max_prompt_length)
    base = load_base(run.base, device)
    config = lora_config(loaded.recipe.lora, base, "CAUSAL_LM")
    model: Any = get_peft_model(base, config)
    for name in ("reference", "reward", "value"):
        model.add_adapter(name, config)
    for name, parameter in model.named_parameters():
        parameter.requires_grad = ".default." in name or ".value." in name
    parts, clock = Parts(model, tokenizer.pad_id, options), StepClock()
    torch.manual_seed(0)
    clock.mark()
    taken: list[dict[str, float]] = []
    for number in range(asked["warm_up"] + STEPS):
        start = number * options.batch_size
        taken.append(parts.step([prompts[i % len(prompts)] for i in range(start, start + options.batch_size)]))
        clock.mark()
    counted = taken[asked["warm_up"] :]
    phases = {name: sum(step[name] for step in counted) / len(counted) for name in counted[0]}
    print(json.dumps(clock.taken(device.type == "cuda", asked["warm_up"]) | {"phases": phases}))


if __name__ == "__main__":
    main()
