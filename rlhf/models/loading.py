"""Loading of base models, tokenizers and adapters from the run directory, a folder or the hub."""

import ctypes
import importlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from peft.tuners.lora import LoraLayer
from safetensors.torch import save_file
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BitsAndBytesConfig,
    PreTrainedModel,
    set_seed,
)
from transformers.quantizers import AutoHfQuantizer

from rlhf import recipe as recipes
from rlhf.data import hub, tokenize
from rlhf.data.tokenize import Codec
from rlhf.errors import UserError
from rlhf.models import folders
from rlhf.models import weights as stored
from rlhf.models.architecture import (
    add_classifier,
    check_model,
    config_of,
    differences,
    has_fused_experts,
    unsupported,
)
from rlhf.models.model import Model, dtype_of
from rlhf.models.weights import ADAPTER_FILE as ADAPTER_FILE
from rlhf.models.weights import adapter_weights as adapter_weights
from rlhf.observe.console import install_command
from rlhf.process import cuda, distributed
from rlhf.recipe import shape
from rlhf.run import reader, records
from rlhf.run.directory import Run
from rlhf.run.reader import reading

SCORE = "score.weight"  # the scalar head in transformers' classifiers


def device_of(recipe: recipes.Recipe) -> torch.device:
    """Return the recipe's device. Raises UserError when it is CUDA and no GPU can be used."""
    if recipe.hardware.device == "cuda" and not torch.cuda.is_available():
        raise UserError(
            f"the recipe needs CUDA, and torch {torch.__version__} finds no usable GPU: see `nvidia-smi`, or use HW=cpu"
        )
    if recipe.hardware.device == "cuda" and distributed.launched():
        return torch.device("cuda", distributed.local_rank())
    return torch.device(recipe.hardware.device)


def set_up_torch(recipe: recipes.Recipe) -> torch.device:
    """Set up threads, kernels and torch's generators for a recipe; return its device.

    A CPU always computes deterministically, which costs nothing there; CUDA where `hardware.deterministic` says so.
    """
    if recipe.hardware.threads:
        torch.set_num_threads(recipe.hardware.threads)
    device = device_of(recipe)
    if device.type == "cpu":
        _keep_freed_memory()
        torch.use_deterministic_algorithms(True)
        # costs time and changes no result here
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # stubs lack it
    else:
        cuda.configure(recipe.hardware.deterministic)
        cuda.cap_memory(device)
    set_seed(recipe.seed)
    return device


def _keep_freed_memory() -> None:
    """Let glibc reuse the pages of freed tensors: new pages from the kernel cost 5 % of a PPO step."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):  # not glibc
        return
    mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD
    mallopt(-3, 2**25)  # M_MMAP_THRESHOLD, at its largest


def load_codec(run: Run) -> Codec:
    settings, architecture = run.loaded.recipe.tokenizer, run.loaded.recipe.model.architecture
    if settings.source == "words":
        assert settings.vocab_size
        return Codec(tokenize.words(settings.vocab_size), settings.template)
    name = str(run.folder_of("pretrain") / "model") if settings.source == "train" else str(settings.name)
    base: records.ModelConfig | None = None
    if run.loaded.recipe.model.source in ("pretrain", "local"):  # the tokenizer's class reads it too
        base = reader.read(Path(base_name(run)) / "config.json", records.ModelConfig)
    with _loading("the tokenizer", name, settings):
        codec = tokenize.load(name, settings)
        entries = max(codec.tokenizer.get_vocab().values()) + 1  # ids may have gaps
    vocabulary, holder = (architecture.vocab_size if architecture else None), "model.architecture.vocab_size is"
    if vocabulary is None:
        vocabulary, holder = base.vocab_size if base else None, "the base model's vocab_size is"
    if vocabulary and entries > vocabulary:
        raise UserError(f"the tokenizer {name} has {entries} entries, {holder} only {vocabulary}")
    return codec


def new_base(architecture: recipes.Architecture, codec: Codec, dtype: str) -> PreTrainedModel:
    """Return a model with random weights, drawn from torch's generator."""
    config = config_of(
        architecture,
        vocab_size=len(codec.tokenizer),
        pad_token_id=codec.pad_id,
        bos_token_id=codec.tokenizer.bos_token_id,
        eos_token_id=codec.eos_id,
    )
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    check_model(model, "model.architecture")
    for parameter in model.parameters():  # but no buffers: rotary frequencies are float32 in every model
        parameter.data = parameter.data.to(getattr(torch, dtype))
    return model


def base_name(run: Run) -> str:
    """Return the name of the base model that plain peft needs for this run's adapters."""
    model = run.loaded.recipe.model
    if model.source == "random":
        return "random weights"
    return str((run.folder_of("pretrain") / "model").resolve()) if model.source == "pretrain" else str(model.name)


def load_base(run: Run, device: torch.device, head: str = "lm", quantize: bool = True) -> PreTrainedModel:
    """Return the base with a language-model head (`lm`) or a new scalar head without bias (`score`).

    The scalar head is drawn from torch's generator: seed it first. `quantize` False loads full weights in any case.
    Raises UserError when the base cannot be loaded, or is not the recipe's.
    """
    settings = run.loaded.recipe.model
    options: dict[str, Any] = {"dtype": getattr(torch, settings.dtype)}
    if settings.attention != "auto":
        options["attn_implementation"] = settings.attention
    nf4 = _nf4(settings) if settings.quantization == "nf4" and quantize else None
    kind = AutoModelForCausalLM if head == "lm" else AutoModelForSequenceClassification
    if nf4 is not None:
        _import("bitsandbytes", "model.quantization: nf4", install_command("gpu"))
        _check_blocks(settings.architecture, device)
    if settings.attention == "flash_attention_2":
        way_out = f"{install_command('flash')} --no-build-isolation, or use model.attention: auto"
        _import("flash_attn", "model.attention: flash_attention_2", way_out)
    if settings.source == "random":
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            torch.manual_seed(run.loaded.recipe.seed)  # the same weights in every stage
            try:
                base = _random_base(settings, device, kind, nf4, options)
                _check_experts(base, settings, "model.architecture")
                return _plain(base, run.loaded.recipe)
            except (OSError, ValueError, ImportError) as error:
                raise UserError(f"cannot build the base model: {_reason(error, settings)}") from error
    if settings.source == "hub":
        options["revision"] = settings.revision
    name = base_name(run)
    with _loading("the base model", name, settings):
        if kind is AutoModelForSequenceClassification:
            options["num_labels"] = 1
            add_classifier(AutoConfig.from_pretrained(name, revision=settings.revision))
        base = _from_pretrained(kind, name, device, quantization_config=nf4, **options)
    _check_experts(base, settings, name)
    if why := unsupported(base.config):
        raise UserError(f"{name}: {base.config.model_type} {why}")
    if settings.architecture:
        _check_architecture(base.config, settings.architecture, name)
    if head == "lm":
        check_model(base, name)
    return _plain(base, run.loaded.recipe)


def load_merged(folder: Path, device: torch.device) -> PreTrainedModel:
    """Return the model that the stage merge has written. Raises UserError where it cannot be used."""
    with reading(folder):
        return _from_pretrained(AutoModelForCausalLM, str(folder), device)


def _from_pretrained(kind: Any, name: str, device: torch.device, **options: Any) -> PreTrainedModel:
    """Return a checkpoint's model, whose weights must all be there and finite.

    A folder is checked before it is read.
    """
    if Path(name).is_dir():
        folders.check(Path(name))
    base: PreTrainedModel
    base, report = kind.from_pretrained(
        name,
        device_map={"": device},
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # the report names them; an error would not
        use_safetensors=True,
        **options,
    )
    if options.get("quantization_config") is None:
        folders.check_full(base.config.to_dict(), name)
    _check_complete(report, name)
    stored.check_base(base, name)
    return base


@contextmanager
def _loading(what: str, name: str, settings: recipes.Model | recipes.Tokenizer) -> Iterator[None]:
    """Turn whatever a library raises into a UserError of one line, as `reader.reading` does, also for the hub."""
    try:
        yield
    except (UserError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise UserError(f"cannot load {what} {name}: {_reason(error, settings)}") from error


def _plain(base: PreTrainedModel, recipe: recipes.Recipe) -> PreTrainedModel:
    """Keep 4-bit weights in one layout where ranks divide them.

    On a CPU bitsandbytes repacks them at first use, in place, and gathered parts undo that without an error. GPUs have
    no such path.
    """
    if recipe.hardware.engine == "fsdp":
        modules: Iterator[Any] = base.modules()
        for module in modules:
            if hasattr(module, "support_avx512bf16_for_cpu"):
                module.support_avx512bf16_for_cpu = False
    return base


def _reason(error: Exception, settings: recipes.Model | recipes.Tokenizer) -> str:
    """Describe why nothing could be loaded, and the way out, in one line."""
    if settings.source != "hub":
        return " ".join(str(error).split())[:300]
    way_out = "without network, use a local folder: --weights DIR (make: WEIGHTS=DIR)"
    return hub.reason(error, f"https://huggingface.co/{settings.name}", settings.revision, way_out)


def _import(package: str, what: str, way_out: str) -> None:
    """Import a package, or raise UserError with the way out.

    Without this check transformers would fail later, or blame another package.
    """
    try:
        importlib.import_module(package)
    except ImportError as error:
        raise UserError(f"{what} needs {package} ({error}): {way_out}") from error


def _check_blocks(architecture: recipes.Architecture | None, device: torch.device) -> None:
    """Raise UserError where bitsandbytes' kernels for a CPU would fail: a row must be whole blocks of 64 weights."""
    for key in ("hidden_size", "intermediate_size"):
        size = getattr(architecture, key, 0)
        if device.type == "cpu" and size % 64:
            raise UserError(
                f"model.quantization: nf4 on a CPU needs model.architecture.{key}, {size}, in multiples of 64"
            )


def _check_experts(base: PreTrainedModel, settings: recipes.Model, name: str) -> None:
    """Raise UserError where NF4 would leave most weights as they are: bitsandbytes packs linear layers alone."""
    if settings.quantization == "nf4" and has_fused_experts(base):
        raise UserError(
            f"{name}: model.quantization: nf4 packs linear layers, and the experts of a {base.config.model_type} model "
            "are one tensor each, which would stay in full: use quantization: none"
        )


def _check_complete(report: dict[str, Any], name: str) -> None:
    """Raise UserError where a checkpoint lacks weights, which transformers would draw at random.

    A new scalar head is not missing.
    """
    missing = sorted(key for key in report["missing_keys"] if key != SCORE)
    mismatched = sorted(str(key[0] if isinstance(key, tuple) else key) for key in report["mismatched_keys"])
    for keys, problem in ((missing, "lacks"), (mismatched, "has another shape of")):
        if keys:
            others = f" and {len(keys) - 1} more weights" if len(keys) > 1 else ""
            raise UserError(
                f"{name} {problem} {keys[0]}{others}: it is damaged, or not a checkpoint of this architecture"
            )


def _nf4(settings: recipes.Model) -> BitsAndBytesConfig:
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=getattr(torch, settings.dtype),
    )


def _check_architecture(config: Any, architecture: recipes.Architecture, name: str) -> None:
    """Raise UserError unless a loaded model has the shape that the recipe plans with."""
    expected = architecture.config_keys()
    for key, value in differences(architecture, config).items():
        if key == "model_type":
            raise UserError(f"{name} is a {value} model: {shape.way_out()}")
        raise UserError(f"{name} has {key} {value}, the recipe says {expected[key]}: correct model.architecture.{key}")


def _random_base(
    settings: recipes.Model, device: torch.device, kind: Any, nf4: BitsAndBytesConfig | None, options: dict[str, Any]
) -> PreTrainedModel:
    """Return the recipe's architecture with random weights, drawn and quantised on the device module by module."""
    architecture = settings.architecture
    assert architecture
    config: Any = config_of(architecture, num_labels=1)
    add_classifier(config)
    quantizer = AutoHfQuantizer.from_config(nf4) if nf4 else None
    model: Any = skeleton(kind, config, quantizer, options)
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            weight = torch.empty(parameter.shape, dtype=options["dtype"], device=device)
            if weight.dim() > 1:
                weight.normal_(0.0, config.initializer_range)
            else:
                weight.fill_(0.0 if name == "bias" else 1.0)
            pack = quantizer and type(module).__name__ == "Linear4bit"
            setattr(module, name, _quantized(module, weight) if pack else nn.Parameter(weight))
    _compute_buffers(model, device)
    model.tie_weights()
    if quantizer:
        model.hf_quantizer = quantizer
        quantizer.postprocess_model(model)
    model.hf_device_map = {"": device}
    base: PreTrainedModel = model.eval()
    return base


def _compute_buffers(model: PreTrainedModel, device: torch.device) -> None:
    """Compute the buffers of a model made on the device meta, such as rotary frequencies; checkpoints lack them too."""
    for module in model.modules():
        buffers = dict(module.named_buffers(recurse=False))
        if buffers:
            for name, buffer in buffers.items():
                module._buffers[name] = torch.empty_like(buffer, device=device)
            model._init_weights(module)


def skeleton(kind: Any, config: Any, quantizer: Any, options: dict[str, Any]) -> PreTrainedModel:
    """Return a model without memory, with bitsandbytes' layers where there is a quantizer."""
    with torch.device("meta"):
        model: PreTrainedModel = kind.from_config(config, **options)
    if quantizer:
        quantizer.preprocess_model(model, device_map=None)
    return model


def _quantized(module: Any, weight: torch.Tensor) -> nn.Parameter:
    """Pack a weight to NF4 on any device, as bitsandbytes does when a weight is moved to a CPU or a GPU.

    `module` is the Linear4bit that holds the weight.
    """
    from bitsandbytes.functional import quantize_4bit
    from bitsandbytes.nn import Params4bit

    packed, state = quantize_4bit(weight, compress_statistics=True, quant_type="nf4")
    module.quant_state = state
    return Params4bit(packed, quant_state=state, quant_type="nf4", module=module, bnb_quantized=True)


@torch.no_grad()
def round_to_nf4(model: PreTrainedModel) -> None:
    """Round the weights that NF4 would pack to the values that they had in training, in place."""
    _import("bitsandbytes", "merge.base: dequantized", install_command("gpu"))
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    for module in model.modules():
        if isinstance(module, nn.Linear) and module is not model.get_output_embeddings():
            packed, state = quantize_4bit(module.weight, compress_statistics=True, quant_type="nf4")
            module.weight.copy_(dequantize_4bit(packed, state))


def lora_config(run: Run, base: PreTrainedModel, task_type: str) -> LoraConfig:
    """Return the recipe's adapter for a base.

    Raises UserError for a target that names no module of the base, and for layers that it does not have.
    """
    lora = run.loaded.recipe.lora
    try:
        layers = lora.layer_numbers(base.config.num_hidden_layers)
    except ValueError as error:
        raise UserError(str(error)) from None
    return LoraConfig(
        task_type=task_type,
        r=lora.r,
        lora_alpha=lora.lora_alpha,
        lora_dropout=lora.lora_dropout,
        target_modules=_targets(base, lora.target_modules, named=layers is not None),
        layers_to_transform=layers,
    )


def new_adapter(base: PreTrainedModel, run: Run) -> PeftModel:
    """Attach a fresh LoRA adapter to a causal base; B = 0 changes nothing yet. Raises UserError without its modules."""
    return without_input_casts(get_peft_model(base, lora_config(run, base, "CAUSAL_LM")))


def _targets(base: PreTrainedModel, targets: Sequence[str] | Literal["all-linear"], named: bool) -> list[str] | str:
    """Return the target modules of a base, for peft; `named`: as names of modules in any case.

    Experts that share one tensor are no linear layers: they stay frozen, and `all-linear` means the others. peft would
    give them adapters of another form. Raises UserError for a target that is the name of no module, with the names of
    the linear layers.
    """
    modules = dict(base.base_model.named_modules())
    linear = sorted({name.rpartition(".")[2] for name, module in modules.items() if isinstance(module, nn.Linear)})
    if isinstance(targets, str):  # all-linear
        return linear if named or has_fused_experts(base) else targets
    for target in targets:
        if not any(f".{name}".endswith(f".{target}") for name in modules):
            raise UserError(
                f"lora.target_modules: the model has no {target}; its linear layers are {', '.join(linear)}"
            )
    return list(targets)


def trainable_adapter(base: PreTrainedModel, stage_dir: Path) -> PeftModel:
    """Attach the adapter of a finished stage to a base, for further training."""
    return without_input_casts(stored.attach_adapter(base, stage_dir, trainable=True))


def reward_from_sft(base: PreTrainedModel, run: Run, sft_dir: Path) -> PeftModel:
    """Return a reward model whose LoRA weights are those of SFT and whose score head is new and trainable.

    peft cannot load a causal adapter into a classifier (it looks for the head's weight), so the weights are copied over
    those of a fresh classification adapter of the same shape.
    """
    model = without_input_casts(get_peft_model(base, lora_config(run, base, "SEQ_CLS")))
    start, sft = get_peft_model_state_dict(model), adapter_weights(sft_dir)
    lora = {key: weight for key, weight in start.items() if "lora_" in key}
    stored.check_shapes(sft, lora, str(sft_dir / "adapter" / ADAPTER_FILE))
    stored.set_adapter_state(model, {**start, **sft})
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()  # in bfloat16 the head would be too coarse for its own updates
    return model


def computes_in_bfloat16(model: Model) -> bool:
    """Return whether the base is in bfloat16.

    All forward passes then run in `mixed_precision`; adapters are float32.
    """
    return dtype_of(model) == torch.bfloat16


def mixed_precision(model: Model) -> torch.autocast:
    """Return the context of every forward pass.

    A bfloat16 base multiplies its float32 adapters in bfloat16 too, as in training.
    """
    return torch.autocast(model.device.type, torch.bfloat16, enabled=computes_in_bfloat16(model))


def without_input_casts(model: PeftModel) -> PeftModel:
    """Keep LoRA layers on a bfloat16 base from copying their inputs to float32; return the same model.

    Autocast casts such a copy back to bfloat16 before the product. Without the two casts the numbers are the same, and
    the backward pass keeps one input for all layers that share it, not a copy for each. With dropout the mask is
    applied in bfloat16 instead of float32, as peft's 4-bit layers always do. Outside of autocast such a layer would
    raise an error for its input.
    """
    if computes_in_bfloat16(model):
        for module in model.modules():
            if isinstance(module, LoraLayer):
                module.cast_input_dtype_enabled = False
    return model


def save_adapter(
    model: PeftModel,
    run: Run,
    folder: Path,
    adapter: str = "default",
    weights: dict[str, torch.Tensor] | None = None,
) -> None:
    """Write one adapter in peft's layout, directly into `folder`, so that plain peft loads it on the run's base.

    `weights`: the model's weights by name, if the model itself does not hold them whole.
    """
    if not run.is_main:
        return
    base, revision = base_name(run), run.loaded.recipe.model.revision
    weights = weights or dict(model.named_parameters())  # state_dict() of a divided base waits for all ranks
    state = get_peft_model_state_dict(model, state_dict=weights, adapter_name=adapter)
    model.peft_config[adapter].save_pretrained(str(folder))
    tensors = {key: value.detach().cpu().contiguous() for key, value in state.items()}
    save_file(tensors, folder / ADAPTER_FILE, {"format": "pt"})
    config = json.loads((folder / "adapter_config.json").read_text())
    config.update(base_model_name_or_path=base, revision=revision, inference_mode=True)
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
