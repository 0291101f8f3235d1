"""Engines whose tiers have a tier key: every way down signs, and nothing else comes up."""

import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")

sys.path.insert(0, str(Path(__file__).parents[1] / "tiers"))

from searching import found_in_files
from test_tiered import TieredEngine

from cli_help import run, told
from quire import Scope
from quire.errors import ConfigError
from quire.exchange.hashing import NO_TENANT, block_hashes, root_digest, tag_of, tenant_tag
from quire.tiers import Files, Host, StackSettings, TierKey, TierStack


def test_an_engine_reads_nothing_that_its_tier_key_did_not_sign(tmp_path):
    """Every way down signs (else the stack refuses the record), and a poisoned prompt is computed and stored anew."""
    prompt = np.arange(40, dtype=np.int32)

    def came(key, *, expected):
        settings = StackSettings(key=key, gate=False)
        with TierStack([Host("4MiB"), Files(tmp_path)], settings) as stack:
            engine = TieredEngine(stack)
            assert sum(engine.serve(prompt).values()) == expected
            engine.store.offload_all()
            assert stack.drain(10)
            return stack.stats().tiers[1].loads.get("untrusted", 0)

    key = TierKey(b"k" * 32)
    came(None, expected=0)  # whoever has no key fills it
    assert came(None, expected=36) == 0
    assert came(key, expected=0) > 0
    assert came(key, expected=36) == 0
    assert came(TierKey(b"l" * 32, [b"k" * 32]), expected=36) == 0
    assert came(TierKey(b"l" * 32), expected=0) > 0


def test_pages_and_groups_of_other_engines_are_signed(tmp_path):
    """Records of SGLang's storage and vLLM's scheduler, with settings in the form of their options."""
    from quire.engines.tiered.pages import PageRecords, PageStack
    from quire.engines.vllm.parts import GroupPart, GroupShape

    file = tmp_path / "tier.key"
    file.write_text((b"k" * 32).hex())
    file.chmod(0o600)
    pages = PageRecords("kv", 1000, 16, "float32", {"model": "m"})
    stack = PageStack([f"files:{tmp_path / 'kv'}"], {"key_file": str(file), "gate": False})

    def fill(_, payloads):
        for payload in payloads:
            payload[:] = b"p" * 1000

    assert stack.store(pages, ["a", "b"], fill) == ["stored", "stored"]
    stack.close()
    part = GroupPart(0, GroupShape(("l",), 1, (4,), "float32", 4, "x"), "m", 4, 1)
    record = memoryview(bytearray(part.record_bytes))
    part.payload(record)[:] = b"q" * 16
    part.seal(record, part.key(bytes(32)), TierKey(b"k" * 32))
    with TierStack([Files(tmp_path / "kv")], StackSettings(key=TierKey(b"k" * 32))) as own:
        keys = [pages.page_key("a"), pages.page_key("b")]
        assert [str(each) for each in own.load(keys, [pages.record_bytes] * 2)[0]] == ["hit", "hit"]
        assert own.store([part.key(bytes(32))], [record]) == ["stored"]
    with pytest.raises(ConfigError, match="key_file"):
        PageStack(["host:1MiB"], {"key": (b"k" * 32).hex()})


PROMPT = np.arange(40, dtype=np.int32)
ACME, BOLT = Scope(tenant="acme"), Scope(tenant="bolt")


def key_file_of(path, tenants):
    path.write_text(f"{(b'k' * 32).hex()}\ntenants {(tenants * 32).hex()}\n")
    path.chmod(0o600)
    return path


def filled(folder, key):
    """Store a prompt of two tenants and one of nobody; return the keys of records, by the tenant's tag."""
    with TierStack([Files(folder)], StackSettings(key=key, gate=False)) as stack:
        engine = TieredEngine(stack)
        for scope in (ACME, BOLT, None):
            engine.serve(PROMPT, scope)
        engine.store.offload_all()
        assert stack.drain(10)
        held = [each.key for each in stack.tiers[0].scan()]
    tags = {name: tenant_tag(scope) for name, scope in (("acme", ACME), ("bolt", BOLT))}
    stored = {name: tag if key is None else key.tag(tag) for name, tag in tags.items()}
    return {name: {each for each in held if each[24:] == tag} for name, tag in stored.items()} | {
        "nobody": {each for each in held if each[24:] == NO_TENANT}
    }


def test_a_listing_of_a_store_confirms_no_guessed_tenant(tmp_path):
    """Neither by a tag nor by the digest of a prompt that is known, in keys, names of files or names.jsonl."""
    keys = [TierKey(b"k" * 32, tenants=each * 32) for each in (b"s", b"t")]
    one, two = (filled(tmp_path / str(at), key) for at, key in enumerate(keys))
    open_ = filled(tmp_path / "open", None)
    for name in ("acme", "bolt"):
        assert len(one[name]) == len(two[name]) == len(open_[name]) > 0
        assert not {key[24:] for key in one[name]} & {key[24:] for key in two[name]}
        assert not {key[:24] for key in one[name] | two[name]} & {key[:24] for key in open_[name]}
    assert one["nobody"] == two["nobody"] == open_["nobody"] != set()
    guesses = [root_digest(ACME), *block_hashes(PROMPT, 4, ACME)]
    guesses = [tenant_tag(ACME), *(each[:16] for each in guesses)]
    assert any(found_in_files(tmp_path / "open", each) for each in guesses)
    for folder in ("0", "1"):
        assert not any(found_in_files(tmp_path / folder, each) for each in guesses)


def test_a_purge_finds_keyed_tenants_through_the_stack_and_by_the_key_file(tmp_path):
    file = key_file_of(tmp_path / "tier.key", b"s")
    key, folder = TierKey.from_file(file), tmp_path / "kv"
    held = filled(folder, key)
    with TierStack([Files(folder)], StackSettings(key=key, gate=False)) as stack:
        assert stack.purge("acme")["files"].count == len(held["acme"])
        assert TieredEngine(stack).serve(PROMPT, BOLT) != {}
    ask = ("cache", "purge", folder, "--tenant", "bolt")
    blind = run(*ask)
    assert blind.exit_code == 1
    assert "--tier-key-file" in " ".join(blind.stdout.split())
    found = told(*ask, "--tier-key-file", file)
    assert (found["purged"], found["complete"]) == (len(held["bolt"]), True)
    with Files(folder) as tier:
        assert {each.key for each in tier.scan()} == held["nobody"]
    blind = told(*ask[:-1], "nobody-else", "--tier-key-file", file)
    assert (blind["purged"], blind["complete"]) == (0, True)


def test_parts_of_vllm_have_keyed_tags_too():
    from quire.engines.vllm.parts import GroupShape, make_parts

    key, digest = TierKey(b"k" * 32, tenants=b"s" * 32), block_hashes(PROMPT, 4, ACME)[0]
    shapes = [[GroupShape(("l",), 1, (4,), "float32", 4, "x")]]
    (plain,), (keyed,) = make_parts(shapes, "m", 4), make_parts(shapes, "m", 4, key)
    assert plain.key(digest)[24:] == tag_of(digest) == tenant_tag(ACME)
    assert keyed.key(digest)[24:] == key.tag(tenant_tag(ACME)) != tenant_tag(ACME)
    nobody = block_hashes(PROMPT, 4)[0]
    assert plain.key(nobody) == keyed.key(nobody)
