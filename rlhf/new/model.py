"""A model for which `rlhf new` writes a recipe: its config.json and tokenizer, read without its weights."""

import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from rlhf.data import hub
from rlhf.errors import OptionError, UserError, no_such
from rlhf.files import read_json
from rlhf.models.fetch import SMALL_FILES
from rlhf.recipe.model_types import TESTED
from rlhf.recipe.schema_model import Tokenizer, is_gguf
from rlhf.recipe.strict import is_commit

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CONFIG, GENERATION = "config.json", "generation_config.json"
THINKING = "enable_thinking"  # variable of chat templates of models that reason before they answer
VOCABULARIES = ("tokenizer.json", "*.model", "*vocab*", "*.tiktoken", "tekken.json")  # one of them is in a tokenizer
INDEXES = ("*.index.json", "*/*")  # of weights; folders of other formats


class ModelFiles(NamedTuple):
    """A model without its weights: where it is from, and a folder with its small files."""

    source: str  # hub or local, as in a recipe
    name: str
    revision: str | None
    folder: Path


class ModelFacts(NamedTuple):
    """What a recipe needs to know about a model."""

    architecture: dict[str, Any]  # the recipe's section; of a type without predictions its whole configuration
    tokenizer_settings: dict[str, Any]  # keys of the recipe's section: template, and what the tokenizer needs beside it

    @property
    def predicted(self) -> bool:
        """Return whether memory is predicted for its type."""
        return self.architecture["model_type"] in TESTED


def check_name(model: str, revision: str | None) -> None:
    """Raise OptionError for a model or a revision of a wrong form, or a file that is not there."""
    kind = _kind(model)
    if kind != "model of the hub" and revision is not None:
        raise OptionError(f"--revision belongs to a model of the hub; {model} is a {kind}")
    if revision is not None and not is_commit(revision):
        raise OptionError(f"--revision {revision}: a commit of 40 hexadecimal digits, because branches and tags move")


def read_model(model: str, revision: str | None) -> ModelFiles:
    """Return a model's small files: of a local folder or GGUF file, or from the hub at a commit.

    Raises UserError for a model that cannot be read.
    """
    kind, path = _kind(model), Path(model)
    if kind == "file":
        from rlhf.models import gguf

        return ModelFiles("local", str(path.resolve()), None, gguf.converted(path))
    if kind == "folder":
        if not (path / CONFIG).is_file():
            raise UserError(f"{model}: no {CONFIG} there; name the folder of a checkpoint")
        return ModelFiles("local", str(path.resolve()), None, path)
    try:
        return _download(model, revision)
    except Exception as error:  # the library raises many unrelated types
        way_out = "is the network up? A local folder needs none"
        reason = hub.reason(error, f"https://huggingface.co/{model}", way_out)
        raise UserError(f"{model}: {reason}") from error


def _kind(model: str) -> Literal["file", "folder", "model of the hub"]:
    """Return what --model names. Raises OptionError for what can be none of these."""
    if Path(model).is_dir():
        return "folder"
    if is_gguf(model):
        if Path(model).is_file():
            return "file"
        raise OptionError(no_such("file", f"--model {model}", "a GGUF file is named by its path"))
    if re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", model):
        return "model of the hub"
    raise OptionError(no_such("folder", f"--model {model}", "models of the hub are named like Qwen/Qwen3-8B"))


def _download(model: str, revision: str | None) -> ModelFiles:
    """Return the small files of a model, downloaded. Without a revision its main branch is asked for the commit."""
    from huggingface_hub import HfApi, snapshot_download

    info = HfApi().model_info(model, revision=revision)
    assert info.sha
    folder = snapshot_download(
        model, revision=info.sha, allow_patterns=list(SMALL_FILES), ignore_patterns=list(INDEXES)
    )
    return ModelFiles("hub", model, info.sha, Path(folder))


def describe(model: ModelFiles) -> ModelFacts:
    """Return what a recipe needs to know about a model. Raises UserError for one that cannot be trained here."""
    from transformers import AutoConfig, AutoTokenizer

    from rlhf.data import tokenize
    from rlhf.files import reading
    from rlhf.models import architecture, checkpoints

    config = read_json(model.folder / CONFIG)
    if config is None:
        raise UserError(f"{model.name}/{CONFIG} cannot be read")
    checkpoints.check_full(config, model.name)
    with reading(model.folder):
        text = AutoConfig.from_pretrained(model.folder).get_text_config(decoder=True)
    if text.model_type in TESTED:
        section = architecture.architecture_of(text)
    else:  # transformers runs it in its own way: nothing is predicted from its shape
        try:
            architecture.parameter_count(text)
        except UserError as error:  # no causal language model
            raise UserError(f"{model.name}: {error}") from None
        section = text.to_dict()
    # Settings alone (tokenizer_config.json) are no tokenizer: transformers would ask for packages that convert one.
    if not any(file.exists() for pattern in VOCABULARIES for file in model.folder.glob(pattern)):
        raise UserError(f"no tokenizer in {model.name}: it has no tokenizer.json; copy the tokenizer's files there")
    with reading(model.folder):
        hf = AutoTokenizer.from_pretrained(model.folder)
    chosen = _tokenizer(hf, _end_ids(config, read_json(model.folder / GENERATION) or {}))
    tokenize.load(model.folder, Tokenizer(source="local", name=model.name, **chosen))  # fails here, not in a stage
    return ModelFacts(section, chosen)


def _tokenizer(tokenizer: "PreTrainedTokenizerBase", ends: set[int]) -> dict[str, Any]:
    """Return the keys of the section `tokenizer` that a tokenizer needs: the template `chat`, or `hh`.

    A model that ends texts (`ends`) with the token that its chat template writes behind an answer was tuned with that
    template. Base models may have the chat template of the tuned model, but end texts with another token.
    """
    from rlhf.data import chat_template, tokenize

    keys: dict[str, Any] = {}
    end = None
    if tokenizer.chat_template:
        chat_template.check(lambda messages: tokenize.chat_text(tokenizer, messages))
        end = tokenize.turn_end(tokenizer)
    tuned = end is not None and tokenizer.convert_tokens_to_ids(end) in ends
    keys["template"] = "chat" if tuned else "hh"
    if tuned:
        if end != tokenizer.eos_token:
            keys["eos_token"] = tokenizer.eos_token = end
        if THINKING in str(tokenizer.chat_template):
            keys["chat_template_kwargs"] = {THINKING: False}
        if tokenize.writes_the_date(tokenizer):
            today = {chat_template.CLOCK: time.strftime("%d %b %Y")}
            keys["chat_template_kwargs"] = keys.get("chat_template_kwargs", {}) | today
    if pad_token := tokenize.needed_pad_token(tokenizer):
        keys["pad_token"] = pad_token
    return keys


def _end_ids(*configs: Mapping[str, object]) -> set[int]:
    """Return the ids with which a model ends a text, by its config.json and generation_config.json."""
    ids: set[int] = set()
    for config in configs:
        value = config.get("eos_token_id")
        ids |= {i for i in (value if isinstance(value, list) else [value]) if isinstance(i, int)}
    return ids
