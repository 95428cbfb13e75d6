"""Private symbols of other libraries: each is used in one module, and a version that lacks one is named.

pyproject.toml ends their versions before the one that nobody has tried; requirements/ has the versions that the tests
passed with. A library may take a private symbol away, or never call a method that is overridden here.
"""

import importlib
import importlib.metadata
import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]
TRAINER = "rlhf/stages/supervised/trainer.py"
PATHS, TRACKER, KERNELS = (f"peakmem/{name}.py" for name in ("paths", "tracker", "kernels"))
OF_TRANSFORMERS, OF_PEFT, OF_TRL, OF_BITSANDBYTES = (
    f"peakmem/patches/{name}.py" for name in ("transformers", "peft", "trl", "bitsandbytes")
)
SYMBOLS = {  # module:name -> the module that uses, overrides or replaces it
    "transformers:Trainer._get_train_sampler": TRAINER,
    "transformers:Trainer._remove_unused_columns": TRAINER,
    "transformers:Trainer._save_checkpoint": PATHS,
    "transformers:TrainingArguments._setup_devices": OF_TRANSFORMERS,
    "transformers:PreTrainedModel._init_weights": "rlhf/models/random_base.py",
    "transformers:PretrainedConfig._attn_implementation": "rlhf/rollout/library_decoding.py",
    "trl:SFTTrainer._metrics": TRAINER,
    "trl:DPOTrainer._prepare_dataset": TRAINER,
    "trl.trainer.utils:_use_triton": OF_TRL,
    "trl.kernels.chunked_logprob:_addmm_fp32": OF_TRL,
    "trl.kernels.chunked_logprob:_forward_tile": OF_TRL,
    "trl.kernels.chunked_logprob:_backward_tile": OF_TRL,
    "peft.tuners.lora:LoraLayer._move_adapter_to_device_of_base_layer": OF_PEFT,
    "bitsandbytes.backends.cuda.ops:_gemm_4bit_use_custom_cuda": OF_BITSANDBYTES,
    "bitsandbytes.backends.cuda.ops:_gemm_4bit_custom_max_m": OF_BITSANDBYTES,
    "bitsandbytes.backends.cuda.ops:_gpu_dispatch_props": OF_BITSANDBYTES,
    "torch.utils._device:_device_constructors": PATHS,
    "torch.utils._foreach_utils:_get_foreach_kernels_supported_devices": PATHS,
    "torch.utils._foreach_utils:_get_fused_kernels_supported_devices": PATHS,
    "torch.utils._python_dispatch:TorchDispatchMode": TRACKER,
    "torch.ops.profiler:_record_function_enter_new": TRACKER,
    "torch.ops.profiler:_record_function_exit._RecordFunction": TRACKER,
    "torch:_C._current_graph_task_id": "peakmem/gradient_sums.py",
    "torch.autograd.graph:_engine_run_backward": "peakmem/gradient_sums.py",
    "torch.ops.mkldnn:_linear_pointwise": "rlhf/models/matmul.py",
    "torch.ops.aten:_softmax_backward_data": KERNELS,
    "torch.ops.aten:_flash_attention_forward": "rlhf/models/lean/packed.py",
    "torch.ops.aten:_local_scalar_dense": "peakmem/device.py",
    "torch.ops.aten:_amp_foreach_non_finite_check_and_unscale_": "peakmem/script.py",
    "torch.amp:GradScaler._maybe_opt_step": "peakmem/cuda.py",
    "torch:_C._cuda_getCurrentRawStream": "peakmem/cuda.py",
    "torch:_C._nn._parse_to": "peakmem/cuda.py",
    "torch.utils._python_dispatch:_disable_current_modes": "peakmem/cuda.py",
    "torch.storage:_LegacyStorage": "peakmem/cuda.py",
    "torch.utils.data.dataloader:_BaseDataLoaderIter": "peakmem/batches.py",
    "torch:Tensor._make_subclass": "peakmem/cuda.py",
    "transformers:PreTrainedModel._from_config": OF_TRANSFORMERS,
}


@pytest.mark.parametrize("symbol", SYMBOLS)
def test_a_version_that_lacks_a_private_symbol_is_named(symbol, monkeypatch):
    module, _, name = symbol.partition(":")
    package = module.partition(".")[0]
    (pinned,) = re.findall(rf"^{package}==(\S+)", (ROOT / "requirements/cpu.txt").read_text(), re.M)
    message = (
        f"{package} {importlib.metadata.version(package)} has no {symbol}, which {SYMBOLS[symbol]} needs; "
        f"{pinned}, the version of requirements/cpu.txt, had it"
    )
    # bitsandbytes' CUDA backend looks up a function that a torch without CUDA lacks.
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", None, raising=False)
    found: Any = importlib.import_module(package if module.startswith("torch.ops") else module)
    path = f"{module.partition('.')[2]}.{name}" if module.startswith("torch.ops") else name
    for part in path.split("."):
        of_class = hasattr(found, part)
        assert of_class or (isinstance(found, type) and f"self.{part} = " in inspect.getsource(found)), message
        found = getattr(found, part, None)
