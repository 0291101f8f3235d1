"""GGUF models and their library: settings, refusals, and rows that come back as they were."""

import shutil
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("gguf")
from gguf_engine_help import tiny_file, tiny_gguf

from quire import Scope
from quire.engines.gguf import GgufModel, library
from quire.engines.gguf.building import build
from quire.engines.gguf.context import Chunk, NoCells
from quire.engines.gguf.declarations import structures
from quire.engines.gguf.residents import common
from quire.engines.gguf.state import SequenceLayout
from quire.engines.loop import Engine, SamplingParams
from quire.errors import ConfigError, RequestFailed, ScopeError, UnsupportedModel

needs_library = pytest.mark.system("llama.cpp")
ONE = np.ones(1, np.int8)


def chunk(tokens, start=0, ids=(1,)):
    """A chunk whose last token's logits are asked for."""
    asked = np.zeros(len(tokens), np.int8)
    asked[-1] = 1
    return Chunk(ids, start, np.array(tokens, np.int32), asked)


@pytest.fixture
def context():
    model = tiny_gguf(n_ctx=256)
    made = model.context()
    yield made
    made.close()
    model.close()


@needs_library
@pytest.mark.parametrize("kind", ["f32", "f16", "bf16"])
def test_a_restored_prompt_goes_on_with_the_bits_of_the_computed_one(kind):
    model = tiny_gguf(n_ctx=256, type_k=kind, type_v=kind)
    context = model.context()
    tokens = np.random.default_rng(0).integers(3, 97, 90).tolist()
    context.decode([chunk(tokens[:80])])
    rows = context.save(1, 0, 80)
    right = context.decode([chunk(tokens[80:], 80)])
    context.clear()
    context.restore(rows[:33], (1,), 0)
    context.restore(rows[33:], (1,), 33)
    assert context.extent(1) == (0, 79)
    assert np.array_equal(context.save(1, 0, 80), rows)
    assert np.array_equal(context.decode([chunk(tokens[80:], 80)]), right)
    context.close()
    model.close()


@needs_library
def test_a_context_without_cells_is_as_it_was(context):
    context.decode([chunk([5] * 200)])
    for refused in (lambda: context.decode([chunk([6] * 57, ids=(2,))]), lambda: context.restore(
        context.save(1, 0, 60), (2,), 0)):  # fmt: skip
        with pytest.raises(NoCells, match="256 cells has none for"):
            refused()
        assert context.extent(2) == context.extent(0) == (-1, -1)
    assert context.extent(1) == (0, 199)


@needs_library
def test_rows_are_read_by_position_wherever_their_cells_lie(context):
    context.decode([chunk([5, 6, 7, 8])])
    rows = context.save(1, 0, 4)
    context.decode([chunk([9] * 3, ids=(2,))])
    context.cut((1,), 1)
    context.restore(rows[3:], (1,), 3)  # into the first free cell
    context.restore(rows[1:3], (1,), 1)
    assert np.array_equal(context.save(1, 0, 4), rows)


@needs_library
def test_states_of_another_form_are_refused_by_name(context):
    context.decode([chunk([5, 6, 7])])
    data = context._state(1)
    for at, value, why in (
        (8, 2, "2 streams"),
        (20, 2, "its cells hold more"),
        (16 + 36, 1, "V is transposed"),
    ):
        other = data.copy()
        other[at] = value
        with pytest.raises(UnsupportedModel, match=why):
            SequenceLayout(other.data, 3)
    with pytest.raises(UnsupportedModel, match="another form"):
        SequenceLayout(data[:-5].tobytes(), 3)


def test_common_tokens_are_whole_ones():
    a, b = (np.array(each, np.int32).tobytes() for each in ([1, 2, 3], [1, 2, 259, 4]))
    assert (common(a, b), common(a, a), common(a, b""), common(bytearray(a), a[:8])) == (2, 3, 0, 2)


@needs_library
def test_an_answer_needs_no_more_cells_than_the_context_has():
    model = tiny_gguf(n_ctx=256)
    engine = Engine(model, num_blocks=100, block_size=8)
    assert engine.max_model_len == 256
    (told,) = engine.generate(
        [[7] * 250], SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
    )
    assert told.outputs[0].num_tokens == 6
    engine.close()
    model.close()


@needs_library
def test_a_step_that_llama_cpp_fails_ends_its_requests_alone(monkeypatch):
    model = tiny_gguf(n_ctx=256)
    engine = Engine(model, num_blocks=100, block_size=8)
    params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
    (right,) = engine.generate([[7, 8, 9] * 8], params)
    decode, context = model._library.llama_decode, engine._forward._context

    def fails_behind_it(*given):
        decode(*given)
        return -3

    monkeypatch.setattr(model._library, "llama_decode", fails_behind_it)
    with pytest.raises(RequestFailed, match="llama_decode returned -3 for"):
        engine.generate([[7, 8, 9] * 8], params)
    engine._forward.residents.check()
    monkeypatch.undo()
    (again,) = engine.generate([[7, 8, 9] * 8], params)
    assert again.outputs[0].token_ids == right.outputs[0].token_ids
    assert context.extent(0) == (-1, -1)
    engine.close()
    model.close()


@needs_library
def test_a_purge_leaves_nothing_of_a_tenant_in_the_context():
    model = tiny_gguf(n_ctx=256)
    engine = Engine(model, num_blocks=100, block_size=8)
    params = SamplingParams(max_tokens=9, temperature=0, ignore_eos=True)
    (right,) = engine.generate([[5, 6] * 20], params, scope=Scope(tenant="b"))
    engine.generate([[7, 8] * 20], params, scope=Scope(tenant="a"))
    engine.add_request([5, 6] * 20, params, scope=Scope(tenant="b"))
    engine.step()
    assert engine.purge("a").is_complete
    engine._forward.residents.check()
    while engine.has_unfinished():
        told = engine.step()
    assert told[0].outputs[0].token_ids == right.outputs[0].token_ids
    engine.close()
    model.close()


@needs_library
@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"n_gpu": 3}, "'n_gpu' is no setting of a GGUF model"),
        ({"type_k": "int8"}, "type_k is 'int8'; give one of f32, f16"),
        ({"n_ctx": 0}, "n_ctx must be from 1"),
        ({"n_ctx": 255}, "n_ctx is 255; give 256 or more"),
        ({"n_threads": 0}, "n_threads must be from 1"),
        ({"n_gpu_layers": -2}, "n_gpu_layers is -1 for all"),
        ({"device_memory": "much"}, "much"),
    ],
)
def test_settings_that_are_none_are_refused(settings, why):
    with pytest.raises(ConfigError, match=why):
        GgufModel(tiny_file(), **settings)


@needs_library
@pytest.mark.parametrize("settings", [{"n_ctx": 1 << 30}, {"device_memory": "100TiB"}])
def test_a_context_larger_than_the_machine_s_memory_is_refused_before_it_is_made(settings):
    model = GgufModel(tiny_file(), **settings)
    if model._library.llama_supports_gpu_offload():
        pytest.skip("a device has memory of its own")
    said = r"tokens takes .*[GT]iB, and the machine has .*; lower n_ctx"
    with pytest.raises(ConfigError, match=said):
        Engine(model, num_blocks=30, block_size=8)
    model.close()


@needs_library
def test_a_recurrent_model_of_few_positions_has_the_smallest_context():
    model = tiny_gguf("mamba")
    model.trained_positions = 128  # rounded down to whole units of llama.cpp, that is none
    context = model.context(4)
    assert context.num_cells == 256
    context.close()
    model.close()


@needs_library
def test_files_that_are_no_model_are_refused(tmp_path):
    whole = Path(tiny_file()).read_bytes()
    (tmp_path / "text.gguf").write_text("a text")
    (tmp_path / "cut.gguf").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "m-00002-of-00003.gguf").write_bytes(whole)
    (tmp_path / "m-00001-of-00003.gguf").write_bytes(whole)
    for name, why in (
        ("none.gguf", "cannot be read"),
        ("text.gguf", "is no GGUF file: it begins with b'a te'"),
        ("cut.gguf", "llama.cpp cannot load .*cut.gguf': .*(bounds|load|read)"),
        ("m-00002-of-00003.gguf", "is part 2 of 3; give the first one"),
        ("m-00001-of-00003.gguf", "00003-of-00003.gguf' cannot be read"),
    ):
        with pytest.raises(ConfigError, match=why):
            GgufModel(tmp_path / name)


@needs_library
def test_engines_refuse_what_llama_cpp_does_not_compute(tmp_path):
    model = tiny_gguf(n_ctx=256)
    for options, why in (
        ({"max_running": 256}, "max_running is 256, and the 256 sequences"),
        ({"adapters": {"a": tmp_path}}, "adapters .'a'. are for models of transformers"),
    ):
        with pytest.raises(ConfigError, match=why):
            Engine(model, num_blocks=50, **options)
    engine = Engine(model, num_blocks=50)
    with pytest.raises(ScopeError, match="the engine sets it"):
        engine.scope(Scope(model="x"))
    with pytest.raises(ConfigError, match=r"1 engines compute with tiny.gguf; close them first"):
        model.close()
    engine.close()
    model.close()
    with pytest.raises(ConfigError, match="was closed"):
        Engine(model)


@needs_library
def test_tiers_find_records_of_the_same_file_and_settings_alone(tmp_path):
    other = tmp_path / "other.gguf"
    data = bytearray(Path(tiny_file()).read_bytes())
    data[-3] ^= 1
    other.write_bytes(data)
    prompt = [*range(3, 90)]
    params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)

    def asked(path, **settings):
        model = GgufModel(path, **{"n_ctx": 256, "n_threads": 1} | settings)
        engine = Engine(
            model, num_blocks=30, block_size=8, tiers=[f"disk:{tmp_path / 'kv'}?capacity=64MiB"]
        )
        (told,) = engine.generate([prompt], params)
        rows = engine._forward._context.save(1, 0, 80)
        engine.close()
        model.close()
        return told, rows

    first, rows = asked(tiny_file())
    again, same = asked(tiny_file())
    assert first.num_cached_tokens == 0
    assert again.num_cached_tokens == 80
    assert again.metrics.loaded_tokens == {"disk": 80}
    assert np.array_equal(rows, same)
    assert again.outputs[0].token_ids == first.outputs[0].token_ids
    shutil.copy(tiny_file(), tmp_path / "copy.gguf")
    assert asked(tmp_path / "copy.gguf")[0].num_cached_tokens == 80
    assert asked(other)[0].num_cached_tokens == 0
    assert asked(tiny_file(), type_k="f32")[0].num_cached_tokens == 0


def test_a_library_that_is_not_there_is_named_with_the_command_that_makes_one(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("QUIRE_LLAMA_LIB", str(tmp_path / "none.so"))
    with pytest.raises(ConfigError, match=r"QUIRE_LLAMA_LIB is .*none.so.*quire gguf build"):
        library.find()
    monkeypatch.delenv("QUIRE_LLAMA_LIB")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(library, "_SYSTEM", ())
    with pytest.raises(ConfigError, match=r"no library of llama.cpp .*quire gguf build"):
        library.find()


@needs_library
def test_a_library_is_held_to_its_own_header(tmp_path):
    path = library.find().resolve()
    header = library._header_of(path)
    (tmp_path / "lib").mkdir()
    for each in path.parent.glob("*"):
        (tmp_path / "lib" / each.name).symlink_to(each.resolve())
    found = tmp_path / "lib" / path.name
    with pytest.raises(ConfigError, match=r"has no llama.h beside it or in ../include"):
        library.LlamaLibrary(found)
    for change, why in (
        (
            ("uint32_t n_batch; ", "uint32_t n_before; uint32_t n_batch; "),
            "does not fit its llama.h: .*n_batch is 512",
        ),
        (("bool kv_unified;", ""), "struct llama_context_params of llama.cpp has no kv_unified"),
        (("enum ggml_type type_k;", "some_type type_k;"), "has a field 'some_type type_k'"),
        (("LLAMA_STATE_SEQ_VERSION 4", "LLAMA_STATE_SEQ_VERSION 9"), "states of version 9"),
    ):
        assert change[0] in header, change
        (tmp_path / "lib" / "llama.h").write_text(header.replace(*change))
        with pytest.raises(ConfigError, match=why):
            library.LlamaLibrary(found)
    (tmp_path / "lib" / "llama.h").write_text(header)
    assert library.LlamaLibrary(found).version == library.load().version


def test_a_header_without_its_structures_is_refused():
    with pytest.raises(ConfigError, match="no struct llama_model_params"):
        structures("int x;")


def test_a_source_package_that_is_none_is_refused_and_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(shutil, "which", lambda tool: tool)
    source = tmp_path / "source.tar.gz"
    source.write_text("no archive")
    with pytest.raises(ConfigError, match="is no source package"):
        build(source=source)
    with pytest.raises(ConfigError, match="'tpu' is no device of a build; there are cuda, vulkan"):
        build(["tpu"])
    assert not [*(tmp_path / "cache" / "quire" / "llama.cpp").iterdir()]
