"""Overlap of sampled answers with the answers that people chose and rejected: BLEU, ROUGE-L and BERTScore.

They measure similarity, not worth. An answer should be nearer to the chosen answer than to the rejected one. BLEU is
sacrebleu's of the whole corpus (ACL P02-1040), ROUGE-L rouge-score's F1 (ACL W04-1013), both with their defaults.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModel, AutoTokenizer

from rlhf.data.corpus import Corpus, Prompt
from rlhf.files import reading
from rlhf.models import checkpoints


class Overlap:
    """Comparison of answers to held-out prompts with the first that people chose and rejected.

    `copies` is the number of answers to each prompt, `encoder` a folder with a BERT-like model, or None.
    """

    def __init__(
        self, corpus: Corpus, prompts: Sequence[Prompt], copies: int, encoder: str | None, device: torch.device
    ):
        chosen: dict[Prompt, str] = {}
        rejected: dict[Prompt, str] = {}
        for pair in corpus.pairs.test:
            chosen.setdefault(pair.prompt, pair.chosen)
            rejected.setdefault(pair.prompt, pair.rejected)
        for example in corpus.imitated.test:
            chosen.setdefault(example.prompt, example.response)
        answered = [prompt for prompt in prompts for _ in range(copies)]
        self._rows = {
            suffix: [(i, references[prompt]) for i, prompt in enumerate(answered) if prompt in references]
            for suffix, references in (("", chosen), ("_rejected", rejected))
        }
        self._encoder = None if encoder is None else Encoder(Path(encoder), device)

    def metrics(self, texts: Sequence[str]) -> dict[str, float]:
        """Return `bleu` (0 to 100) and mean `rouge_l` and `bertscore` (F1), against the rejected answers too."""
        from rouge_score.rouge_scorer import RougeScorer
        from sacrebleu import corpus_bleu

        metrics: dict[str, float] = {}
        rouge = RougeScorer(["rougeL"])
        for suffix, rows in ((suffix, rows) for suffix, rows in self._rows.items() if rows):
            pairs = [(texts[i], reference) for i, reference in rows]
            metrics[f"bleu{suffix}"] = corpus_bleu([a for a, _ in pairs], [[b for _, b in pairs]]).score
            metrics[f"rouge_l{suffix}"] = sum(rouge.score(b, a)["rougeL"].fmeasure for a, b in pairs) / len(pairs)
            if self._encoder is not None:
                embed = self._encoder.embed
                metrics[f"bertscore{suffix}"] = sum(bertscore(embed(a), embed(b)) for a, b in pairs) / len(pairs)
        return metrics


def bertscore(answer: Tensor, reference: Tensor) -> float:
    """Return the F1 of BERTScore (arXiv 1904.09675) from unit vectors (T, H) of both texts' tokens; 0 for no overlap.

    It is the harmonic mean of precision and recall: the mean best similarity of the answer's tokens to the reference's,
    and the reverse, without weights and without rescaling.
    """
    if not len(answer) or not len(reference):
        return 0.0
    similarity = answer @ reference.T
    precision, recall = similarity.amax(1).mean(), similarity.amax(0).mean()
    return (2 * precision * recall / (precision + recall)).item() if precision + recall else 0.0


class Encoder:
    """A BERT-like model, whose last layer gives the vectors of tokens. Raises UserError where it cannot be read."""

    def __init__(self, folder: Path, device: torch.device):
        with reading(folder):
            self._tokenizer = AutoTokenizer.from_pretrained(folder)
            # many encoders lack a pooler
            model: Any = checkpoints.load(AutoModel, str(folder), unneeded=("pooler.",), placed=False)
        self._model = model.to(device).eval()
        self._longest = min(model.config.max_position_embeddings - 2, self._tokenizer.model_max_length)  # RoBERTa's − 2

    @torch.no_grad()
    def embed(self, text: str) -> Tensor:
        """Return unit vectors (T, H) of a text's tokens, without the special tokens at its ends."""
        encoded = self._tokenizer(
            text, return_tensors="pt", truncation=True, max_length=self._longest, return_special_tokens_mask=True
        )
        marks = encoded.pop("special_tokens_mask")[0].bool()
        hidden = self._model(**encoded.to(self._model.device)).last_hidden_state[0].float().cpu()
        return torch.nn.functional.normalize(hidden[~marks], dim=-1)
