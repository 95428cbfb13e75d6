"""The page of a result, README.md as model hubs show it, from the records of its run alone.

A stage that finishes, or is found finished, writes the pages of the run anew, so that a policy's page has the results
of a later evaluation. The page belongs to no result: its bytes are not among a result's hashes.
"""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from rlhf.errors import UserError
from rlhf.files import replacing, sha256
from rlhf.recipe import StageName
from rlhf.recipe.stages import EVALUATE, MERGE, PRETRAIN, REWARD_MODELS, STAGE_TABLE, STAGES
from rlhf.run.evidence import gains_over_start
from rlhf.run.finished import read_manifest, read_summary
from rlhf.run.layout import CARD, RESULT_FOLDERS, SUMMARY
from rlhf.run.records import Summary
from rlhf.terminal.wording import estimate

TEMPLATE = Path(__file__).with_name("card.jinja")
NOT_STATED = "not stated"  # the licence of a base whose file has none


def write(run_directory: Path) -> None:
    """Write the page of each finished result in a run directory; what is damaged or cannot be written keeps its own."""
    for stage in STAGES:
        for folder in (run_directory / stage / name for name in RESULT_FOLDERS):
            with suppress(UserError, OSError, KeyError, TypeError, AttributeError):
                summary = read_summary(run_directory / stage)
                if folder.is_dir() and summary and f"{folder.name}/{CARD}" not in summary.result_sha256:
                    with replacing(folder / CARD) as temporary:
                        temporary.write_text(page(run_directory, stage), encoding="utf-8")


def page(run_directory: Path, stage: StageName) -> str:
    """Return the page of a finished result; equal runs have equal ones. Raises UserError for damaged records."""
    from huggingface_hub import ModelCard, ModelCardData  # half a second

    own = read_manifest(run_directory / stage)
    trained: StageName = own.settings["merge"]["stage"] if stage == MERGE else stage
    manifest = read_manifest(run_directory / trained)
    model, data = manifest.settings.get("model", {}), manifest.settings.get("data", {})
    is_reward = trained in REWARD_MODELS
    whole = stage == MERGE or trained == PRETRAIN  # a model, and no adapter
    licence = str((manifest.base or {}).get("licence", NOT_STATED))
    card = ModelCardData(
        base_model=model.get("name") if model.get("source") == "hub" else None,
        datasets=data.get("name") if data.get("source") == "hub" else None,
        license=None if licence == NOT_STATED else licence,
        library_name="transformers" if whole else "peft",
        pipeline_tag="text-classification" if is_reward else "text-generation",
        tags=["rlhf", trained],
    )
    revision = f', revision="{model["revision"]}"' if model.get("revision") and not whole else ""
    text = ModelCard.from_template(
        card,
        template_path=str(TEMPLATE),
        recipe=f"{manifest.recipe} {manifest.version}",
        title=STAGE_TABLE[trained].title,
        stage=trained,
        whole=whole,
        source=model.get("source"),
        results=[*_results(run_directory, trained)],
        made=manifest,
        auto=f"AutoModelFor{'SequenceClassification' if is_reward else 'CausalLM'}",
        options=", num_labels=1" * is_reward + revision,
    )
    return f"{text}\n"


def _results(run_directory: Path, trained: StageName) -> Iterator[str]:
    """Yield what was measured of a stage's weights, by an evaluation of just these or else by the stage."""
    folder = run_directory / trained
    own, evaluated = read_summary(folder), read_summary(run_directory / EVALUATE)
    summaries: dict[str, Summary] = {trained: own} if own else {}
    if evaluated and read_manifest(run_directory / EVALUATE).parents.get(trained) == sha256(folder / SUMMARY):
        summaries[EVALUATE] = evaluated
    for gain in gains_over_start(summaries):
        if gain.stage == trained:
            yield f"{gain.title}, {gain.name}: {gain.start:.4g} before, {gain.end:.4g} after; {gain.in_words()}"
    if trained in REWARD_MODELS and own and (accuracy := estimate(own.metrics, "accuracy", ", 95 %: ")):
        yield f"Accuracy on held-out pairs: {accuracy}"
