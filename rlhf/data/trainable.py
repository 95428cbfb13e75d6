"""Which rows the tokenizer's template can write as they are, so that what is trained is what the row says."""

from collections.abc import Sequence
from dataclasses import replace

from rlhf.data.formats import ParsedRows
from rlhf.data.rows import Document, LeftOut, Message, Row, responses
from rlhf.data.tokenize import THINK, DialogueTokenizer
from rlhf.data.transcripts import unix
from rlhf.errors import UserError
from rlhf.recipe.choices import OnBadRow
from rlhf.terminal import counted


def why_not(tokenizer: DialogueTokenizer, prompt: Sequence[Message], response: str | None = None) -> str | None:
    """Return why a conversation cannot be trained on as written, or None. Without a response the prompt alone counts.

    Text must not spell control tokens or marks of turns, which would end or begin turns that nobody took; the template
    must accept the conversation and write every message of the prompt; reasoning must be closed as it was opened.
    """
    said = [message.content for message in prompt]
    for text in said if response is None else [*said, response]:
        if (reason := _spelled(tokenizer, text)) is not None:
            return reason
    try:
        text = tokenizer.prompt_text(prompt)
    except (UserError, ValueError) as error:
        return str(error)
    if (lost := _lost_message(prompt, text)) is not None:
        return f"the chat template leaves out or alters message {lost + 1} ({prompt[lost].role})"
    return None if response is None else _unclear_reasoning(text.rstrip(), response)


def _unclear_reasoning(prompt: str, response: str) -> str | None:
    """Return what is wrong with the marks of reasoning in a response to a prompt as the template writes it."""
    opened, closed = THINK
    if prompt.endswith(closed):
        return "the response has reasoning, which the chat template closes before it" if opened in response else None
    begun, reasons = prompt.endswith(opened), response.lstrip().startswith(opened)
    rest = response.lstrip().removeprefix(opened)
    if (reasons or (begun and (opened in rest or closed in rest))) and (opened in rest or rest.count(closed) != 1):
        where = "the chat template" if begun else "the response"
        return f"{where} opens reasoning with {opened}, so the response must close it once, with {closed}"
    return None


def refusals(tokenizer: DialogueTokenizer, rows: Sequence[Row]) -> list[tuple[Row, str]]:
    """Return the rows that cannot be trained on as written, each with the reason. Texts without a template all can."""
    reasons = ((row, _why_not_row(tokenizer, row)) for row in rows)
    return [(row, reason) for row, reason in reasons if reason is not None]


def trainable(rows: ParsedRows, tokenizer: DialogueTokenizer, on_bad_row: OnBadRow) -> ParsedRows:
    """Return the rows that can be trained on as written; the others are left out.

    Raises UserError for the first of the others unless `on_bad_row` is skip.
    """
    refused = refusals(tokenizer, rows.rows)
    if refused and on_bad_row == "stop":
        row, reason = refused[0]
        others = f", and {counted(len(refused) - 1, 'other row')} like it" if refused[1:] else ""
        way_out = "repair it, or leave such rows out: --set data.on_bad_row=skip"
        raise UserError(f"{row.source}: {reason}; it cannot be trained as written{others} ({way_out})")
    left_out: list[tuple[LeftOut, str, str]] = [("template", row.source, reason) for row, reason in refused]
    ids = {id(row) for row, _ in refused}  # these very rows, whatever they equal
    kept = tuple(row for row in rows.rows if id(row) not in ids)
    return replace(rows, rows=kept, left_out=(*rows.left_out, *left_out))


def _why_not_row(tokenizer: DialogueTokenizer, row: Row) -> str | None:
    if isinstance(row, Document):
        return _spelled_token(tokenizer, row.text)
    answers = responses(row) or (None,)  # of a prompt that stands alone
    reasons = (why_not(tokenizer, row.prompt, response) for response in answers)
    return next((reason for reason in reasons if reason is not None), None)


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


def _lost_message(prompt: Sequence[Message], text: str) -> int | None:
    """Return the index of the first message of a prompt that its text lacks; None if it has all, in their order.

    White space at the ends may go, and so may the reasoning with which earlier answers begin: templates remove it by
    design.
    """
    position = 0
    for index, message in enumerate(prompt):
        content = message.content.strip()
        if message.role == "assistant" and content.startswith(THINK[0]):
            content = content.partition(THINK[1])[2].strip()
        found = text.find(content, position)
        if found < 0:
            return index
        position = found + len(content)
    return None
