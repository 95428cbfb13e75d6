"""The runs of one seed: two worlds that differ in their labels, reward models, policies, and answers to choose from.

Every stage is one of the project's, with the keys of `CHANGES`. `Chains.run` makes what is missing below its folder.
"""

import itertools
import json
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import NamedTuple

import torch

from bench.paths import ROOT
from bench.reading import read
from rlhf import recipe as recipes
from rlhf.data.load import read_corpus
from rlhf.data.split import part
from rlhf.data.tokenize import Encoded
from rlhf.data.worlds import toy
from rlhf.evaluation.best_of_n import PerPrompt
from rlhf.evaluation.policies import PolicySamples, heldout_sampling, measure
from rlhf.evaluation.reward_model import member_scores_of
from rlhf.evaluation.run_policies import load_roles
from rlhf.files import JsonValue, write_json
from rlhf.models.loading import load_tokenizer
from rlhf.objectives.choices import Combine
from rlhf.objectives.ensembles import combine
from rlhf.process.torch_setup import set_up_torch
from rlhf.recipe import Changes, PinnedRecipe
from rlhf.recipe.stages import EVALUATE, PPO, PRETRAIN, RM, SFT
from rlhf.run.directory import StageRun
from rlhf.run.layout import METRICS, MODEL
from rlhf.run.reader import read_lines
from rlhf.run.records import MetricsLine
from rlhf.stages import runner
from studies.kinds import BestOfN, OptimisedPoint, OveroptimisationRun
from studies.overoptimisation import curves, judges

RECIPE = ROOT / "recipes" / "cpu-tiny" / "v2"
TOY = {"documents": 16_000, "pairs": 9_000, "demonstrations": 2_600}  # less than the recipe, for more runs
NOISE = {"clean": 0.0, "noisy": 0.25}  # share of the training pairs whose labels are flipped
CHANGES: Changes = {
    "hardware.trunk": "lean",
    "data.source": "files",
    "data.toy": None,
    "sft.max_samples": 2000,
    "rm.num_train_epochs": 3,
    "rm.max_eval_samples": 600,
    "rm.logging_steps": 25,
    "ppo.steps": 24,
    "ppo.batch_size": 64,
    "ppo.rollout_batch_size": 64,
    "ppo.per_device_train_batch_size": 32,
    "ppo.learning_rate": 1e-3,
    "ppo.lr_scheduler_type": "constant",
    "ppo.kl_coef": 0.0,  # nothing but the number of steps keeps the policy near SFT
    "ppo.eval_steps": 3,
    "ppo.save_steps": 24,
    "ppo.max_eval_samples": 160,
    "ppo.best_kl_limit": None,
    "ppo.adapter": "last",
    "ppo.reward_funcs": ["model", *(f"{judges.__name__}:{judge}" for judge in ("truth", "utility"))],
    "ppo.reward_weights": [1.0, 0.0, 0.0],
}
ON_BASE: Changes = {  # the worlds of a seed share one base
    "pretrain": None,
    "model.source": "local",
    "model.architecture": None,
    "tokenizer.source": "local",
    "tokenizer.vocab_size": None,
}
PROMPTS, ANSWERS = 96, 128  # of best-of-n
ROWS = 256  # decoded or scored together
MEMBERS = 3
VARIANCE_COEF = 0.5  # of an ensemble's mean_minus_var, on standardised scores
COMBINES: tuple[Combine, ...] = ("mean", "min", "mean_minus_var")


class RewardModel(NamedTuple):
    """A reward model: the world of its labels, its number of training pairs, and whether an ensemble is trained too."""

    world: str
    pairs: int
    ensemble: bool


REWARD_MODELS = {
    "400 pairs": RewardModel("clean", 400, False),
    "1600 pairs": RewardModel("clean", 1600, False),
    "6400 pairs": RewardModel("clean", 6400, False),
    "1600 noisy pairs": RewardModel("noisy", 1600, True),
}
POLICIES: list[tuple[str, Combine | None]] = [
    *((name, None) for name in REWARD_MODELS),
    *(("1600 noisy pairs", how) for how in COMBINES),
]


def label(name: str, how: Combine | None) -> str:
    """Return the name of a proxy: of a reward model, or of an ensemble with its combination."""
    return name if how is None else f"{name}, {how}"


def write_world(folder: Path, seed: int, noise: float) -> None:
    """Write the toy world of a seed with a share of its training pairs flipped."""
    data = recipes.load(RECIPE).recipe.data
    assert data.toy is not None
    fractions = (data.heldout_fraction, data.validation_fraction or 0.0)
    options = data.toy.model_dump() | TOY
    toy.write(folder, seed=seed, heldout_fraction=fractions[0], validation_fraction=fractions[1], **options)
    rng, file = random.Random(f"flip:{seed}"), folder / toy.PAIRS
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    for row in rows:
        message = row["chosen"].split(toy.HUMAN)[1].split(toy.ASSISTANT)[0].strip()
        if part(message, seed, *fractions) == "train" and rng.random() < noise:
            row["chosen"], row["rejected"] = row["rejected"], row["chosen"]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8", newline="\n")


@dataclass(frozen=True)
class Chains:
    """The runs of a seed below a folder, with further changes of all their recipes."""

    folder: Path
    seed: int
    more: Changes

    def run(self) -> OveroptimisationRun:
        """Make the runs, or read those that are there; return their curves."""
        for world, noise in NOISE.items():
            if not (folder := self.folder / world / "files").exists():
                write_world(folder, self.seed, noise)
        runner.execute(PRETRAIN, self._recipe("clean", {}), self.folder)
        for name in {model.world: name for name, model in REWARD_MODELS.items()}.values():
            runner.execute(SFT, self.recipe_of(name), self._world(name))
        accuracy = {
            label(name, how): self._reward_model(name, how)["accuracy"]
            for name, model in REWARD_MODELS.items()
            for how in ((None, COMBINES[0]) if model.ensemble else (None,))
        }
        chosen = self.best_of_n()
        return {
            **chosen,
            "accuracy": accuracy,
            "ppo": {label(name, how): self._policy(name, how, chosen["sft_sd"]) for name, how in POLICIES},
        }

    def best_of_n(self) -> BestOfN:
        """Return the curves of best-of-n by every proxy, with mean and sd of SFT's answers."""
        file = self.folder / f"best-of-{ANSWERS}-of-{PROMPTS}.json"
        if not file.exists():
            answers = self._answers()
            made: BestOfN = {
                "sft_truth": fmean(itertools.chain(*answers.judged["truth"])),
                "sft_sd": {judge: stdev(itertools.chain(*rows)) for judge, rows in answers.judged.items()},
                "best_of_n": {
                    name: curves.of_best_of_n({**answers.judged, "proxy": answers.samples.by_prompt(scores)})
                    for name, scores in self._proxies(answers)
                },
            }
            write_json(file, made)
        return read(file, BestOfN)

    def _reward_model(self, name: str, how: Combine | None) -> Mapping[str, float]:
        """Train a reward model, or an ensemble; return the metrics of its summary."""
        executed = runner.execute(RM, self.recipe_of(name, how), self._place(name, how), reuse_root=self._world(name))
        assert executed.summary is not None
        return {key: value for key, value in executed.summary.metrics.items() if value is not None}

    def _policy(self, name: str, how: Combine | None, sds: Mapping[str, float]) -> list[OptimisedPoint]:
        """Train a policy against a reward model or an ensemble; return its curve."""
        loaded = self.recipe_of(name, how)
        out = self._place(name, how) / (how or "alone")
        _, _, folder = runner.execute(PPO, loaded, out, reuse_root=self._place(name, how))
        return curves.of_ppo([line.plain() for line in read_lines(folder / METRICS, MetricsLine)], sds)

    def _answers(self) -> "Answers":
        """Return the answers of SFT to held-out prompts, with what the judges of the toy world say of them."""
        name = next(iter(REWARD_MODELS))  # SFT is the same in every world
        loaded = self.recipe_of(name)
        run = StageRun(self._world(name), loaded, EVALUATE)
        tokenizer, device = load_tokenizer(run.base), set_up_torch(loaded.recipe)
        corpus = read_corpus(loaded.recipe, run.run_directory, tokenizer).corpus
        prompts = corpus.prompts(EVALUATE).test[:PROMPTS]
        sampling = heldout_sampling(loaded.recipe.evaluate, ROWS)
        shared = load_roles(run, device, run.parents.start(), [])
        samples = measure(
            shared,
            "reference",
            tokenizer,
            prompts,
            sampling,
            seed=self.seed,
            with_true_reward=False,
            samples_per_prompt=ANSWERS,
        )
        asked = [prompt for prompt in prompts for _ in range(ANSWERS)]
        rows, _ = tokenizer.encode(
            list(zip(asked, samples.texts, strict=True)), sampling.max_prompt_length, loaded.recipe.longest()
        )
        encoded = [  # an answer that was cut was sampled without EOS
            row if ended else row._replace(response=row.response[:-1])
            for row, ended in zip(rows, samples.ended.tolist(), strict=True)
            if row
        ]
        written = [tokenizer.prompt_text(prompt) for prompt in asked]
        judged = {
            judge.__name__: samples.by_prompt(torch.tensor(judge(written, samples.texts), dtype=torch.float64))
            for judge in (judges.truth, judges.utility)
        }
        return Answers(samples, encoded, tokenizer.pad_id, judged)

    def _proxies(self, answers: "Answers") -> Iterator[tuple[str, torch.Tensor]]:
        """Return the scores (N,) of the answers by each reward model, and by each combination of an ensemble."""
        for name, model in REWARD_MODELS.items():
            how = COMBINES[0] if model.ensemble else None
            run = StageRun(self._place(name, how), self.recipe_of(name, how), EVALUATE, self._world(name))
            shared = load_roles(run, torch.device("cpu"), run.parents.start(), [])
            members = member_scores_of(shared, answers.encoded, answers.pad_id, ROWS, shared.reward_roles)
            yield name, members[0]
            standardised = (members - members.mean(1, keepdim=True)) / members.std(1, keepdim=True)
            for way in COMBINES if model.ensemble else ():
                yield label(name, way), combine(standardised, way, VARIANCE_COEF)

    def _world(self, name: str) -> Path:
        return self.folder / REWARD_MODELS[name].world

    def _place(self, name: str, how: Combine | None) -> Path:
        return self.folder / f"{name.replace(' ', '-')}{'-ensemble' if how else ''}"

    def recipe_of(self, name: str, how: Combine | None = None) -> PinnedRecipe:
        """Return the recipe of a reward model and of a policy that is optimised against it, on the base of the seed."""
        model, base = REWARD_MODELS[name], str(self.folder / RECIPE.parent.name / RECIPE.name / PRETRAIN / MODEL)
        changes: Changes = {**ON_BASE, "model.name": base, "tokenizer.name": base, "rm.max_samples": model.pairs}
        if how is not None:
            changes |= {"rm.ensemble": MEMBERS, "ppo.combine_scores": how}
        if how == "mean_minus_var":
            changes["ppo.variance_coef"] = VARIANCE_COEF
        return self._recipe(model.world, changes)

    def _recipe(self, world: str, changes: Changes) -> PinnedRecipe:
        files: list[JsonValue] = [
            str(self.folder / world / "files" / name) for name in toy.files(TOY["demonstrations"])
        ]
        return recipes.load(RECIPE, {**CHANGES, "data.files": files, **changes, **self.more}, self.seed)


class Answers(NamedTuple):
    """Answers of SFT, several to each prompt, as texts and tokens, with the numbers of the toy world's judges."""

    samples: PolicySamples
    encoded: list[Encoded]
    pad_id: int
    judged: dict[str, PerPrompt]
