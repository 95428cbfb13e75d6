"""Regressions as a commit might bring them by accident, each to be put into a copy of the code."""

import shutil
from pathlib import Path
from typing import NamedTuple

from bench.against.checkout import CHECKOUTS, Checkout
from rlhf.errors import UserError
from rlhf.recipe import StageName

MOST = 0.15  # share by which a plant should at most change a figure: that a larger one is found shows less


class Plant(NamedTuple):
    """A regression: what it does, a text of a file with what replaces it, and where it should be found."""

    does: str
    file: str
    old: str
    new: str
    where: StageName | str  # a stage; `card`: in the predictions of a card's recipe; a small function, `micro/NAME`
    vocabulary: int = 800  # tokens; the recipe's own is as small as no model's


ADVANCE = "            learner.advance(batch)\n"
SCORES = "        raw = role_passes.reward_scores(learner.shared, rollout, options.score_rows)\n"
PLANTS = {
    "copied logits": Plant(
        "the logits of responses are copied; with a vocabulary of 1,500",
        "rlhf/objectives/logprobs.py",
        "normaliser = logits.logsumexp(1)",
        "copied = logits.clone()\n            normaliser = copied.logsumexp(1)",
        "ppo",
        1500,  # with the recipe's 800 it costs less than is allowed
    ),
    "item in the loop": Plant(
        "`.item()` in every eighth step of decoding",
        "rlhf/rollout/library_decoding.py",
        "            self.advance()\n            ahead",
        "            self.advance()\n"
        "            if step % 8 == 0:\n"
        "                self.position.sum().item()\n"
        "            ahead",
        "ppo",
    ),
    "optimizer twice": Plant(
        "one of the optimizer's two moments is kept twice",
        "rlhf/stages/online/train_state.py",
        "        self.used.append(stats | self.state.step_optimizer())",
        "        self.used.append(stats | self.state.step_optimizer())\n"
        "        self.state.twice = [  # type: ignore[attr-defined]\n"
        "            s['exp_avg'].clone() for s in self.state.optimizer.state.values()\n"
        "        ]",
        "ppo",
    ),
    "role scored twice": Plant(
        "the reward model scores half of the responses again in every second step",
        "rlhf/stages/ppo.py",
        SCORES,
        SCORES + "        if learner.state.step % 2:\n"
        "            half = rollout.rows(torch.arange(len(rollout.ids) // 2))\n"
        "            role_passes.reward_scores(learner.shared, half, options.score_rows)\n",
        "ppo",
    ),
    "checkpointing lost": Plant(
        "the first layer keeps its activations instead of computing them again",
        "rlhf/stages/online/train_state.py",
        "self.shared.base.train(self.options.gradient_checkpointing)",
        "self.shared.base.train(self.options.gradient_checkpointing)\n"
        "        self.shared.base.get_decoder().layers[0].train(False)",
        "card",
    ),
    "padded to the longest": Plant(
        "micro-batches are padded half way to the longest row of the batch",
        "rlhf/data/batch.py",
        "width = int((prompt + response).max())",
        "width = (int((prompt + response).max()) + self.ids.shape[1]) // 2",
        "ppo",
    ),
    "leak per step": Plant(
        "every batch is kept",
        "rlhf/stages/ppo.py",
        ADVANCE,
        ADVANCE + "            learner.__dict__.setdefault('kept', []).append(batch)\n",
        "ppo",
    ),
    "slower tokenizer": Plant(
        "two fifths of the prompts are encoded again",
        "rlhf/data/tokenize.py",
        "        prompts = self._ids(texts, bos=True)\n",
        "        prompts = self._ids(texts, bos=True)\n        self._ids(texts[: 2 * len(texts) // 5], bos=True)\n",
        "micro/encode_dialogues",
    ),
    "layer twice": Plant(
        "the last of two layers is computed twice in every third micro-batch",
        "rlhf/models/shared_base.py",
        "        return self._hidden_at(rollout.ids, rollout.predictors)\n",
        "        self.passes = getattr(self, 'passes', 0) + 1\n"
        "        layer = self.base.get_decoder().layers[-1]\n"
        "        once_more = torch.no_grad()(layer.__class__.forward)\n"
        "        again = layer.register_forward_hook(\n"
        "            lambda m, i, k, out: self.passes % 3 == 0 and once_more(m, *i, **k) is None or out,\n"
        "            with_kwargs=True,\n"
        "        )\n"
        "        try:\n"
        "            return self._hidden_at(rollout.ids, rollout.predictors)\n"
        "        finally:\n"
        "            again.remove()\n",
        "ppo",
    ),
    "larger cache": Plant(
        "the cache of decoding has 15 % more slots",
        "rlhf/rollout/library_decoding.py",
        "slots = round_up(self.width + self.room, self.window_rule.whole)",
        "slots = round_up(round(1.15 * (self.width + self.room)), self.window_rule.whole)",
        "ppo",
    ),
    "extra pass in DPO": Plant(
        "the policy scores a third of the held-out pairs twice after DPO",
        "rlhf/stages/dpo.py",
        '        policy, reference = (logprobs(role, batch) for role in ("policy", "reference"))\n',
        '        policy, reference = (logprobs(role, batch) for role in ("policy", "reference"))\n'
        '        logprobs("policy", batch.rows(torch.arange(len(batch.ids) // 3)))\n',
        "dpo",
    ),
    "evaluation with graphs": Plant(
        "the divergence of held-out responses is computed with a graph",
        "rlhf/evaluation/policies.py",
        "@torch.no_grad()\ndef exact_kl(",
        "@torch.enable_grad()\ndef exact_kl(",
        "ppo",
    ),
    "memory in the update": Plant(
        "3.2 MB more in every micro-batch",
        "rlhf/stages/ppo.py",
        "            hidden = self.shared.response_hidden(micro.rollout)\n            loss, stats",
        "            more = torch.empty(800_000)\n"
        "            hidden = self.shared.response_hidden(micro.rollout)\n            loss, stats",
        "ppo",
    ),
    "time in scoring": Plant(
        "scoring takes a seventh more time, and computes nothing in it",
        "rlhf/stages/ppo.py",
        "                batch = make_batch(learner, *with_verdict(rollout, rewards))  # 2, 3, 4\n",
        "                import time\n\n"
        "                start = time.process_time()\n"
        "                batch = make_batch(learner, *with_verdict(rollout, rewards))  # 2, 3, 4\n"
        "                end = time.process_time() + (time.process_time() - start) / 7\n"
        "                while time.process_time() < end:\n"
        "                    pass\n",
        "ppo",
    ),
}
TIMED = ("time in scoring",)  # of a stage, and no count can see it


def plant(name: str, base: Checkout, into: Path = CHECKOUTS) -> Checkout:
    """Return a copy of a checkout, below `into`, with one of PLANTS in it.

    Raises UserError where its code is not as it was.
    """
    planted = PLANTS[name]
    folder = into / f"planted-{name.replace(' ', '-')}"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(base.root, folder)
    file = folder / planted.file
    text = file.read_text(encoding="utf-8")
    if text.count(planted.old) != 1:
        raise UserError(f"{planted.file}: the text that {name!r} replaces is not there once: write the plant anew")
    file.write_text(text.replace(planted.old, planted.new), encoding="utf-8")
    return Checkout(name, folder, base.python)
