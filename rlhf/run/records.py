"""Typed records of what run directories hold. `rlhf/run/reader.py` reads files as one of them.

Unknown keys are kept: a newer version may add some. A version that changes the meaning of a key raises SCHEMA.
"""

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from rlhf.recipe import published

SCHEMA = 1


# -- records ---------------------------------------------------------------------------------------------------------


class Record(BaseModel):
    """An object in a file of a run directory. Types are strict; unknown keys are kept."""

    model_config = ConfigDict(extra="allow", frozen=True, strict=True, protected_namespaces=())


def _relative(name: str) -> str:
    """Return the name of a file inside a folder. Raises ValueError for any other path."""
    if not name or Path(name).is_absolute() or ".." in Path(name).parts or "\0" in name:
        raise ValueError("not the name of a file inside the folder")
    return name


def _readable_comparison(entry: dict[str, Any]) -> dict[str, Any]:
    """Return a comparison that rlhf/recipe/published.py can read. Raises ValueError for anything else."""
    try:
        low, high = entry["published"]
        for number in (entry["measured"], low, high):
            if number is not None and (isinstance(number, bool) or not isinstance(number, int | float)):
                raise ValueError(f"{number!r} is not a number")
        published.verdict_of(entry)
    except (KeyError, TypeError, AttributeError, ArithmeticError) as error:
        raise ValueError(f"not a comparison ({type(error).__name__}: {error})") from None
    return entry


Count = Annotated[int, Field(ge=0, lt=2**63)]
Number = Annotated[float, Field(allow_inf_nan=False)]
Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Name = Annotated[str, Field(pattern=r"^[^/\x00]+$")]
Hash = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
InnerFile = Annotated[str, AfterValidator(_relative)]
Hashes = dict[InnerFile, Hash]
Comparison = Annotated[dict[str, Any], AfterValidator(_readable_comparison)]


class Device(Record):
    """The device that a stage ran on."""

    name: str
    type: str
    threads: Count | None = None
    processes: Count = 1


class Code(Record):
    """The commit of the code that ran, and whether it had changes."""

    commit: str | None
    dirty: bool | None


class DataFile(Record):
    """A file of data, with its hash."""

    name: str
    sha256: str


class DataRead(Record):
    """The fingerprint of the data that a stage read."""

    sha256: str
    files: list[DataFile]
    documents: Count = 0
    examples: Count = 0
    pairs: Count = 0
    dropped: dict[str, Count] = {}


class HardwareSettings(Record):
    """The keys of a recipe's hardware that are read from a manifest."""

    memory_gb: Amount | None = None


class DataSettings(Record):
    """The keys of a recipe's data that are read from a manifest."""

    source: str
    heldout_fraction: Amount
    format: str = "auto"
    name: str | None = None
    revision: str | None = None
    data_dir: str | None = None


class TokenizerSettings(Record):
    """The keys of a recipe's tokenizer that are read from a manifest."""

    template: str = "hh"


class Settings(Record):
    """The settings in a manifest. These keys are read again; all keys are compared with a recipe's."""

    seed: Count = 0
    hardware: HardwareSettings = HardwareSettings()
    data: DataSettings | None = None
    tokenizer: TokenizerSettings = TokenizerSettings()


class Manifest(Record):
    """The content of manifest.json."""

    schema_: Annotated[int, Field(alias="schema", ge=1, le=SCHEMA)] = SCHEMA
    recipe: Name
    version: Name
    recipe_sha256: str
    overrides: dict[str, Any]
    seed: Count
    settings: Settings
    parents: dict[Name, Hash]
    started: str | None = None  # UTC, ISO 8601
    parents_from: dict[Name, str] = {}  # places of parents below another root, relative to this run's root
    code: Code
    packages: dict[str, str]
    device: Device
    data: DataRead | None = None


class Summary(Record):
    """The content of summary.json."""

    schema_: Annotated[int, Field(alias="schema", ge=1, le=SCHEMA)] = SCHEMA
    recipe: str
    version: str
    modified: bool
    stage: str
    status: Literal["done"]
    seed: Count
    wall_seconds: Amount
    tokens_per_second: Amount | None
    peak_vram_bytes: Amount | None
    peak_rss_bytes: Amount
    predicted_peak_vram_bytes: Amount | None = None
    processes: Count = 1
    phase_seconds: dict[str, Amount] = {}
    result_sha256: Hashes
    metrics: dict[str, Number | None]
    findings: list[str] = []
    targets: list[Comparison]
    all_stages: list[published.Figure] = []


class Checkpoint(Record):
    """The content of checkpoint.json, which is written last into a checkpoint's folder."""

    step: Count
    wall_seconds: Amount
    sha256: Annotated[Hashes, Field(min_length=1)]
    log_lines: dict[Name, Count] | None = None  # lines of each log at the checkpoint; older ones lack it


class BestCheckpoint(Record):
    """The content of checkpoints/best.json."""

    best_step: Count | None


class TrainerState(Record):
    """The keys of transformers' trainer_state.json that a resumed run depends on."""

    epoch: Amount
    global_step: Count
    max_steps: Count
    logging_steps: Amount
    eval_steps: Amount
    save_steps: Amount
    train_batch_size: Count | None
    num_train_epochs: Count
    num_input_tokens_seen: Count
    total_flos: Amount
    log_history: list[dict[str, Any]]
    stateful_callbacks: dict[str, Any]


class SchedulerState(Record):
    """The state of one of torch's learning-rate schedules, in scheduler.pt and in PPO's state.pt."""

    last_epoch: Count
    step_count: Annotated[Count, Field(alias="_step_count")]
    base_lrs: list[Amount]
    last_lr: Annotated[list[Amount], Field(alias="_last_lr")]


class ParameterGroup(Record):
    """One group of parameters of an optimizer."""

    params: list[Count]
    lr: Amount
    betas: tuple[Amount, Amount] | list[Amount]
    eps: Amount
    weight_decay: Amount


class OptimizerState(Record):
    """The state of an AdamW, in optimizer.pt and in PPO's state.pt.

    Its tensors are checked against the parameters elsewhere.
    """

    state: dict[Count, dict[str, Any]]
    param_groups: Annotated[list[ParameterGroup], Field(min_length=1)]


class AdapterConfig(Record):
    """The adapter_config.json of a plain LoRA adapter, the only kind that the stages write."""

    peft_type: Literal["LORA"]
    task_type: Literal["CAUSAL_LM", "SEQ_CLS"]
    base_model_name_or_path: str | None = None
    r: Annotated[int, Field(gt=0, le=2**16)]
    lora_alpha: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    lora_dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    target_modules: str | Annotated[list[str], Field(min_length=1)]
    bias: Literal["none"] = "none"
    auto_mapping: None = None
    init_lora_weights: Literal[True] = True
    use_dora: Literal[False] = False
    use_rslora: Literal[False] = False
    rank_pattern: Annotated[dict[str, int], Field(max_length=0)] = {}
    alpha_pattern: Annotated[dict[str, int], Field(max_length=0)] = {}
    layers_to_transform: list[int] | None = None
    layer_replication: None = None
    target_parameters: None = None
    trainable_token_indices: None = None


class Generated(Record):
    """The content of made.json beside generated data: the hash of each file."""

    sha256: Hashes


class ModelConfig(Record):
    """The keys of a base model's config.json that are used before the model is built."""

    vocab_size: Annotated[int, Field(gt=0, le=2**24)] | None = None
    hidden_size: Annotated[int, Field(gt=0, le=2**20)] | None = None
    intermediate_size: Annotated[int, Field(gt=0, le=2**24)] | None = None
    num_hidden_layers: Annotated[int, Field(gt=0, le=2**12)] | None = None
    num_attention_heads: Annotated[int, Field(gt=0, le=2**16)] | None = None
    num_key_value_heads: Annotated[int, Field(gt=0, le=2**16)] | None = None
    max_position_embeddings: Annotated[int, Field(gt=0, le=2**31)] | None = None


class WeightsIndex(Record):
    """The content of model.safetensors.index.json."""

    metadata: dict[str, Any]
    weight_map: dict[str, InnerFile]


# -- records that a report shows -------------------------------------------------------------------------------------


class MetricsLine(Record):
    """A line of metrics.jsonl."""

    __pydantic_extra__: dict[str, Number | None]
    step: Count


class LogLine(Record):
    """A line of any log."""

    step: Count


class TelemetryLine(Record):
    """A line of telemetry.jsonl."""

    step: Count
    memory_bytes: Amount | None = None


class FindingLine(Record):
    """A line of findings.jsonl."""

    step: Count
    check: str
    seen: str
    cause: str
    remedies: dict[str, Any]


class Answer(Record):
    """One policy's answer to a prompt, with its scores."""

    response: str
    score: Number | None = None
    true_reward: Number | None = None


class SampleLine(Record):
    """A line of an evaluation's samples.jsonl: a prompt and the answer of each policy."""

    __pydantic_extra__: dict[str, str | Answer]
    prompt: str
    step: Count = 0
    sample: Count = 0
    messages: list[Any] = []


class Histogram(Record):
    """Counts of values between neighbouring edges."""

    edges: list[Number]
    counts: list[Amount]

    @model_validator(mode="after")
    def _matches(self) -> Self:
        if len(self.edges) != len(self.counts) + 1:
            raise ValueError("a histogram has one edge more than counts")
        return self


class Histograms(Record):
    """Counts of several policies' scores between the same edges."""

    edges: list[Number]
    counts: dict[str, list[Amount]]


class CalibrationBin(Record):
    """The pairs of one range of confidence."""

    confidence: Number | None
    accuracy: Number | None
    pairs: Count


class RewardModelFigures(Record):
    """The figures of a reward model: calibration, margins and scores after a sigmoid."""

    calibration: list[CalibrationBin]
    margins: Histogram
    sigmoid_scores: Histogram


class Contradiction(Record):
    """A held-out pair on which the reward model contradicts the label."""

    margin: Number
    prompt: str
    chosen: str
    rejected: str


class Details(Record):
    """The content of evaluate/details.json."""

    scores: Histograms | None = None
    reward_model: RewardModelFigures | None = None
    contradicted: list[Contradiction] = []


class QualityLine(Record):
    """One check of the data: its outcome and a hint."""

    severity: str
    name: str
    value: Any
    hint: str


class Lengths(Record):
    """A histogram of lengths: counts up to each limit."""

    upto: list[Number]
    counts: list[Amount]


class Quality(Record):
    """The content of data/quality.json, the check of the data that a report has made."""

    made_from: dict[str, Any]
    unit: str
    table: list[QualityLine]
    lengths: dict[str, Lengths]


class Prediction(Record):
    """The content of a recipe's predicted.json: bytes by stage, phase and component."""

    stages: dict[str, dict[str, dict[str, Amount]]]


class Packages(Record):
    """The packages that a record of seeds names."""

    torch: str
    transformers: str
    trl: str
    peft: str


class Reproduction(Record):
    """The record that `rlhf reproduce` writes: the summaries of a chain by seed and stage."""

    recipe: str
    version: str
    recipe_sha256: str
    code: Code
    device: Device
    packages: Packages
    price_per_hour: Amount | None = None
    seeds: Annotated[dict[str, dict[str, Summary]], Field(min_length=1)]

    @model_validator(mode="after")
    def _same_stages(self) -> Self:
        chains = [
            [(stage, len(s.targets), len(s.all_stages)) for stage, s in run.items()] for run in self.seeds.values()
        ]
        if not chains[0] or any(chain != chains[0] for chain in chains):
            raise ValueError("every seed needs the same stages with the same targets")
        return self
