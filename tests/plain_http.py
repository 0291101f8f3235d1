"""Requests over plain HTTP: httpx and OpenAI's client without a context of TLS, which takes 50 ms to make for each."""

from functools import partial

import httpx
import openai

get, post, delete, stream, Client = (
    partial(each, verify=False)
    for each in (httpx.get, httpx.post, httpx.delete, httpx.stream, httpx.Client)
)


def openai_client(url, key="none", **more):
    """OpenAI's client of a server, which asks everything once."""
    http = openai.DefaultHttpxClient(verify=False)
    return openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, http_client=http, **more)
