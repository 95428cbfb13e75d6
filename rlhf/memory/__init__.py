"""Predicts peak memory of every phase of a recipe on a machine that has no GPU."""

COMPONENTS = (
    "base",  # the model's own weights and buffers
    "quantization",  # scales and code book beside packed weights
    "adapters",
    "heads",
    "gradients",
    "optimizer",
    "activations",  # made in a forward pass and freed in its backward pass
    "logits",
    "kv_cache",
    "buffers",  # what one phase leaves for another
    "temporaries",
    "kernels",  # inside kernels
)
