"""Overlap of sampled answers with the answers that people chose and rejected: BLEU, ROUGE-L and BERTScore.

They measure similarity, not worth. An answer should be nearer to the chosen answer than to the rejected one.

BLEU (Papineni et al. 2002, ACL P02-1040) is sacrebleu's of the whole corpus: 13a tokens, case kept, exponential
smoothing. ROUGE-L (Lin 2004, ACL W04-1013) is rouge-score's F1 of the longest common subsequence of two whole texts, in
lower case and without stemming. BERTScore is thirty lines here: its package (bert-score 0.3.13, the last, of 2023)
would add pandas, matplotlib and requests.
"""

import functools
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModel, AutoTokenizer

from rlhf.data.corpus import Corpus, Prompt
from rlhf.models.folders import check_encoder
from rlhf.models.weights import check_base, check_report
from rlhf.run.reader import reading
from rlhf.terminal import say


def answers(corpus: Corpus, prompts: Sequence[Prompt], samples_per_prompt: int) -> list[tuple[str, str | None] | None]:
    """Return for each response to held-out prompts the first chosen answer, and the rejected one if there is a pair.

    The `samples_per_prompt` responses to one prompt follow each other.
    """
    references: dict[Prompt, tuple[str, str | None]] = {}
    for pair in corpus.pairs.test:
        references.setdefault(pair.prompt, (pair.chosen, pair.rejected))
    for example in corpus.imitated.test:
        references.setdefault(example.prompt, (example.response, None))
    return [references.get(prompt) for prompt in prompts for _ in range(samples_per_prompt)]


class Overlap:
    """Comparison of texts with the same references; `encoder` is a folder with a BERT-like model, or None."""

    def __init__(self, references: Sequence[tuple[str, str | None] | None], encoder: str | None, device: torch.device):
        from rouge_score.rouge_scorer import RougeScorer

        self._rows = {
            "": [(i, pair[0]) for i, pair in enumerate(references) if pair],
            "_rejected": [(i, pair[1]) for i, pair in enumerate(references) if pair and pair[1] is not None],
        }
        self._rouge = RougeScorer(["rougeL"])
        self._encoder: _Encoder | None = None
        self._embedded: dict[str, Tensor] = {}
        if encoder is None:
            say("evaluate: BERTScore is skipped: evaluate.bertscore_model names no encoder")
            return
        self._encoder = _Encoder(Path(encoder), device)
        texts = {reference for rows in self._rows.values() for _, reference in rows}
        self._embedded = {text: self._encoder.embed(text) for text in texts}

    def metrics(self, texts: Sequence[str]) -> dict[str, float]:
        """Return `bleu` (0 to 100, of the corpus) and mean `rouge_l` and `bertscore` (F1).

        Each is computed against the rejected answers too.
        """
        from sacrebleu import corpus_bleu

        metrics: dict[str, float] = {}
        embed = functools.cache(self._encoder.embed) if self._encoder is not None else None
        for suffix, rows in self._rows.items():
            if not rows:
                continue
            pairs = [(texts[i], reference) for i, reference in rows]
            responses, references = [a for a, _ in pairs], [b for _, b in pairs]
            metrics[f"bleu{suffix}"] = corpus_bleu(responses, [references]).score
            rouge = [self._rouge.score(b, a)["rougeL"].fmeasure for a, b in pairs]
            metrics[f"rouge_l{suffix}"] = sum(rouge) / len(rouge)
            if embed is not None:
                scores = [bertscore(embed(a), self._embedded[b]) for a, b in pairs]
                metrics[f"bertscore{suffix}"] = sum(scores) / len(scores)
        return metrics


def bertscore(answer: Tensor, reference: Tensor) -> float:
    """Return the F1 of BERTScore (arXiv 1904.09675) from unit vectors (T, H) of both texts' tokens.

    It is the harmonic mean of precision and recall: the mean best similarity of the answer's tokens to the reference's,
    and the reverse, without weights and without rescaling. 0 for an empty text, and for texts without any similarity.
    """
    if not len(answer) or not len(reference):
        return 0.0
    similarity = answer @ reference.T
    precision, recall = similarity.amax(1).mean(), similarity.amax(0).mean()
    return (2 * precision * recall / (precision + recall)).item() if precision + recall else 0.0


class _Encoder:
    """A BERT-like model, whose last layer gives the vectors of tokens."""

    def __init__(self, folder: Path, device: torch.device):
        """Load the encoder. Raises UserError where it cannot be read, or lacks weights, or has some that are NaN."""
        check_encoder(folder)
        with reading(folder):
            self._tokenizer = AutoTokenizer.from_pretrained(folder)
            model, report = AutoModel.from_pretrained(
                folder, output_loading_info=True, ignore_mismatched_sizes=True, use_safetensors=True
            )
        check_report(report, str(folder), ("pooler.",), placed=False)  # many encoders lack a pooler
        check_base(model, str(folder))
        self._model = model.to(device).eval()
        room = self._model.config.max_position_embeddings - 2  # RoBERTa's positions begin at 2
        self._longest = min(room, self._tokenizer.model_max_length)

    @torch.no_grad()
    def embed(self, text: str) -> Tensor:
        """Return unit vectors (T, H) of a text's tokens, without the special tokens at its ends."""
        encoded = self._tokenizer(
            text, return_tensors="pt", truncation=True, max_length=self._longest, return_special_tokens_mask=True
        )
        marks = encoded.pop("special_tokens_mask")[0].bool()
        hidden = self._model(**encoded.to(self._model.device)).last_hidden_state[0].float().cpu()
        return torch.nn.functional.normalize(hidden[~marks], dim=-1)
