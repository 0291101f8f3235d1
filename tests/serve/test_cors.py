"""Requests of other sites' pages: the headers by which a browser lets a page ask, and read what it is answered."""

import html
import json
import re
import subprocess
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from serve_help import fixtures, running

import plain_http
import system
from quire.errors import ConfigError
from quire.web.keys import ApiKeys

PAGE = "https://chat.example"
OTHER = "https://evil.example"
KEYS = ApiKeys([("ann", "key-of-ann")], "the-operators", origins=[PAGE, "app://obsidian.md"])

server, nothing_stays = fixtures(keys=KEYS)


def from_page(origin=PAGE, **more):
    return {"headers": {"Authorization": "Bearer key-of-ann", "Origin": origin} | more}


def preflight(url, origin=PAGE, method="POST", headers="authorization,x-stainless-os"):
    asked = {"Origin": origin, "Access-Control-Request-Method": method}
    client = plain_http.Client()
    return client.options(url, headers=asked | {"Access-Control-Request-Headers": headers})


def allowed(answer):
    """Return the origin that an answer names; one of a list is in `Vary` then."""
    origin = answer.headers.get("access-control-allow-origin")
    assert origin in (None, "*") or "Origin" in answer.headers["vary"]
    return origin


def test_a_preflight_allows_the_methods_and_any_header_of_a_client(server):
    answer = preflight(f"{server.url}/v1/chat/completions")
    assert (answer.status_code, allowed(answer)) == (200, PAGE)
    assert "POST" in answer.headers["access-control-allow-methods"]
    assert answer.headers["access-control-allow-headers"] == "authorization,x-stainless-os"
    assert "access-control-allow-credentials" not in answer.headers


def test_a_preflight_of_another_site_is_refused(server):
    answer = preflight(f"{server.url}/v1/chat/completions", OTHER)
    assert (answer.status_code, allowed(answer)) == (400, None)


@pytest.mark.parametrize("origin", [PAGE, "app://obsidian.md"])
def test_answers_streams_and_errors_may_be_read_by_a_page(server, origin, monkeypatch):
    asked, how = {"prompt": "A list", "max_tokens": 2}, from_page(origin)
    for more, status in (({"odd": 1}, 200), ({"stream": True}, 200), ({"top_p": 7}, 400), ({"model": "x"}, 404)):  # fmt: skip
        answer = server.post("/v1/completions", asked | more, **how)
        assert (answer.status_code, allowed(answer)) == (status, origin)
        assert "X-Quire-Ignored" in answer.headers["access-control-expose-headers"]
    assert allowed(server.get("/v1/nothing", **how)) == origin
    assert allowed(server.post("/v1/completions", asked, headers={"Origin": origin})) == origin
    monkeypatch.setattr(server.service, "card", lambda _: 1 / 0)
    broken = server.get("/v1/models", **how)
    assert (broken.status_code, allowed(broken)) == (500, origin)


def test_a_page_of_another_site_is_refused_and_so_is_any_at_the_operators_paths(server):
    answer = server.get("/v1/models", **from_page(OTHER))
    assert (answer.status_code, allowed(answer)) == (403, None)
    how = from_page(PAGE, Authorization="Bearer the-operators")
    assert server.get("/v1/cache", **how).status_code == 403
    assert server.post("/v1/cache/evict", {"all": True}, **how).status_code == 403


def test_answers_that_are_not_for_pages_have_no_origin(server):
    answer = server.get("/v1/models", headers={"Authorization": "Bearer key-of-ann"})
    assert (answer.status_code, allowed(answer)) == (200, None)


def test_without_an_origin_to_allow_nothing_is_said_of_origins_and_options_is_no_method():
    with running() as plain:
        answer = plain.get("/v1/models", headers={"Origin": plain.url})
        assert answer.status_code == 200
        assert not {"vary", "access-control-allow-origin"} & {*answer.headers}
        assert preflight(f"{plain.url}/v1/models").status_code == 405
        assert plain.get("/v1/models", headers={"Origin": PAGE}).status_code == 403


@pytest.mark.parametrize(
    "origin",
    ["chat.example", "https://chat.example/", "https://Chat.example", "null", "", "https://*.example", "https://a b"],
)  # fmt: skip
def test_what_is_no_origin_is_refused(origin):
    with pytest.raises(ConfigError, match="--allow-origin is"):
        ApiKeys(origins=[origin])


PROGRAM = """
const ask = (more) => fetch(`${url}/v1/completions`, {method: 'POST',
  headers: {'Content-Type': 'application/json', 'X-Stainless-OS': 'none'},
  body: JSON.stringify({prompt: 'A list', max_tokens: 3, odd: 1, ...more})});
const said = {};
Promise.resolve()
  .then(() => ask({})).then(async (a) => {
    said.whole = [a.status, a.headers.get('x-quire-ignored'), typeof (await a.json()).choices[0].text]; })
  .then(() => ask({stream: true})).then(async (a) => { said.stream = (await a.text()).includes('[DONE]'); })
  .then(() => ask({top_p: 7})).then(async (a) => { said.error = (await a.json()).error.param; })
  .catch((e) => { said.failed = String(e); })
  .then(() => { document.title = 'said'; document.getElementById('said').textContent = JSON.stringify(said); });
"""


@pytest.mark.ci
@pytest.mark.system("chromium")
@pytest.mark.parametrize("is_allowed", [True, False])
def test_a_browser_lets_a_page_of_an_allowed_site_ask_and_read(tmp_path, is_allowed):
    class Site(BaseHTTPRequestHandler):
        def do_GET(self):
            text = f"<!doctype html><pre id='said'></pre><script>const url = {served.url!r};{PROGRAM}</script>"
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(text.encode())

        log_message = print

    site = ThreadingHTTPServer(("127.0.0.1", 0), Site)
    threading.Thread(target=site.serve_forever, daemon=True).start()
    origin = f"http://localhost:{site.server_port}"
    with running(keys=ApiKeys(origins=[origin if is_allowed else PAGE])) as served:
        argv = [system.need("chromium"), "--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}/home",
                "--virtual-time-budget=20000", "--dump-dom", origin]  # fmt: skip
        dom = subprocess.run(argv, check=True, capture_output=True, text=True, timeout=120).stdout
        served.quiet()
    site.shutdown()
    found = re.search(r'<pre id="said">(.*?)</pre>', dom, re.DOTALL)
    said = json.loads(html.unescape(found[1]))
    if is_allowed:
        assert said == {"whole": [200, "odd", "string"], "stream": True, "error": "top_p"}
    else:
        assert "Failed to fetch" in said["failed"]
