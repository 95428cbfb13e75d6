"""Model types whose layers this project runs by itself: to sample, some to train too (docs/own-model.md).

Models of any other type are run as transformers runs them. What was sampled is compared with what is trained in the
first rollout of every model: rlhf/rollout/check.py.
"""

from typing import NamedTuple


class ModelType(NamedTuple):
    """How models of a type differ from the others."""

    rms_norm: str | None  # transformers' class of its norms that compute weight * x / rms(x)
    llama_layers: bool = True  # its linear layers are the seven of a Llama
    head_dim: int | None = None  # width of a head where an architecture has no such key; None: hidden_size / heads
    lean: bool = False  # rlhf/models/lean/trunk.py computes its passes


TYPES = {
    "llama": ModelType("LlamaRMSNorm", lean=True),
    "mistral": ModelType("MistralRMSNorm", lean=True),
    "ministral": ModelType("MinistralRMSNorm"),
    "qwen2": ModelType("Qwen2RMSNorm", lean=True),
    "qwen3": ModelType("Qwen3RMSNorm", head_dim=128, lean=True),
    "qwen3_moe": ModelType("Qwen3MoeRMSNorm", llama_layers=False),
    "gemma3_text": ModelType(None, head_dim=256),  # its norms multiply with 1 + weight
    "smollm3": ModelType("SmolLM3RMSNorm"),
    "olmo2": ModelType("Olmo2RMSNorm"),
    "olmo3": ModelType("Olmo3RMSNorm"),
    "phi3": ModelType("Phi3RMSNorm", llama_layers=False),
    "granite": ModelType("GraniteRMSNorm"),
}
TESTED = tuple(TYPES)
LEAN_TYPES = tuple(name for name, kind in TYPES.items() if kind.lean)
LLAMA_LAYERS = tuple(name for name, kind in TYPES.items() if kind.llama_layers)
RMS_NORMS = {kind.rms_norm for kind in TYPES.values()} - {None}
