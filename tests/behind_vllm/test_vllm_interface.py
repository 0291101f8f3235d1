"""vLLM's interface has what the connector uses; read from vLLM's sources, nothing is imported."""

import ast
import os
from pathlib import Path

import pytest

import quire

REPOSITORY = Path(__file__).parents[2]
OURS = Path(quire.__file__).parent / "engines/vllm/connector.py"
TIER = OURS.with_name("tier.py")
THEIR_TIER = "v1/kv_offload/tiering/base.py"

TIER_METHODS = {
    "build_metric_definitions": "cls, extra_config",
    "drain_jobs": "self",
    "get_finished_jobs": "self",
    "get_stats": "self",
    "has_pending_work": "self",
    "lookup": "self, key, req_context",
    "on_new_request": "self, req_context",
    "on_request_finished": "self, req_context",
    "on_schedule_end": "self, context",
    "shutdown": "self",
    "submit_load": "self, job_metadata",
    "submit_store": "self, job_metadata",
    "take_events": "self",
}
"""The methods of `SecondaryTierManager` that the secondary tier has, as 0.32 and 0.33 have them."""

METHODS = {
    "__init__": "self, vllm_config, role, kv_cache_config",
    "bind_connector_metadata": "self, connector_metadata",
    "build_connector_meta": "self, scheduler_output",
    "build_connector_worker_meta": "self",
    "build_kv_connector_stats": "cls, data",
    "build_prom_metrics": "cls, vllm_config, metric_types, labelnames, per_engine_labelvalues",
    "get_kv_connector_stats": "self",
    "on_new_request": "self, request",
    "get_num_new_matched_tokens": "self, request, num_computed_tokens",
    "has_connector_metadata": "self",
    "register_kv_caches": "self, kv_caches",
    "request_finished": "self, request, block_ids",
    "requires_kv_delivery": "self",
    "reset_cache": "self",
    "save_kv_layer": "self, layer_name, kv_layer, attn_metadata, **kwargs",
    "shutdown": "self",
    "take_events": "self",
    "start_load_kv": "self, forward_context, **kwargs",
    "update_connector_output": "self, connector_output",
    "update_state_after_alloc": "self, request, blocks, num_external_tokens",
    "wait_for_layer_load": "self, layer_name",
    "wait_for_save": "self",
}
"""The hooks of `KVConnectorBase_V1` that the connector has or calls, as 0.32 and 0.33 have them."""

FIELDS = {
    ("v1/core/sched/output.py", "SchedulerOutput"): (
        "scheduled_new_reqs scheduled_cached_reqs num_scheduled_tokens kv_connector_block_state"
    ),
    ("v1/core/sched/output.py", "KVConnectorBlockState"): "resolve_block_ids",
    ("v1/core/sched/output.py", "NewRequestData"): "req_id num_computed_tokens",
    ("v1/core/sched/output.py", "CachedRequestData"): "req_ids num_computed_tokens",
    ("v1/outputs.py", "KVConnectorOutput"): "kv_connector_worker_meta",
    ("v1/request.py", "Request"): (
        "request_id all_token_ids prompt_token_ids prompt_embeds mm_features lora_request cache_salt "
        "skip_reading_prefix_cache"
    ),
    ("lora/request.py", "LoRARequest"): "lora_int_id lora_path load_inplace",
    ("multimodal/inputs.py", "MultiModalFeatureSpec"): "modality identifier mm_position",
    ("multimodal/inputs.py", "PlaceholderRange"): "offset length",
    ("v1/kv_cache_interface.py", "KVCacheConfig"): "num_blocks kv_cache_groups",
    ("v1/kv_cache_interface.py", "KVCacheGroupSpec"): "layer_names kv_cache_spec",
    ("v1/kv_cache_interface.py", "SlidingWindowSpec"): "sliding_window",
    ("config/cache.py", "CacheConfig"): "cache_dtype",
    (
        "config/parallel.py",
        "ParallelConfig",
    ): "rank data_parallel_index tensor_parallel_size pipeline_parallel_size nnodes",
    ("config/model.py", "ModelConfig"): "dtype quantization revision max_model_len",
    ("config/scheduler.py", "SchedulerConfig"): "max_num_seqs",
    (THEIR_TIER, "TransferJob"): "job_id keys chunk_ids is_promotion",
    (THEIR_TIER, "JobResult"): "job_id success successful_keys transfer_time transfer_bytes",
    (
        "v1/kv_offload/base.py",
        "OffloadingEvent",
    ): "keys medium removed locality ownership removal_expected",
    ("v1/kv_offload/config.py", "OffloadingConfig"): "model parallel kv_cache_layout",
    (
        "distributed/kv_events.py",
        "BlockStored",
    ): "block_hashes parent_block_hash token_ids block_size lora_id medium lora_name extra_keys group_idx ownership",
    ("distributed/kv_events.py", "BlockRemoved"): "block_hashes medium group_idx ownership",
}
"""What the connector reads, by file and class."""


def places():
    """Return the sources of vLLM that are here, by name: installed, or unpacked where `QUIRE_VLLM_SOURCES` says."""
    environment = Path(os.environ.get("QUIRE_VLLM", REPOSITORY / ".venv-vllm"))
    found = [*environment.glob("lib/python3*/site-packages/vllm")]
    found += map(Path, filter(None, os.environ.get("QUIRE_VLLM_SOURCES", "").split(os.pathsep)))
    return found


@pytest.fixture(params=places() or [None], ids=str)
def sources(request):
    if request.param is None:
        pytest.skip("vLLM is not here: `make test-vllm` installs it")
    return request.param


def class_in(file, name):
    tree = ast.parse(file.read_text("utf-8"))
    return next(
        node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == name
    )


def parameters(function):
    told = function.args
    names = [each.arg for each in (*told.posonlyargs, *told.args)]
    names += [f"*{told.vararg.arg}"] if told.vararg else []
    names += [f"{each.arg}=" for each in told.kwonlyargs]
    names += [f"**{told.kwarg.arg}"] if told.kwarg else []
    return ", ".join(names)


def methods(node):
    return {each.name: parameters(each) for each in node.body if isinstance(each, ast.FunctionDef)}


def abstract(node):
    """Return the methods of a class that a subclass has to have."""
    return {
        each.name
        for each in node.body
        if isinstance(each, ast.FunctionDef)
        and any(getattr(mark, "id", "") == "abstractmethod" for mark in each.decorator_list)
    }


def fields(node):
    names = {each.target.id for each in node.body if isinstance(each, ast.AnnAssign)}
    stores = (each for each in ast.walk(node) if isinstance(each, ast.Attribute))
    return names | {each.attr for each in stores if isinstance(each.ctx, ast.Store)}


def drifted(theirs, wanted):
    return {
        f"{name}({told})": f"vLLM has {name}({theirs[name]})" if name in theirs else "vLLM has none"
        for name, told in wanted.items()
        if theirs.get(name) != told
    }


def test_every_hook_has_the_parameters_it_was_written_for(sources):
    base = sources / "distributed/kv_transfer/kv_connector/v1/base.py"
    assert drifted(methods(class_in(base, "KVConnectorBase_V1")), METHODS) == {}
    hybrid = {"request_finished_all_groups": "self, request, block_ids"}
    assert drifted(methods(class_in(base, "SupportsHMA")), hybrid) == {}


def test_the_secondary_tier_has_the_methods_that_vllm_calls(sources):
    base = class_in(sources / THEIR_TIER, "SecondaryTierManager")
    assert drifted(methods(base), TIER_METHODS) == {}
    ours = methods(class_in(TIER, "QuireTier"))
    assert abstract(base) <= set(ours)
    assert {name for name in ours if name[0] != "_"} == set(TIER_METHODS)
    assert {name: ours[name] for name in TIER_METHODS} == TIER_METHODS


@pytest.mark.parametrize(("file", "name"), FIELDS)
def test_what_is_read_is_there(sources, file, name):
    node = class_in(sources / file, name)
    missing = set(FIELDS[file, name].split()) - fields(node)
    assert not missing, f"{name} of vLLM has no {missing}"


def test_a_hook_that_vllm_asks_for_is_answered(sources):
    base = class_in(
        sources / "distributed/kv_transfer/kv_connector/v1/base.py", "KVConnectorBase_V1"
    )
    assert abstract(base) <= set(methods(class_in(OURS, "QuireConnector")))


def test_the_table_names_every_hook_of_the_connector():
    ours = {
        name
        for name in methods(class_in(OURS, "QuireConnector"))
        if name == "__init__" or name[0] != "_"
    }
    assert ours <= set(METHODS) | {"request_finished_all_groups"}


def test_a_drift_is_named():
    theirs = methods(ast.parse("class A:\n def shutdown(self, wait): ...").body[0])
    assert drifted(theirs, {"shutdown": "self"}) == {
        "shutdown(self)": "vLLM has shutdown(self, wait)"
    }
