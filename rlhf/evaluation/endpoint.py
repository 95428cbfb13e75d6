"""A model behind an OpenAI-compatible endpoint, asked with openai's client.

The client retries while the endpoint is busy, broken or away, waits as long as the endpoint asks, and uses the proxies
that the environment names, but none to this machine. It does not limit the size of an answer, so `_bound` does.
Redirects are turned off: the key is sent to the given address only.
"""

import json
import re
import time
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import httpx2
import openai
from openai.types.chat import ChatCompletionUserMessageParam

from rlhf.errors import OptionError, UserError
from rlhf.process import proxies
from rlhf.terminal import excerpt, harmless

TIMEOUT = 300.0  # seconds for one answer
RETRIES = 10  # 40 to 55 seconds of waiting, as limits on requests are for a minute
TOKENS = 1024  # of a reply; one letter is asked for, but models that reason first need more
ANSWER_BYTES = 2**22  # bytes of an answer


class Refused(UserError):
    """The endpoint works, but refuses this question."""


class Unavailable(UserError):
    """The endpoint was busy or broken at every attempt."""


class Reply(NamedTuple):
    """What a model says, and the tokens of question and reply as the endpoint counts them; 0 where it does not."""

    text: str
    tokens_in: int
    tokens_out: int


class Endpoint:
    """A model behind the address `url`, which ends in /v1. `option` is what named the address."""

    def __init__(
        self,
        url: str,
        model: str,
        key: str,
        easy: str,
        *,
        option: str = "--url",
        timeout: float | None = None,
        retries: int | None = None,
    ):
        """Ask the question `easy` first. Without `timeout` and `retries`: TIMEOUT and RETRIES.

        Raises UserError if the address, the key or the model is wrong.
        """
        timeout = TIMEOUT if timeout is None else timeout
        self._option, self._most_retries = option, RETRIES if retries is None else retries
        if not url.startswith(("http://", "https://")):
            raise OptionError(f"{option} {url}: an endpoint's address is, for example, http://127.0.0.1:8000/v1")
        if key and not re.fullmatch(r"[!-~]+", key):
            raise UserError("OPENAI_API_KEY holds characters that no key has")
        self.url, self.model, self.key = url.rstrip("/"), model, key
        try:
            http = openai.DefaultHttpxClient(
                timeout=timeout,
                follow_redirects=False,
                headers={"Accept-Encoding": "identity"},
                event_hooks={"response": [partial(_bound, timeout)]},
                transport=httpx2.HTTPTransport() if proxies.is_local(self.url) else None,  # one of ours has no proxy
            )
            # The client requires a key. Without a key no header is sent, so any word will do.
            self._client = openai.OpenAI(base_url=self.url, api_key=key or "none", http_client=http)
        except (httpx2.InvalidURL, ValueError, ImportError, OSError) as error:  # the address, a proxy or a certificate
            raise self._silence(str(error)) from None
        self._headers: dict[str, str | openai.Omit] = {} if key else {"Authorization": openai.Omit()}
        self._limits: dict[str, Any] = {"temperature": 0, "max_tokens": TOKENS}
        self._retries = 0  # an address with a typing error is not worth a minute
        self._begin(easy)

    def _begin(self, easy: str) -> None:
        """Ask the easy question: once more with retries if the endpoint fails, and without limits if it refuses."""
        try:
            self.ask(easy)
        except Unavailable:
            if self._retries or not self._most_retries:
                raise
            self._retries = self._most_retries
            self._begin(easy)
        except Refused:  # some reasoning models accept neither of the two limits
            if not self._limits:
                raise
            self._limits = {}
            self._begin(easy)
        self._retries = self._most_retries

    def ask(self, question: str) -> str:
        """Return the text of `reply`."""
        return self.reply(question).text

    def reply(self, question: str) -> Reply:
        """Return the model's reply.

        Raises Refused if the endpoint does not accept this question, Unavailable if it does not recover, and UserError
        if the key, the model or the address is wrong.
        """
        client = self._client.with_options(max_retries=self._retries).chat.completions.with_raw_response
        messages: list[ChatCompletionUserMessageParam] = [{"role": "user", "content": question}]
        try:
            answer = client.create(model=self.model, messages=messages, extra_headers=self._headers, **self._limits)
        except openai.APIStatusError as error:
            raise self._refusal(error.status_code, quoted(error.response.text)) from None
        except openai.APIConnectionError as error:
            problem = quoted(str(error.__cause__ or error))
            if not self._retries:
                raise self._silence(str(error.__cause__ or error)) from None
            raise self._failure(problem) from None
        except httpx2.InvalidURL as error:
            raise self._silence(str(error)) from None
        try:
            content = json.loads(answer.text)
            said = content["choices"][0]["message"]["content"] or ""
            text = "".join(part.get("text", "") for part in said) if isinstance(said, list) else str(said)
            usage = content.get("usage") or {}
            return Reply(text, *(_count(usage.get(name)) for name in ("prompt_tokens", "completion_tokens")))
        except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
            raise UserError(f"{self.url} does not answer as a chat completion: {quoted(answer.text)}") from None

    def _refusal(self, status: int, text: str) -> UserError:
        """Return the error for an HTTP status other than success."""
        problem = f"{status}: {text}"
        if status in (408, 409, 429) or status >= 500:
            return self._failure(problem)
        if status in (401, 403):
            has = "which does not hold one that is accepted" if self.key else "which is not set"
            return UserError(f"{self.url} wants a key in OPENAI_API_KEY, {has} ({problem})")
        if status == 404:
            return UserError(f"{self.url} knows no model {self.model!r}, or is not an address up to /v1 ({problem})")
        kind = Refused if status in (400, 413, 422) else UserError
        return kind(f"{self.url} refused the question ({problem})")

    def _silence(self, problem: str) -> UserError:
        return UserError(
            f"no endpoint answers at {self.url}{proxies.in_words(self.url)} ({quoted(problem)}); start one with `rlhf "
            f"serve`, or check {self._option}"
        )

    def _failure(self, problem: str) -> Unavailable:
        return Unavailable(f"{self.url} fails ({problem}); what was judged is kept: try again later")


def _count(tokens: object) -> int:
    """Return a number of tokens that an endpoint reports; 0 for anything else."""
    return tokens if isinstance(tokens, int) and not isinstance(tokens, bool) and 0 <= tokens < 2**31 else 0


def quoted(text: str) -> str:
    """Return the excerpt of what an endpoint says, without what does not print."""
    return excerpt(harmless(text))


def _bound(timeout: float, response: httpx2.Response) -> None:
    """Limit a response to ANSWER_BYTES bytes and `timeout` seconds, and read it as UTF-8.

    A content encoding in its headers could turn a short answer into gigabytes, so those headers are ignored.
    """
    for name in ("Content-Encoding", "Content-Type"):
        response.headers.pop(name, None)
    response.stream = _Bounded(response.stream, timeout)


class _Bounded(httpx2.SyncByteStream):
    """A stream that is limited to ANSWER_BYTES bytes and `timeout` seconds."""

    def __init__(self, stream: Any, timeout: float):
        self._stream, self._timeout = stream, timeout

    def __iter__(self) -> Iterator[bytes]:
        size, end = 0, time.monotonic() + self._timeout
        for part in self._stream:
            size += len(part)
            if size > ANSWER_BYTES:
                raise UserError(f"the endpoint's answer is longer than {ANSWER_BYTES:,} bytes")
            if time.monotonic() > end:
                raise UserError(f"the endpoint's answer takes longer than {self._timeout:.0f} s")
            yield part

    def close(self) -> None:
        self._stream.close()
