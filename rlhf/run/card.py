"""The page of a result, README.md as model hubs show it, from the records of its run alone.

A stage that finishes, or is found finished, writes the pages of the run anew, so that a policy's page has the results
of a later evaluation. The page belongs to no result: its bytes are not among a result's hashes.
"""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from rlhf.errors import UserError
from rlhf.files import replacing, sha256
from rlhf.recipe import StageName
from rlhf.recipe.stages import EVALUATE, MERGE, PRETRAIN, REWARD_MODELS, STAGE_TABLE, STAGES
from rlhf.run.evidence import gains_over_start
from rlhf.run.finished import read_manifest, read_summary, stage_folder
from rlhf.run.layout import ADAPTER, CARD, MODEL, SUMMARY
from rlhf.run.records import Manifest, Summary
from rlhf.terminal.wording import estimate

NOT_STATED = "not stated"  # the licence of a base whose file has none


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
    """Return the page of a finished result; equal runs have equal ones. Raises UserError for damaged records."""
    from huggingface_hub import ModelCard, ModelCardData  # half a second

    own = read_manifest(run_directory / stage)
    trained = own.settings.merge.stage if stage == MERGE and own.settings.merge else stage
    manifest = read_manifest(stage_folder(run_directory, trained))
    base, is_reward = _on_hub(manifest, "model"), trained in REWARD_MODELS
    whole = stage == MERGE or trained == PRETRAIN  # a model, and no adapter
    licence = str((manifest.base or {}).get("licence", NOT_STATED))
    data = ModelCardData(
        base_model=base,
        datasets=_on_hub(manifest, "data"),
        license=None if licence == NOT_STATED else licence,
        library_name="transformers" if whole else "peft",
        pipeline_tag="text-classification" if is_reward else "text-generation",
        tags=["rlhf", trained],
    )
    results = "\n".join(f"- {line}" for line in _results(run_directory, trained)) or "No result was measured."
    escaped = [(name, value.replace("|", r"\|")) for name, value in _facts(manifest)]
    facts = "\n".join(f"| {name} | {value} |" for name, value in escaped)
    head = f"AutoModelFor{'SequenceClassification' if is_reward else 'CausalLM'}.from_pretrained"
    revision = _setting(manifest, "model", "revision")
    options = [f'"{"FOLDER" if whole else base or "BASE"}"', *(["num_labels=1"] if is_reward else [])]
    options += [f'revision="{revision}"'] if revision and not whole else []
    adapter = "" if whole else '\nmodel = PeftModel.from_pretrained(model, "FOLDER")'
    kind = "A model" if whole else "A LoRA adapter"
    start = base or f"`model.source: {_setting(manifest, 'model', 'source')}`"
    text = f"""---
{data.to_yaml()}
---
# {manifest.recipe} {manifest.version}: {STAGE_TABLE[trained].title}

{kind} of the stage {trained}. Base: {start}.

## Results

{results}

## How it was made

| | |
| --- | --- |
{facts}

## Loading

```python
model = {head}({", ".join(options)}){adapter}
```

`FOLDER` is where this page lies.
"""
    return str(ModelCard(text))


def _setting(manifest: Manifest, section: str, key: str) -> Any:
    """Return a value of the recipe that was run; None if it has none."""
    content = manifest.settings.plain().get(section)
    return content.get(key) if isinstance(content, Mapping) else None


def _on_hub(manifest: Manifest, section: str) -> str | None:
    """Return the name that a recipe's model or data have on the hub; None if they are from elsewhere."""
    return _setting(manifest, section, "name") if _setting(manifest, section, "source") == "hub" else None


def _results(run_directory: Path, trained: StageName) -> Iterator[str]:
    """Yield what was measured of a stage's weights, by an evaluation of just these or else by the stage."""
    folder = stage_folder(run_directory, trained)
    own, evaluated = read_summary(folder), read_summary(run_directory / EVALUATE)
    summaries: dict[str, Summary] = {trained: own} if own else {}
    if evaluated and read_manifest(run_directory / EVALUATE).parents.get(trained) == sha256(folder / SUMMARY):
        summaries[EVALUATE] = evaluated
    for gain in gains_over_start(summaries):
        if gain.stage == trained:
            yield f"{gain.title}, {gain.name}: {gain.start:.4g} before, {gain.end:.4g} after; {gain.in_words()}"
    of_evaluation = summaries[EVALUATE].metrics if EVALUATE in summaries else {}
    accuracy = estimate(of_evaluation, f"{trained}/accuracy", ", 95 %: ") or estimate(
        own.metrics if own else {}, "accuracy"
    )
    if trained in REWARD_MODELS and accuracy:
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
