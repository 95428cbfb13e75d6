"""Training of pretrain, SFT, reward model, DPO and KTO by transformers' Trainer: arguments, logs, checkpoints."""

import gc
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from peft import PeftModel
from transformers import PrinterCallback, TrainerCallback, TrainerState, TrainingArguments

from rlhf.models.adapters import adapter_weights, save_adapter, set_adapter_state
from rlhf.observe.telemetry import Telemetry
from rlhf.process import distributed
from rlhf.recipe.schema import Dialogues, Optimization
from rlhf.run.checkpoints import require_usable
from rlhf.run.directory import StageRun
from rlhf.run.evidence import OF_EVALUATIONS
from rlhf.run.layout import ADAPTER
from rlhf.stages.best import Logged, best_step, choice
from rlhf.stages.supervised.forward import LeanSteps
from rlhf.stages.supervised.trainer import RunTrainer
from rlhf.terminal.progress import Bar

ArgumentsT = TypeVar("ArgumentsT", bound=TrainingArguments)
# Costs, which telemetry.jsonl records, and TRL's count of tokens, which starts again at 0 when a run is resumed.
_NOT_METRICS = (
    *("train_", "total_flos", "epoch", "num_tokens", "num_input_tokens_seen"),
    *("eval_runtime", "eval_samples_per_second", "eval_steps_per_second", "eval_num_tokens"),
)


def arguments(kind: type[ArgumentsT], run: StageRun, options: Optimization, **overrides: Any) -> ArgumentsT:
    """Return the training arguments of one stage; everything that decides the result comes from the recipe."""
    recipe = run.loaded.recipe
    micro_batch, accumulated = options.per_device(recipe.processes(run.stage))
    eval_steps = options.eval_steps if isinstance(options, Dialogues) else None
    args = kind(
        output_dir=str(run.path / "checkpoints" / ".partial"),
        seed=run.seed,
        use_cpu=recipe.hardware.device == "cpu",
        bf16=recipe.model.dtype == "bfloat16",
        learning_rate=options.learning_rate,
        lr_scheduler_type=options.lr_scheduler_type,
        warmup_steps=options.warmup_ratio,  # a fraction is a share of all steps
        weight_decay=options.weight_decay,
        adam_beta1=options.adam_beta1,
        adam_beta2=options.adam_beta2,
        adam_epsilon=options.adam_epsilon,
        max_grad_norm=options.max_grad_norm,
        optim=options.optim,
        num_train_epochs=options.num_train_epochs,
        max_steps=options.max_steps or -1,
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=accumulated,
        activation_checkpointing=options.gradient_checkpointing,
        logging_steps=options.logging_steps,
        save_strategy="steps",
        save_steps=options.save_steps,
        eval_strategy="steps" if eval_steps else "no",
        eval_steps=eval_steps,
        per_device_eval_batch_size=options.per_device_train_batch_size,  # of one process: RunTrainer.evaluation_loop
        dataloader_pin_memory=recipe.hardware.device == "cuda",
        ddp_find_unused_parameters=False,
        include_num_input_tokens_seen="non_padding",
        report_to="none",
        disable_tqdm=True,
        **overrides,
    )
    # One process uses one card. With more visible, Trainer would spread each batch over all, and TRL refuses that.
    args._n_gpu = min(args.n_gpu, 1)
    if hasattr(args, "router_aux_loss_coef"):
        args.router_aux_loss_coef = 0.0  # routers are frozen: a loss that balances experts would bend adapters
    return args


def train(
    trainer: RunTrainer, run: StageRun, telemetry: Telemetry, lengths: Sequence[int], pairs: bool = False
) -> dict[str, float]:
    """Train to the end, and write the adapter; a resumed run continues from its newest checkpoint.

    The trainer evaluates on its validation rows every `eval_steps` and before the last checkpoint. With `adapter: best`
    the model ends with the adapter of the checkpoint whose loss on them is the lowest.
    `lengths`: tokens of each training row; `pairs` as in `LabelStatistics`.
    Returns the metrics of `choice` where checkpoints are compared.
    """
    recipe, options = run.loaded.recipe, run.loaded.recipe.section(run.stage)
    assert isinstance(options, Optimization)
    model = trainer.trained_model
    trainer.remove_callback(PrinterCallback)
    if options.group_by_length:
        trainer.group_by_length(lengths, run.seed)
    lean = recipe.hardware.trunk == "lean" and isinstance(model, PeftModel)  # pretrain has no adapters
    # without a mask the library gains nothing on a CPU, and would round differently
    trainer.hides_padding = lean or recipe.hardware.device == "cuda"
    if lean:
        trainer.lean_steps = LeanSteps(model, pairs, recipe.hardware.joined_rows)
    with Bar(run.stage) as bar:  # its length is known when training begins
        trainer.add_callback(_RunCallback(run, bar, telemetry))
        trainer.around_evaluation = partial(telemetry.phase, "evaluate")
        with telemetry.phase("train"):
            trainer.train(resume_from_checkpoint=str(run.resumed_from) if run.resumed_from else None)
    # an engine that divides the weights would make each rank count its own share
    if distributed.world() == 1 and trainer.optimizer is not None:
        telemetry.note_components(model, trainer.optimizer)
    metrics: dict[str, float] = {}
    if isinstance(options, Dialogues) and options.eval_steps:
        best = distributed.from_main(lambda: best_step(run, _gain))
        metrics = choice(run, best)
        if options.adapter == "best" and best not in (None, trainer.state.global_step):
            require_usable(run.checkpoints.of(best), run.stage)
            unwrapped = trainer.accelerator.unwrap_model(trainer.model)
            set_adapter_state(unwrapped, adapter_weights(run.checkpoints.of(best)))
    if isinstance(model, PeftModel):
        divided = distributed.world() > 1 and recipe.hardware.engine != "ddp"  # collected on rank 0
        weights = trainer.accelerator.get_state_dict(trainer.model_wrapped) if divided else None
        save_adapter(model, run.base.model.revision, run.path / ADAPTER, weights=weights)
        distributed.barrier()  # every rank may read it
    return metrics


class _RunCallback(TrainerCallback):
    """Callback that logs to the stage's directory and seals each checkpoint that transformers has written."""

    def __init__(self, run: StageRun, bar: Bar, telemetry: Telemetry):
        self.run, self.bar, self.telemetry = run, bar, telemetry
        self.note = ""  # beside the bar
        self.tokens = 0  # that are counted

    def _count(self, state: TrainerState) -> None:
        """Count the tokens since the last call."""
        self.telemetry.count(state.num_input_tokens_seen - self.tokens)
        self.tokens = state.num_input_tokens_seen

    def on_train_begin(self, args: object, state: Any, control: object, **_: object) -> None:
        self.run.total_steps = state.max_steps
        self.tokens = state.num_input_tokens_seen  # a resumed run starts above 0

    def on_log(
        self, args: object, state: TrainerState, control: object, logs: dict[str, float] | None = None, **_: object
    ) -> None:
        values = {key: value for key, value in (logs or {}).items() if not key.startswith(_NOT_METRICS)}
        if not values:  # the closing record holds only times
            return
        if "eval_loss" in values:
            evaluated = {OF_EVALUATIONS + key.removeprefix("eval_"): value for key, value in values.items()}
            self.run.logs.metrics(state.global_step, evaluated)
            return
        self.run.logs.metrics(state.global_step, values)
        self._count(state)
        self.run.logs.telemetry(state.global_step, self.telemetry.since_last_call())
        self.note = f"loss {values['loss']:.4f}" if "loss" in values else self.note

    def on_step_end(self, args: object, state: TrainerState, control: object, **_: object) -> None:
        self.bar.update(state.global_step, self.note, total=state.max_steps)

    def on_save(self, args: Any, state: TrainerState, control: object, **_: object) -> None:
        step = state.global_step
        distributed.barrier()  # every rank has written its random state
        self.run.seal_checkpoint(step, Path(args.output_dir) / f"checkpoint-{step}")

    def on_train_end(self, args: object, state: TrainerState, control: object, **_: object) -> None:
        self._count(state)


def _gain(logged: Logged) -> float | None:
    """Return the negated loss on validation rows, None where it was not measured or is not finite."""
    loss = logged.get("eval/loss")
    return None if loss is None else -loss


def free_memory() -> None:
    """Free a trained model that only libraries still refer to; they would keep it on the device."""
    bitsandbytes = sys.modules.get("bitsandbytes")
    if bitsandbytes is not None:  # its 8-bit optimizers register embeddings for 32 bits and never remove them
        bitsandbytes.optim.GlobalOptimManager.get_instance().module_weight_config_triple.clear()
    gc.collect()  # transformers' Trainer refers to itself
