"""Models as numbers: bytes of K and V, parameters, and configs that users bring."""

import json

import pytest

from quire import demo_model
from quire.errors import ConfigError
from quire_sim.hardware import (
    Accelerator,
    KVBytes,
    MemoryTier,
    accelerator_named,
    accelerator_names,
    model_facts,
    model_named,
    published,
)
from quire_sim.hardware.tiers import parse_tiers

TINY = demo_model()

KV_PER_TOKEN = {
    "llama-3.1-8b": 131_072,
    "llama-3.1-70b": 327_680,
    "llama-3.1-405b": 516_096,
    "qwen2.5-7b": 57_344,
    "qwen3-8b": 147_456,
    "qwen3-32b": 262_144,
    "qwen3-30b-a3b": 98_304,
    "qwen3-235b-a22b": 192_512,
    "deepseek-v3": 70_272,
    "deepseek-r1": 70_272,
    "kimi-k2": 70_272,
    "gpt-oss-20b": 24_576,
    "gpt-oss-120b": 36_864,
    "gemma-4-31b": 81_920,
    "qwen3.5-35b-a3b": 20_480,
    "nemotron-3-super-120b": 8_192,
    "quire-tiny": 2_560,
}
WINDOW_MB = {"gpt-oss-20b": 3.1, "gpt-oss-120b": 4.7, "gemma-4-31b": 839}
STATE_MB = {"qwen3.5-35b-a3b": 33, "nemotron-3-super-120b": 174}

# Parameters as the checkpoints' safetensors indices count them; without multi-token prediction.
PARAMS = {
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "llama-3.2-1b": 1_235_814_400,
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "mistral-small-24b": 23_572_403_200,
    "mixtral-8x7b": 46_702_792_704,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-14b": 14_768_307_200,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-8b": 8_190_735_360,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
    "quire-tiny": 3_756_800,
}
ACTIVE_BILLIONS = {
    "qwen3-30b-a3b": 3.3,
    "qwen3-235b-a22b": 22,
    "deepseek-v3": 37,
    "kimi-k2": 32,
    "nemotron-3-super-120b": 12,
    "llama-3.1-8b": 8.03,
}


@pytest.mark.parametrize("name", KV_PER_TOKEN)
def test_kv_bytes_per_token_are_the_published_ones(name):
    assert model_named(name).kv.per_token == KV_PER_TOKEN[name]


@pytest.mark.parametrize("name", KV_PER_TOKEN)
def test_windows_and_states_are_the_published_ones(name):
    kv = model_named(name).kv
    assert kv.window_bytes / 1e6 == pytest.approx(WINDOW_MB.get(name, 0), rel=0.02)
    assert kv.state_bytes / 1e6 == pytest.approx(STATE_MB.get(name, 0), rel=0.02)


@pytest.mark.parametrize("name", PARAMS)
def test_parameters_derived_from_the_config_are_those_of_the_checkpoint(name):
    assert model_named(name).params == PARAMS[name]


@pytest.mark.parametrize("name", ACTIVE_BILLIONS)
def test_active_parameters_are_as_published(name):
    assert model_named(name).active_params / 1e9 == pytest.approx(ACTIVE_BILLIONS[name], rel=0.07)


def test_weights_weigh_what_the_checkpoints_weigh():
    gigabytes = {"llama-3.1-8b": 16.06, "gpt-oss-20b": 13.8, "gpt-oss-120b": 65.2}
    for name, expected in gigabytes.items():
        assert model_named(name).weight_bytes / 1e9 == pytest.approx(expected, rel=0.01)
    assert model_named("deepseek-v3").weight_bytes_per_param == 1.0


def test_kv_has_a_linear_part_a_window_and_states():
    kv = KVBytes(10, window_bytes=400, window_tokens=4, state_bytes=1000)
    assert kv.of(0) == 0
    assert kv.of(2) == 20 + 200 + 1000
    assert kv.of(100) == 1000 + 400 + 1000
    assert kv.of(100, boundaries=3) == 1000 + 400 + 3000


@pytest.mark.parametrize("sizes", [(-1,), (1, 5, 0), (1, 0, 5), (1, 0, 0, -2)])
def test_kv_bytes_that_cannot_be_are_refused(sizes):
    with pytest.raises(ConfigError):
        KVBytes(*sizes)


def test_every_published_model_says_where_its_config_stands():
    for name, model in published().items():
        assert model_named(name).name == name
        assert "/" in model["hub"]


@pytest.mark.parametrize(
    "written",
    ["Llama-3.1-8B", "meta-llama/Llama-3.1-8B-Instruct", "meta_llama 3.1 8b", " LLAMA-3.1-8b "],
)
def test_models_are_found_as_people_write_them(written):
    assert model_named(written).name == "llama-3.1-8b"


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("Qwen/Qwen3-30B-A3B-Instruct-2507", "qwen3-30b-a3b"),
        ("RedHatAI/Meta-Llama-3.1-8B-Instruct-FP8-dynamic", "llama-3.1-8b"),
        ("mistralai/Mistral-Small-24B-Instruct-2501", "mistral-small-24b"),
        ("mistralai/Mistral-7B-Instruct-v0.3", "mistral-7b"),
        ("deepseek-ai/DeepSeek-R1-Distill-Llama-70B", "llama-3.3-70b"),
    ],
)
def test_models_are_found_by_what_engines_are_started_with(written, name):
    assert model_named(written).name == name


def test_an_unknown_model_names_those_that_resemble_it():
    with pytest.raises(ConfigError, match=r"did you mean llama-3\.1-8b"):
        model_named("llama-3.1-8")
    with pytest.raises(ConfigError, match=r"path of its config\.json"):
        model_named("zzz")


def test_a_model_of_ones_own_is_its_config_json(tmp_path):
    ours = model_named(str(TINY))
    assert ours.params == 3_756_800
    assert ours.name == "quire-tiny"
    file = tmp_path / "mine.json"
    file.write_text((TINY / "config.json").read_text())
    assert model_named(str(file)).kv == model_named("quire-tiny").kv
    assert model_named(str(file)).name == "mine"


def test_the_language_model_of_a_multimodal_config_is_what_counts():
    inner = json.loads((TINY / "config.json").read_text())
    tied = inner.pop("tie_word_embeddings")
    outer = {"model_type": "seer", "text_config": inner, "tie_word_embeddings": tied}
    assert model_facts(outer).params == 3_756_800


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"num_hidden_layers": None}, "no num_hidden_layers"),
        ({"hidden_size": -4}, "hidden_size in the config is -4"),
        ({"hidden_size": "big"}, "hidden_size in the config is 'big'"),
        ({"num_attention_heads": 0}, "num_attention_heads in the config is 0"),
        ({"vocab_size": 1 << 60}, "vocab_size"),
        ({"layer_types": ["full_attention", "telepathy"]}, "telepathy"),
        ({"layer_types": ["linear_attention"]}, "neither linear_num_value_heads"),
        ({"mamba_d_state": 128}, "mamba_d_state"),
        ({"attn_layer_period": 8}, "attn_layer_period"),
        ({"num_local_experts": 8}, "num_experts_per_tok"),
        ({"layer_types": 7}, "layer_types in the config is 7"),
        ({"num_hidden_layers": 1 << 30}, "above 10000"),
        ({"intermediate_size": [704]}, "each of 2 layers"),
    ],
)
def test_a_config_that_cannot_be_read_says_why(change, says):
    config = json.loads((TINY / "config.json").read_text()) | change
    with pytest.raises(ConfigError, match=says):
        model_facts(config)


def test_a_source_that_is_no_model_config_is_refused(tmp_path):
    broken = tmp_path / "config.json"
    broken.write_text("{")
    for source in (broken, tmp_path / "none.json", 3, [1]):
        with pytest.raises(ConfigError):
            model_facts(source)


def test_another_number_format_changes_bytes_and_nothing_else():
    model = model_named("nemotron-3-super-120b")
    small = model.stored_as(weights="fp8", kv="fp8")
    ends = model.lookup_params + model.head_params
    assert small.weight_bytes == model.params + ends
    assert small.kv.per_token * 2 == model.kv.per_token
    assert small.kv.state_bytes == model.kv.state_bytes
    assert small.params == model.params
    with pytest.raises(ConfigError, match="fp9"):
        model.stored_as(weights="fp9")


@pytest.mark.parametrize(
    ("name", "weights", "gigabytes"),
    [
        ("llama-3.1-8b", "fp8", 9.08),
        ("llama-3.1-8b", "int4", 5.73),
        ("llama-3.1-70b", "int4", 39.8),
    ],
)
def test_checkpoints_of_few_bits_weigh_what_published_ones_do(name, weights, gigabytes):
    model = model_named(name).stored_as(weights=weights)
    assert model.weight_bytes / 1e9 == pytest.approx(gigabytes, rel=0.01)
    assert model.weight_bytes_read(1) == model.weight_bytes
    assert model.stored_as(weights="bfloat16") == model_named(name)


def test_a_step_reads_the_experts_that_its_tokens_chose():
    model = model_named("qwen3-30b-a3b")
    one, many = model.weight_bytes_read(1), model.weight_bytes_read(4096)
    assert one == pytest.approx(2 * model.active_params)
    assert many == pytest.approx(model.weight_bytes, rel=1e-6)
    assert one < model.weight_bytes_read(16) < many
    assert model_named("llama-3.1-8b").weight_bytes_read(1) == 2 * PARAMS["llama-3.1-8b"]


@pytest.mark.cases(3)
@pytest.mark.parametrize(
    "family",
    [
        "llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "qwen3_next",
        "qwen3_5_text", "qwen3_5_moe_text", "gemma2", "gemma3_text", "gemma4_text", "gpt_oss",
        "deepseek_v3", "nemotron_h", "granitemoehybrid", "lfm2", "llama4_text", "phi3", "glm4_moe",
    ],
)  # fmt: skip
def test_parameters_are_those_transformers_would_make(family):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(family)
    with torch.device("meta"):
        made = transformers.AutoModelForCausalLM.from_config(config)
    expected = sum(parameter.numel() for parameter in made.parameters())
    written = json.loads(config.to_json_string(use_diff=False))
    assert model_facts(written).params == expected


def test_accelerators_are_found_as_people_write_them():
    assert accelerator_named("NVIDIA H100") == accelerator_named("h100")
    assert accelerator_named("cpu").name == "cpu"
    with pytest.raises(ConfigError, match="did you mean h100"):
        accelerator_named("h10")


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("RTX4090", "rtx-4090"),
        ("RTXPRO6000", "rtx-pro-6000"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "rtx-pro-6000"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "rtx-pro-6000-workstation"),
        ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", "rtx-pro-6000-workstation"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("H100_SXM5", "h100"),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA A100 80GB PCIe", "a100-pcie"),
        ("NVIDIA RTX A6000", "rtx-a6000"),
        ("A6000", "rtx-a6000"),
        ("Tesla V100-SXM2-32GB", "v100"),
        ("AMD Instinct MI300X OAM", "mi300x"),
        ("NVIDIA RTX 6000 Ada Generation", "rtx-6000-ada"),
        ("NVIDIA GH200 480GB", "gh200"),
    ],
)
def test_accelerators_are_found_as_their_drivers_name_them(written, name):
    assert accelerator_named(written).name == name


def test_every_accelerator_has_a_peak_a_bandwidth_and_a_memory():
    for name in accelerator_names():
        device = accelerator_named(name)
        assert device.peak_flops > device.bandwidth > device.link_bandwidth / 2 > 0
        assert device.memory_bytes >= 1 << 30
        assert device.unit_flops == 0 or device.unit_flops > device.peak_flops
        assert device.fp8_flops == 0 or device.fp8_flops >= 1.9 * device.peak_flops


def test_an_accelerator_of_ones_own_is_a_file(tmp_path):
    file = tmp_path / "mine.json"
    file.write_text(
        '{"name": "mine", "peak_flops": 1e12, "bandwidth": 1e11, "memory_bytes": 1000, '
        '"link_bandwidth": 1e9, "peer_bandwidth": 1e9}'
    )
    assert accelerator_named(str(file)).bandwidth == 1e11
    for content in ("{", '{"name": "x"}'):
        file.write_text(content)
        with pytest.raises(ConfigError, match="peak_flops"):
            accelerator_named(str(file))
    with pytest.raises(ConfigError, match="cannot read"):
        accelerator_named(str(tmp_path / "none.json"))


def test_an_accelerator_without_memory_is_refused():
    with pytest.raises(ConfigError, match="memory_bytes"):
        Accelerator(
            name="x", peak_flops=1, bandwidth=1, memory_bytes=0, link_bandwidth=1, peer_bandwidth=1
        )


def test_tiers_are_written_as_name_size_and_speed():
    host, disk = parse_tiers("host=256GiB@50GB/s, disk=2TiB@6GB/s@100us")
    assert host == MemoryTier("host", 256 << 30, 50e9, 20e-6)
    assert (disk.name, disk.capacity_bytes, disk.bandwidth) == ("disk", 2 << 40, 6e9)
    assert disk.latency_s == pytest.approx(100e-6)
    assert disk.fetch_s(6e9) == pytest.approx(1.0001)


@pytest.mark.parametrize(
    "text", ["host", "host=1GiB", "host=1GiB@5", "host=0B@1GB/s", "host=1GiB@5GB/s@soon",
             "a=1GiB@1GB/s,a=1GiB@1GB/s", "host=1XB@1GB/s"],
)  # fmt: skip
def test_a_text_that_names_no_memory_tier_is_refused(text):
    with pytest.raises(ConfigError):
        parse_tiers(text)
