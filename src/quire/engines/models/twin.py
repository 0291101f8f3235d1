"""The config of a model's twin: the same architecture, so small that it is built and run at once.

A config is a dict of numbers whose meaning stands in their names, and whose relations an
architecture relies on: heads times their width are a projection, a rotation turns a part of a
head, a pattern of layers repeats. Three maps keep these relations without a list of models:

    counts     of heads, groups and experts are cut to 4, 2 or 1; equal ones stay equal
    widths     are scaled by one factor: equal ones stay equal, and multiples stay multiples
    distances  (windows, chunks, thresholds of positions) keep their order, all below 32 tokens

The layers are the first ones that show every kind. Numbers of no such meaning stay as they are.
"""

import re
from collections.abc import Iterator
from typing import Any, cast

_Values = dict[str, Any]

MAX_DISTANCE = 31
"""No window, chunk or threshold of a twin is longer, in tokens."""

_VOCAB = 128
_POSITIONS = 512
_FEW_LAYERS = 12
_HEADS_LEFT = 4
_UNIT = 8
# What no number of a config tells: multiples that an architecture rounds some of its widths up to,
_WIDTH_UNITS = {"xlstm": 128}
# and kinds of layers of which it needs two, as the second one takes its weights from the first.
_SHARING = {"zamba": "hybrid"}


def _named(*patterns: str) -> re.Pattern[str]:
    return re.compile("|".join(f"(?:{pattern})" for pattern in patterns))


# What a number means, by its name.
_LAYERS = _named(
    r"num_hidden_layers", r"(?:n|num)_layers?", r"(?:num_)?(?:en|de)coder_layers", r"depth",
    r"num_layers_per_stack", r"num_blocks",
)  # fmt: skip
_TOKENS = _named(r".*token_(?:id|index)s?", r"(?:bos|eos|pad|unk|mask)_index", r".*_tokens")
_DISTANCES = _named(
    r".*window(?:_size|_len)?", r"attention_chunk_size", r"local_attention", r"floor_scale",
    r"log_scaling_n_floor", r"original_max_position_embeddings", r"rel_extent", r"index_topk",
)  # fmt: skip
# Counts that are cut to so many at most, whatever else a config says.
_CUT = {
    _named(r".*(?<!type_)vocab(?:_size.*)?"): _VOCAB,
    _named(
        r"max_.*position(?:s|_embeddings)", r"n_positions", r"n_ctx", r"max_seq_len",
        r"model_max_length", r"context_length",
    ): _POSITIONS,
    _named(
        r"(?:mamba_)?chunk_size", r".*attn_chunk_length", r"(?:index_)?block_size",
        r"block_multiple_of", r"ffn_round_up_to_multiple_of",
    ): 4,
    _named(r".*num_(?:local_|routed_)?experts", r"n_routed_experts", r"zero_expert_num"): 4,
    _named(r"mamba_d_state", r"ssm_state_size", r"state_size", r"d_state"): _UNIT,
    _named(r"n_group", r"num_expert_groups?"): 2,
    _named(r"num_experts_per_tok(?:en)?", r"moe_k", r"(?:moe_)?top_?k(?:_experts)?"): 2,
    _named(r"topk_groups?"): 1,
}  # fmt: skip
_KV_HEADS = _named(
    r".*(?:key_value|kv).*heads", r".*num_key_heads", r"(?:mamba_)?n_?groups", r"o_groups"
)
_HEADS = _named(
    r".*attention_heads(?:_per_layer)?", r"(?:.*_)?(?:n|num)_(?:\w+_)?heads?", r"num_query_groups"
)
_HEAD_WIDTHS = _named(
    r".*head_?dim", r"(?:mamba_)?d_head", r"dim_head", r"attention_head_size", r"kv_channels",
    r"d_kv", r"rotary_dim",
)  # fmt: skip
_WIDTHS = _named(
    r"(?!.*(?:kernel|patch|batch|image|crop|group|ngram|merge|vocab)).*"
    r"(?:_size|_dim|width|_rank|_lowrank)(?:_mlp|_per_layer_input)?",
    r"d_model", r"d_inner", r"d_ff", r"dff", r"dim_ff", r"n_embd", r"n_inner", r"mamba_d_ssm",
    r"dim_model_base",
)  # fmt: skip
_HANDED_OVER = ("out_hidden_size", "output_dim", "projection_dim", "adapter_out_dim")

# Which numbers the maps start from: the first of each that a config has.
_MAIN_WIDTH = ("embed_dim", "hidden_size", "d_model", "n_embd", "embedding_dim", "emb_dim")
_MAIN_HEADS = (
    "num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads",
    "decoder_attention_heads", "attention_heads", "num_decoder_attention_heads",
)  # fmt: skip
_MAIN_HEAD_WIDTH = ("qk_nope_head_dim", "head_dim", "attention_head_size", "dim_head", "d_kv")
_MAIN_LAYERS = (
    "num_hidden_layers", "n_layer", "n_layers", "num_layers", "depth", "decoder_layers",
    "num_decoder_layers", "encoder_layers",
)  # fmt: skip

# What says which layer is of which kind.
_PERIODS = _named(
    r".*layers?_(?:period|interval|step|pattern)", r".*sliding_window_pattern", r".*sparse_step",
    r".*attention_interval", r"layer_group_size", r"global_attn_every_n_layers",
    r"n_layers_per_attn_res_block",
)  # fmt: skip
_FIRST_SO_MANY = _named(r"first_k_dense_replace", r"num_dense_layers", r"moe_layer_start_index")
_LAYER_INDICES = _named(r".*layers", r".*layer_(?:ids|indices)", r"full_attn_idxs")
_COMPUTED = ("layer_types", "layers_block_type", "layers_num_experts")

# Widths that are a count times a width, where these are not the attention's own heads.
_PRODUCTS = (
    ("mamba_n_heads", "mamba_d_head"),
    ("n_mamba_heads", "mamba_headdim"),
    ("mamba_num_heads", "mamba_head_dim"),
    ("num_heads", "head_dim"),
)
_TOTALS = ("expand", "mamba_expand", "mamba_d_ssm")


def shrunk(config: Any) -> Any:
    """Return a config like `config` whose model has the same kinds of layers and is tiny.

    The configs inside that of a composite model are shrunk with it. Nothing of a quantization is
    left; the attention function stays. Raises whatever the config's class raises when it is not
    content with its numbers.
    """
    values = cast("_Values", config.to_dict())
    for name in ("quantization_config", "transformers_version"):
        values.pop(name, None)
    twin = cast("Any", type(config)).from_dict(_small(config, values, _Shared(values)))
    twin._attn_implementation = config._attn_implementation  # noqa: SLF001 - its only name
    return twin


def distances(config: Any) -> dict[int, int]:
    """Return the windows, chunks and thresholds that a config names, in tokens, and the twin's of each."""
    return _Shared(cast("_Values", config.to_dict())).distances


def _small(
    config: Any, values: _Values, shared: "_Shared", outer: "_Maps | None" = None
) -> _Values:
    """Return the values of one config, those of the configs in it included.

    A part without a width of its own describes a part of the `outer` one, and is mapped with it.
    """
    parts = [name for name, value in values.items() if _is_config(name, value)]
    own = {name: value for name, value in values.items() if name not in parts}
    maps = _Maps(own, shared) if outer is None or _first(own, _MAIN_WIDTH) else outer
    small = {name: maps.of(name, value) for name, value in own.items()}
    layers = _kept_layers(config, own)
    if layers:
        small |= _cut_layers(own, small, layers, maps)
    maps.relate(own, small)
    # The text first: other parts hand over what has its width.
    for name in sorted(parts, key=lambda name: ("text" not in name, name)):
        small[name] = _small(getattr(config, name, None), values[name], shared, maps)
        if name == "text_config":
            shared.text_widths = _first(values[name], _MAIN_WIDTH), _first(small[name], _MAIN_WIDTH)
    return small


class _Shared:
    """Numbers that all parts of a config share: distances, ids of special tokens, the text's width."""

    def __init__(self, values: _Values) -> None:
        named = list(numbers_in(values))
        self.text_widths: tuple[int, int] = (0, 0)
        self.distances: dict[int, int] = {}
        for value in sorted({v for name, v in named if _DISTANCES.fullmatch(name) and v > 0}):
            floor = max(self.distances.values(), default=4) + (4 if len(self.distances) < 5 else 1)
            self.distances[value] = min(value if value < 20 else floor, MAX_DISTANCE)
        large = {v for name, v in named if _TOKENS.fullmatch(name) and v >= _VOCAB}
        self.tokens = {v: _VOCAB - 1 - rank for rank, v in enumerate(sorted(large, reverse=True))}


class _Maps:
    """Maps from the numbers of one config to small ones."""

    def __init__(self, values: _Values, shared: _Shared) -> None:
        self._shared = shared
        heads = _first(values, _MAIN_HEADS) or 1
        width = _first(values, _MAIN_WIDTH) or heads * 8 * _UNIT
        head_width = _first(values, _MAIN_HEAD_WIDTH) or max(width // heads, 1)
        self._heads = {
            number
            for name, number in numbers_in(values)
            if _HEADS.fullmatch(name) and not _KV_HEADS.fullmatch(name) and "index" not in name
        }
        unit = _head_unit(_rotated_part(values, head_width))
        self._head_scale = min(unit / head_width, 1)
        self._width = width
        self._inner = "embed_dim" in values  # beside it hidden_size is what is handed over
        total = width * min(heads, _HEADS_LEFT) * unit / (heads * head_width)
        of_type = _WIDTH_UNITS.get(values.get("model_type", ""), 2 * _UNIT)
        self._scale = min(_rounded(total, of_type) / width, 1)

    def of(self, name: str, value: Any) -> Any:
        """Return a named value of the twin; a list's members each on their own."""
        if isinstance(value, dict):
            value = cast("_Values", value)
            return self._rope(value) if name.startswith("rope") else value
        if isinstance(value, list):
            return [self.of(name, member) for member in cast("list[Any]", value)]
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            return value
        return self._number(name, value)

    def relate(self, old: _Values, small: _Values) -> None:
        """Make the relations between widths hold in `small` that rounding may have lost."""
        for counted, per_head in _PRODUCTS:
            heads, width = old.get(counted), old.get(per_head)
            if not isinstance(heads, int) or not isinstance(width, int):
                continue
            for name, factor in [(n, old.get(n)) for n in _TOTALS]:
                if isinstance(factor, int) and heads * width == factor * self._width:
                    small[per_head] = factor * self.width(self._width) // small[counted]
                elif name == "mamba_d_ssm" and factor == heads * width:
                    small[per_head] = small[name] // small[counted]
        name, parts = "qk_head_dim", ("qk_nope_head_dim", "qk_rope_head_dim")
        if name in old and old[name] == sum(old.get(part) or 0 for part in parts):
            small[name] = sum(small[part] for part in parts)

    def width(self, value: int) -> int:
        """Return a width of the twin."""
        return _rounded(value * self._scale) if value > _UNIT else value

    def _number(self, name: str, value: int) -> int:
        shared = self._shared
        if _TOKENS.fullmatch(name):
            return shared.tokens.get(value, value)
        if _DISTANCES.fullmatch(name):
            return shared.distances[value]
        limit = next((most for names, most in _CUT.items() if names.fullmatch(name)), None)
        if limit is not None:
            return min(value, limit)
        if _KV_HEADS.fullmatch(name):
            return min(value, _HEADS_LEFT if value in self._heads else 2)
        if _HEADS.fullmatch(name):
            return min(value, _HEADS_LEFT)
        if _HEAD_WIDTHS.fullmatch(name):
            return _rounded(value * self._head_scale) if value > _UNIT else value
        handed_over = (*_HANDED_OVER, "hidden_size") if self._inner else _HANDED_OVER
        if name in handed_over and value == shared.text_widths[0]:
            return shared.text_widths[1]
        return self.width(value) if _WIDTHS.fullmatch(name) else value

    def _rope(self, values: _Values) -> _Values:
        """Return the parameters of a rotation, those by kind of layer included."""
        small = {
            name: self.of("rope", value) if isinstance(value, dict) else self.of(name, value)
            for name, value in values.items()
        }
        for name in ("mrope_section", "long_factor", "short_factor"):
            if isinstance(values.get(name), list):
                small[name] = _section(values[name], _UNIT // 2, name == "mrope_section")
        return small


def _section(values: list[Any], length: int, sums: bool) -> list[Any]:
    """Return so many of the factors of a rotation, or sections that sum to so many."""
    if not sums:
        return values[:length]
    small = [max(value * length // sum(values), 1) for value in values]
    small[-1] += length - sum(small)
    return small


def _rotated_part(values: _Values, head_width: int) -> float:
    """Return the smallest part of a head that any of its layers rotates."""
    rotary = values.get("rotary_dim")
    parts = [rotary / head_width] if isinstance(rotary, int) else []
    for found in _dicts(values):
        named = (
            found.get(n) for n in ("partial_rotary_factor", "rotary_pct", "rotary_emb_fraction")
        )
        parts += [part for part in named if isinstance(part, float) and part > 0]
    return min(parts, default=1.0)


def _head_unit(rotated_part: float) -> int:
    """Return a head's width of which that part is a whole, even number of at least 8."""
    for width in range(_UNIT, 8 * _UNIT, _UNIT):
        half = width * rotated_part / 2
        if half >= _UNIT / 2 - 1e-6 and abs(half - round(half)) < 1e-6:
            return width
    return 8 * _UNIT


def _kept_layers(config: Any, values: _Values) -> list[int]:
    """Return the layers that the twin keeps, in order: those that show all there is; or none."""
    num_layers = _first(values, _MAIN_LAYERS)
    if not num_layers:
        return []
    kinds: list[list[Any]] = []
    for name, value in [*values.items(), *((n, getattr(config, n, None)) for n in _COMPUTED)]:
        if isinstance(value, list):
            members = cast("list[Any]", value)
            if _LAYER_INDICES.fullmatch(name) and _are_indices(members, num_layers):
                kinds.append([layer in members for layer in range(num_layers)])
            elif len(members) == num_layers:
                kinds.append([repr(member) for member in members])
        elif isinstance(value, int) and _FIRST_SO_MANY.fullmatch(name):
            kinds.append([layer < value for layer in range(num_layers)])
    periods = [v for n, v in values.items() if _PERIODS.fullmatch(n) and isinstance(v, int)]
    repeating = [[layer % period for layer in range(num_layers)] for period in periods if period]
    repeating.append(
        [min(layer, _times_run(values, num_layers) - 1) for layer in range(num_layers)]
    )
    twice = _SHARING.get(values.get("model_type", ""))
    if twice:
        again = [[one[: n + 1].count(repr(twice)) == 2 for n in range(num_layers)] for one in kinds]
        kinds += again
    alone = num_layers - (values.get("num_kv_shared_layers") or 0)
    return [
        layer
        for layers in (range(alone), range(alone, num_layers))
        for layer in _showing_all([*kinds, *repeating], layers)
    ]


def _times_run(values: _Values, num_layers: int) -> int:
    """Return how often each layer is run, where a config counts runs and layers."""
    named = {n: v for n, v in values.items() if _LAYERS.fullmatch(n) and "coder" not in n}
    counts = [count for count in named.values() if isinstance(count, int) and count > 0]
    times = [num_layers // count for count in counts if num_layers % count == 0]
    return max([1, *(n for n in times if n <= _FEW_LAYERS)])


def _showing_all(kinds: list[list[Any]], layers: range) -> list[int]:
    """Return the first of some layers, until each kind was there; if that is long, one of each."""
    firsts = set(layers[:2])
    for of_layer in kinds:
        there = {of_layer[layer] for layer in layers}
        firsts |= {next(layer for layer in layers if of_layer[layer] == kind) for kind in there}
    upto = [layer for layer in layers if layer <= max(firsts)]
    return upto if len(upto) <= _FEW_LAYERS else sorted(firsts)


def _cut_layers(old: _Values, small: _Values, kept: list[int], maps: _Maps) -> _Values:
    """Return the values that speak of layers, for the layers that are kept."""
    num_layers = _first(old, _MAIN_LAYERS)
    cut: _Values = {}
    for name, value in old.items():
        if _LAYERS.fullmatch(name) and isinstance(value, int):
            exact = value <= num_layers and value * len(kept) % num_layers == 0
            cut[name] = value * len(kept) // num_layers if exact else min(value, 2)
        elif _FIRST_SO_MANY.fullmatch(name) and isinstance(value, int):
            cut[name] = sum(layer < value for layer in kept)
        elif name == "num_kv_shared_layers" and value:
            cut[name] = sum(layer >= num_layers - value for layer in kept)
        elif name == "per_layer_config" and value:
            cut[name] = {
                kept.index(int(layer)): {n: maps.of(n, v) for n, v in changed.items()}
                for layer, changed in value.items()
                if int(layer) in kept
            }
        elif isinstance(value, list):
            members = cast("list[Any]", value)
            if _LAYER_INDICES.fullmatch(name) and _are_indices(members, num_layers):
                cut[name] = [kept.index(layer) for layer in members if layer in kept]
            elif len(members) == num_layers:
                cut[name] = [small[name][layer] for layer in kept]
    return cut


def _are_indices(members: list[Any], num_layers: int) -> bool:
    known = all(type(m) is int and 0 <= m < num_layers for m in members)
    return known and sorted(set(members)) == members


def _is_config(name: str, value: Any) -> bool:
    return isinstance(value, dict) and name.endswith("config") and name != "per_layer_config"


def _first(values: _Values, names: tuple[str, ...]) -> int:
    """Return the first of the named numbers that there is, or 0."""
    found = (values.get(name) for name in names)
    return next((v for v in found if isinstance(v, int) and v > 0), 0)


def _rounded(value: float, unit: int = _UNIT) -> int:
    """Return the nearest multiple of a unit, at least one."""
    return max(round(value / unit), 1) * unit


def numbers_in(values: _Values) -> Iterator[tuple[str, int]]:
    """Yield the integers of a config, and of those in it, by name; members of lists one by one."""
    for found in _dicts(values):
        for name, value in found.items():
            for member in cast("list[Any]", value) if isinstance(value, list) else [value]:
                if isinstance(member, int) and not isinstance(member, bool):
                    yield name, member


def _dicts(values: _Values) -> Iterator[_Values]:
    yield values
    for value in values.values():
        if isinstance(value, dict):
            yield from _dicts(cast("_Values", value))
