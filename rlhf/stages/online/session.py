"""One run of a stage that learns from its own samples: data, models, sampling, evaluation and log files."""

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial

import torch

from rlhf.data.batch import Rollout
from rlhf.data.corpus import Corpus, Prompt
from rlhf.data.tokenize import DialogueTokenizer
from rlhf.errors import UserError
from rlhf.evaluation.policies import PolicySamples, gains_with_intervals, measure
from rlhf.evaluation.reward_model import add_reward_models
from rlhf.evaluation.samples import examples, expected_answers, sample_rows
from rlhf.files import remove
from rlhf.models.adapters import lora_config, save_adapter
from rlhf.models.loading import base_name, load_base
from rlhf.models.roles import AdapterStart
from rlhf.models.shared_base import SharedBase
from rlhf.observe.telemetry import Telemetry
from rlhf.process import distributed
from rlhf.recipe.schema_online import OnlineOptions
from rlhf.recipe.stages import RM, Role, SharedRole
from rlhf.rollout import vllm
from rlhf.rollout.check import check_first
from rlhf.rollout.decoding import Sampling
from rlhf.rollout.engine import sample
from rlhf.rollout.vllm_command import start_command
from rlhf.run.checkpoints import with_resume_advice
from rlhf.run.directory import StageRun
from rlhf.run.evidence import NO_VERDICT
from rlhf.run.layout import ADAPTER
from rlhf.stages.online import role_passes
from rlhf.stages.online.checkpoints import update_checkpoints
from rlhf.stages.online.loop import FunctionRewards
from rlhf.stages.online.prompts import OnlinePrompts
from rlhf.stages.online.reward_sum import RewardSum, total_figures
from rlhf.stages.online.role_passes import ScoreNorm
from rlhf.stages.online.served import check_served
from rlhf.stages.online.train_state import SavedState, TrainState, read_state
from rlhf.stages.result import Result
from rlhf.terminal import say
from rlhf.terminal.progress import Bar

LOGGED_PROMPTS = 8  # held-out prompts whose responses are logged


def begin(run: StageRun, device: torch.device, tokenizer: DialogueTokenizer, corpus: Corpus) -> "Session":
    """Encode the prompts and load the models of a run. New adapters are drawn from torch's generator, seeded here."""
    options = run.loaded.recipe.online()[run.stage]
    run.total_steps = options.steps
    telemetry = Telemetry(device)
    client = vllm.Client(options.vllm_url, partial(_server_command, run, options)) if options.vllm_url else None
    prompts, reward_sum = _encode_prompts(run, tokenizer, corpus, options, device)
    run.describe(cuts={"prompts_cut": prompts.cut})
    torch.manual_seed(run.loaded.recipe.seed)
    with telemetry.phase("load"):
        shared = _load_models(run, device, options, tokenizer)
    saved = _read_checkpoint(run)
    expected = expected_answers(corpus)
    return Session(run, device, options, telemetry, client, tokenizer, prompts, reward_sum, shared, saved, expected)


def _encode_prompts(
    run: StageRun, tokenizer: DialogueTokenizer, corpus: Corpus, options: OnlineOptions, device: torch.device
) -> tuple[OnlinePrompts, RewardSum | None]:
    """Return the prompts, and the rewards where the score is a sum of them."""
    split, reward_sum = corpus.prompts(run.stage), None
    if options.sums_rewards:
        reward_sum = RewardSum(
            run.stage, options, corpus.right_answers(), tokenizer, corpus.columns, run.path, device=device.type
        )
        split = reward_sum.usable(split)
    return OnlinePrompts(split, tokenizer, options, run.loaded.recipe.seed), reward_sum


def _load_models(
    run: StageRun, device: torch.device, options: OnlineOptions, tokenizer: DialogueTokenizer
) -> SharedBase:
    """Return the base with the roles that all methods need; PPO adds a critic."""
    recipe, base, start = run.loaded.recipe, load_base(run.base, device), run.parents.start()
    policy = lora_config(recipe.lora, base, "CAUSAL_LM") if start is None else start
    roles: dict[Role, AdapterStart] = {"policy": policy, "reference": start}
    hardware = recipe.hardware
    shared = SharedBase(base, roles, ("policy",), lean=hardware.trunk == "lean", joins=hardware.joined_rows)
    if options.gradient_checkpointing:
        shared.base.activation_checkpointing_enable()
        shared.base.enable_input_require_grads()
    if options.model_scores:
        add_reward_models(shared, run)
    return shared


def _server_command(run: StageRun, options: OnlineOptions) -> str:
    """Return the command that starts the server of a run."""
    return start_command(run.loaded.recipe, options, base_name(run.base))


def _read_checkpoint(run: StageRun) -> SavedState | None:
    """Return the state that a resumed run continues from; None in a new run."""
    if run.resumed_from is None:
        return None
    with with_resume_advice(run.resumed_from):
        return read_state(run.resumed_from)


class Session:
    """Data, models, sampling, evaluation and log files of one run; `begin` makes it.

    `shared` has the roles `policy` and `reference`, both at the start (SFT, or the base itself), and the reward model
    where the stage needs it. `saved` is the state that a resumed run continues from.
    """

    def __init__(
        self,
        run: StageRun,
        device: torch.device,
        options: OnlineOptions,
        telemetry: Telemetry,
        client: vllm.Client | None,
        tokenizer: DialogueTokenizer,
        prompts: OnlinePrompts,
        reward_sum: RewardSum | None,
        shared: SharedBase,
        saved: SavedState | None,
        expected: dict[Prompt, str],
    ):
        self.run, self.device, self.recipe, self.options = run, device, run.loaded.recipe, options
        self.telemetry, self.tokenizer, self.shared = telemetry, tokenizer, shared
        self.prompts, self.reward_sum, self._saved, self._expected = prompts, reward_sum, saved, expected
        self.rm_dir = run.parents.folder(RM)
        self.sampling = sampling_settings(options)
        self.client, self._server_is_checked = client, False
        self._reference_samples: PolicySamples  # of `measure_reference`
        self._policy_samples: PolicySamples | None = None  # of the last evaluation; None before the first

    def measure_reference(self) -> None:
        """Measure the reference on held-out prompts: the policy's gains are in its standard deviations.

        Raises UserError where none of its answers has a score: nothing could be learned or compared.
        """
        self._reference_samples = found = self.evaluate("reference")
        if found.scores is not None and found.scores.isnan().all():
            counts = ", ".join(f"{name} {int((~x.isnan()).sum())}" for name, x in found.rewards.items())
            raise UserError(
                f"{self.run.stage}: none of {len(found.texts)} held-out answers of {self.recipe.start} has a verdict "
                f"of every reward (with a verdict: {counts} of {len(found.texts)}); where a reward does not apply, "
                "return a number such as 0"
            )

    def measure_score_norm(self) -> ScoreNorm:
        """Return the mean and sd by which scores are normalised: measured, or those of the checkpoint of a resumed run.

        Raises UserError for a damaged checkpoint, and for scores that do not differ.
        """
        if self._saved is not None:
            return ScoreNorm(*self._saved["norm"])
        if not self.options.normalize_scores:
            return ScoreNorm()
        with self.phase("evaluate"):
            return role_passes.measure_score_norm(self.shared, self.sample_step, self.options)

    def restore(self, state: TrainState) -> None:
        """Continue from the checkpoint of a resumed run; in a new run do nothing."""
        if self._saved is not None:
            state.restore(self._saved)
            self._saved = None  # frees its tensors

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Measure time and memory of a block under this name."""
        return self.telemetry.phase(name)

    def sample_step(self, step: int) -> Rollout:
        """Sample the policy's responses to the prompts of a step."""
        return self.sample(self.prompts.of_step(step))

    def sample(self, indices: Sequence[int]) -> Rollout:
        """Sample the policy's responses to training prompts, those to one prompt side by side."""
        shared, tokenizer = self.shared, self.tokenizer
        prompts, copies = [self.prompts.ids[i] for i in indices], self.options.samples_per_prompt
        sampling = replace(self.sampling, samples_per_prompt=copies)
        if self.client is not None:
            folder = self.run.path / "sampling.tmp"  # a name that a restart deletes, after a run that was killed
            try:
                save_adapter(shared.peft, self.run.base.model.revision, folder, adapter="policy")
                with self.client.adapter(folder):
                    rollout = self.client.sample(prompts, tokenizer, sampling, self.device)
            finally:
                remove(folder)
            if not self._server_is_checked:
                check_served(
                    shared, rollout, self.recipe, self.options, partial(_server_command, self.run, self.options)
                )
                self._server_is_checked = True
        else:
            with shared.role("policy"):
                trunk = shared.role_trunk
                rollout = sample(shared.base, prompts, tokenizer, sampling, phase=self.phase, trunk=trunk)
                check_first(shared, rollout, sampling)
        if shared.lean_trunk is None or copies == 1:
            return rollout
        return replace(rollout, prompt_numbers=torch.arange(len(prompts), device=self.device).repeat_interleave(copies))

    def function_rewards(self, step: int, rollout: Rollout) -> FunctionRewards | None:
        """Return what reward functions give the responses to the prompts of a step; None where a recipe names none."""
        if self.reward_sum is None:
            return None
        prompts = [self.prompts.train[i] for i in self.prompts.of_step(step)]
        texts = self.tokenizer.decode_rows(rollout.tokens, rollout.mask)
        return self.reward_sum.of_functions(prompts, texts, rollout.response_ids)

    def evaluate(self, role: SharedRole, prompts: Sequence[Prompt] | None = None) -> PolicySamples:
        """Measure a role on held-out prompts; by default on those that choose checkpoints."""
        prompts = self.prompts.validation if prompts is None else prompts
        truth = self.recipe.data.has_true_reward
        reward_fn = self.reward_sum.for_evaluation if self.reward_sum else None
        seed = self.recipe.seed
        with self.phase("evaluate"):
            return measure(
                self.shared,
                role,
                self.tokenizer,
                prompts,
                self.sampling,
                seed=seed,
                with_true_reward=truth,
                reward_fn=reward_fn,
            )

    def shard(self) -> None:
        """Divide the frozen layers among ranks if the recipe says so."""
        if self.recipe.hardware.engine == "fsdp" and distributed.world() > 1:
            self.shared.shard()

    def end_step(self, state: TrainState, rollout: Rollout, metrics: dict[str, float], bar: Bar) -> None:
        """Evaluate, log and save after a step, as often as the recipe says."""
        run, options, done = self.run, self.options, state.step
        last = done == options.steps
        save = last or done % options.save_steps == 0
        self.telemetry.count(int((rollout.prompt_length + rollout.response_length).sum()))
        ends = rollout.other_end_rate(self.shared.end_ids, self.tokenizer.eos_id)
        metrics = metrics | {f"response/{name}": rate for name, rate in ends.items()}
        if save or done % options.eval_steps == 0:
            metrics = metrics | self._evaluate_policy(done)
        if last or done % options.logging_steps == 0:
            run.logs.metrics(done, metrics)
            run.logs.telemetry(done, self.telemetry.since_last_call())
        if save:
            run.save_checkpoint(done, lambda folder: state.save(run.base, folder))
            distributed.from_main(lambda: update_checkpoints(run, options))
        kl = metrics.get("objective/kl_per_token")
        bar.update(
            done,
            f"score {metrics.get('objective/scores', math.nan):.3f}" + ("" if kl is None else f"  KL/token {kl:.3f}"),
        )

    def _evaluate_policy(self, done: int) -> dict[str, float]:
        """Measure the policy after a step, and log some of its responses. Return the metrics."""
        self._policy_samples = self.evaluate("policy")
        policies = {self.recipe.start: self._reference_samples, self.run.stage: self._policy_samples}
        rows = sample_rows(self.tokenizer, self.prompts.validation[:LOGGED_PROMPTS], policies, self._expected)
        self.run.logs.samples(done, rows)
        gains = gains_with_intervals(self._reference_samples, self._policy_samples, self.recipe.start)
        return {f"eval/{name}": value for name, value in gains.items()}

    def finish(self, state: TrainState) -> Result:
        """Write the resulting adapter, last or best, and measure it on the prompts for reporting.

        Where validation is set apart, the reference was measured on other prompts, and is measured again.
        """
        run = self.run
        if distributed.world() == 1:
            self.telemetry.note_components(self.shared.peft, state.optimizer)
        best = self._choose_policy(state)
        save_adapter(self.shared.peft, run.base.model.revision, run.path / ADAPTER, adapter="policy")
        test, before, after = self.prompts.test, self._reference_samples, self._policy_samples
        if self.prompts.has_validation:
            before, after = self.evaluate("reference", test), self.evaluate("policy", test)
        elif after is None:  # also the case when a resumed run had already taken its last step
            after = self.evaluate("policy")
        self.say_no_verdict(self.recipe.start, before)
        self.say_no_verdict(run.stage, after)
        metrics = gains_with_intervals(before, after, self.recipe.start)
        metrics |= {"best_step": math.nan if best is None else best}
        metrics |= total_figures(self.reward_sum.called) if self.reward_sum else {}
        return Result(metrics, self.telemetry.costs(), examples(test, {self.recipe.start: before, run.stage: after}))

    def say_no_verdict(self, label: str, samples: PolicySamples) -> None:
        """Say which share of the answers of a policy is in no score, where there is one."""
        if share := samples.no_verdict().get(f"score{NO_VERDICT}"):
            say(f"{self.run.stage}: {100 * share:.3g} % of the answers of {label} have no verdict and are in no score")

    def _choose_policy(self, state: TrainState) -> int | None:
        """Return the step of the best checkpoint, None without one. With `adapter: best` load the policy from it."""
        run, options = self.run, self.options
        best = distributed.from_main(lambda: update_checkpoints(run, options))  # a resumed run may take no step
        if options.adapter == "last":
            return best
        if best is None:
            limit = options.best_kl_limit
            within = "" if limit is None else f" within best_kl_limit: {limit} nats/token"
            say(f"{run.stage}: no checkpoint has a finite score{within}; the result is the last")
        elif best != state.step:
            state.take_policy(run.checkpoints.of(best))
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
