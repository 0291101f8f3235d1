"""Engines whose tiers have a tier key: every way down signs, and nothing else comes up."""

import numpy as np
import pytest

pytest.importorskip("torch")

from test_tiered import Engine

from quire.errors import ConfigError
from quire.tiers import Files, Host, StackSettings, TierKey, TierStack


def test_an_engine_reads_nothing_that_its_tier_key_did_not_sign(tmp_path):
    """Every way down signs (else the stack refuses the record), and a poisoned prompt is computed and stored anew."""
    prompt = np.arange(40, dtype=np.int32)

    def came(key, *, expected):
        settings = StackSettings(key=key, gate=False)
        with TierStack([Host("4MiB"), Files(tmp_path)], settings) as stack:
            engine = Engine(stack)
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
    """What SGLang's storage and vLLM's scheduler hand down, with settings as their options have them."""
    from quire.engines.sglang.records import PageRecords, PageStack
    from quire.engines.vllm.parts import GroupPart, GroupShape

    file = tmp_path / "tier.key"
    file.write_text((b"k" * 32).hex())
    file.chmod(0o600)
    pages = PageRecords("kv", 1000, 16, "float32", {"model": "m"})
    stack = PageStack([f"files:{tmp_path / 'kv'}"], {"key_file": str(file), "gate": False})

    def fill(_, payloads):
        for payload in payloads:
            payload[:] = b"p" * 1000

    assert stack.store(pages, ["a", "b"], fill) == [True, True]
    stack.close()
    part = GroupPart(0, GroupShape(("l",), 1, (4,), "float32", 4, "x"), "m", 4, 1)
    record = memoryview(bytearray(part.record_bytes))
    part.write(record, memoryview(b"q" * 16), part.key(bytes(32)), TierKey(b"k" * 32))
    with TierStack([Files(tmp_path / "kv")], StackSettings(key=TierKey(b"k" * 32))) as own:
        keys = [pages.key("a"), pages.key("b")]
        assert [str(each) for each in own.load(keys, [pages.record_bytes] * 2)[0]] == ["hit", "hit"]
        assert own.store([part.key(bytes(32))], [record]) == ["stored"]
    with pytest.raises(ConfigError, match="key_file"):
        PageStack(["host:1MiB"], {"key": (b"k" * 32).hex()})
