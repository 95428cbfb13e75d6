"""The reward `judge`: a model behind an OpenAI-compatible address marks a response by a rubric.

Each mark is kept in judged.jsonl of the run, so that a question is paid for once, also by a run that is resumed.
"""

import json
import math
import re
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path

from rlhf.data.normal import says_something
from rlhf.evaluation.judging import Endpoint, Refused, Unavailable, conclusion, question
from rlhf.files import append, replacing
from rlhf.packages import install_command, require
from rlhf.process.threads import results_of
from rlhf.run import reader
from rlhf.run.layout import JUDGED_FILE
from rlhf.run.records import Amount, Count, Record

EASY = "Reply with the number 1 and nothing else."
TASK = (
    "An assistant answered the last message of a conversation. Mark the answer with a whole number from 0 (worst) to "
    "{most} (best), by this rubric:\n{rubric}"
)
REPLY_WITH = "Reply with the number and nothing else."
MARK_LINE = r"\W*(?:(?:the |final |overall )*(?:mark|score|rating|answer)(?: is)?\W*)?(?<!-)(\d+(?:\.\d+)?)"


class JudgedLine(Record):
    """A question that was asked: whom, its digest, the mark from 0 to 1 if the reply has one, and what it took."""

    judge: str  # the digest of model and rubric: several judges share the file
    question: str
    mark: Amount | None
    tokens_in: Count
    tokens_out: Count


class JudgeReward:
    """A judge as a reward function. Raises ValueError for options that it cannot use."""

    def __init__(self, *, rubric: str, url: str, model: str, most: int = 10, at_once: int = 8):
        if not url.startswith(("http://", "https://")):
            raise ValueError("url is, for example, 'http://127.0.0.1:8000/v1'")
        if not rubric.strip() or not model.strip():
            raise ValueError("rubric and model must not be empty")
        if most < 1 or not 1 <= at_once <= 256:
            raise ValueError("most must be above 0, and at_once from 1 to 256")
        require(["openai", "httpx2"], "the reward judge", install_command("judge"))
        self.url, self.model, self.most, self.at_once = url, model, most, at_once
        self.task = TASK.format(most=most, rubric=rubric.strip())
        self.identity = sha256(json.dumps([model, rubric, most]).encode()).hexdigest()[:16]
        self._file: Path | None = None
        self._judged: dict[str, JudgedLine] = {}
        self._endpoint: Endpoint | None = None

    def begin(self, folder: Path | None, device: str) -> None:
        """Keep marks in a run's folder, and take those that are there. Raises UserError for a damaged file."""
        if folder is not None:
            self._file = folder / JUDGED_FILE
            lines = reader.read_lines(self._file, JudgedLine)
            self._judged = {line.question: line for line in lines if line.judge == self.identity}
            with replacing(self._file) as temporary:  # a crash may have left a part of a line
                append(temporary, [line.plain() for line in lines])

    def __call__(self, prompts: Sequence[str], completions: Sequence[str]) -> list[float | None]:
        """Return the mark of each response, from 0 to 1; None where the judge gives none. An empty response gets 0.

        Raises UserError where the address, the key or the model is wrong, and where no question is answered.
        """
        asked = [*zip(prompts, completions, strict=True)]
        digests = [sha256(json.dumps([self.identity, *pair]).encode()).hexdigest() for pair in asked]
        texts = dict(zip(digests, asked, strict=True))  # an answer that comes twice is asked about once
        new = [d for d, (_, answer) in texts.items() if says_something(answer) and d not in self._judged]
        if new and self._endpoint is None:
            self._endpoint = Endpoint(self.url, self.model, EASY, option="the judge's url")
        answered = 0
        for number, outcome in enumerate(results_of(lambda d: self._asked(d, *texts[d]), new, self.at_once), 1):
            if isinstance(outcome, JudgedLine):
                answered += 1
                self._judged[outcome.question] = outcome
                if self._file is not None:
                    append(self._file, [outcome.plain()])
            elif not isinstance(outcome, Unavailable) or (number == len(new) and not answered):
                raise outcome
        marks = [self._judged[d].mark if d in self._judged else None for d in digests]
        return [mark if says_something(answer) else 0.0 for mark, answer in zip(marks, completions, strict=True)]

    def _asked(self, digest: str, prompt: str, answer: str) -> JudgedLine:
        """Ask about an answer. Raises what `Endpoint.reply` raises where it is never answered."""
        assert self._endpoint is not None
        material = {"conversation": prompt, "answer": answer}
        try:
            reply = self._endpoint.reply(question(self.task, material, digest[:16], REPLY_WITH))
        except Refused:
            return JudgedLine(judge=self.identity, question=digest, mark=None, tokens_in=0, tokens_out=0)
        found, usage = mark(reply.text, self.most), {"tokens_in": reply.tokens_in, "tokens_out": reply.tokens_out}
        share = None if found is None else found / self.most
        return JudgedLine(judge=self.identity, question=digest, mark=share, **usage)


def mark(reply: str, most: int) -> float | None:
    """Return the mark that a reply ends with, at most `most`: `7`, `Score: 7`, `7/10`. Reasoning does not count."""
    if not (text := conclusion(reply)):
        return None
    found = re.fullmatch(rf"{MARK_LINE}(?:\s*(?:/|out of)\s*{most})?\W*", text.splitlines()[-1].strip(), re.I)
    number = float(found[1]) if found else math.inf
    return number if number <= most else None
