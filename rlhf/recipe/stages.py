"""The stages of a chain, in one table: all that code for every stage has to know of each.

A stage is a row of this table, a section of the recipe (schema.py) and a module with `run_stage` (rlhf/stages).
Recipes, chains, plans, checks during training, reports and the command line read the table. Where they need one stage,
such as the results of SFT, they name it by a constant of this module. Nothing here imports torch.
"""

from dataclasses import dataclass, replace
from typing import Final, Literal, NamedTuple, get_args

from rlhf.errors import UserError

RewardModelName = Literal["rm", "second_rm"]
GroupName = Literal["rloo", "grpo"]  # stages that compare several responses to a prompt
OnlineName = Literal["ppo", GroupName]  # stages that learn from their own samples
PolicyName = Literal[OnlineName, "dpo", "kto"]  # stages whose policy is compared with where it started
TrainingName = Literal["sft", RewardModelName, PolicyName]  # stages that train an adapter
StageName = Literal["pretrain", TrainingName, "evaluate", "merge"]
PolicyStart = Literal["sft", "base"]  # where policies start: SFT's adapter, or the base without one
PolicyLabel = PolicyStart | PolicyName  # what an evaluation measures
# Roles of adapters on a shared base.
ScoreRole = Literal["reward", "second_reward"]  # of the reward model, and of the second one
SharedRole = Literal["policy", "reference", "reward", "second_reward", "value", "base"]  # base: without an adapter
Role = SharedRole | PolicyName  # in an evaluation each policy has a role too

STAGES: tuple[StageName, ...] = get_args(StageName)
ONLINE: tuple[OnlineName, ...] = get_args(OnlineName)
STARTS: tuple[PolicyStart, ...] = get_args(PolicyStart)
POLICIES: tuple[PolicyName, ...] = get_args(PolicyName)
LABELS: tuple[PolicyLabel, ...] = ("base", "sft", *POLICIES)
TRAINING_STAGES: tuple[TrainingName, ...] = get_args(TrainingName)  # `hardware.count` processes share one of them
REWARD_MODELS: tuple[RewardModelName, ...] = get_args(RewardModelName)

# Stages that other code names: most make what others read.
PRETRAIN: Final = "pretrain"  # a base model
SFT: Final = "sft"  # the adapter at which policies start
RM: Final = "rm"  # the reward model
SECOND_RM: Final = "second_rm"  # a reward model that only measures: no policy learns from it
PPO: Final = "ppo"
GRPO: Final = "grpo"
DPO: Final = "dpo"
EVALUATE: Final = "evaluate"  # figures of all policies
MERGE: Final = "merge"  # one checkpoint


FEW_SAMPLES = 8  # held-out prompts whose answers are logged before and after


# Seeds that follow from the recipe's, for draws that must not repeat what training draws. Orders of rows need none:
# Python's `random.Random` takes a text such as `shuffle:3`, and no two texts share a stream. Recorded results were
# drawn with these offsets. They are so far apart that recipes with seeds below 7,000 never meet.
SEED_COUNT = 2**32  # what numpy takes
HELDOUT_ANSWERS = 7_000  # sampled answers to held-out prompts
SECOND_MODEL = 1_000_000  # the reward model that only measures


class Curve(NamedTuple):
    """A curve of a report: its key in metrics.jsonl, its title and its unit."""

    key: str
    title: str
    unit: str


@dataclass(frozen=True, kw_only=True)
class Stage:
    """What generic code knows of a stage."""

    title: str  # in tables and pictures
    parents: tuple[StageName, ...] = ()  # whose results it reads, as far as the recipe has them; theirs come with them
    rows: Literal["texts", "demonstrations", "pairs", "judged", "prompts"]  # what it learns from, or looks at
    chooses: bool = True  # validation rows choose its checkpoints, where the data set some apart
    module: str | None = None  # of rlhf.stages; None: named as the stage
    also_decided_by: tuple[str, ...] = ()  # sections of the recipe beside its own and its parents'
    seed_offset: int = 0  # of its own seed, where another stage would draw the same
    sizes_from: tuple[StageName, ...] = ()  # stages whose sections give sizes to its rehearsal
    least_rows: int = 1  # of a micro-batch; more than one where its loss compares them: their number is in the result
    shared: bool = True  # `hardware.count` processes may share it
    rate: float = 2e-5  # learning rate of an adapter whose base is 4,096 wide: rlhf/new/learning_rates.py
    # FSDP: phases in which a rank has its part of each layer and fetches them one by one, the next one while it
    # computes; and phases in which it has fetched all of them. While it loads, it has not given any away yet.
    divided: tuple[str, ...] = ()
    fetched: tuple[str, ...] = ()
    samples: Literal["few", "all"] | None = None  # held-out prompts that it samples answers to as `evaluate` says
    on_host: bool = False  # it leaves the card alone
    remade: bool = False  # it only reads; run again when an input has changed
    curves: tuple[Curve, ...] = ()


_NATS = "nats per token"
_LOSS_OF_TOKENS = Curve("loss", "loss", _NATS)
_LOSS_OF_PAIRS = Curve("loss", "loss", "nats per pair")
_SCORE = Curve("objective/scores", "score", "score")
_KL = Curve("objective/kl_per_token", "KL to the reference", _NATS)
_OF_RESPONSES = (
    Curve("response/length", "response length", "tokens"),
    Curve("response/eos_rate", "responses that end (EOS)", "share"),
    Curve("policy/entropy_avg", "entropy", _NATS),
)
_CLIPPED = Curve("policy/clipfrac_avg", "clipped tokens", "share")


_SFT = Stage(
    title="SFT",
    parents=("pretrain",),
    rows="demonstrations",
    rate=2e-4,
    divided=("train", "evaluate"),
    samples="few",
    curves=(_LOSS_OF_TOKENS,),
)
_RM = Stage(
    title="reward model",
    parents=("sft",),
    rows="pairs",
    rate=1e-4,
    divided=("train", "evaluate"),
    curves=(
        _LOSS_OF_PAIRS,
        Curve("accuracy", "accuracy", "share of pairs"),
        Curve("margin", "margin", "score"),
    ),
)
_PPO = Stage(
    title="PPO",
    parents=("sft", *REWARD_MODELS),
    rows="prompts",
    rate=6e-5,
    divided=("update",),
    fetched=("rollout", "score", "evaluate"),
    curves=(
        _SCORE,
        _KL,
        *_OF_RESPONSES,
        Curve("val/explained_variance", "explained variance of the critic", "share"),
        Curve("loss/value_avg", "value loss", "squared reward"),
        _CLIPPED,
    ),
)
_RLOO = replace(
    _PPO,
    title="RLOO",
    module="groups",
    curves=(
        _SCORE,
        _KL,
        Curve("groups/no_signal", "groups without signal", "share"),
        Curve("groups/reward_sd", "standard deviation of the rewards in a group", "reward"),
        *_OF_RESPONSES,
        _CLIPPED,
    ),
)
_DPO = Stage(
    title="DPO",
    parents=("sft",),
    rows="pairs",
    also_decided_by=("evaluate",),  # it measures its gains with these keys
    divided=("train",),
    samples="all",
    curves=(
        _LOSS_OF_PAIRS,
        Curve("rewards/accuracies", "accuracy", "share of pairs"),
        Curve("rewards/margins", "margin", "implicit reward"),
    ),
)
_KTO = replace(
    _DPO,
    title="KTO",
    rows="judged",
    least_rows=2,  # answers to different prompts are compared
    shared=False,
    curves=(
        Curve("loss", "loss", "from 0 to 1"),
        Curve("kl", "KL to the reference", "nats per answer"),
        Curve("rewards/margins", "margin", "implicit reward"),
    ),
)

STAGE_TABLE: dict[StageName, Stage] = {
    "pretrain": Stage(title="pretraining", rows="texts", chooses=False, curves=(_LOSS_OF_TOKENS,)),
    "sft": _SFT,
    "rm": _RM,
    "second_rm": replace(_RM, title="second reward model", module="rm", seed_offset=SECOND_MODEL),
    "ppo": _PPO,
    "rloo": _RLOO,
    "grpo": replace(_RLOO, title="GRPO"),
    "dpo": _DPO,
    "kto": _KTO,
    "evaluate": Stage(
        title="evaluation",
        parents=("sft", *REWARD_MODELS),  # and every trained policy that exists
        rows="prompts",
        chooses=False,
        sizes_from=("rm",),
        samples="all",
        remade=True,
    ),
    "merge": Stage(
        title="merged model",
        parents=("sft",),  # and the stage whose adapter is merged
        rows="prompts",
        chooses=False,
        sizes_from=("sft",),
        on_host=True,
        remade=True,
    ),
}


def stage_name(text: str) -> StageName:
    """Return `text` as the name of a stage. Raises UserError if it is none."""
    if text in STAGES:
        return text
    raise UserError(f"{text!r} is not one of {', '.join(STAGES)}")


def derived_seed(seed: int, offset: int) -> int:
    """Return the seed of draws with an offset; it is below 2^32 too."""
    return (seed + offset) % SEED_COUNT
