"""The reward `judge`: a model behind an OpenAI-compatible address marks a response by a rubric.

Each mark is kept in judged.jsonl of the run, so that a question is paid for once, also by a run that is resumed.
"""

import json
import math
import re
from collections.abc import Iterator, Sequence
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

from rlhf.data.normal import says_something
from rlhf.errors import UserError
from rlhf.evaluation import judging
from rlhf.files import append, replacing
from rlhf.process.threads import results_of
from rlhf.run import reader
from rlhf.run.layout import JUDGED_FILE
from rlhf.run.packages import require_found
from rlhf.run.records import Amount, Count, Record

if TYPE_CHECKING:
    from rlhf.evaluation.endpoint import Endpoint

EASY = "Reply with the number 1 and nothing else."
TASK = (
    "An assistant answered the last message of a conversation. Mark the answer with a whole number from 0 (worst) to "
    "{most} (best), by this rubric:\n{rubric}"
)
REPLY_WITH = "Reply with the number and nothing else."
NUMBER = r"(?<!-)(\d+(?:\.\d+)?)"
NAMES = r"(?:(?:the |final |overall )*(?:mark|score|rating|answer)(?: is)?\W*)?"
MARK_LINE = rf"\W*{NAMES}{NUMBER}(?:\s*(?:/|out of)\s*{{most}})?\W*"


class JudgedLine(Record):
    """A question that was asked: whom, its digest, the mark from 0 to 1 if the reply has one, and what it took."""

    judge: str  # the digest of model and rubric: several judges share the file
    question: str
    mark: Amount | None
    tokens_in: Count
    tokens_out: Count


class JudgeReward:
    """A judge as a reward function. Raises ValueError for options that it cannot use."""

    def __init__(
        self,
        *,
        rubric: str,
        url: str,
        model: str,
        most: int = 10,
        at_once: int = 8,
        dollars_in: float = 0.0,
        dollars_out: float = 0.0,
    ):
        if not url.startswith(("http://", "https://")):
            raise ValueError("url is, for example, 'http://127.0.0.1:8000/v1'")
        if not rubric.strip() or not model.strip():
            raise ValueError("rubric and model must not be empty")
        if most < 1:
            raise ValueError("most must be above 0")
        if not 1 <= at_once <= 256:
            raise ValueError("at_once must be from 1 to 256")
        if not all(0 <= dollars < math.inf for dollars in (dollars_in, dollars_out)):
            raise ValueError("dollars_in and dollars_out are dollars for a million tokens, 0 or more")
        require_found(("openai", "httpx2"), "the reward judge", "judge")
        self.rubric, self.url, self.model, self.most, self.at_once = rubric, url, model, most, at_once
        self.dollars_in, self.dollars_out = dollars_in, dollars_out
        self.identity = sha256(json.dumps([model, rubric, most]).encode()).hexdigest()[:16]
        self._timeout: float | None = None
        self._retries: int | None = None
        self._file: Path | None = None
        self._writes = False
        self._judged: dict[str, JudgedLine] = {}
        self._endpoint: Endpoint | None = None

    def open(self, folder: Path | None, timeout: float | None, retries: int) -> None:
        """Begin a run: keep marks in its folder, and take those that are there. Raises UserError for a damaged file.

        `timeout` and `retries` are of one question: None and 0 stand for those of `rlhf judge`.
        """
        self._timeout, self._retries = timeout, retries or None
        if folder is not None:
            self._file = folder / JUDGED_FILE
            lines = reader.read_lines(self._file, JudgedLine)
            self._judged = {line.question: line for line in lines if line.judge == self.identity}

    def __call__(self, prompts: Sequence[str], completions: Sequence[str]) -> list[float | None]:
        """Return the mark of each response, from 0 to 1; None where the judge gives none. An empty response gets 0.

        Raises UserError where the address, the key or the model is wrong, and where no question is answered.
        """
        questions = {
            self._digest(prompt, answer): self._question(prompt, answer)
            for prompt, answer in zip(prompts, completions, strict=True)
            if says_something(answer)
        }
        new = {digest: question for digest, question in questions.items() if digest not in self._judged}
        failures: list[UserError] = []
        for outcome in self._asked(new) if new else ():
            if isinstance(outcome, JudgedLine):
                self._keep(outcome)
            else:
                failures.append(outcome)
        if failures and len(failures) == len(new):
            raise failures[0]
        marks: list[float | None] = []
        for prompt, answer in zip(prompts, completions, strict=True):
            line = self._judged.get(self._digest(prompt, answer))
            marks.append(0.0 if not says_something(answer) else None if line is None else line.mark)
        return marks

    def _keep(self, line: JudgedLine) -> None:
        """Keep a line in memory and in the file. The first one replaces the file: a crash may have cut its end."""
        self._judged[line.question] = line
        if self._file is not None and self._writes:
            append(self._file, [line.plain()])
        elif self._file is not None:
            intact = reader.read_lines(self._file, JudgedLine)
            with replacing(self._file) as temporary:
                append(temporary, [kept.plain() for kept in (*intact, line)])
            self._writes = True

    def figures(self) -> dict[str, float]:
        """Return the number of calls in this run, their tokens, and their price if the recipe has prices."""
        lines = self._judged.values()
        tokens_in, tokens_out = sum(line.tokens_in for line in lines), sum(line.tokens_out for line in lines)
        figures: dict[str, float] = {
            "judge_calls": len(lines),
            "judge_tokens_in": tokens_in,
            "judge_tokens_out": tokens_out,
        }
        if self.dollars_in or self.dollars_out:
            figures["judge_dollars"] = (tokens_in * self.dollars_in + tokens_out * self.dollars_out) / 1e6
        return figures

    def _asked(self, questions: dict[str, str]) -> Iterator[JudgedLine | UserError]:
        """Yield what becomes of each question: a line, or the error of one that was never answered."""
        from rlhf.evaluation.endpoint import Refused, Unavailable

        if self._endpoint is None:
            limits = {"option": "the judge's url", "timeout": self._timeout, "retries": self._retries}
            self._endpoint = judging.client(self.url, self.model, EASY, **limits)
        endpoint = self._endpoint

        def ask(item: tuple[str, str]) -> JudgedLine:
            digest, question = item
            try:
                reply = endpoint.reply(question)
            except Refused:
                return JudgedLine(judge=self.identity, question=digest, mark=None, tokens_in=0, tokens_out=0)
            found = mark(reply.text, self.most)
            return JudgedLine(
                judge=self.identity,
                question=digest,
                mark=None if found is None else found / self.most,
                tokens_in=reply.tokens_in,
                tokens_out=reply.tokens_out,
            )

        for outcome in results_of(ask, [*questions.items()], self.at_once):
            if isinstance(outcome, Exception) and not isinstance(outcome, Unavailable):
                raise outcome
            yield outcome

    def _question(self, prompt: str, answer: str) -> str:
        task = TASK.format(most=self.most, rubric=self.rubric.strip())
        material = {"conversation": prompt, "answer": answer}
        return judging.question(
            task, material, self._digest(prompt, answer)[:16], "Reply with the number and nothing else."
        )

    def _digest(self, prompt: str, answer: str) -> str:
        """Return what two equal questions to one judge have in common."""
        return sha256(json.dumps([self.identity, prompt, answer]).encode()).hexdigest()


def mark(reply: str, most: int) -> float | None:
    """Return the mark of a reply, at most `most`; None if it has none. Reasoning does not count.

    The mark stands alone on the last line, or on the only one: `7`, `Score: 7`, `7/10`.
    """
    if not (text := judging.conclusion(reply)):
        return None
    found = re.fullmatch(MARK_LINE.replace("{most}", str(most)), text.splitlines()[-1].strip(), re.I)
    number = float(found[1]) if found else math.inf
    return number if number <= most else None


REWARDS: dict[str, type] = {"judge": JudgeReward}
FIGURES = {
    "judge_calls": "calls of the judge",
    "judge_tokens_in": "tokens of questions to the judge",
    "judge_tokens_out": "tokens of its replies",
    "judge_dollars": "US dollars for the judge",
}
