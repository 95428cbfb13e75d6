"""Names in a stage's directory of what it leaves for other stages and other tools: an adapter or a whole model."""

ADAPTER, MODEL = "adapter", "model"  # folders
RESULTS = (ADAPTER, MODEL)
ADAPTER_FILE, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"  # names of peft
ADAPTER_WEIGHTS = f"{ADAPTER}/{ADAPTER_FILE}"  # in the summary's hashes
