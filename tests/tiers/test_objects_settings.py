"""Settings of object stores: what is written in an address reaches the store and its HTTP client."""

import re
import threading
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import obstore
import pytest

from quire.errors import ConfigError
from quire.tiers.contract.samples import name_of
from quire.tiers.objects.client import open_store
from quire.tiers.opening import open_tier


@pytest.fixture
def listener():
    """A server that denies everything: its address, and (path, user agent) of each request."""
    heard = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            heard.append((self.path, self.headers["user-agent"]))
            self.send_error(403)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield f"127.0.0.1:{server.server_port}", heard
    server.shutdown()
    thread.join()
    server.server_close()


def ask(spec):
    with open_tier(spec) as tier:
        tier.contains([name_of(1)], timeout_s=5)


STUB = (Path(obstore.__file__).parent / "_store/_client.pyi").read_text("utf-8")
CLIENT_OPTIONS = [*re.findall(r"^    (\w+): ", STUB, re.MULTILINE), "http2_max_frame_size"]
"""Options of obstore's HTTP client, by its own types."""


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("scheme", "prefix", "needed"),
    [
        ("s3", "", {}),
        ("s3", "AWS_", {}),
        ("gs", "google_", {}),
        ("az", "azure_", {"account_name": "mine"}),
    ],
)
def test_no_option_of_the_http_client_panics_among_the_settings(scheme, prefix, needed, capfd):
    assert len(CLIENT_OPTIONS) > 20
    for name in CLIENT_OPTIONS:
        for value in ("true", "1s", "1"):
            with suppress(ConfigError):
                open_store(f"{scheme}://bucket", needed | {f"{prefix}{name}": value}, None)
    assert "panicked" not in capfd.readouterr().err


def test_options_of_the_http_client_in_an_address_reach_it(listener):
    address, heard = listener
    ask(f"s3://b?endpoint=http://{address}&region=x&skip_signature=true&user_agent=mine")
    assert {agent for _, agent in heard} == {"mine"}


def test_options_of_the_http_client_in_a_table_reach_it_as_bools_too(listener):
    address, heard = listener
    settings = {"region": "x", "skip_signature": True, "allow_http": True, "user_agent": "mine"}
    # Not an endpoint that allows HTTP of itself.
    settings["endpoint"] = f"HTTP://{address}"
    ask({"kind": "objects", "url": "s3://b"} | settings)
    ask({"kind": "objects", "url": "s3://b", "config": settings})
    assert len(heard) >= 2
    assert {agent for _, agent in heard} == {"mine"}


def test_an_azure_address_names_the_container_and_the_path_in_it(listener):
    address, heard = listener
    settings = f"account_name=mine&skip_signature=true&endpoint=http://{address}/mine"
    ask(f"az://container/path?{settings}")
    (path,) = {urlsplit(path).path for path, _ in heard}
    (prefix,) = {parse_qs(urlsplit(path).query)["prefix"][0] for path, _ in heard}
    assert path == "/mine/container"
    assert prefix.startswith("path/")
