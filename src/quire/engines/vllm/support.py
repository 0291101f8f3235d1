"""Support checks of a vLLM config, and the name of what it computes."""

# vLLM is not there where types are checked: it has an environment of its own.
# pyright: basic, reportMissingImports=false

from __future__ import annotations

from pathlib import Path
from typing import Any

from quire.engines.models.weights import FileDigests, fingerprint, weight_files
from quire.errors import ConfigError

OPTIONS = ("tiers", "settings", "staging", "weights")

GROUPS = ("FullAttentionSpec", "MLAAttentionSpec", "SlidingWindowSpec")
"""The layer groups of vLLM that quire keeps."""

REFUSED = {
    "MambaSpec": "its states are of one token, not of blocks of tokens, and vLLM keeps few of them",
    "ChunkedLocalAttentionSpec": "quire has no form for what a hit needs of its chunks",
    "SlidingWindowMLASpec": "its cache has another form than a window's or MLA's",
    "SinkFullAttentionSpec": "its sinks are in no block",
    "CrossAttentionSpec": "it depends on the input of an encoder, not on the tokens before",
    "EncoderOnlyAttentionSpec": "it depends on all tokens, also those behind the block",
}
"""Why quire keeps no other groups."""


def check_supported(config: Any, groups: Any, extra: dict[str, Any]) -> None:
    """Raise `ConfigError` for what quire cannot keep, and for options that it does not know."""
    unknown = sorted(set(extra) - set(OPTIONS))
    if unknown:
        raise ConfigError(
            f"kv_connector_extra_config has no option {', '.join(unknown)}; options: {', '.join(OPTIONS)}"
        )
    parallel = config.parallel_config
    others = (
        "pipeline_parallel_size",
        "prefill_context_parallel_size",
        "decode_context_parallel_size",
        "nnodes",
    )
    for name in others:
        if getattr(parallel, name, 1) > 1:
            raise ConfigError(
                f"quire keeps no KV with {name} = {getattr(parallel, name)}; set it to 1"
            )
    size = parallel.tensor_parallel_size
    heads = config.model_config.get_total_num_kv_heads()
    if size > 1 and (heads % size or config.model_config.use_mla):
        raise ConfigError(
            f"{size} workers (tensor_parallel_size) do not share {heads} KV heads evenly: quire keeps each head once"
        )
    speculative = config.speculative_config
    if speculative is not None and speculative.method not in ("ngram", "ngram_gpu", "suffix"):
        raise ConfigError(
            f"quire keeps no KV of a drafting model (speculative method {speculative.method!r}): it depends on "
            "tokens behind the block; use ngram, or none"
        )
    for group in groups:
        kind = type(group.kv_cache_spec).__name__
        if kind not in GROUPS:
            why = REFUSED.get(kind, "quire does not know its caches")
            raise ConfigError(
                f"quire keeps {', '.join(GROUPS)}; this model has layers of {kind}: {why}. Serve it without quire"
            )
    sizes = sorted({group.kv_cache_spec.block_size for group in groups})
    if len(sizes) > 1:
        raise ConfigError(
            f"quire needs one block size for all layer groups; this model has {sizes}"
        )


def model_name(config: Any, extra: dict[str, Any], digests: FileDigests) -> str:
    """Return the digest of all that decides what KV means: weights by their contents, and how vLLM reads them."""
    model, cache = config.model_config, config.cache_config
    named = extra.get("weights")
    weights = named if named is not None else digests.of(weight_files(_folder(config)))
    hf_config = model.hf_config.to_dict()
    for name in ("_name_or_path", "transformers_version"):
        hf_config.pop(name, None)
    facts = {
        "weights": weights,
        "config": hf_config,
        "dtype": str(model.dtype),
        "kv_dtype": cache.cache_dtype,
        "quantization": model.quantization,
        "load_format": str(config.load_config.load_format),
        "vllm": version_of_vllm().rsplit(".", 1)[0],
    }
    return fingerprint(facts)


def version_of_vllm() -> str:
    """Return vLLM's version: another minor one may compute and lay out KV differently."""
    import vllm  # noqa: PLC0415 - whichever distribution it comes from

    return str(vllm.__version__).split("+")[0]


def _folder(config: Any) -> Path:
    """Return where the weights lie: a folder, a file, or the snapshot of a model of the hub."""
    model = config.model_config
    place = Path(model.model)
    if place.exists():
        return place
    from huggingface_hub import snapshot_download  # noqa: PLC0415 - vLLM needs it itself

    try:
        return Path(
            snapshot_download(
                model.model,
                revision=model.revision,
                cache_dir=config.load_config.download_dir,
                local_files_only=True,
            )
        )
    except Exception:  # noqa: BLE001 - whatever it is, `weight_files` says what to do
        return place
