"""Typed records of what run directories hold. `rlhf/run/reader.py` reads files as one of them.

Unknown keys are kept: a newer version may add some. A version that changes the meaning of a key raises SCHEMA.
"""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from rlhf.recipe import published

SCHEMA = 1


# -- records ---------------------------------------------------------------------------------------------------------


class Record(BaseModel):
    model_config = ConfigDict(extra="allow", frozen=True, strict=True, protected_namespaces=())


def _relative(name: str) -> str:
    if not name or Path(name).is_absolute() or ".." in Path(name).parts or "\0" in name:
        raise ValueError("not the name of a file inside the folder")
    return name


def _compared(entry: dict[str, Any]) -> dict[str, Any]:
    """A comparison with a published figure as rlhf/recipe/published.py can read it."""
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
Compared = Annotated[dict[str, Any], AfterValidator(_compared)]


class Device(Record):
    name: str
    type: str
    threads: Count | None = None
    processes: Count = 1


class Code(Record):
    commit: str | None
    dirty: bool | None


class DataFile(Record):
    name: str
    sha256: str


class DataRead(Record):
    """The fingerprint of what a stage read."""

    sha256: str
    files: list[DataFile]
    documents: Count = 0
    examples: Count = 0
    pairs: Count = 0
    dropped: dict[str, Count] = {}


class HardwareSettings(Record):
    memory_gb: Amount | None = None


class DataSettings(Record):
    source: str
    heldout_fraction: Amount
    format: str = "auto"
    name: str | None = None
    revision: str | None = None
    data_dir: str | None = None


class TokenizerSettings(Record):
    template: str = "hh"


class Settings(Record):
    """The part of a manifest's settings that is read again; all of it is compared with a recipe's."""

    seed: Count = 0
    hardware: HardwareSettings = HardwareSettings()
    data: DataSettings | None = None
    tokenizer: TokenizerSettings = TokenizerSettings()


class Manifest(Record):
    """manifest.json"""

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
    """summary.json"""

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
    targets: list[Compared]
    all_stages: list[published.Figure] = []


class Checkpoint(Record):
    """checkpoint.json, which closes the folder of a checkpoint."""

    step: Count
    wall_seconds: Amount
    sha256: Annotated[Hashes, Field(min_length=1)]
    log_lines: dict[Name, Count] | None = None  # of each log before the checkpoint; older ones lack it


class BestCheckpoint(Record):
    """checkpoints/best.json"""

    best_step: Count | None


class TrainerState(Record):
    """trainer_state.json of transformers, as far as a resumed run depends on it."""

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
    params: list[Count]
    lr: Amount
    betas: tuple[Amount, Amount] | list[Amount]
    eps: Amount
    weight_decay: Amount


class OptimizerState(Record):
    """The state of an AdamW, in optimizer.pt and in PPO's state.pt; its tensors are checked against the parameters."""

    state: dict[Count, dict[str, Any]]
    param_groups: Annotated[list[ParameterGroup], Field(min_length=1)]


class AdapterConfig(Record):
    """adapter_config.json of a plain LoRA adapter, the only kind that is made here."""

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
    layers_to_transform: None = None
    layer_replication: None = None
    target_parameters: None = None
    trainable_token_indices: None = None


class Generated(Record):
    """made.json beside generated data: the hash of each file."""

    sha256: Hashes


class ModelConfig(Record):
    """config.json of a base model, as far as it is relied on before anything is built from it."""

    vocab_size: Annotated[int, Field(gt=0, le=2**24)] | None = None
    hidden_size: Annotated[int, Field(gt=0, le=2**20)] | None = None
    intermediate_size: Annotated[int, Field(gt=0, le=2**24)] | None = None
    num_hidden_layers: Annotated[int, Field(gt=0, le=2**12)] | None = None
    num_attention_heads: Annotated[int, Field(gt=0, le=2**16)] | None = None
    num_key_value_heads: Annotated[int, Field(gt=0, le=2**16)] | None = None
    max_position_embeddings: Annotated[int, Field(gt=0, le=2**31)] | None = None


class WeightsIndex(Record):
    """model.safetensors.index.json"""

    metadata: dict[str, Any]
    weight_map: dict[str, InnerFile]


# -- records that a report shows -------------------------------------------------------------------------------------


class MetricsLine(Record):
    __pydantic_extra__: dict[str, Number | None]
    step: Count


class LogLine(Record):
    """A line of any log."""

    step: Count


class TelemetryLine(Record):
    step: Count
    memory_bytes: Amount | None = None


class FindingLine(Record):
    step: Count
    check: str
    seen: str
    cause: str
    remedies: dict[str, Any]


class Answer(Record):
    response: str
    score: Number | None = None
    true_reward: Number | None = None


class SampleLine(Record):
    __pydantic_extra__: dict[str, str | Answer]
    prompt: str
    step: Count = 0
    sample: Count = 0
    messages: list[Any] = []


class Histogram(Record):
    edges: list[Number]
    counts: list[Amount]

    @model_validator(mode="after")
    def _matches(self):
        if len(self.edges) != len(self.counts) + 1:
            raise ValueError("a histogram has one edge more than counts")
        return self


class Histograms(Record):
    edges: list[Number]
    counts: dict[str, list[Amount]]


class CalibrationBin(Record):
    confidence: Number | None
    accuracy: Number | None
    pairs: Count


class RewardModelFigures(Record):
    calibration: list[CalibrationBin]
    margins: Histogram
    sigmoid_scores: Histogram


class Contradicted(Record):
    margin: Number
    prompt: str
    chosen: str
    rejected: str


class Details(Record):
    """evaluate/details.json"""

    scores: Histograms | None = None
    reward_model: RewardModelFigures | None = None
    contradicted: list[Contradicted] = []


class QualityLine(Record):
    severity: str
    name: str
    value: Any
    hint: str


class Lengths(Record):
    upto: list[Number]
    counts: list[Amount]


class Quality(Record):
    """data/quality.json, a check of the data that a report has made."""

    made_from: dict[str, Any]
    unit: str
    table: list[QualityLine]
    lengths: dict[str, Lengths]


class Predicted(Record):
    """predicted.json of a recipe: bytes by stage, phase and component."""

    stages: dict[str, dict[str, dict[str, Amount]]]


class Packages(Record):
    torch: str
    transformers: str
    trl: str
    peft: str


class Reproduced(Record):
    """What `rlhf reproduce` writes: the summaries of a chain by seed and stage."""

    recipe: str
    version: str
    recipe_sha256: str
    code: Code
    device: Device
    packages: Packages
    price_per_hour: Amount | None = None
    seeds: Annotated[dict[str, dict[str, Summary]], Field(min_length=1)]

    @model_validator(mode="after")
    def _alike(self):
        chains = [
            [(stage, len(s.targets), len(s.all_stages)) for stage, s in run.items()] for run in self.seeds.values()
        ]
        if not chains[0] or any(chain != chains[0] for chain in chains):
            raise ValueError("every seed needs the same stages with the same targets")
        return self
