"""A client of an OpenAI-compatible endpoint: what it sends, and faults of an endpoint in one line each."""

import time

import pytest

from rlhf.errors import UserError
from rlhf.evaluation.judging import RETRIES, Endpoint, Refused, Unavailable
from tests.e2e.judges import PROBE, stubs


@pytest.fixture(autouse=True)
def no_key(monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


@pytest.fixture
def stub(monkeypatch):
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    with stubs() as start:
        yield start


def endpoint(url: str) -> Endpoint:
    return Endpoint(url, "some/model", PROBE)


def test_a_question_is_asked_with_limits_and_a_key_only_if_there_is_one(stub, monkeypatch):
    server = stub(lambda question, times: "A")
    assert endpoint(server.url).reply("Which?").text == "A" and server.headers.get("Authorization") is None
    monkeypatch.setenv("OPENAI_API_KEY", "sk-1")
    assert endpoint(server.url).reply("Which?") == ("A", 0, 0)
    assert server.headers["Authorization"] == "Bearer sk-1" and set(server.temperatures) == {0}


def test_a_model_that_takes_no_temperature_is_asked_without(stub):
    server = stub(lambda question, times: "A")
    server.mind = lambda question, times: (400, "no temperature") if server.temperatures[-1] is not None else "A"
    assert endpoint(server.url).reply("Which?").text == "A" and server.temperatures == [0, None, None]


def test_a_busy_and_broken_endpoint_is_asked_again_as_long_as_it_says(stub, monkeypatch):
    waited: list[float] = []
    monkeypatch.setattr(time, "sleep", waited.append)
    faults = {1: (429, "slow down", ("Retry-After", "7")), 2: (500, "oops"), 3: (503, "")}
    server = stub(lambda question, times: "A" if question == PROBE else faults.get(times) or "B")
    assert endpoint(server.url).reply("Which?").text == "B" and len(server.asked) == 5
    assert waited[0] == 7 and 0.5 <= waited[1] <= waited[2] + 0.5


def test_an_endpoint_that_fails_for_good_is_given_up(stub):
    server = stub(lambda question, times: "A" if question == PROBE else (500, "oops"))
    with pytest.raises(Unavailable, match=r"500: oops"):
        endpoint(server.url).reply("Which?")
    assert len(server.asked) == 2 + RETRIES


@pytest.mark.parametrize(
    ("reply", "key", "said"),
    [
        ((401, "bad key"), "sk-1", "OPENAI_API_KEY.*401: bad key"),
        ((400, "too long"), "", "400: too long"),
        ((302, "", ("Location", "http://127.0.0.1:9/")), "sk-1", "302"),
        ((200, "<html>a\x1b[31m page"), "", "chat completion"),
    ],
)
def test_what_is_wrong_with_an_endpoint_is_one_line(stub, monkeypatch, reply, key, said):
    server = stub(lambda question, times: reply)
    monkeypatch.setenv("OPENAI_API_KEY", key)
    with pytest.raises(UserError, match=said) as caught:
        endpoint(server.url)
    assert server.url in str(caught.value) and str(caught.value).isprintable()
    assert isinstance(caught.value, Refused) == (reply[0] == 400)


@pytest.mark.parametrize("url", ["http://127.0.0.1:9/v1", "http://[nowhere/v1", "file:///etc/passwd"])
def test_an_address_without_an_endpoint_is_one_line(url):
    with pytest.raises(UserError) as caught:
        endpoint(url)
    assert url in str(caught.value) and "--url" in str(caught.value) and str(caught.value).isprintable()


def test_a_key_is_never_shown(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-\nsecret")
    with pytest.raises(UserError) as caught:
        endpoint("http://127.0.0.1:9/v1")
    assert "OPENAI_API_KEY" in str(caught.value) and "secret" not in str(caught.value)
