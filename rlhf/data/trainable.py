"""Which rows the tokenizer's template can write as they are, so that what is trained is what the row says."""

from collections.abc import Sequence
from pathlib import Path

from transformers import AutoTokenizer

from rlhf.data.chat_template import check
from rlhf.data.formats import RECIPE_ADVICE, ParsedRows
from rlhf.data.rows import Document, Example, Message, PreferencePair, PromptOnly, Row
from rlhf.data.tokenize import DialogueTokenizer, chat_text, needed_pad_token, turn_end
from rlhf.data.transcripts import unix
from rlhf.errors import UserError
from rlhf.recipe.choices import OnBadRow
from rlhf.run.reader import reading
from rlhf.terminal import counted


def why_not(tokenizer: DialogueTokenizer, prompt: Sequence[Message], response: str | None = None) -> str | None:
    """Return why a conversation cannot be trained on as written, or None. Without a response the prompt alone counts.

    Text must not spell control tokens or marks of turns, which would end or begin turns that nobody took; the template
    must accept the conversation, write every message of the prompt, and continue the prompt with the response.
    """
    said = [message.content for message in prompt]
    for text in said if response is None else [*said, response]:
        if (reason := _spelled(tokenizer, text)) is not None:
            return reason
    try:
        text = tokenizer.prompt_text(prompt)
        answer = None if response is None else tokenizer.answer_text(prompt, response, text)
    except (UserError, ValueError) as error:
        return str(error)
    if (lost := _lost_message(tokenizer, prompt, text)) is not None:
        return f"the chat template leaves out or alters message {lost + 1} ({prompt[lost].role})"
    if response is None:
        return None
    reasoning = tokenizer.reasoning
    if reasoning.closes(text) and reasoning.opened in response:
        return "the response has reasoning, which the chat template closes before it"
    if reasoning.opens(text) and reasoning.closed is None:
        return f"the chat template opens reasoning with {reasoning.opened}, and nothing says what closes it"
    if reasoning.opens(text) and reasoning.is_ambiguous(response):
        return (
            "the chat template opens reasoning, and it is unclear where the response closes it: begin it "
            f"with {reasoning.opened}, or have {reasoning.closed} once, on a line of its own"
        )
    return "the chat template does not continue the prompt with the response" if answer is None else None


def refusals(tokenizer: DialogueTokenizer, rows: Sequence[Row]) -> list[tuple[Row, str]]:
    """Return the rows that cannot be trained on as written, each with the reason. Texts without a template all can."""
    reasons = ((row, _why_not_row(tokenizer, row)) for row in rows)
    return [(row, reason) for row, reason in reasons if reason is not None]


def trainable(rows: ParsedRows, tokenizer: DialogueTokenizer, on_bad_row: OnBadRow) -> tuple[ParsedRows, list[str]]:
    """Return the rows that can be trained on as written, and the place of each other row with the reason.

    Raises UserError for the first other row unless `on_bad_row` is skip.
    """
    refused = refusals(tokenizer, rows.rows)
    if not refused:
        return rows, []
    places = [f"{row.source}: {reason}" for row, reason in refused]
    if on_bad_row == "stop":
        others = f", and {counted(len(places) - 1, 'other row')} like it" if places[1:] else ""
        raise UserError(f"{places[0]}; it cannot be trained as written{others}. {RECIPE_ADVICE.skip}")
    return rows.without(row for row, _ in refused), places


def tokenizer_of_folder(folder: str | Path) -> DialogueTokenizer:
    """Return a folder's tokenizer with its own chat template, or `hh` without one, and tokens that suit it.

    Raises UserError where a recipe would have to say more, and for what `DialogueTokenizer` refuses.
    """
    with reading(Path(folder)):
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    if tokenizer.chat_template:
        check(lambda messages: chat_text(tokenizer, messages))
        tokenizer.eos_token = turn_end(tokenizer) or tokenizer.eos_token
    return DialogueTokenizer(tokenizer, "chat" if tokenizer.chat_template else "hh", needed_pad_token(tokenizer))


def _why_not_row(tokenizer: DialogueTokenizer, row: Row) -> str | None:
    match row:
        case Document():
            return _spelled_token(tokenizer, row.text)
        case Example():
            return why_not(tokenizer, row.prompt, row.response)
        case PreferencePair():
            return why_not(tokenizer, row.prompt, row.chosen) or why_not(tokenizer, row.prompt, row.rejected)
        case PromptOnly():
            return why_not(tokenizer, row.prompt)


def _spelled(tokenizer: DialogueTokenizer, text: str) -> str | None:
    """Return which control token, or else which mark of the template's turns, a text spells first; None for neither."""
    if (reason := _spelled_token(tokenizer, text)) is not None:
        return reason
    mark = tokenizer.turn_marks.search(unix(text))  # a mark is one with the line ends of any system
    return None if mark is None else f"a text spells the mark of a turn {mark[0]!r}"


def _spelled_token(tokenizer: DialogueTokenizer, text: str) -> str | None:
    """Return which control token a text spells first; None for none. It is all that a document must not spell."""
    tokens = [token for token in tokenizer.control_tokens if token in text]
    return f"a text spells the control token {min(tokens, key=text.index)!r}" if tokens else None


def _lost_message(tokenizer: DialogueTokenizer, prompt: Sequence[Message], text: str) -> int | None:
    """Return the index of the first message of a prompt that its text lacks; None if it has all, in their order.

    White space at the ends may go, and so may the reasoning with which earlier answers begin: templates remove it by
    design.
    """
    position = 0
    for index, message in enumerate(prompt):
        content = message.content.strip()
        if message.role == "assistant":
            content = tokenizer.reasoning.without(content)
        found = text.find(content, position)
        if found < 0:
            return index
        position = found + len(content)
    return None
