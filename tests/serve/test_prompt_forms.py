"""Every route that takes token ids, with everything that is no token ids: a clear error, and nothing changed."""

import re
from itertools import product

import pytest
from serve_help import fixtures

server, nothing_stays = fixtures()

FORMS = {
    "number": (5, "got 5"),
    "dict": ({"a": 1}, "object"),
    "flag": (True, "bool"),
    "flags": ([True, False], "bool"),
    "floats": ([3.5, 4.0], "float"),
    "words": ([3, "a"], "one kind"),
    "holes": ([3, None], "null"),
    "mixed": ([3, [4]], "one kind"),
    "nested": ([[[3]]], "array"),
    "negative": ([-1], "-1"),
    "beyond": ([10**6], "1000000"),
    "huge": ([2**70], "1180591620717411303424"),
}
ROUTES = {
    "/v1/completions": {"max_tokens": 1},
    "/v1/cache/explain": {},
    "/v1/cache/pin": {"ttl_s": 5.0},
    "/v1/cache/evict": {},
}
TOKENS = [form for form in FORMS if form not in ("mixed", "words")]


CASES = [*product(ROUTES, FORMS)]
# The cache knows no vocabulary: of an id beyond it nothing is cached.
CASES = [(route, form) for route, form in CASES if form != "beyond" or "cache" not in route]


def state(server):
    return server.get("/v1/cache/pins").json(), server.get("/v1/cache").json()["stats"]


def check_refused(server, route, body, named):
    before = state(server)
    reply = server.post(route, body)
    assert reply.status_code == 400, reply.text
    assert re.search(named, reply.json()["error"]["message"])
    assert state(server) == before


@pytest.mark.cases(3)
@pytest.mark.parametrize(("route", "form"), CASES)
def test_an_invalid_prompt_is_refused_on_every_route(server, route, form):
    given, named = FORMS[form]
    check_refused(server, route, {"prompt": given, **ROUTES[route]}, named)


@pytest.mark.parametrize("form", TOKENS)
def test_detokenize_refuses_invalid_ids(server, form):
    given, named = FORMS[form]
    check_refused(server, "/detokenize", {"tokens": given}, named)
