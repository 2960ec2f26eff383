"""One model behind one server that speaks OpenAI's chat protocol: a call becomes a checked reply, or a CallError.

Goes through huggingface_hub's AsyncInferenceClient on an HTTP client of ours. Knows no principle and no verdict.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx2
from huggingface_hub import AsyncInferenceClient, ChatCompletionOutput, ChatCompletionOutputComplete
from huggingface_hub.errors import HfHubHTTPError

from onetrunk.judges.answers import Reply, checked_reply
from onetrunk.judges.failures import failure_of, is_html
from onetrunk.judges.retries import CallError
from onetrunk.judges.urls import check_host, check_url, guarded_client, read_secret, shown, use_client
from onetrunk.types import Message

CHAT_PATH = "/chat/completions"
NO_JSON_OF_THAT_FORM = (ValueError, TypeError, AttributeError, KeyError, RecursionError)
AN_HTML_PAGE = "an HTML page where JSON was expected"


class ChatServer:
    """A model that answers chats.

    Args:
        url: of the API, such as "http://127.0.0.1:8000/v1"; a path that ends in /chat/completions is taken as it is.
        model: its name on the server.
        api_key_env: environment variable that holds the key; None sends no credentials.
        allow_http: plain http also to hosts outside this machine and private networks.
        extra_body: further entries of the body of every call.

    Raises:
        ValueError: a URL that may not be called, no model, or a variable that is not set.
    """

    def __init__(
        self,
        url: str,
        model: str,
        api_key_env: str | None = None,
        allow_http: bool = False,
        extra_body: dict[str, Any] | None = None,
    ):
        self.url = check_url(url, allow_http=allow_http)
        if not model or not model.strip():
            raise ValueError(f"judge_model is not set; name the model that {shown(self.url)} should answer with")
        self.model = model
        self.api_key_env = api_key_env
        self.allow_http = allow_http
        self.extra_body = extra_body or {}
        read_secret(api_key_env)

    def __str__(self) -> str:
        return f"judge server {shown(self.url)}"

    def check_host(self) -> None:
        """Look up the host, and refuse addresses that may not be called (see `urls.check_host`)."""
        check_host(self.url, allow_http=self.allow_http)

    @asynccontextmanager
    async def session(self, max_connections: int) -> AsyncIterator[AsyncInferenceClient]:
        """Yield a client for this server, and close its connections at the end."""
        # Read anew for every session, and kept nowhere: what holds a judge does not hold its key.
        secret = read_secret(self.api_key_env)
        use_client(lambda: guarded_client(self.url, secret, max_connections))
        # Without a token the hub's client would look up, and send, that of whoever is logged in.
        async with AsyncInferenceClient(base_url=self.url, api_key=secret or "none") as client:
            yield client

    async def reply(
        self,
        client: AsyncInferenceClient,
        messages: list[Message],
        *,
        max_tokens: int,
        seed: int,
        top_logprobs: int = 0,
    ) -> Reply:
        """Return a reply, sampled at temperature 1 from all tokens.

        Args:
            client: from `session`.
            messages: the conversation.
            max_tokens: of the reply.
            seed: makes replies differ; below 2**31.
            top_logprobs: candidates per token whose log probabilities are asked for; 0 asks for none.

        Raises:
            CallError: no reply, or one that is not what it should be.
        """
        secret = read_secret(self.api_key_env)
        asked: dict[str, Any] = {"logprobs": True, "top_logprobs": top_logprobs} if top_logprobs else {}
        try:
            output = await client.chat_completion(
                messages,
                model=self.model,
                max_tokens=max_tokens,
                seed=seed,
                temperature=1.0,
                top_p=1.0,
                extra_body=self.extra_body,
                **asked,
            )
        except (httpx2.HTTPError, httpx2.InvalidURL, HfHubHTTPError) as error:
            raise failure_of(error, secret) from None
        except json.JSONDecodeError as error:
            raise CallError(AN_HTML_PAGE if is_html("", error.doc) else "a body that is not whole JSON") from None
        except NO_JSON_OF_THAT_FORM as error:
            # The hub's parser meets a body of another form: a list, a text where an object should be, other bytes.
            raise CallError(f"a body of another form than a chat completion ({type(error).__name__})") from None
        return checked_reply(_with_messages(output), self.model)

    async def served_models(self) -> list[str] | None:
        """Return the names of the models that the server lists; None where it keeps no such list, or fails to read it
        (transformers serve without a Hub cache answers HTTP 500): that it answers at all is what counts.

        Raises:
            CallError: no server, or one that answers with pages for people.
        """
        base = self.url.removesuffix(CHAT_PATH)
        path = "/models" if base != self.url or base.endswith("/v1") else "/v1/models"
        secret = read_secret(self.api_key_env)
        async with guarded_client(self.url, secret, 1) as client:
            try:
                response = await client.get(base + path)
            except (httpx2.HTTPError, httpx2.InvalidURL) as error:
                raise failure_of(error, secret) from None
        if response.is_success and is_html(response.headers.get("content-type", ""), response.text):
            raise CallError(AN_HTML_PAGE, "stop")
        try:
            listed = response.json()["data"] if response.is_success else None
            return None if listed is None else [str(entry["id"]) for entry in listed]
        except (ValueError, TypeError, KeyError):
            return None

    async def rendered(self, messages: list[Message]) -> tuple[str, list[str]] | None:
        """Return a conversation as the server's chat template renders it, and its tokens as the tokenizer names them,
        by `/tokenize` and `/detokenize` of vLLM; None from a server that lacks them, or whose template does not take
        the conversation."""
        root = self.url.removesuffix(CHAT_PATH).removesuffix("/v1")
        asked = {"messages": messages, "add_generation_prompt": True, "return_token_strs": True}
        try:
            async with guarded_client(self.url, read_secret(self.api_key_env), 1) as client:
                response = await client.post(f"{root}/tokenize", json={"model": self.model, **asked})
                found = response.json() if response.is_success else {}
                tokens = {"model": self.model, "tokens": found["tokens"]}
                response = await client.post(f"{root}/detokenize", json=tokens)
                text = response.json()["prompt"] if response.is_success else None
                names = found.get("token_strs")
        except (CallError, httpx2.HTTPError, httpx2.InvalidURL, *NO_JSON_OF_THAT_FORM):
            return None
        names = [name for name in names if isinstance(name, str)] if isinstance(names, list) else []
        return (text, names) if isinstance(text, str) else None


def _with_messages(output: ChatCompletionOutput) -> dict[str, Any]:
    """Return a body with the messages as the server sent them.

    The hub's objects are dicts too, but a dict inside another one has lost the keys that the hub does not know, such
    as reasoning_content and refusal. The message itself still has them.
    """
    choices = output.choices if isinstance(output.choices, list) else []
    if not all(isinstance(choice, ChatCompletionOutputComplete) for choice in choices):
        return dict(output)
    return {**output, "choices": [{**choice, "message": choice.message} for choice in choices]}
