"""Commands as people type them, and what comes of them."""

import json

from typer.testing import CliRunner

from parts import skip_without
from quire.cli.app import app


def run(*words, **options):
    skip_without(*words)
    return CliRunner().invoke(app, [str(word) for word in words], **options)


def shown(*words, **options):
    """The output of a command for people."""
    done = run(*words, **options)
    assert done.exit_code == 0, done.output
    return done.stdout


def told(*words):
    """The output of a command for programs."""
    return json.loads(shown(*words, "--json"))


def refusal(*words):
    """The line in which a command refuses; it prints nothing else."""
    done = run(*words)
    assert (done.exit_code, done.stdout) == (2, ""), done.output
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith("error: ")
    return line


LLAMA = {
    "vocab_size": 264, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 2048,
    "initializer_range": 0.2, "pad_token_id": 256, "bos_token_id": 257, "eos_token_id": 258,
}  # fmt: skip


def saved_llama(path):
    """Save a random model with the packaged tokenizer, as any model is; return the path."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    from quire import demo_model

    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**LLAMA)).save_pretrained(path)
    AutoTokenizer.from_pretrained(demo_model()).save_pretrained(path)
    return path
