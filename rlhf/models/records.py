"""Typed records of files that models, adapters and trainers write. `rlhf/run/reader.py` reads a file as one of them."""

from typing import Annotated, Literal

from pydantic import Field

from rlhf.run.records import Amount, Count, InnerFile, Record


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

    metadata: dict[str, object]
    weight_map: dict[str, InnerFile]


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
    rank_pattern: Annotated[dict[str, int], Field(max_length=0, default_factory=dict)]
    alpha_pattern: Annotated[dict[str, int], Field(max_length=0, default_factory=dict)]
    layers_to_transform: list[int] | None = None
    layer_replication: None = None
    target_parameters: Annotated[list[str], Field(max_length=0)] | None = None  # empty where peft looked for experts
    trainable_token_indices: None = None


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
    log_history: list[dict[str, object]]
    stateful_callbacks: dict[str, object]


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

    state: dict[Count, dict[str, object]]
    param_groups: Annotated[list[ParameterGroup], Field(min_length=1)]
