"""API keys: the tenants that they stand for; no answer has a key in it."""

import base64
from functools import partial

import pytest

from quire.core import Scope
from quire.errors import ConfigError
from quire.web.errors import ApiError
from quire.web.keys import KEY_ENV, OPERATOR_ENV, ApiKeys, is_loopback, read_keys, scope_of

KEYS = ApiKeys(
    [("ann", "key-of-ann"), ("bob", "key-of-bob"), ("ann", "second-of-ann")], "the-operators"
)


def bearer(key, **more):
    return {"host": "127.0.0.1:8000", "authorization": f"Bearer {key}", **more}


def status(call):
    with pytest.raises(ApiError) as raised:
        call()
    return raised.value.status


def test_a_key_stands_for_its_tenant():
    assert KEYS.tenant(bearer("key-of-ann")) == KEYS.tenant(bearer("second-of-ann")) == "ann"
    assert KEYS.tenant(bearer("key-of-bob")) == "bob"


@pytest.mark.parametrize(
    "authorization",
    [
        "Bearer key-of-eve",
        "Bearer ",
        "Bearer key-of-an",
        "",
        "key-of-ann",
        "Basic !!",
        "Bearer \udcff",
    ],
)
def test_an_unknown_key_is_refused(authorization):
    assert status(lambda: KEYS.tenant({"authorization": authorization})) == 401
    assert status(lambda: KEYS.check_operator({"authorization": authorization})) == 401


def test_the_operators_key_is_no_tenants_and_the_other_way_round():
    assert status(lambda: KEYS.tenant(bearer("the-operators"))) == 401
    assert status(lambda: KEYS.check_operator(bearer("key-of-ann"))) == 401
    KEYS.check_operator(bearer("the-operators"))


def test_a_browser_gives_the_operators_key_as_a_password():
    given = base64.b64encode(b"me:the-operators").decode()
    KEYS.check_operator({"authorization": f"Basic {given}"})


def test_keys_are_not_told():
    told = repr(vars(KEYS)) + repr(KEYS)
    assert "key-of-ann" not in told
    assert "the-operators" not in told


def test_without_keys_all_are_one_tenant_and_the_operator_but_only_as_localhost():
    keys = ApiKeys()
    for host in ("localhost:1", "127.0.0.1", "[::1]:8000"):
        assert keys.tenant({"host": host}) is None
        keys.check_operator({"host": host})
    for host in (
        "evil.example:8000", "", "localhost.evil.example", "[::2]", "[", "localhost:", "evil@localhost",
    ):  # fmt: skip
        assert status(lambda host=host: keys.tenant({"host": host})) == 403
        assert status(lambda host=host: keys.check_operator({"host": host})) == 403


@pytest.mark.parametrize("keys", [KEYS, ApiKeys()])
def test_another_sites_page_may_not_make_a_browser_ask(keys):
    headers = bearer("key-of-ann", origin="https://evil.example")
    assert status(lambda: keys.tenant(headers)) == 403
    assert status(lambda: keys.tenant(headers | {"origin": "http://["})) == 403
    assert status(lambda: keys.tenant(headers | {"origin": "null"})) == 403
    keys.tenant(headers | {"origin": "http://127.0.0.1:8000"})


def test_with_keys_but_none_of_an_operator_nobody_is_the_operator():
    keys = ApiKeys([("ann", "key-of-ann")])
    assert status(lambda: keys.check_operator(bearer("key-of-ann"))) == 403


def test_a_server_beyond_loopback_needs_keys():
    with pytest.raises(ConfigError, match="beyond loopback needs keys"):
        ApiKeys(exposed=True)
    keys = ApiKeys([("ann", "key-of-ann")], exposed=True)
    assert keys.tenant({"host": "anything", "authorization": "Bearer key-of-ann"}) == "ann"


@pytest.mark.parametrize(
    ("tenants", "operator"),
    [
        ([("a", "short")], None),
        ([("a", "with a blank")], None),
        ([("a", "schlüssel")], None),
        ([], "short"),
        ([("a", "same-key"), ("b", "same-key")], None),
        ([("a", "same-key")], "same-key"),
    ],
)
def test_keys_that_cannot_work_are_refused_and_not_shown(tenants, operator):
    with pytest.raises(ConfigError) as raised:
        ApiKeys(tenants, operator)
    assert not any(key in str(raised.value) for _, key in [*tenants, ("", operator or "-" * 99)])


def test_keys_come_from_a_file_and_the_environment(tmp_path, monkeypatch):
    file = tmp_path / "keys"
    file.write_text("# who may ask\n\nann key-of-ann\n  bob   key-of-bob\n")
    monkeypatch.setenv(KEY_ENV, "the-default-key")
    monkeypatch.setenv(OPERATOR_ENV, "the-operators")
    keys = read_keys(file, exposed=True)
    assert keys.tenant(bearer("key-of-bob")) == "bob"
    assert keys.tenant(bearer("the-default-key")) == "default"
    keys.check_operator(bearer("the-operators"))


@pytest.mark.parametrize("text", ["ann", "ann secret-key more", "# none\n"])
def test_a_file_of_keys_that_is_none_is_refused_without_its_words(tmp_path, text):
    file = tmp_path / "keys"
    file.write_text(text)
    with pytest.raises(ConfigError) as raised:
        read_keys(file, exposed=False)
    assert "secret-key" not in str(raised.value)


def test_a_missing_file_of_keys_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="cannot read"):
        read_keys(tmp_path / "none", exposed=False)


def test_no_two_tenants_or_salts_share_a_scope():
    pairs = [
        (None, None), ("a", None), (None, "a"), ("a", "b"), ("a", ""), ("", "a"), ("", None), (None, ""),
        ("ab", ""), ('a","b', None), ("a", 'b"]'), (None, '["a",null]'),
    ]  # fmt: skip
    assert len({scope_of(*pair) for pair in pairs}) == len(pairs)
    assert scope_of(None, None) == Scope()


def test_an_address_is_loopback_or_not_or_none():
    assert is_loopback("localhost")
    assert is_loopback("127.0.0.1")
    assert is_loopback("::1")
    assert not is_loopback("0.0.0.0")  # noqa: S104 - no socket is bound
    assert not is_loopback("10.0.0.1")
    with pytest.raises(ConfigError, match="--host"):
        is_loopback("example.org")


def test_a_tenant_asks_for_priorities_up_to_its_own(tmp_path):
    file = tmp_path / "keys.txt"
    file.write_text("ann key-of-ann priority=5\nbob key-of-bob\nlow key-of-low priority=-10\n")
    keys = read_keys(file, exposed=False)
    allowed = [("ann", 5), ("ann", -100), ("bob", 0), ("low", -10), (None, 100)]
    for each in allowed:
        keys.check_priority(*each)
    for each in (("ann", 6), ("bob", 1), ("low", 0)):
        assert status(partial(keys.check_priority, *each)) == 400


@pytest.mark.parametrize(
    "more", ["priority", "priority=", "priority=x", "priority=101", "5", "a b"]
)
def test_a_line_of_keys_with_another_third_word_is_refused(tmp_path, more):
    file = tmp_path / "keys.txt"
    file.write_text(f"ann key-of-ann {more}\n")
    with pytest.raises(ConfigError, match=r"line 1 .* a line is NAME KEY"):
        read_keys(file, exposed=False)


def test_pages_of_allowed_sites_may_ask_as_clients_do_and_not_as_the_operator():
    for allowed in (["https://chat.example"], ["https://chat.example", "*"], ["*"]):
        keys = ApiKeys(origins=allowed)
        page = {"host": "localhost:1", "origin": "https://chat.example"}
        assert keys.tenant(page) is None
        assert status(lambda keys=keys, page=page: keys.check_operator(page)) == 403
        elsewhere = page | {"host": "evil.example"}
        assert status(lambda keys=keys, page=elsewhere: keys.tenant(page)) == 403
    assert keys.tenant({"host": "localhost:1", "origin": "null"}) is None
    keys = ApiKeys([("ann", "key-of-ann")], origins=["*"])
    assert status(lambda: keys.tenant({"origin": "https://chat.example"})) == 401
