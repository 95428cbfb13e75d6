"""A trained model that continues a conversation; an answer appears while it is sampled."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from rlhf.data.rows import Message
from rlhf.process import cuda
from rlhf.recipe import Recipe
from rlhf.recipe.stages import LABELS, MERGE, PRETRAIN, SFT, PolicyName
from rlhf.run.directory import StageRun
from rlhf.run.layout import ADAPTER, MODEL
from rlhf.run.named import NamedRun
from rlhf.terminal import harmless, say

ChatStage = Literal["base", "sft", PolicyName, "merge"]
CHAT_STAGES: tuple[ChatStage, ...] = (*LABELS, MERGE)


def first_policy(recipe: Recipe) -> ChatStage:
    """Return the first policy that a recipe trains; SFT's if there is no other."""
    return next(iter(recipe.policies()), SFT)


def stage_of(run: NamedRun | None) -> ChatStage | None:
    """Return what can be talked with in the folder of a stage that was named; None if there is nothing."""
    named = "base" if run and run.stage == PRETRAIN else run and run.stage
    return next((stage for stage in CHAT_STAGES if stage == named), None)


def trained_stage(run: StageRun, stage: ChatStage) -> Path | None:
    """Return the directory of the stage to chat with; None for the base.

    Raises ParentMissing if it is not done, and UserError if it was done with other settings. No library is imported
    before.
    """
    folder = None if stage == "base" else run.require(stage)
    if run.loaded.recipe.pretrain:
        run.require(PRETRAIN)
    return folder


class Speaker:
    """A trained model that continues conversations."""

    def __init__(self, run: StageRun, stage: ChatStage, folder: Path | None):
        """Load the model of a stage in the directory that `trained_stage` has found."""
        recipe = run.loaded.recipe
        cuda.set_environment(recipe)
        from transformers import GenerationConfig

        from rlhf.models.adapters import attach_adapter
        from rlhf.models.loading import load_base, load_merged, load_tokenizer
        from rlhf.process.torch_setup import set_up_torch

        self.options = recipe.evaluate
        self.cut = False  # whether a conversation was cut, and this was said
        device = set_up_torch(recipe)
        self.tokenizer = load_tokenizer(run.base)
        if folder is not None and stage == MERGE:
            self.model: Any = load_merged(folder / MODEL, device)
        else:
            self.model = load_base(run.base, device)
            if folder is not None:
                self.model = attach_adapter(self.model, folder / ADAPTER)
        self.model.generation_config = GenerationConfig()  # a hub model may bring a penalty, with which none trained
        self.model.eval()

    def answer(self, messages: list[Message], temperature: float, tokens: int, show: Callable[[str], object]) -> str:
        """Return the answer to a conversation, and show it piece by piece; temperature 0 takes the likeliest token."""
        import torch
        from transformers import TextStreamer

        from rlhf.models.precision import mixed_precision

        pieces: list[str] = []

        class Pieces(TextStreamer):
            def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
                # a transcript puts a space before an answer
                pieces.append(harmless(text) if any(pieces) else harmless(text).lstrip())
                show(pieces[-1])

        (prompt,), cut = self.tokenizer.encode_prompts([messages], self.options.max_prompt_length)
        if cut and not self.cut:
            self.cut = True
            say(f"the conversation is longer than {self.options.max_prompt_length} tokens: its beginning is left out")
        ids = torch.tensor([prompt], device=self.model.device)
        drawn = {"temperature": temperature, "top_k": 0, "top_p": self.options.top_p} if temperature else {}
        with mixed_precision(self.model):
            self.model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=tokens,
                eos_token_id=self.tokenizer.eos_id,
                pad_token_id=self.tokenizer.pad_id,
                streamer=Pieces(self.tokenizer.hf, skip_prompt=True, skip_special_tokens=True),
                do_sample=temperature > 0,
                **drawn,
            )
        return "".join(pieces).strip()
