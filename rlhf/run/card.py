"""The page of a result, README.md as model hubs show it, from the records of its run alone.

A stage that finishes, or is found finished, writes the pages of the run anew, so that a policy's page has the results
of a later evaluation, and one that a kill prevented is made.
The page belongs to no result: its bytes are not among a result's hashes.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from rlhf.errors import UserError
from rlhf.files import replacing, sha256
from rlhf.recipe import StageName
from rlhf.recipe.stages import EVALUATE, MERGE, PRETRAIN, REWARD_MODELS, STAGE_TABLE, STAGES
from rlhf.run.evidence import gains_over_start
from rlhf.run.finished import read_manifest, read_summary, stage_folder
from rlhf.run.layout import ADAPTER, ADAPTER_CONFIG, CARD, MODEL, SUMMARY
from rlhf.run.records import Manifest, Summary
from rlhf.terminal.wording import estimate

HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
LICENCE = re.compile(r"[a-z0-9][a-z0-9.-]*")  # as hubs abbreviate them


def write(run_directory: Path) -> None:
    """Write the page of each finished result in a run directory; what is damaged or cannot be written keeps its own."""
    for stage in STAGES:
        with suppress(UserError, OSError):
            summary = read_summary(run_directory / stage)
            folders = [path for name in (ADAPTER, MODEL) if (path := run_directory / stage / name).is_dir()]
            if summary is not None and folders and f"{folders[0].name}/{CARD}" not in summary.result_sha256:
                text, place = page(run_directory, stage).encode(), folders[0] / CARD
                if not place.is_file() or place.read_bytes() != text:
                    with replacing(place) as temporary:
                        temporary.write_bytes(text)


def page(run_directory: Path, stage: StageName) -> str:
    """Return the page of a finished stage's result. Raises UserError for damaged records.

    Equal runs have equal pages."""
    trained = _trained(read_manifest(run_directory / stage), stage)
    folder = stage_folder(run_directory, trained)
    manifest = read_manifest(folder)
    header = yaml.safe_dump(_header(manifest, trained, merged=stage == MERGE), sort_keys=False, allow_unicode=True)
    results = "\n".join(f"- {line}" for line in _results(run_directory, trained)) or "No result was measured."
    escaped = [(name, value.replace("|", r"\|")) for name, value in _facts(manifest)]
    facts = "\n".join(f"| {name} | {value} |" for name, value in escaped)
    return f"""---
{header}---
# {manifest.recipe} {manifest.version}: {STAGE_TABLE[trained].title}

{_what(manifest, stage, trained)}

## Results

{results}

## How it was made

| | |
| --- | --- |
{facts}

## Loading

{_loading(manifest, stage, trained)}
"""


def _trained(manifest: Manifest, stage: StageName) -> StageName:
    """Return the stage whose weights a result has: of a merged model the one that was merged."""
    return manifest.settings.merge.stage if stage == MERGE and manifest.settings.merge else stage


def _setting(manifest: Manifest, section: str, key: str) -> Any:
    """Return a value of the recipe that was run; None if it has none."""
    content = manifest.settings.plain().get(section)
    return content.get(key) if isinstance(content, Mapping) else None


def _on_hub(manifest: Manifest, section: str) -> str | None:
    """Return the name that a recipe's model or data have on the hub; None if they are from elsewhere."""
    name = _setting(manifest, section, "name")
    from_hub = _setting(manifest, section, "source") == "hub" and isinstance(name, str) and HUB_ID.fullmatch(name)
    return name if from_hub else None


def _header(manifest: Manifest, trained: StageName, merged: bool) -> dict[str, object]:
    """Return the keys by which a hub sorts pages, as far as the records have their values."""
    licence = (manifest.base or {}).get("licence")
    model, data = _on_hub(manifest, "model"), _on_hub(manifest, "data")
    return {
        **({"base_model": model} if model else {}),
        **({"datasets": [data]} if data else {}),
        **({"license": licence} if isinstance(licence, str) and LICENCE.fullmatch(licence) else {}),
        "library_name": "transformers" if merged else "peft",
        "pipeline_tag": "text-classification" if trained in REWARD_MODELS else "text-generation",
        "tags": ["rlhf", trained, *([] if merged else ["lora"])],
    }


def _what(manifest: Manifest, stage: StageName, trained: StageName) -> str:
    """Return what the result is, as sentences."""
    start = _on_hub(manifest, "model") or _files(manifest) or f"`model.source: {_setting(manifest, 'model', 'source')}`"
    kind = "A merged model" if stage == MERGE else "A LoRA adapter"
    kind = "A model" if trained == PRETRAIN else kind
    task = "a reward model" if trained in REWARD_MODELS else STAGE_TABLE[trained].title
    return f"{kind} of the stage {trained} ({task}). Base: {start}."


def _files(manifest: Manifest) -> str:
    """Return the files of Python packages that the base is of; "" for another base."""
    files = _setting(manifest, "model", "files")
    named = [file for file in files if isinstance(file, Mapping)] if isinstance(files, list) else []
    return ", ".join(f"`{file.get('file')}` of {file.get('package')} {file.get('version')}" for file in named)


def _results(run_directory: Path, trained: StageName) -> Iterator[str]:
    """Yield what was measured of a stage's weights, by an evaluation of just these or else by the stage."""
    folder = stage_folder(run_directory, trained)
    own = read_summary(folder)
    summaries: dict[str, Summary] = {trained: own} if own else {}
    evaluated = read_summary(run_directory / EVALUATE)
    if evaluated and read_manifest(run_directory / EVALUATE).parents.get(trained) == sha256(folder / SUMMARY):
        summaries[EVALUATE] = evaluated
    for gain in gains_over_start(summaries):
        if gain.stage == trained:
            yield f"{gain.title}, {gain.name}: {gain.start:.4g} before, {gain.end:.4g} after; {gain.in_words()}"
    if trained in REWARD_MODELS:
        of_evaluation = summaries[EVALUATE].metrics if EVALUATE in summaries else {}
        of_stage = own.metrics if own else {}
        accuracy = estimate(of_evaluation, f"{trained}/accuracy", ", 95 %: ") or estimate(of_stage, "accuracy")
        if accuracy:
            yield f"Accuracy on held-out pairs: {accuracy}"


def _facts(manifest: Manifest) -> Iterator[tuple[str, str]]:
    """Yield what decides the weights, by name."""
    changed = f", changed: {', '.join(f'`{key}`' for key in manifest.overrides)}" if manifest.overrides else ""
    yield "recipe", f"{manifest.recipe}/{manifest.version}, SHA-256 `{manifest.recipe_sha256}`{changed}"
    yield "seed", str(manifest.seed)
    dirty = " and files that differed from it" * bool(manifest.code.dirty)
    yield "code", f"commit `{manifest.code.commit}`{dirty}" if manifest.code.commit else "no commit"
    for file in manifest.data.files if manifest.data else ():
        yield "data", f"{Path(file.name).name}, SHA-256 `{file.sha256}`"
    if (revision := _setting(manifest, "model", "revision")) is not None:
        yield "base", f"revision `{revision}`"
    if manifest.base:
        yield "base", f"GGUF file, SHA-256 `{manifest.base.get('sha256')}`"
    yield "packages", ", ".join(f"{name} {version}" for name, version in manifest.packages.items())
    yield "device", manifest.device.text()


def _loading(manifest: Manifest, stage: StageName, trained: StageName) -> str:
    """Return how to load the result in Python."""
    kind = "SequenceClassification" if trained in REWARD_MODELS else "CausalLM"
    if stage == MERGE or trained == PRETRAIN:
        lines = [
            f"from transformers import AutoModelFor{kind}, AutoTokenizer",
            "",
            f'model = AutoModelFor{kind}.from_pretrained("FOLDER")',
            'tokenizer = AutoTokenizer.from_pretrained("FOLDER")',
        ]
        after = "`FOLDER` is where this page lies. The tokenizer's chat template writes prompts as training did."
    else:
        revision = _setting(manifest, "model", "revision")
        pinned = f', revision="{revision}"' if revision else ""
        labels = ", num_labels=1" if kind != "CausalLM" else ""
        lines = [
            "from peft import PeftModel",
            f"from transformers import AutoModelFor{kind}",
            "",
            f'base = AutoModelFor{kind}.from_pretrained("{_on_hub(manifest, "model") or "BASE"}"{pinned}{labels})',
            'model = PeftModel.from_pretrained(base, "FOLDER")',
        ]
        after = "`FOLDER` is where this page lies. `rlhf run merge` writes one checkpoint of base and adapter."
        if manifest.base:
            after += (
                f" `BASE` was converted from a GGUF file, and `{ADAPTER_CONFIG}` names its folder on the machine "
                "that trained; elsewhere `rlhf fetch` with the recipe converts the file again and names the folder."
            )
    code = "\n".join(lines)
    return f"```python\n{code}\n```\n\n{after}"
