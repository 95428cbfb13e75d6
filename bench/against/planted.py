"""`python -m bench.against.planted`: whether the comparison finds what was planted, and nothing in equal code.

Each plant is a regression as a commit might bring it by accident, put into a copy of the commit that stands here.
"""

import json
import shutil
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import click

from bench import options
from bench.against import checkout, judge
from bench.against.checkout import FOLDER, Checkout
from bench.against.compare import CARD, MICRO_SLOWER, Comparison, small_functions
from bench.against.judge import Bounds, Change
from bench.against.sides import Cost, Side
from bench.paths import ROOT
from bench.steps import STAGES, with_parents
from rlhf import recipe as recipes
from rlhf.cli import guarded
from rlhf.cli.options import OneOf, WholeNumber
from rlhf.errors import UserError
from rlhf.recipe import PinnedRecipe, StageName
from rlhf.terminal import say

CPU_RECIPE = ROOT / "recipes" / "cpu-tiny" / "v2"
STEPS = 2
SMALLER = {
    "ppo.batch_size": 16,
    "ppo.rollout_batch_size": 16,
    "ppo.per_device_train_batch_size": 8,
    "evaluate.batch_size": 16,
}


class Plant(NamedTuple):
    """A regression: a text of a file with what replaces it, and where it should be found."""

    file: str
    old: str
    new: str
    where: StageName | str  # a stage; `card`: in the predictions of a card's recipe; `micro`: in a small function


ADVANCE = "            learner.advance(batch)\n"
PLANTS = {
    "copied logits": Plant(
        "rlhf/objectives/logprobs.py",
        "normaliser = logits.logsumexp(1)",
        "copied = logits.clone()\n            normaliser = copied.logsumexp(1)",
        "card",  # with the CPU's small vocabulary it costs less than is allowed
    ),
    "item in the loop": Plant(
        "rlhf/rollout/library_decoding.py",
        "            self.advance()\n            ahead",
        "            self.advance()\n            self.position.sum().item()\n            ahead",
        "ppo",
    ),
    "optimizer twice": Plant(
        "rlhf/stages/online/train_state.py",
        "        self.used.append(stats | self.state.step_optimizer())",
        "        self.used.append(stats | self.state.step_optimizer())\n"
        "        self.state.twice = [  # type: ignore[attr-defined]\n"
        "            {n: v.clone() for n, v in s.items()} for s in self.state.optimizer.state.values()\n"
        "        ]",
        "ppo",
    ),
    "role scored twice": Plant(
        "rlhf/stages/ppo.py",
        "        raw = role_passes.reward_scores(learner.shared, rollout, options.score_rows)\n",
        "        raw = role_passes.reward_scores(learner.shared, rollout, options.score_rows)\n" * 2,
        "ppo",
    ),
    "checkpointing lost": Plant(
        "rlhf/stages/online/train_state.py",
        "self.shared.base.train(self.options.gradient_checkpointing)",
        "self.shared.base.train(False)",
        "card",
    ),
    "padded to the longest": Plant(
        "rlhf/data/batch.py",
        "width = int((prompt + response).max())",
        "width = self.ids.shape[1]",
        "ppo",
    ),
    "leak per step": Plant(
        "rlhf/stages/ppo.py",
        ADVANCE,
        ADVANCE + "            learner.__dict__.setdefault('kept', []).append(batch)\n",
        "ppo",
    ),
    "slower tokenizer": Plant(
        "rlhf/data/tokenize.py",
        "        prompts = self._ids(texts, bos=True)\n",
        "        prompts = self._ids(texts, bos=True)\n        self._ids(texts[: len(texts) // 3], bos=True)\n",
        "micro",
    ),
    "layer twice": Plant(
        "rlhf/models/shared_base.py",
        "        return self._hidden_at(rollout.ids, rollout.predictors)\n",
        "        layer = self.base.get_decoder().layers[-1]\n"
        "        again = layer.register_forward_hook(\n"
        "            lambda m, i, k, out: m.__class__.forward(m, *i, **k) is None or out, with_kwargs=True\n"
        "        )\n"
        "        try:\n"
        "            return self._hidden_at(rollout.ids, rollout.predictors)\n"
        "        finally:\n"
        "            again.remove()\n",
        "ppo",
    ),
    "larger cache": Plant(
        "rlhf/rollout/library_decoding.py",
        "slots = round_up(self.width + self.room, self.window_rule.whole)",
        "slots = round_up(round(1.15 * (self.width + self.room)), self.window_rule.whole)",
        "ppo",
    ),
    "extra pass in DPO": Plant(
        "rlhf/stages/dpo.py",
        '        policy, reference = (logprobs(role, batch) for role in ("policy", "reference"))\n',
        '        policy, reference = (logprobs(role, batch) for role in ("policy", "reference"))\n'
        '        policy = logprobs("policy", batch)\n',
        "dpo",
    ),
    "evaluation with graphs": Plant(
        "rlhf/stages/dpo.py",
        "@torch.no_grad()\ndef preference_accuracy(",
        "def preference_accuracy(",
        "dpo",
    ),
    "memory in the update": Plant(
        "rlhf/stages/ppo.py",
        "            hidden = self.shared.response_hidden(micro.rollout)\n            loss, stats",
        "            more = torch.empty(7_000_000)\n"
        "            hidden = self.shared.response_hidden(micro.rollout)\n            loss, stats",
        "ppo",
    ),
    "time in scoring": Plant(
        "rlhf/stages/ppo.py",
        "                batch = make_batch(learner, *with_verdict(rollout, rewards))  # 2, 3, 4\n",
        "                import time\n\n"
        "                start = time.process_time()\n"
        "                batch = make_batch(learner, *with_verdict(rollout, rewards))  # 2, 3, 4\n"
        "                end = time.process_time() + 0.15 * (time.process_time() - start)\n"
        "                while time.process_time() < end:\n"
        "                    pass\n",
        "ppo",
    ),
}
TIMED = ("time in scoring",)  # of a stage, and no count can see it


def plant(name: str, base: Checkout, into: Path = FOLDER) -> Checkout:
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


def small_recipe() -> PinnedRecipe:
    """Return the recipe for a CPU with smaller batches, to save time."""
    return recipes.load(CPU_RECIPE, SMALLER)


def counts(side: Checkout, loaded: PinnedRecipe, stage: StageName) -> dict[StageName, Cost]:
    """Return what a stage and those that it builds on count, in STEPS steps each."""
    with Side(side, loaded, STEPS, "hh") as process:
        process.wait_until_ready()
        costs = {}
        for name in with_parents(loaded, [stage]):
            process.ask_cost(name, count=True)
            costs[name] = process.cost()
        return costs


def all_counted(base: Checkout, names: Sequence[str], at_once: int) -> Iterator[tuple[str, list[Change]]]:
    """Yield each plant's name with what its stage counts. `at_once` processes run, which changes no count."""
    loaded = small_recipe()
    stages = {name: recipes.stage_name(PLANTS[name].where) for name in names}
    with ThreadPoolExecutor(at_once) as pool:
        bases = {stage: pool.submit(counts, base, loaded, stage) for stage in set(stages.values())}
        plants = {name: pool.submit(counts, plant(name, base), loaded, stage) for name, stage in stages.items()}
        for name, stage in stages.items():
            old, new = bases[stage].result()[stage], plants[name].result()[stage]
            yield name, [*judge.counted(stage, old, new, Bounds())]


def otherwise(base: Checkout, name: str, rounds: int) -> list[Change]:
    """Return what the comparison measures of a plant that the counts on a CPU cannot see."""
    new, where, bounds = plant(name, base), PLANTS[name].where, Bounds()
    if where == "micro":
        return small_functions(base, new, rounds, bounds._replace(slower=MICRO_SLOWER), say)
    loaded = small_recipe()
    with Comparison(base, new, loaded, steps=STEPS, shape="hh", bounds=bounds, say=say) as comparison:
        if where == "card":
            return comparison.predicted(CARD)
        stage = recipes.stage_name(where)
        comparison.counted(with_parents(loaded, [stage]))
        return comparison.timed([stage], rounds)


@options.command()
@click.option("--only", "names", multiple=True, type=OneOf([*PLANTS]), help="Only this plant; may be repeated.")
@click.option("--same", default=0, type=WholeNumber(min=0), help="Instead, compare the code with itself so often.")
@click.option("--stage", "stages", multiple=True, type=OneOf(STAGES), help="With --same: only this stage.")
@click.option("--rounds", default=3, show_default=True, type=WholeNumber(min=2), help="Timed runs of each side.")
@click.option("--at-once", default=2, show_default=True, type=WholeNumber(min=1), help="Processes that count.")
@click.option("--out", type=click.Path(path_type=Path), metavar="FILE", help="Add a line of JSON for each.")
def main(
    names: tuple[str, ...], same: int, stages: tuple[StageName, ...], rounds: int, at_once: int, out: Path | None
) -> None:
    """Compare the commit that stands here with copies that something was planted in, or with itself.

    Exit code 1: a plant was not found, or something was found in equal code.
    """
    base = checkout.unpack("HEAD")
    failed = False

    def note(name: str, lines: Sequence[str], good: bool) -> None:
        nonlocal failed
        failed |= not good
        print(f"{'good' if good else 'WRONG'}  {name}: {'; '.join(lines) or 'nothing is worse'}", flush=True)
        if out:
            with out.open("a", encoding="utf-8") as file:
                print(json.dumps({"name": name, "good": good, "lines": list(lines)}), file=file)

    for number in range(same):
        copy = base._replace(name=f"the same, {number + 1}")
        loaded = small_recipe()
        chosen = options.stages_of(loaded, stages, STAGES)
        with Comparison(base, copy, loaded, steps=STEPS, shape="hh", bounds=Bounds(), say=say) as comparison:
            found = comparison.counted(with_parents(loaded, chosen)) + comparison.timed(chosen, rounds)
        lines = judge.verdicts(found)
        note(copy.name, lines, not lines)
    chosen_plants = [] if same else [name for name in PLANTS if name in (names or PLANTS)]
    by_counts = [name for name in chosen_plants if PLANTS[name].where in STAGES and name not in TIMED]
    for name, found in all_counted(base, by_counts, at_once):
        note(name, judge.verdicts(found), any(change.worse for change in found))
    for name in chosen_plants:
        if name not in by_counts:
            lines = judge.verdicts(otherwise(base, name, rounds))
            note(name, lines, bool(lines))
    sys.exit(failed)


if __name__ == "__main__":
    guarded(main)
