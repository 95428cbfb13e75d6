"""The sections of a recipe for stages that learn from their own samples: PPO, RLOO and GRPO."""

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from rlhf.objectives.choices import Advantage, KlEstimator, Level, LossType, SamplingCorrection, Scale, TokenLevel
from rlhf.recipe.bounds import (
    BatchRows,
    ClipRange,
    Finite,
    Fraction,
    Name,
    NonNegative,
    Passes,
    Positive,
    Rate,
    Steps,
    StepsOrZero,
    Temperature,
    Tokens,
    Training,
)
from rlhf.recipe.choices import CriticKind, KeptWeights
from rlhf.recipe.strict import AsTuple

MODEL_REWARD = "model"  # in reward_funcs: the reward model


class OnlineBase(Training):
    """The keys of all stages that learn from their own samples.

    One step is one batch of responses and the update on it.
    """

    steps: Steps
    batch_size: Annotated[int, Field(gt=1, le=65_536)]  # responses per step
    num_mini_batches: BatchRows  # optimizer steps per epoch
    rollout_batch_size: BatchRows  # responses decoded together
    score_batch_size: BatchRows | None = None  # responses scored together; null: per_device_train_batch_size
    vllm_url: Name | None = None  # address of a vLLM server that samples (rlhf/rollout/vllm.py)
    warmup_steps: StepsOrZero
    adam_epsilon: Positive = 1e-5  # as in openai/baselines ppo2
    max_prompt_length: Tokens
    temperature: Temperature = 1.0
    # `model`, the reward model, or functions: docs/rewards.md
    reward_funcs: Annotated[tuple[Name, ...], AsTuple, Field(min_length=1)] = ("model",)
    reward_weights: Annotated[tuple[Finite, ...] | None, AsTuple] = None  # one for each reward; null: 1 each
    reward_timeout: Positive | None = None  # seconds that a call of a reward function may take; null: no limit
    kl_estimator: KlEstimator = "k1"
    kl_penalty: Literal["reward", "loss"] = "reward"  # part of each token's reward, or of the loss
    kl_target: Positive | None = None  # nats per token; the KL coefficient starts as given and follows the target
    entropy_coef: NonNegative = 0.0
    normalize_scores: bool = True  # by mean and sd of the reward model's scores on SFT responses to training prompts
    norm_responses: Annotated[int, Field(gt=1, le=10_000_000)] = 256  # how many, rounded up to whole batches
    missing_eos_penalty: NonNegative | None = 1.0
    # Weights for responses that were sampled from another distribution; auto: docs/methods.md
    sampling_correction: Literal["auto", SamplingCorrection] = "auto"
    sampling_correction_cap: Positive = 3.0  # of a weight, as TRL's vllm_importance_sampling_clip_max
    logging_steps: Steps = 1
    eval_steps: Steps  # steps between evaluations on held-out prompts; also at every checkpoint
    keep_checkpoints: Literal["all"] | Steps = "all"  # a number: as many of the newest, and the best
    best_kl_limit: Positive | None = None  # most KL of the best checkpoint, nats per token
    adapter: KeptWeights = "last"  # the weights that are kept

    @property
    def score_rows(self) -> int:
        """Return the number of responses that are scored together."""
        return self.score_batch_size or self.per_device_train_batch_size

    @property
    def model_scores(self) -> bool:
        """Return whether the reward model scores the responses."""
        return MODEL_REWARD in self.reward_funcs

    @property
    def weights(self) -> tuple[float, ...]:
        """Return the weight of each reward."""
        return (1.0,) * len(self.reward_funcs) if self.reward_weights is None else self.reward_weights

    @property
    def model_weight(self) -> float:
        """Return the weight of the reward model's score."""
        return dict(zip(self.reward_funcs, self.weights, strict=True)).get(MODEL_REWARD, 0.0)

    @property
    def correction(self) -> SamplingCorrection:
        """Return how the policy loss is corrected for a sampler that differs; `auto` is TRL's default where it does."""
        if self.sampling_correction != "auto":
            return self.sampling_correction
        return "none" if self.vllm_url is None else "sequence_mask"

    @property
    def samples_per_prompt(self) -> int:
        """Return the number of responses to each prompt in a batch."""
        return 1

    passes_key: ClassVar[str]  # the key that sets `passes`
    kl_key: ClassVar[str]  # the key that sets `kl_coef`
    corrects_kl: ClassVar[bool] = False  # multiply the KL in the loss by the ratio of the token, as TRL's GRPO does

    @property
    def passes(self) -> int:
        """Return the number of passes that an update makes over a batch."""
        passes: int = getattr(self, self.passes_key)
        return passes

    def problems(self) -> Iterator[str]:
        yield from self.not_multiple("batch_size", "num_mini_batches")
        yield from self.not_multiple("eval_steps", "logging_steps")
        yield from self.not_multiple("save_steps", "logging_steps")
        if self.kl_target is not None and not getattr(self, self.kl_key):
            yield f"kl_target needs {self.kl_key} above 0: it is multiplied, so that 0 stays 0"
        if self.kl_penalty == "loss" and self.kl_estimator == "k1" and not self.corrects_kl:
            yield "kl_penalty: loss needs kl_estimator k2 or k3: the expected gradient of k1 is zero"
        if self.kl_penalty == "loss" and self.kl_estimator == "k2" and self.corrects_kl:
            yield "kl_estimator: use k3 or k1, not k2: times GRPO's ratio its gradient is wrong"
        if self.vllm_url is not None and not self.vllm_url.startswith(("http://", "https://")):
            yield f"vllm_url: {self.vllm_url} must begin with http:// or https://"
        if len(self.weights) != len(self.reward_funcs):
            yield "reward_weights: give each of reward_funcs its weight"
        if not any(self.weights):
            yield "reward_weights: one must not be 0"
        if len(set(self.reward_funcs)) != len(self.reward_funcs):
            yield "reward_funcs names a reward twice"
        if self.normalize_scores and not self.model_scores:
            yield f"normalize_scores needs {MODEL_REWARD} among reward_funcs: it is about its scores"


class Ppo(OnlineBase):
    """PPO; keys are named as in the PPOConfig of TRL 1.12."""

    passes_key: ClassVar[str] = "num_ppo_epochs"
    kl_key: ClassVar[str] = "kl_coef"
    num_ppo_epochs: Passes  # passes over a batch of responses
    value_learning_rate: Rate
    response_length: Tokens
    kl_coef: NonNegative
    gamma: Fraction = 1.0
    lam: Fraction
    cliprange: ClipRange = 0.2
    cliprange_value: Positive | None = 0.2
    vf_coef: NonNegative = 1.0
    value_warmup_steps: StepsOrZero = 0  # first steps, in which only the critic learns
    whiten_advantages: bool = True
    sigmoid_scores: bool = False
    value_model: CriticKind = "adapter"  # a head on the policy, or an adapter that starts as `reward` or the policy

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if self.sigmoid_scores and (self.normalize_scores or not self.model_scores):
            yield f"sigmoid_scores needs {MODEL_REWARD} among reward_funcs, and normalize_scores: false"
        if self.value_warmup_steps >= self.steps:
            yield "value_warmup_steps must be below steps, or the policy never learns"


class GroupBase(OnlineBase):
    """The keys that RLOO and GRPO share: `num_generations` responses to each prompt are compared with each other."""

    documented_in: ClassVar[str] = "docs/methods.md"
    passes_key: ClassVar[str] = "num_iterations"
    kl_key: ClassVar[str] = "beta"
    num_generations: Annotated[int, Field(ge=2, le=65_536)]  # responses to a prompt; batch_size is a multiple of it
    num_iterations: Passes = 1  # passes over a batch of responses
    max_completion_length: Tokens
    beta: NonNegative  # weight of the KL; 0: the reference is not computed in training
    epsilon: ClipRange = 0.2  # clip of the ratio, in gmpo of its logarithm; the lower clip if epsilon_high is set
    epsilon_high: Positive | None = None  # upper clip (DAPO); null: epsilon; with cispo the largest ratio itself
    mask_truncated_completions: bool = False  # no gradient from responses without EOS; their rewards count
    normalize_advantages: bool = False  # mean 0 and sd 1 over the batch; GRPO with scale_rewards: none: REINFORCE++

    @property
    def kl_coef(self) -> float:
        return self.beta

    @property
    def response_length(self) -> int:
        return self.max_completion_length

    @property
    def upper_epsilon(self) -> float:
        """Return the upper clip of the ratio."""
        return self.epsilon if self.epsilon_high is None else self.epsilon_high

    @property
    def samples_per_prompt(self) -> int:
        return self.num_generations

    @property
    def updates_once(self) -> bool:
        """Return whether one optimizer step learns from a batch, and nothing else needs the log-probabilities before.

        Then they are those of the step's own pass.
        """
        return self.passes * self.num_mini_batches == 1 and not self.beta and self.correction == "none"

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        yield from self.not_multiple("batch_size", "num_generations")
        yield from self.not_multiple("rollout_batch_size", "num_generations")


class Rloo(GroupBase):
    """RLOO; keys are named as in TRL's RLOOConfig. The ratio is of whole responses; the loss is the mean over them."""

    advantage: ClassVar[Advantage] = "leave_one_out"
    importance_sampling_level: ClassVar[Level] = "sequence_sum"
    loss_type: ClassVar[LossType] = "grpo"


class Grpo(GroupBase):
    """GRPO; keys are named as in TRL's GRPOConfig."""

    corrects_kl: ClassVar[bool] = True
    kl_estimator: KlEstimator = "k3"
    kl_penalty: Literal["reward", "loss"] = "loss"
    scale_rewards: Scale = "group"  # whose standard deviation divides; none: Dr. GRPO
    loss_type: LossType = "dapo"  # docs/methods.md
    importance_sampling_level: TokenLevel = "token"  # sequence: GSPO's, whose loss is grpo's

    @property
    def advantage(self) -> Advantage:
        """Return how rewards become advantages: `rlhf.objectives.groups.ADVANTAGES`."""
        return self.scale_rewards

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if self.loss_type == "cispo" and self.epsilon_high is None:
            yield "loss_type: cispo needs epsilon_high, the largest ratio, as in TRL: 5.0 is usual"
        if self.loss_type in ("cispo", "gmpo") and self.importance_sampling_level != "token":
            yield f"loss_type: {self.loss_type} needs importance_sampling_level: token"


GroupOptions = Rloo | Grpo
OnlineOptions = Ppo | GroupOptions  # a section of a stage that learns from its own samples
