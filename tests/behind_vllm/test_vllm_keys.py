"""Keys of the connector bind what the weights are, not what they are called."""

import os

import pytest

from quire.core import MediaItem, Scope
from quire.engines.models import weights
from quire.engines.models.weights import Adapters, FileDigests, fingerprint, weight_files
from quire.engines.vllm.parts import GroupShape, make_parts
from quire.engines.vllm.prompts import PromptNames
from quire.errors import ConfigError
from quire.exchange.hashing import block_hashes

SHAPE = GroupShape(("a", "b"), 2, (4, 6), "float32", 4, "plain")


def checkpoint(path, content=b"weights"):
    path.mkdir(exist_ok=True)
    (path / "model.safetensors").write_bytes(content)
    (path / "config.json").write_text("{}")
    return path


def digest(digests, path):
    return fingerprint(digests.of(weight_files(path)))


def test_weights_replaced_under_the_same_path_are_others(tmp_path):
    kept = tmp_path / "cache" / "digests.json"
    path = checkpoint(tmp_path / "model")
    file = path / "model.safetensors"
    os.utime(file, ns=(10**18, 10**18))
    before = digest(FileDigests(kept), path)
    assert digest(FileDigests(kept), path) == before
    file.write_bytes(b"WEIGHTS")  # as many bytes
    os.utime(file, ns=(10**18, 10**18))  # and the old time
    assert digest(FileDigests(kept), path) != before
    file.write_bytes(b"weights")
    assert digest(FileDigests(kept), path) == before
    assert digest(FileDigests(), checkpoint(tmp_path / "another name")) == before


def test_a_file_is_read_once_as_long_as_it_stays(tmp_path, monkeypatch):
    monkeypatch.setattr(weights, "SETTLED_S", -1e9)
    kept = tmp_path / "digests.json"
    path = checkpoint(tmp_path / "model")
    before = digest(FileDigests(kept), path)
    monkeypatch.setattr(weights, "file_digest", None)  # nothing may be read
    assert digest(FileDigests(kept), path) == before


def test_a_file_that_has_just_changed_is_not_remembered(tmp_path):
    kept = tmp_path / "digests.json"
    digest(FileDigests(kept), checkpoint(tmp_path / "model"))
    assert not kept.exists()


@pytest.mark.parametrize(
    "content", [b"", b"not JSON", b'{"a": 1}', b'{"a": {"stat": [1], "digest": ""}}']
)
def test_a_damaged_memory_of_digests_costs_reading_again(tmp_path, content):
    kept = tmp_path / "digests.json"
    path = checkpoint(tmp_path / "model")
    kept.write_bytes(content)
    assert digest(FileDigests(kept), path) == digest(FileDigests(), path)


def test_a_place_without_weights_is_refused(tmp_path):
    with pytest.raises(ConfigError, match='"weights"'):
        weight_files(tmp_path)
    with pytest.raises(ConfigError, match="cannot be read"):
        FileDigests().of([tmp_path / "gone.safetensors"])


def test_an_adapter_is_its_contents_whatever_its_name_and_number(tmp_path):
    path = checkpoint(tmp_path / "adapter")
    adapters = Adapters(FileDigests())
    first = adapters.digest(1, str(path))
    assert first is not None
    assert adapters.digest(2, str(checkpoint(tmp_path / "other"))) == first
    checkpoint(path, b"new")
    assert adapters.digest(1, str(path)) is None  # nobody knows which of the two vLLM holds
    again = adapters.digest(3, str(path))  # loaded anew under the old name
    assert again not in (None, first)
    assert adapters.digest(1, str(path), in_place=True) == again
    assert adapters.digest(4, str(tmp_path / "gone")) is None


def test_names_of_blocks_are_those_of_quire_as_tokens_come():
    tokens = [(5 * at) % 60 for at in range(23)]
    media = [MediaItem(b"d" * 32, 3, 4)]
    scope = Scope(salt="s", lora="l")
    for shown in (media, []):
        names = PromptNames(tokens[:9], 4, scope, shown)
        names.extend(tokens[9:10])
        names.extend(tokens[10:])
        assert names.digests == block_hashes(tokens, 4, scope, shown)
        assert names.num_tokens == len(tokens)


def test_layout_dtype_block_size_window_layers_and_weights_are_in_the_key():
    from msgspec.structs import replace

    name = b"n" * 32
    key = make_parts([[SHAPE]], "m", 4)[0].key(name)
    others = [
        make_parts([[replace(SHAPE, layout="amx")]], "m", 4),
        make_parts([[replace(SHAPE, dtype="int8")]], "m", 4),
        make_parts([[replace(SHAPE, layers=("a", "c"))]], "m", 4),
        make_parts([[replace(SHAPE, inner=(4, 8))]], "m", 4),
        make_parts([[replace(SHAPE, heads=4)]], "m", 4),
        make_parts([[SHAPE]], "m", 8),
        make_parts([[SHAPE]], "n", 4),
    ]
    keys = {key} | {parts[0].key(name) for parts in others}
    assert len(keys) == len(others) + 1
    assert make_parts([[replace(SHAPE, heads=1)]] * 2, "m", 4)[0].key(name) == key  # the same heads
    with pytest.raises(ConfigError, match="differ"):
        make_parts([[SHAPE], [replace(SHAPE, heads=4)]], "m", 4)
