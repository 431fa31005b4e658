"""API keys guard ``/v1`` and nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from lm_server import FakeEngine, running

from attnops_lm.serve import application

BODY: dict[str, Any] = {"model": "fake", "prompt": "a", "max_tokens": 2}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with running(FakeEngine(), api_keys=["one", "two"]) as (_, url, _):
        yield url


@pytest.mark.parametrize("key", ["one", "two"])
def test_each_key_is_valid(url: str, key: str) -> None:
    response = httpx.post(f"{url}/v1/completions", json=BODY, headers={"Authorization": f"Bearer {key}"}, timeout=60)
    assert response.json()["choices"][0]["text"] == "!!"
    headers = {"Authorization": f"bearer  {key}"}  # the scheme's case, and more spaces, mean nothing
    assert httpx.get(f"{url}/v1/models", headers=headers).status_code == 200


@pytest.mark.parametrize(
    "header", [None, "", "one", "Bearer", "Bearer on", "Bearer onee", "Basic one", "Bearer one two"]
)
def test_another_key_or_none_is_401_in_the_format_of_errors(url: str, header: str | None) -> None:
    headers = {} if header is None else {"Authorization": header}
    for path in ("models", "models/fake", "completions", "chat/completions", "nothing"):
        response = httpx.post(f"{url}/v1/{path}", json=BODY, headers=headers)
        assert response.status_code == 401
        assert response.headers["WWW-Authenticate"] == "Bearer"
        error = response.json()["error"]
        assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_api_key")
        assert "Bearer KEY" in error["message"]


@pytest.mark.slow
def test_openais_client_sends_its_key_and_knows_the_error(url: str) -> None:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="one", max_retries=0) as client:
        assert client.completions.create(**BODY).choices[0].text == "!!"
        with pytest.raises(openai.AuthenticationError, match="Bearer KEY"):
            client.with_options(api_key="three").models.list()


@pytest.mark.parametrize("path", ["health", "metrics"])
def test_what_a_supervisor_reads_needs_no_key(url: str, path: str) -> None:
    assert httpx.get(f"{url}/{path}").status_code == 200


@pytest.mark.parametrize("key", ["", "a b", "ä", "a\n"])
def test_a_key_that_no_header_can_carry_is_refused(key: str) -> None:
    with pytest.raises(ValueError, match=f"API key 1 has {len(key)} characters, but must have at least one, all visib"):
        application(FakeEngine(), "fake", ["good", key])
