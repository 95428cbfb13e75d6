"""A trained model that continues a conversation; an answer appears while it is sampled."""

from collections.abc import Callable
from typing import Any

from rlhf.data.rows import Message
from rlhf.errors import OptionError
from rlhf.process import environment
from rlhf.recipe import Recipe, StageName
from rlhf.recipe.stages import MERGE, POLICIES, PRETRAIN, SFT
from rlhf.run.directory import StageRun
from rlhf.run.layout import ADAPTER, MODEL
from rlhf.run.named import NamedRun
from rlhf.terminal import harmless, say


def stage_of(run: NamedRun | None, recipe: Recipe) -> StageName:
    """Return the stage to talk with: the named one, or the first policy that a recipe trains, or SFT without one.

    `pretrain` is the base. Raises OptionError for a stage that makes no answers.
    """
    stage: StageName = run.stage if run and run.stage else next(iter(recipe.policies()), SFT)
    if stage not in (PRETRAIN, SFT, *POLICIES, MERGE):
        raise OptionError(f"{run}: {stage} makes no answers; name another stage's folder")
    return stage


class Speaker:
    """A trained model that continues conversations."""

    def __init__(self, run: StageRun, stage: StageName):
        """Load the model of a stage of the recipe's run. Raises ParentMissing where it is not done."""
        recipe = run.loaded.recipe
        folder = run.require(stage)
        if recipe.pretrain:
            run.require(PRETRAIN)
        environment.prepare(recipe)  # before any library is imported
        from transformers import GenerationConfig

        from rlhf.models.adapters import attach_adapter
        from rlhf.models.loading import load_base, load_merged, load_tokenizer
        from rlhf.process.torch_setup import set_up_torch

        self.options = recipe.evaluate
        self.cut = False  # whether a conversation was cut, and this was said
        device = set_up_torch(recipe)
        self.tokenizer = load_tokenizer(run.base)
        self.model: Any
        if stage == MERGE:
            self.model = load_merged(folder / MODEL, device)
        elif stage == PRETRAIN:
            self.model = load_base(run.base, device)
        else:
            self.model = attach_adapter(load_base(run.base, device), folder / ADAPTER)
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
