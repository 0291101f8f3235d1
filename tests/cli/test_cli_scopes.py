"""The command line with tenants, adapters and images."""

import pytest

from cli_help import LLAMA, refusal, saved_llama, shown
from cli_help import told as told_by

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("typer")

from quire import demo_model  # noqa: E402

IMAGE = "<image>"
TEMPLATE = (
    "{% for said in messages %}{{ said['role'] }}: {% for part in said['content'] %}"
    "{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %} {% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def text_model(tmp_path_factory):
    return saved_llama(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def vision_model(tmp_path_factory):
    """A random LLaVA with a processor, saved as any vision model is."""
    pytest.importorskip("PIL")
    path = tmp_path_factory.mktemp("vision")
    tokenizer = transformers.AutoTokenizer.from_pretrained(demo_model())
    tokenizer.add_tokens([IMAGE], special_tokens=True)
    tower = {
        "model_type": "clip_vision_model", "hidden_size": 16, "intermediate_size": 24,
        "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 8, "patch_size": 4,
    }  # fmt: skip
    config = transformers.LlavaConfig(
        vision_config=tower,
        text_config=LLAMA | {"model_type": "llama", "vocab_size": LLAMA["vocab_size"] + 8},
        image_token_id=tokenizer.convert_tokens_to_ids(IMAGE),
        vision_feature_layer=-1,
    )
    torch.manual_seed(0)
    transformers.LlavaForConditionalGeneration(config).save_pretrained(path)
    size = {"height": 8, "width": 8}
    transformers.LlavaProcessor(
        transformers.CLIPImageProcessor(size={"shortest_edge": 8}, crop_size=size),
        tokenizer,
        patch_size=4,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=TEMPLATE,
        image_token=IMAGE,
    ).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def adapter(text_model, tmp_path_factory):
    """A random adapter of the text model, saved by PEFT."""
    peft = pytest.importorskip("peft")
    path = tmp_path_factory.mktemp("adapters") / "cats.v1"
    model = transformers.LlamaForCausalLM.from_pretrained(text_model)
    torch.manual_seed(1)
    config = peft.LoraConfig(r=4, target_modules=["k_proj", "v_proj"], init_lora_weights=False)
    peft.get_peft_model(model, config).save_pretrained(path)
    return path


def picture(path, seed):
    from PIL import Image

    random = torch.Generator().manual_seed(seed)
    pixels = torch.randint(0, 256, (20, 30, 3), dtype=torch.uint8, generator=random)
    Image.fromarray(pixels.numpy()).save(path)
    return path


def told(*words):
    return told_by("generate", "--max-new-tokens", 4, *words)


def test_generate_names_its_scope(text_model, adapter):
    words = ("--model", text_model, "Hello there, how are you?")
    assert told(*words)["scope"] == {"salt": None, "lora": None}
    scope = {"salt": "me", "lora": str(adapter)}
    assert told("--salt", "me", "--lora", adapter, *words)["scope"] == scope


def test_an_adapter_changes_the_text_and_stands_in_the_saved_tree(text_model, adapter, tmp_path):
    saved = tmp_path / "run.json"
    words = ("--model", text_model, "Hello there, how are you?")
    plain = told(*words)["turns"][0]["text"]
    adapted = told("--lora", adapter, "--salt", "me", "--save", saved, *words)["turns"][0]["text"]
    assert adapted != plain
    text = shown("inspect", saved)
    assert "salt='me'" in text
    assert "lora='cats_v1'" in text


@pytest.mark.ci
def test_images_are_part_of_the_conversation(vision_model, tmp_path):
    turns = tmp_path / "turns.txt"
    turns.write_text("What is on it?\nAnd behind it?\n")
    words = ("--model", vision_model, "--turns", turns)
    found = told("--image", picture(tmp_path / "a.png", 1), *words)["turns"]
    assert [turn["prompt"] for turn in found] == ["What is on it?", "And behind it?"]
    assert found[0]["cached_tokens"] == 0
    assert found[1]["cached_tokens"] >= 20
    other = told("--image", picture(tmp_path / "b.png", 2), *words)["turns"]
    assert [turn["text"] for turn in other] != [turn["text"] for turn in found]
    pair = told("--image", tmp_path / "a.png", "--image", tmp_path / "b.png", *words)["turns"]
    assert pair[0]["prompt_tokens"] == found[0]["prompt_tokens"] + 4


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("--lora", "no/such", "hi"), "no adapter_config.json"),
        (("--image", "no/such.png", "hi"), "cannot read the image 'no/such.png'"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(words, reason):
    assert reason in refusal("generate", *words)


def test_an_image_for_a_model_that_reads_none_is_refused(text_model, tmp_path):
    image = picture(tmp_path / "a.png", 1)
    refusal("generate", "--model", text_model, "--image", image, "hi")


def test_an_adapter_of_another_model_is_refused(adapter):
    assert "does not fit the model" in refusal("generate", "--lora", adapter, "hi")


def test_a_snapshot_that_cannot_be_written_is_refused(text_model):
    said = refusal("generate", "--model", text_model, "--save", "no/such/run.json", "hi")
    assert "cannot write 'no/such/run.json'" in said
