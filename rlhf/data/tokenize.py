"""Conversion of text to token ids, with every cut counted.

A sequence is prompt + response. The prompt starts with BOS where the tokenizer has one and ends where the response
begins ("…\\n\\nAssistant:"); the response ends with EOS. Prompts lose their oldest tokens, responses their last ones
(and with them EOS: the model is not taught to stop there). A row that loses its whole response is dropped.
"""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as RawTokenizer
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from rlhf.data import chat_template
from rlhf.data.rows import Example, Message
from rlhf.data.transcripts import HH_CHAT_TEMPLATE, render_hh
from rlhf.errors import UserError
from rlhf.files import why_unreadable
from rlhf.recipe.choices import Template
from rlhf.recipe.schema_model import Tokenizer

PAD, BOS, EOS = "<pad>", "<bos>", "<eos>"
# The text of `render_plain` as a chat template. GAP is '' or ' ': `write_chat_template` chooses the one that yields the
# training ids.
PLAIN_CHAT_TEMPLATE = "{{ (bos_token or '') + GAP }}{% for m in messages %}{{ m.content + '\\n' }}{% endfor %}"
TURNS = ("\n\nHuman:", "\n\nAssistant:")
THINK = ("<think>", "</think>")  # the marks of reasoning, which are text
UNCUT = 10**9  # tokens


class Encoded(NamedTuple):
    """The token ids of a prompt and of its response; the response ends with EOS unless it was cut."""

    prompt: list[int]
    response: list[int]

    @property
    def ids(self) -> list[int]:
        """Return all ids."""
        return self.prompt + self.response


class Imitated(NamedTuple):
    """The token ids of a conversation, and for each whether it is imitated."""

    ids: list[int]
    imitated: list[bool]


class SpecialIds(Protocol):
    """Ids of special tokens that sampling needs of a tokenizer."""

    @property
    def pad_id(self) -> int: ...

    @property
    def eos_id(self) -> int: ...


class DialogueTokenizer:
    """A tokenizer together with the template by which dialogues are written for it."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, template: Template, pad_token: str | None = None):
        """Choose the padding token: `pad_token`, or else the tokenizer's own.

        Raises UserError where no token can pad.
        """
        if tokenizer.eos_token_id is None:
            raise UserError("the tokenizer has no end-of-sequence token")
        if not isinstance(tokenizer.model_max_length, int | float):
            raise UserError("model_max_length in tokenizer_config.json is not a number; correct it or leave it out")
        pad = own_pad_token(tokenizer) if pad_token is None else pad_token
        if pad in (None, tokenizer.eos_token, tokenizer.bos_token) or pad not in tokenizer.get_vocab():
            raise UserError(
                f"tokenizer.pad_token: {pad!r} cannot pad; name a token of the vocabulary that texts never hold, such "
                f"as {', '.join(pad_candidates(tokenizer)[:3]) or '<pad>'}"
            )
        tokenizer.pad_token = pad
        if template == "chat" and not tokenizer.chat_template:
            raise UserError("tokenizer.template: chat, but the tokenizer has no chat template; use template: hh")
        self.hf, self.template = tokenizer, template
        self.pad_id: int = tokenizer.pad_token_id
        self.eos_id: int = tokenizer.eos_token_id
        if template == "chat":
            chat_template.check(self.prompt_text)
            self._check_turn_end()

    @cached_property
    def control_tokens(self) -> list[str]:
        """The tokens that mark where texts and turns begin and end. Marks of reasoning are text.

        They are the special ones, and of the others that were added to the vocabulary those that the chat template
        writes and those that look like a mark (`<|x|>`). A word or white space, which texts hold, is none.
        """
        written = ""
        if self._is_chat:
            written = "\n".join([str(self.hf.chat_template), *chat_template.written(self.prompt_text)])
        added = [
            token.content
            for token in self.hf.added_tokens_decoder.values()
            if token.special or chat_template.is_mark(token.content, written)
        ]
        tokens = dict.fromkeys([*self.hf.all_special_tokens, *added])
        return [token for token in tokens if token and token not in THINK]

    @cached_property
    def turn_marks(self) -> re.Pattern[str]:
        """Find the plain text by which the template marks turns; `plain` marks none."""
        if self._is_chat:
            return chat_template.turn_marks(self.prompt_text, [*self.control_tokens, *THINK])
        return re.compile("|".join(TURNS) if self.template == "hh" else r"(?!)")

    @property
    def _is_chat(self) -> bool:
        return self.template == "chat"

    def prompt_text(self, messages: Sequence[Message]) -> str:
        """Return the prompt as the template writes it, up to where the response begins."""
        if self.template == "hh":
            return render_hh(messages)
        if self.template == "plain":
            return render_plain(messages)
        return chat_text(self.hf, messages, add_generation_prompt=True)

    def _check_turn_end(self) -> None:
        """Raise UserError where the template ends an answer with a special token other than EOS.

        The model would have learned to stop there, and sampling would go on.
        """
        end_token = turn_end(self.hf)
        if end_token is not None and end_token != self.hf.eos_token:
            raise UserError(
                f"the chat template ends an answer with {end_token}, the tokenizer's end of sequence is "
                f"{self.hf.eos_token}: set tokenizer.eos_token to {end_token!r}"
            )

    def encode_prompts(self, prompts: Sequence[Sequence[Message]], max_length: int) -> tuple[list[list[int]], int]:
        """Return the ids of each prompt, cut to its last `max_length` tokens, and the number of cut prompts.

        BOS is kept.
        """
        encoded = self._ids([self.prompt_text(p) for p in prompts], bos=True)
        return [self._cut_prompt(ids, max_length) for ids in encoded], sum(len(ids) > max_length for ids in encoded)

    def encode(
        self,
        rows: Sequence[tuple[Sequence[Message], str]],
        max_prompt_length: int,
        max_length: int,
        max_response_length: int | None = None,
    ) -> tuple[list[Encoded | None], Counter[str]]:
        """Return the ids of each (prompt messages, response), and counts of what was cut.

        A row whose whole response was cut away, or that begins with EOS, gives None. A response with its EOS
        gets the tokens that the prompt leaves of `max_length`, and at most `max_response_length`. The response is the
        part of the whole text's ids that follows the prompt, so that training sees exactly what sampling continues.
        Where tokens merge across that border, prompt and response are encoded apart.
        """
        texts = [self.prompt_text(prompt) for prompt, _ in rows]
        answers = [self.answer_text(response, text) for (_, response), text in zip(rows, texts, strict=True)]
        prompts = self._ids(texts, bos=True)
        full_ids = self._ids([text + answer for text, answer in zip(texts, answers, strict=True)], bos=True)
        counts: Counter[str] = Counter()
        encoded: list[Encoded | None] = []
        for answer, prompt, ids in zip(answers, prompts, full_ids, strict=True):
            response = ids[len(prompt) :]
            if ids[: len(prompt)] != prompt:
                counts["merged_at_response"] += 1
                response = self._ids([answer], bos=False)[0]
            counts["prompts_cut"] += len(prompt) > max_prompt_length
            prompt = self._cut_prompt(prompt, max_prompt_length)
            room = min(max_length - len(prompt), max_response_length or max_length)
            end = response.index(self.eos_id) if self.eos_id in response else len(response)  # the text may hold it
            lost = len(response) > end + 1
            room = 0 if response and not end else max(room, 0)  # one that begins with its end is none
            counts["responses_cut"] += room > 0 and (lost or room < end + 1)
            response = [*response[:end], self.eos_id][:room]
            counts["dropped"] += not response
            encoded.append(Encoded(prompt, response) if response else None)
        return encoded, counts

    def encode_turns(
        self, rows: Sequence[Example], max_prompt_length: int, max_length: int
    ) -> tuple[list[Imitated], Counter[str]]:
        """Return the ids of the answers that rows have a model imitate, and counts as `encode` gives them.

        Each answer follows what was said before it, as the template writes that when the answer is due. Where this is
        the beginning of a later answer's ids, and all of those fit, it is imitated there; elsewhere it has a sequence
        of its own. An earlier answer that is a row's response is left to that row.
        """
        own = {(row.prompt, row.response) for row in rows}  # which stand in the file by themselves
        turns = [[*(a for a in row.earlier() if (a.prompt, a.response) not in own), row] for row in rows]
        several = [(a.prompt, a.response) for conversation in turns if conversation[1:] for a in conversation]
        uncut = iter(self.encode(several, UNCUT, UNCUT)[0])
        planned: list[Imitated | Example] = []
        for conversation in turns:
            apart = not conversation[1:]
            planned += conversation if apart else _joined([(a, next(uncut)) for a in conversation], max_length)
        alone = [(answer.prompt, answer.response) for answer in planned if isinstance(answer, Example)]
        encoded, counts = self.encode(alone, max_prompt_length, max_length)
        cut = iter(encoded)
        sequences = ((next(cut) if isinstance(item, Example) else item) for item in planned)
        return [imitated(item) if isinstance(item, Encoded) else item for item in sequences if item], counts

    def encode_texts(self, texts: Sequence[str], max_length: int) -> list[list[int]]:
        """Return BOS + text + EOS of each text in pieces of at most `max_length` tokens; no token is dropped."""
        documents = ([*ids, self.eos_id] for ids in self._ids(texts, bos=True))
        return [ids[start : start + max_length] for ids in documents for start in range(0, len(ids), max_length)]

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of response ids, without padding, BOS and EOS and without white space at its two ends.

        Other special tokens stay: a reward may depend on `<think>`.
        """
        silent = {self.pad_id, self.eos_id, self.hf.bos_token_id}
        text = self.hf.decode([i for i in ids if i not in silent], skip_special_tokens=False)
        assert isinstance(text, str)
        return text.strip()

    def decode_rows(self, tokens: Tensor, mask: Tensor) -> list[str]:
        """Return the text of each row of response ids (B, R), of the slots in `mask`."""
        return [self.decode(row[real].tolist()) for row, real in zip(tokens, mask, strict=True)]

    def write_chat_template(self) -> bool:
        """Give the tokenizer a chat template that renders a conversation to the same ids as training did.

        SentencePiece puts a space before a text, but not behind the BOS that a template writes. Returns whether such a
        template exists. A tokenizer's own template is kept where it was trained with.
        """
        if self.template == "chat":
            return True
        template = PLAIN_CHAT_TEMPLATE if self.template == "plain" else HH_CHAT_TEMPLATE
        conversation = [Message("user", "Hello."), Message("assistant", "Yes?"), Message("user", "Who are you?")]
        rows = [{"role": m.role, "content": m.content} for m in conversation]
        for gap in ("", " "):
            self.hf.chat_template = template.replace("GAP", repr(gap))
            text = self.hf.apply_chat_template(rows, tokenize=False, add_generation_prompt=True)
            assert isinstance(text, str)
            if self._ids([text], bos=False) == self.encode_prompts([conversation], 1 << 20)[0]:
                return True
        return False

    def answer_text(self, response: str, prompt: str) -> str:
        """Return the text of a response as it follows `prompt`, as the template writes it, without EOS.

        Where the template opens reasoning, the response goes on inside of it.
        """
        if not self._is_chat:
            return f" {response}" if self.template == "hh" else response
        before, after = self._around_answers
        response = response.strip()
        _, mark, gap = prompt.rpartition(THINK[0])
        if mark and not gap.strip():  # the prompt ends where reasoning begins
            if THINK[1] not in response:  # an answer without reasoning
                response = f"{'' if gap else chr(10)}\n{THINK[1]}\n\n{response}"
            return response.removeprefix(THINK[0] + gap).removeprefix(THINK[0]) + after
        if THINK[0] in response:  # its own reasoning stands in place of the template's empty one
            before = before.partition(THINK[0])[0]
        return f"{before}{response}{after}"

    @cached_property
    def _around_answers(self) -> tuple[str, str]:
        """What the chat template writes between a prompt and its answer, and between the answer and EOS."""
        asked, answer = chat_template.EXCHANGE[:1], Message("assistant", chat_template.WORD)
        prompt, whole = self.prompt_text(asked), chat_text(self.hf, (*asked, answer))
        before, word, after = whole[len(prompt) :].partition(chat_template.WORD)
        if not whole.startswith(prompt) or not word:
            return "", ""  # it writes what was said in another way than what is to be said
        after = after.rpartition(chat_template.WORD)[2]  # it may repeat the answer
        return before, after.partition(str(self.hf.eos_token))[0].rstrip()

    def _ids(self, texts: Sequence[str], bos: bool) -> list[list[int]]:
        """Return the ids of each text, with `bos` after a BOS where the tokenizer has one."""
        if not texts:
            return []
        encoded: list[list[int]] = self.hf(list(texts), add_special_tokens=False)["input_ids"]
        start = self.hf.bos_token_id
        if not bos or start is None or self.template == "chat":  # a chat template writes BOS itself, or does without
            return encoded
        return [ids if ids[:1] == [start] else [start, *ids] for ids in encoded]

    def _cut_prompt(self, ids: list[int], length: int) -> list[int]:
        """Return a prompt cut to `length` ids: the last ones, after its BOS if it has one."""
        if len(ids) <= length:
            return ids
        if ids[0] == self.hf.bos_token_id:
            return [ids[0], *ids[len(ids) - length + 1 :]]
        return ids[-length:]


def _joined(answers: list[tuple[Example, Encoded | None]], max_length: int) -> list[Imitated | Example]:
    """Return the answers of a conversation, those together whose ids are the beginning of a later one's that fit."""
    found: list[Imitated | Example] = []
    while answers:
        *answers, (answer, whole) = answers
        fits = whole is not None and len(whole.ids) <= max_length
        within = [ids for _, ids in answers if fits and whole and ids and whole.ids[: len(ids.ids)] == ids.ids]
        found.append(imitated(whole, *within) if whole and within else answer)
        answers = [pair for pair in answers if pair[1] not in within]
    return found[::-1]


def imitated(whole: Encoded, *within: Encoded) -> Imitated:
    """Return the ids of a prompt with its response, marked at the response and at those that stand in the prompt."""
    marks = [False] * len(whole.ids)
    for prompt, response in (whole, *within):
        marks[len(prompt) : len(prompt) + len(response)] = [True] * len(response)
    return Imitated(whole.ids, marks)


def pad_candidates(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Return the special tokens of the vocabulary that could pad; those made for padding come first."""
    excluded = {tokenizer.eos_token, tokenizer.bos_token}
    special = [t.content for t in tokenizer.added_tokens_decoder.values() if t.special and t.content not in excluded]
    special.sort(key=lambda token: ("pad" not in token.lower(), "reserved" not in token.lower()))
    return special


def own_pad_token(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Return the padding token, or else the unknown token; None where a tokenizer has neither, or only as its EOS.

    With pad = EOS the reward model would read its score one token too early.
    """
    for token in (tokenizer.pad_token, tokenizer.unk_token):
        if token is not None and token != tokenizer.eos_token:
            return str(token)
    return None


def needed_pad_token(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Return the value of tokenizer.pad_token that a tokenizer needs; None if it has a token to pad with."""
    candidates = [] if own_pad_token(tokenizer) else pad_candidates(tokenizer)
    return candidates[0] if candidates else None


def chat_text(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    add_generation_prompt: bool = False,
    template: str | None = None,
) -> str:
    """Return a conversation as a chat template, the tokenizer's by default, writes it.

    Raises UserError where that refuses it.
    """
    rows = [{"role": m.role, "content": m.content} for m in messages]
    try:
        text = tokenizer.apply_chat_template(
            rows, chat_template=template, tokenize=False, add_generation_prompt=add_generation_prompt
        )
    except Exception as error:  # a template may raise anything
        raise UserError(f"the tokenizer's chat template refuses a conversation: {why_unreadable(error)}") from error
    assert isinstance(text, str)
    return text


def writes_the_date(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether the chat template, which must have been checked, writes today's date into a conversation."""
    if chat_template.CLOCK not in str(tokenizer.chat_template):  # as in most, which need not be rendered for it
        return False
    day = "29 Feb 2000"
    dated = chat_template.with_settings(str(tokenizer.chat_template), {chat_template.CLOCK: day}, None)
    return any(day in text for text in chat_template.written(lambda said: chat_text(tokenizer, said, template=dated)))


def turn_end(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Return the added token with which the chat template ends an answer; None if it ends with none.

    The template must have been checked: it runs in this process.
    """
    text = chat_text(tokenizer, (Message("user", "Hello."), Message("assistant", chat_template.WORD)))
    after_answer = text.rpartition(chat_template.WORD)[2].lstrip()
    added = [token.content for token in tokenizer.added_tokens_decoder.values() if token.content.strip()]
    return max((token for token in added if after_answer.startswith(token)), key=len, default=None)


def render_plain(messages: Sequence[Message]) -> str:
    """Return a prompt as bare text: the content of each message, followed by a line break.

    The response follows directly. Nothing marks who speaks, so that `["Hello", "Yes?", "Who?"]` becomes
    `Hello\\nYes?\\nWho?\\n`.
    """
    return "".join(f"{message.content}\n" for message in messages)


def train(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer of at most `vocab_size` tokens.

    The turn markers of transcripts are one token each.
    """
    raw = RawTokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(TURNS),
        special_tokens=[PAD, BOS, EOS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    words = (text.replace(TURNS[0], " ").replace(TURNS[1], " ") for text in texts)
    raw.train_from_iterator(words, trainer)
    raw.add_tokens([AddedToken(turn, normalized=False) for turn in TURNS])
    return PreTrainedTokenizerFast(tokenizer_object=raw, pad_token=PAD, bos_token=BOS, eos_token=EOS)


def words(vocab_size: int) -> PreTrainedTokenizerFast:
    """Return a stand-in tokenizer with `vocab_size` ids, one for each word of rlhf/data/worlds/lengths.py that fits."""
    special = [PAD, BOS, EOS, *(turn.strip() for turn in TURNS)]
    ids = {word: i for i, word in enumerate([*special, *map(str, range(vocab_size - len(special)))])}
    raw = RawTokenizer(models.WordLevel(ids, unk_token=PAD))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=raw, pad_token=PAD, bos_token=BOS, eos_token=EOS)


def load(
    name: str | Path, settings: Tokenizer, errors_named: AbstractContextManager[None] | None = None
) -> DialogueTokenizer:
    """Return a saved tokenizer with its template: a folder, or a hub id at a pinned revision.

    `errors_named` turns what the library raises into a UserError. Raises UserError for an EOS token that is not in the
    vocabulary, and for what `DialogueTokenizer` refuses.
    """
    with errors_named or nullcontext():
        tokenizer = AutoTokenizer.from_pretrained(name, revision=settings.revision)
        has_template = settings.template == "chat" and tokenizer.chat_template
        template = tokenizer.get_chat_template() if has_template else None
    if settings.eos_token is not None:
        if settings.eos_token not in tokenizer.get_vocab():
            raise UserError(f"tokenizer.eos_token: {settings.eos_token!r} is not in the vocabulary")
        tokenizer.eos_token = settings.eos_token
    if template is not None:
        if not isinstance(template, str):
            raise UserError(f"the tokenizer's chat template is not text: {template!r}; use tokenizer.template: hh")
        variables = settings.chat_template_kwargs or {}
        tokenizer.chat_template = chat_template.with_settings(template, variables, settings.system_prompt)
    dialogues = DialogueTokenizer(tokenizer, settings.template, settings.pad_token)
    if template is not None and writes_the_date(tokenizer):
        raise UserError(
            "the tokenizer's chat template writes today's date, so another day gives other tokens; set the date: "
            f"tokenizer.chat_template_kwargs: {{{chat_template.CLOCK}: 26 Jul 2024}}"
        )
    return dialogues


def pad_right(sequences: Sequence[Sequence[int]], pad_id: int) -> torch.Tensor:
    """Return the sequences padded on the right: (B, longest) int64.

    Causal attention never looks to the right, so no mask is needed.
    """
    width = max(len(s) for s in sequences)
    return torch.tensor([[*s, *[pad_id] * (width - len(s))] for s in sequences])
