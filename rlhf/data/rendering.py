"""How the text of a response follows the prompt that a chat template writes, so that nothing of the response is lost.

Templates are made to render what was said before. Some rewrite an answer: they strip its white space, or remove its
reasoning. What is trained is the response as written, between what the template writes before and after an answer.
"""

import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

from rlhf.data import chat_template
from rlhf.data.rows import Message
from rlhf.errors import UserError

Render = Callable[[Sequence[Message]], str]

_TAG = re.compile(r"<[^<>\s]+>|\[[^\[\]\s]+\]|◁[^◁▷\s]+▷")
_ENDING = {
    "start": "end",
    "begin": "end",
    "open": "close",
}  # words of marks that begin something, and of those that end


class Reasoning(NamedTuple):
    """The marks between which a model reasons; `closed` is None where nothing says how reasoning ends."""

    opened: str
    closed: str | None

    @property
    def marks(self) -> tuple[str, ...]:
        """Return the marks that are known."""
        return (self.opened,) if self.closed is None else (self.opened, self.closed)

    def opens(self, prompt: str) -> bool:
        """Return whether a prompt ends where reasoning begins."""
        return prompt.rstrip().endswith(self.opened)

    def closes(self, prompt: str) -> bool:
        """Return whether a prompt ends with a block of reasoning that is closed, so that only an answer can follow."""
        return self.closed is not None and prompt.rstrip().endswith(self.closed)

    def is_in(self, response: str) -> bool:
        """Return whether a response has a mark of reasoning."""
        return self.opened in response or (self.closed is not None and self.closed in response)

    def is_ambiguous(self, response: str) -> bool:
        """Return whether it is open what of a response, which follows a prompt that opens reasoning, is reasoning.

        Clear is a response that begins with the mark that opens it, one with one mark that closes it on a line of its
        own, and one without marks. Where nothing says how reasoning ends, none is clear.
        """
        if self.closed is None:
            return True
        response = response.strip()
        if self.opened in response.removeprefix(self.opened):
            return True
        if response.startswith(self.opened) or self.closed not in response:
            return False
        alone = re.search(rf"^[ \t]*{re.escape(self.closed)}[ \t]*$", response, re.MULTILINE)
        return response.count(self.closed) > 1 or not alone

    def without(self, answer: str) -> str:
        """Return an answer without the reasoning that it begins with."""
        if self.closed is None or not answer.startswith(self.opened) or self.closed not in answer:
            return answer
        return answer.partition(self.closed)[2].strip()


THINK = Reasoning("<think>", "</think>")  # where a template shows no other marks


def reasoning_of(prompted: Render, written: Render, known: str) -> Reasoning:
    """Return the marks of reasoning of a chat template, judged by what it renders and not by their names.

    `prompted` renders a conversation up to where an answer begins, `written` the conversation alone. `known` has the
    template's source and the added tokens: one of them may hold what closes a mark. THINK where no other is opened.
    """
    try:
        _, before, after, end = prompted(chat_template.EXCHANGE).split(chat_template.WORD)
        unprompted = written(chat_template.EXCHANGE).rpartition(chat_template.WORD)[2]
    except (UserError, ValueError):  # it writes a message twice, or takes no such conversation
        return THINK
    return _opened(end.removeprefix(unprompted) or end, before, after, known)


def _opened(generation: str, before_answer: str, after_answer: str, known: str) -> Reasoning:
    """Return the marks of the reasoning that a template opens, or opens and closes; THINK where it opens none.

    generation     what it writes for an answer to begin
    before_answer  what stands between a message and an earlier answer to it
    after_answer   what stands between an earlier answer and the next message

    Reasoning is opened by a mark at the end of `generation` that is not the assistant's own: it is not written before
    earlier answers, or another word or mark that users' messages do not have stands beside it. A mark that is written
    for users too, or is closed right behind an answer, is none of reasoning.
    """
    tags = _TAG.findall(generation)
    for number, tag in enumerate(tags):
        closed = next((end for end in _ends(tag) if end in tags[number + 1 :]), None)
        if closed and tag not in after_answer:
            return Reasoning(tag, closed)  # an empty block: reasoning is switched off
    at_end = re.search(rf"(?:{_TAG.pattern})\w*\s*$", generation)  # with a word, as in <|channel>thought
    if at_end is None or tags[-1] in after_answer:
        return THINK
    mark, ends = at_end[0].rstrip(), _ends(tags[-1])
    if any(after_answer.lstrip().startswith(end) for end in ends):
        return THINK
    opened = mark.replace("/", "", 1)
    if opened != mark and opened not in before_answer + after_answer:  # only the end is written
        return Reasoning(opened, mark)
    closed = next((end for end in ends if end in known), None)
    own = _TAG.sub(lambda tag: " " if tag[0] in after_answer else f" {tag[0]}", generation).split()
    if len(own) < 2 and mark in before_answer and closed is None:
        return THINK
    as_in_xml = ends[0] if re.fullmatch(r"<[\w:.-]+>|\[[\w:.-]+\]", mark) else None
    return Reasoning(mark, closed or as_in_xml)


def _ends(opened: str) -> list[str]:
    """Return the marks that may close one: </x> for <x>, [/X] for [X], <x|> for <|x>, <|end_x|> for <|start_x|>."""
    bracket = opened[: 2 if opened[1:2] in "|｜" else 1]
    ends = [f"{bracket}/{opened[len(bracket) :]}"]
    if bracket == "<|" and not opened.endswith("|>"):
        ends.append(f"<{opened[2:-1]}|>")
    for begin, end in _ENDING.items():
        named = re.sub(begin, lambda word: end.upper() if word[0].isupper() else end, opened, flags=re.IGNORECASE)  # noqa: B023
        ends += [named] if named != opened else []
    return ends


def answer_text(prompt: str, response: str, render: Callable[[str], str], end: str, reasoning: Reasoning) -> str | None:
    """Return what follows a prompt's text: the response, with what the template writes around it, without `end`.

    White space at the two ends of the response is the template's: many templates strip it. `render` returns the whole
    conversation's text with a given response. `end` is the end-of-sequence token, `reasoning` has the template's marks.
    Returns None where the template does not continue the prompt with the answer.
    """
    if reasoning.opens(prompt):
        return _after_open_reasoning(prompt, response, render, end, reasoning)
    answer = _continuation(prompt, render(response), end)
    frame = _continuation(prompt, render(chat_template.WORD), end)
    if answer is None or frame is None or chat_template.WORD not in frame:
        return None
    before, after = frame.partition(chat_template.WORD)[0], frame.rpartition(chat_template.WORD)[2]  # it may repeat it
    if reasoning.is_in(response):  # its own reasoning stands in place of the template's empty one
        before = before.partition(reasoning.opened)[0]
    written = answer.removeprefix(before).removesuffix(after)
    if answer == f"{before}{written}{after}" and written.strip() == response.strip():
        return answer
    return f"{before}{response.strip()}{after}"  # the template rewrites this response


def _after_open_reasoning(
    prompt: str, response: str, render: Callable[[str], str], end: str, reasoning: Reasoning
) -> str | None:
    """Return the response as it continues a prompt that opened reasoning; one without reasoning closes it at once."""
    opened, _, gap = prompt.rpartition(reasoning.opened)
    frame = _continuation(opened.rstrip(), render(chat_template.WORD), end)
    if frame is None or chat_template.WORD not in frame or reasoning.closed is None:
        return None
    response = response.strip()
    if response.startswith(reasoning.opened):
        response = response.removeprefix(reasoning.opened).removeprefix(gap)
    elif reasoning.closed not in response:
        response = f"{'' if gap else chr(10)}\n{reasoning.closed}\n\n{response}"
    return response + frame.rpartition(chat_template.WORD)[2]


def _continuation(prompt: str, whole: str, end: str) -> str | None:
    """Return what a whole conversation has after its prompt, up to the last `end`; None if it begins otherwise."""
    if not whole.startswith(prompt):
        return None
    answer = whole[len(prompt) :]
    return (answer.rpartition(end)[0] or answer).rstrip()
