"""A stand-in for a model, through which quire sees what the model is fed."""

from collections.abc import Callable, Sequence
from types import MethodType
from typing import TYPE_CHECKING, Any, cast

from quire.errors import ConfigError

if TYPE_CHECKING:
    from quire.engines.hf.recorder import Recorder


class Watched:
    """A model as quire, and the block of a session, call it.

    `model` is the stand-in. It shares the attributes of the original, in both directions, since
    the two have one `__dict__`; only its class differs, in what calling it does: the original is
    called, between the two halves of the recorder of the cache that is passed to it. So `generate`
    and any loop that runs on the stand-in is seen, while nothing is ever registered at the original:
    its hooks and wrappers run as they are, and calls of other threads meet nothing of quire.

    names      the parameters of `model.forward`, in order
    recorders  by the `id` of a working cache, as long as it is recorded
    """

    def __init__(self, model: Any, names: Sequence[str]) -> None:
        self.names = names
        self.recorders: dict[int, Recorder] = {}
        self.model = _stand_in(model, self._forward)

    def _forward(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = dict(zip(self.names, args, strict=False)) | kwargs
        recorder = self.recorders.get(id(given.get("past_key_values")))
        is_given_twice = len(given) < len(args) + len(kwargs)  # Python refuses such a call
        if recorder is None or is_given_twice:
            return model(*args, **kwargs)
        changed = recorder.forward_starts(given)
        output = model(*args, **kwargs) if changed is None else model(**changed)
        recorder.forward_ends(output)
        return output


def _stand_in(model: Any, forward: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]) -> Any:
    """Return an object that is `model` in all but its class, where calls go to `forward`."""

    def call(_: Any, *args: Any, **kwargs: Any) -> Any:
        return forward(model, args, kwargs)

    def generate(stand_in: Any) -> Any:
        own = model.generate
        if isinstance(own, MethodType) and own.__self__ is model:
            return MethodType(own.__func__, stand_in)
        raise ConfigError(
            f"model.generate was replaced by {own!r}, which calls the model where quire cannot see "
            "what it feeds; delete that attribute, and wrap cache.generate instead"
        )

    def reduce(_: Any, __: int) -> Any:
        return _unchanged, (model,)  # copied or pickled, it is the original

    kind = cast("Any", type(model))
    body = {
        "__call__": call,
        "__reduce_ex__": reduce,
        "__wrapped__": kind,  # what builds another model of this class
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__doc__": kind.__doc__,
        "generate": property(generate),
    }
    stand_in: Any = object.__new__(type(kind)(kind.__name__, (kind,), body))
    object.__setattr__(stand_in, "__dict__", model.__dict__)
    return stand_in


def _unchanged(model: Any) -> Any:
    return model
