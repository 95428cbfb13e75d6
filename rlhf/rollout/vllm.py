"""Client of a vLLM server that samples rollouts in place of `engine.sample`, over HTTP; without values.

rlhf/rollout/vllm_command.py has the command that starts a server for a recipe; a run without one prints it. On the same
card the server holds a second copy of the base.

The standard library sends these requests: adapters and sleep are calls of vLLM's own, which openai's client does not
have, and a package less is needed.
"""

import http.client
import json
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from rlhf.data.batch import Rollout, collate
from rlhf.data.tokenize import SpecialIds
from rlhf.errors import Interrupted, UserError
from rlhf.process import proxies
from rlhf.rollout.decoding import Sampling
from rlhf.terminal import excerpt

TIMEOUT = 600  # seconds for one response


class Client:
    """Client of the vLLM server at `url`, which follows one policy; `command()` is what starts such a server.

    Raises Interrupted when the server cannot be reached or refuses, and UserError when it answers in another form.
    """

    def __init__(self, url: str, command: Callable[[], str]):
        self.url, self._command = url.rstrip("/"), command
        self._name = ""
        around = [urllib.request.ProxyHandler({})] if proxies.is_local(self.url) else []  # without any proxy
        self._open = urllib.request.build_opener(*around).open
        self._call("/v1/models")

    @contextmanager
    def adapter(self, folder: Path) -> Iterator[None]:
        """Sample with the adapter in this folder.

        Its name is new each time: the server may still hold an adapter of a run that was killed, and it caches its
        computations for a prompt under the adapter's name.
        """
        self._name = f"policy-{uuid.uuid4().hex}"
        try:
            self._call("/v1/load_lora_adapter", {"lora_name": self._name, "lora_path": str(folder.resolve())})
            yield
        finally:
            with suppress(UserError):  # a server that has gone away would hide the error that happened first
                self._call("/v1/unload_lora_adapter", {"lora_name": self._name})

    def hint(self) -> str:
        """Return how to start a server that serves this run."""
        return f"start one with: `{self._command()}`"

    def sample(
        self,
        prompts: Sequence[list[int]],
        tokenizer: SpecialIds,
        sampling: Sampling,
        device: torch.device | None = None,
    ) -> Rollout:
        """Sample responses to prompts, in their order; each has its own seed from torch's generator."""
        prompts = [prompt for prompt in prompts for _ in range(sampling.samples_per_prompt)]
        seeds = torch.randint(2**31, (len(prompts),)).tolist()
        with ThreadPoolExecutor(sampling.batch_size) as pool:
            answers = list(pool.map(lambda ids, seed: self._complete(ids, seed, tokenizer, sampling), prompts, seeds))
        rollout = collate(prompts, [ids for ids, _ in answers], tokenizer.pad_id, tokenizer.eos_id, device)
        logprobs = torch.zeros(rollout.mask.shape)
        for row, (_, values) in enumerate(answers):
            logprobs[row, : len(values)] = torch.tensor(values)
        return replace(rollout, logprobs=logprobs.to(device))

    def _complete(
        self, prompt: list[int], seed: int, tokenizer: SpecialIds, sampling: Sampling
    ) -> tuple[list[int], list[float]]:
        result = self._call(
            "/v1/completions",
            {
                "model": self._name,
                "prompt": prompt,
                "max_tokens": sampling.response_length,
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
                "top_k": -1,
                # These keep out what the base's generation_config.json sets: penalties, and further tokens that end.
                "min_p": 0.0,
                "repetition_penalty": 1.0,
                "ignore_eos": True,  # EOS is among `stop_token_ids`
                "seed": seed,
                "logprobs": 0,
                "stop_token_ids": [tokenizer.eos_id],
                "return_token_ids": True,
            },
        )
        try:
            (choice,) = result["choices"]
            ids, logprobs = map(int, choice["token_ids"]), map(float, choice["logprobs"]["token_logprobs"])
            pairs = list(zip(ids, logprobs, strict=True))
            if not pairs:
                raise ValueError("no tokens")
            return [number for number, _ in pairs], [logprob for _, logprob in pairs]
        except (KeyError, ValueError, TypeError) as error:
            answer = excerpt(str(result))
            raise UserError(f"vLLM at {self.url} answers in another form: {answer}; {self.hint()}") from error

    def _call(self, path: str, content: dict[str, Any] | None = None) -> Any:
        data = None if content is None else json.dumps(content).encode()
        try:
            request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
            with self._open(request, timeout=TIMEOUT) as response:
                body = response.read()
        except urllib.error.HTTPError as error:
            reason = excerpt(error.read().decode(errors="replace"))
            raise Interrupted(f"vLLM at {self.url} refused {path} ({error.code}): {reason}; {self.hint()}") from error
        except (OSError, ValueError, http.client.HTTPException) as error:  # ValueError: a bad address
            raise Interrupted(f"no vLLM server answers at {self.url} ({error}); {self.hint()}") from error
        try:
            return json.loads(body)
        except ValueError:
            return body.decode(errors="replace")  # loading an adapter returns a sentence
