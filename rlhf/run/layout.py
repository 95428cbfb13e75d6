"""Names in a stage's directory of what it leaves for other stages and other tools: records, logs and the result.

rlhf/run/directory.py says what each of them holds.
"""

MANIFEST, SUMMARY = "manifest.json", "summary.json"  # records
METRICS, TELEMETRY, SAMPLES, FINDINGS = "metrics.jsonl", "telemetry.jsonl", "samples.jsonl", "findings.jsonl"  # logs
JUDGED_FILE = "judged.jsonl"  # marks that the reward `judge` was given
REMAKING = ".new"  # folder in a run's of stages that are made anew beside their finished result
ADAPTER, MODEL = "adapter", "model"  # folders
RESULT_FOLDERS = (ADAPTER, MODEL)
CARD = "README.md"  # in a result's folder, about it and no part of it (rlhf/run/card.py)
ADAPTER_FILE, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"  # names of peft
ADAPTER_WEIGHTS = f"{ADAPTER}/{ADAPTER_FILE}"  # in the summary's hashes
