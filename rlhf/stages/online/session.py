"""One run of a stage that learns from its own samples: data, models, sampling, evaluation and log files."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rlhf.data.batch import Rollout
from rlhf.data.corpus import Corpus, Prompt
from rlhf.data.tokenize import DialogueTokenizer
from rlhf.errors import UserError
from rlhf.evaluation.policies import PolicySamples, gains_over_start, measure
from rlhf.evaluation.reward_model import add_reward_models
from rlhf.evaluation.samples import expected_answers, sample_rows
from rlhf.files import remove
from rlhf.models.adapters import adapter_weights, lora_config, save_adapter, set_adapter_state
from rlhf.models.loading import base_name, load_base
from rlhf.models.roles import AdapterStart
from rlhf.models.shared_base import SharedBase
from rlhf.observe.telemetry import Telemetry
from rlhf.observe.watch import mismatch_limit
from rlhf.process import distributed
from rlhf.recipe.schema_online import OnlineOptions
from rlhf.recipe.stages import FEW_SAMPLES, RM, Role, SharedRole
from rlhf.rollout import vllm
from rlhf.rollout.check import check_first
from rlhf.rollout.decoding import Sampling
from rlhf.rollout.engine import sample
from rlhf.rollout.vllm_command import start_command
from rlhf.run.checkpoints import require_usable
from rlhf.run.directory import StageRun
from rlhf.run.layout import ADAPTER
from rlhf.stages.best import Logged, best_step, choice
from rlhf.stages.online.reward_sum import RewardSum
from rlhf.stages.online.scores import ByName, FunctionRewards, ScoreNorm, measure_score_norm
from rlhf.stages.online.train_state import TrainState, read_state
from rlhf.terminal import say
from rlhf.terminal.progress import Bar


class Session:
    """The `Loop` of a run.

    `validation` are the prompts that choose checkpoints, `test` those on which the result is reported: the same ones
    unless the recipe sets validation apart. New adapters are drawn from torch's generator, which is seeded here.
    """

    def __init__(self, run: StageRun, telemetry: Telemetry, tokenizer: DialogueTokenizer, corpus: Corpus):
        self.run, self.tokenizer, self.recipe = run, tokenizer, run.loaded.recipe
        self.telemetry, self.phase, self.device = telemetry, telemetry.phase, telemetry.device
        self.stage = run.stage
        self.options = options = self.recipe.online()[run.stage]
        run.total_steps = options.steps
        self.rm_dir = run.folder(RM)
        self.client: vllm.Client | None = None
        if options.vllm_url:
            self.client = vllm.Client(
                options.vllm_url, lambda: start_command(self.recipe, options, base_name(run.base))
            )

        self.rewards = RewardSum(run.stage, [options], corpus, tokenizer, run.path, self.device.type)
        self._expected = expected_answers(corpus)
        prompts = self.rewards.usable(corpus.prompts(run.stage))
        self.train = prompts.train[: options.max_samples]
        self.ids, cut = tokenizer.encode_prompts(self.train, options.max_prompt_length)
        self.validation = prompts.validation[: options.max_eval_samples]
        self.test = prompts.test[: options.max_eval_samples]
        run.describe(cuts={"prompts_cut": cut})

        torch.manual_seed(self.recipe.seed)
        with self.phase("load"):
            self.shared = self._load_models()
        self._saved = read_state(run.resumed_from) if run.resumed_from else None
        self.score_norm = self._score_norm()
        self._reference_samples = self.evaluate("reference", self.validation)
        require_verdicts(run.stage, self._reference_samples)
        self._policy_samples: PolicySamples | None = None  # of the last evaluation; None before the first

    def _load_models(self) -> SharedBase:
        """Return the base with the roles that all methods need; PPO adds a critic."""
        base, start, hardware = load_base(self.run.base, self.device), self.run.policy_start(), self.recipe.hardware
        policy = lora_config(self.recipe.lora, base, "CAUSAL_LM") if start is None else start
        roles: dict[Role, AdapterStart] = {"policy": policy, "reference": start}
        shared = SharedBase(base, roles, ("policy",), lean=hardware.trunk == "lean", joins=hardware.joined_rows)
        if self.options.gradient_checkpointing:
            shared.base.activation_checkpointing_enable()
            shared.base.enable_input_require_grads()
        if self.options.model_scores:
            add_reward_models(shared, self.run)
        return shared

    def _score_norm(self) -> ScoreNorm:
        """Return how scores are normalised: a new run measures it, a resumed one has it in its checkpoint.

        Raises UserError for scores that do not differ.
        """
        if self._saved is not None:
            return ScoreNorm(*self._saved["norm"])
        if not self.options.normalize_scores:
            return ScoreNorm()
        with self.phase("evaluate"):
            return measure_score_norm(self.shared, self.sample, self.options)

    def restore(self, state: TrainState[Any]) -> None:
        """Continue from the checkpoint of a resumed run. Divide the frozen layers among ranks if the recipe says so."""
        if self._saved is not None:
            state.restore(self._saved)
            self._saved = None  # frees its tensors
        if self.recipe.hardware.engine == "fsdp" and distributed.world() > 1:
            self.shared.shard()

    # -- a step --------------------------------------------------------------------------------------------------------

    def prompts_of(self, step: int) -> list[int]:
        """Return the indices of the training prompts of a step."""
        count = self.options.batch_size // self.options.samples_per_prompt
        return prompt_order(len(self.train), step, count, self.recipe.seed)

    def sample(self, step: int) -> Rollout:
        """Sample the policy's responses to the prompts of a step, those to one prompt side by side."""
        shared, client, copies = self.shared, self.client, self.options.samples_per_prompt
        prompts = [self.ids[i] for i in self.prompts_of(step)]
        sampling = replace(sampling_settings(self.options), samples_per_prompt=copies)
        with shared.role("policy"):
            if client is None:
                trunk = shared.role_trunk
                rollout = sample(shared.base, prompts, self.tokenizer, sampling, phase=self.phase, trunk=trunk)
                check_first(shared, rollout, sampling)
            else:
                rollout = self._sample_by_server(client, prompts, sampling)
                check_first(shared, rollout, sampling, client, mismatch_limit(self.recipe.model, served=True))
        if shared.lean_trunk is None or copies == 1:
            return rollout
        return replace(rollout, prompt_numbers=torch.arange(len(prompts), device=self.device).repeat_interleave(copies))

    def _sample_by_server(self, client: vllm.Client, prompts: list[list[int]], sampling: Sampling) -> Rollout:
        """Sample from the vLLM server, which gets the policy's adapter."""
        folder = self.run.path / "sampling.tmp"  # a name that a restart deletes, after a run that was killed
        try:
            save_adapter(self.shared.peft, self.run.base.model.revision, folder, adapter="policy")
            with client.adapter(folder):
                return client.sample(prompts, self.tokenizer, sampling, self.device)
        finally:
            remove(folder)

    def function_rewards(self, step: int, rollout: Rollout) -> FunctionRewards | None:
        """Return what reward functions give the responses of a step; None where a recipe names none."""
        if not self.rewards.functions:
            return None
        prompts = [self.train[i] for i in self.prompts_of(step) for _ in range(self.options.samples_per_prompt)]
        texts = self.tokenizer.decode_rows(rollout.tokens, rollout.mask)
        return self.rewards(prompts, texts, rollout.response_ids)

    def end_step(self, state: TrainState[Any], rollout: Rollout, metrics: dict[str, float], bar: Bar) -> None:
        """Evaluate, log and save after a step, as often as the recipe says."""
        run, options, done = self.run, self.options, state.step
        last = done == options.steps
        save = last or done % options.save_steps == 0
        self.telemetry.count(int((rollout.prompt_length + rollout.response_length).sum()))
        if save or done % options.eval_steps == 0:
            metrics = metrics | self._evaluate_policy(done)
        if last or done % options.logging_steps == 0:
            run.logs.metrics(done, metrics)
            run.logs.telemetry(done, self.telemetry.since_last_call())
        if save:
            run.save_checkpoint(done, lambda folder: state.save(run.base, folder))
            distributed.from_main(self._update_checkpoints)
        bar.update(done, f"score {metrics.get('objective/scores', math.nan):.3f}")

    # -- held-out prompts ----------------------------------------------------------------------------------------------

    def evaluate(self, role: SharedRole, prompts: Sequence[Prompt]) -> PolicySamples:
        """Measure a role on held-out prompts."""
        with self.phase("evaluate"):
            return measure(
                self.shared,
                role,
                self.tokenizer,
                prompts,
                sampling_settings(self.options),
                seed=self.recipe.seed,
                with_true_reward=self.recipe.data.has_true_reward,
                reward_fn=self._judged,
            )

    def _judged(
        self, prompts: Sequence[Prompt], texts: Sequence[str], model_scores: Tensor | None, ids: Sequence[list[int]]
    ) -> tuple[ByName, Tensor | None]:
        """Return the rewards of functions by name, and the weighted sum of all rewards."""
        by_name, total = self.rewards(prompts, texts, ids)
        return by_name, total if model_scores is None else self.options.model_weight * model_scores + total

    def _evaluate_policy(self, done: int) -> dict[str, float]:
        """Measure the policy after a step, and log some of its responses. Return the metrics."""
        self._policy_samples = self.evaluate("policy", self.validation)
        policies = {self.recipe.start: self._reference_samples, self.run.stage: self._policy_samples}
        rows = sample_rows(self.tokenizer, self.validation[:FEW_SAMPLES], policies, self._expected)
        self.run.logs.samples(done, rows)
        gains = gains_over_start(self._reference_samples, self._policy_samples, self.recipe.start)
        return {f"eval/{name}": value for name, value in gains.items()}

    def _update_checkpoints(self) -> int | None:
        """Delete what `keep_checkpoints` does not keep. Return the step of the best checkpoint, None without."""
        run, options = self.run, self.options
        best = best_step(run, lambda logged: score_within(logged, options.best_kl_limit))
        if options.keep_checkpoints != "all":
            run.checkpoints.keep_newest(keep=options.keep_checkpoints, spare=best)
        return best

    # -- the end -------------------------------------------------------------------------------------------------------

    def finish(self, state: TrainState[Any]) -> dict[str, float]:
        """Write the resulting adapter, last or best, and measure it on the prompts for reporting.

        Where validation is set apart, the reference was measured on other prompts, and is measured again.
        """
        run, start = self.run, self.recipe.start
        if distributed.world() == 1:
            self.telemetry.note_components(self.shared.peft, state.optimizer)
        best = self._choose_policy(state)
        save_adapter(self.shared.peft, run.base.model.revision, run.path / ADAPTER, adapter="policy")
        before, after = self._reference_samples, self._policy_samples
        if self.test != self.validation:
            before, after = self.evaluate("reference", self.test), self.evaluate("policy", self.test)
        elif after is None:  # also the case when a resumed run had already taken its last step
            after = self.evaluate("policy", self.test)
        return gains_over_start(before, after, start) | choice(run, best)

    def _choose_policy(self, state: TrainState[Any]) -> int | None:
        """Return the step of the best checkpoint, None without one. With `adapter: best` load the policy from it."""
        run, options = self.run, self.options
        best = distributed.from_main(self._update_checkpoints)  # a resumed run may take no step
        if options.adapter == "last":
            return best
        if best is None:
            limit = options.best_kl_limit
            within = "" if limit is None else f" within best_kl_limit: {limit} nats/token"
            say(f"{run.stage}: no checkpoint has a finite score{within}; the result is the last")
        elif best != state.step:
            require_usable(run.checkpoints.of(best), run.stage)
            set_adapter_state(self.shared.peft, adapter_weights(run.checkpoints.of(best) / ADAPTER), "policy")
            self._policy_samples = None
        return best


def sampling_settings(options: OnlineOptions) -> Sampling:
    """Return the settings by which the policy's responses are sampled."""
    return Sampling(
        max_prompt_length=options.max_prompt_length,
        response_length=options.response_length,
        temperature=options.temperature,
        batch_size=options.rollout_batch_size,
    )


def require_verdicts(stage: str, start: PolicySamples) -> None:
    """Raise UserError where none of the start's answers has a score: nothing could be learned or compared."""
    if "score" in start.judged and start.judged["score"].isnan().all():
        raise UserError(
            f"{stage}.reward_funcs: none of {len(start.texts)} held-out answers has a verdict of every reward; where "
            "one does not apply, return a number such as 0"
        )


def score_within(logged: Logged, kl_limit: float | None) -> float | None:
    """Return the held-out score that was logged, None where the KL is not within the limit, in nats per token."""
    kl = logged.get("eval/kl_per_token")
    within = kl_limit is None or (kl is not None and kl <= kl_limit)
    return logged.get("eval/score") if within else None


def prompt_order(total: int, step: int, per_step: int, seed: int) -> list[int]:
    """Return the indices of one step's prompts among `total`: epoch after epoch, each in an order of its own.

    The order is a function of seed and step, so that a resumed run continues with the same prompts. It is one of
    places: the second epoch of a seed has the places of the first one of the next seed, and released results depend on
    it. Prompts still come in another order, because the seed has shuffled the rows before (`divide_rows`).
    """
    first = step * per_step
    epochs = range(first // total, (first + per_step - 1) // total + 1)
    generators = (torch.Generator().manual_seed(seed + epoch) for epoch in epochs)
    order = [place for generator in generators for place in torch.randperm(total, generator=generator).tolist()]
    first -= epochs[0] * total
    return order[first : first + per_step]
