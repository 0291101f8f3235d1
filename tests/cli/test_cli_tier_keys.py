"""`quire cache key`, and tier keys where commands take tiers."""

import pytest

from cli_help import refusal, run, shown, told
from forging import summed
from quire.cli.tiers import opened
from quire.errors import ConfigError
from quire.tiers import Files, TierKey
from quire.tiers.contract.poisoned import STRANGER, signed_of
from quire.tiers.contract.samples import names_of, record_of
from quire.tiers.format import MAC_AT


@pytest.fixture
def file(tmp_path):
    file = tmp_path / "tier.key"
    shown("cache", "key", file)
    return file


def secrets_of(file):
    return [word for word in file.read_text().split() if len(word) == 64]


def test_a_new_key_file_is_its_owners_and_no_output_shows_a_secret(tmp_path):
    file = tmp_path / "tier.key"
    found = told("cache", "key", file)
    key = TierKey.from_file(file)
    assert file.stat().st_mode & 0o777 == 0o600
    assert len(key.tenants) == 32
    assert found == {"file": str(file), "writes": key.write_id.hex(), "reads": [key.write_id.hex()]}
    text = shown("cache", "key", tmp_path / "other.key")
    assert not any(each in text for each in secrets_of(tmp_path / "other.key"))


def test_a_key_file_that_is_there_is_left_alone_and_rotated_on_request(file):
    before = TierKey.from_file(file)
    assert "--rotate" in refusal("cache", "key", file)
    assert TierKey.from_file(file) == before
    found = told("cache", "key", file, "--rotate")
    key = TierKey.from_file(file)
    assert key.ids[1:] == before.ids
    assert key.tenants == before.tenants
    assert found["reads"] == [each.hex() for each in key.ids]
    assert file.stat().st_mode & 0o777 == 0o600
    assert [each.name for each in file.parent.iterdir()] == [file.name], "no copy is left"


def test_verify_with_a_key_tells_signed_unsigned_and_forged_records(tmp_path, file):
    keys = names_of(range(4))
    forgery = bytearray(signed_of(keys[3], TierKey.from_file(file)))
    forgery[MAC_AT] ^= 1
    with Files(tmp_path / "kv") as tier:
        own = signed_of(keys[0], TierKey.from_file(file))
        others = [record_of(keys[1]), signed_of(keys[2], STRANGER)]
        tier.put(keys, [own, *others, memoryview(bytearray(summed(forgery)))])
    assert told("cache", "verify", tmp_path / "kv")["whole"] == 4
    result = run("cache", "verify", tmp_path / "kv", "--tier-key-file", file)
    assert result.exit_code == 1
    words = result.stdout.split()
    assert words[words.index("whole") + 1] == "1"
    assert words[words.index("untrusted") + 1] == "2"
    assert "its signature does not hold" in " ".join(words)
    assert (
        told("cache", "verify", tmp_path / "kv", "--tier-key-file", file, "--repair")["dropped"]
        == 1
    )


def test_a_command_opens_its_tiers_with_the_key_of_a_file(tmp_path, file):
    key = TierKey.from_file(file)
    with opened(["host:1MiB"], None, file) as stack:
        assert stack.settings.key == key
    toml = tmp_path / "tiers.toml"
    toml.write_text(f'tiers = ["host:1MiB"]\n[stack]\nkey_file = "{file}"\n')
    with opened(None, toml) as stack:
        assert stack.settings.key == key
    toml.write_text(f'tiers = ["host:1MiB"]\n[stack]\nkey = "{secrets_of(file)[0]}"\n')
    with pytest.raises(ConfigError, match="key_file") as caught, opened(None, toml):
        raise AssertionError
    assert secrets_of(file)[0] not in str(caught.value)
    with pytest.raises(ConfigError, match="given without a tier"), opened(None, None, file):
        raise AssertionError
