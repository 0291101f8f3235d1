"""Seeing what a model is fed: by a stand-in that quire calls, and in sessions at the model itself."""

import functools
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from types import MethodType
from typing import Any, Protocol, cast

from quire.errors import ConfigError


class ForwardListener(Protocol):
    """Is told of the forwards over one working cache."""

    def forward_starts(self, given: Mapping[str, Any]) -> dict[str, Any] | None:
        """Note that a forward begins with these arguments; return others where it needs them."""
        ...

    def forward_ends(self, output: Any) -> None:
        """Note what the forward that began last has returned."""
        ...


class Watched:
    """A model as quire calls it, and as others call it with a cache that was lent to them.

    `model` is the stand-in that quire calls. It shares its attributes with the original, as the two have
    one `__dict__`; only its class differs: calling it calls the original between the two halves of the
    recorder of the cache that is passed. So `generate` on it is seen, while nothing is registered at
    the original: its hooks and wrappers run as they are, and other threads meet nothing of quire.

    While a cache is on loan (`lending`), whoever has it calls the original. Then that has a `SeenForward`,
    set and taken away in one step each, which passes by all calls but those with a cache that is recorded.

    names      the parameters of `model.forward`, in order
    clock      seconds, rising
    recorders  by the `id` of a working cache, as long as it is recorded and no forward over it runs
    """

    def __init__(self, model: Any, names: Sequence[str], clock: Callable[[], float]) -> None:
        self.names = names
        self.clock = clock
        self.recorders: dict[int, ForwardListener] = {}
        self.model = _stand_in(model, functools.partial(self.forward, model))
        self._original = model
        self._num_lent = 0

    def forward(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Make a forward by `call`, seen by the recorder of the cache that it is over."""
        given = dict(zip(self.names, args, strict=False)) | kwargs
        cache = id(given.get("past_key_values"))
        is_given_twice = len(given) < len(args) + len(kwargs)  # Python refuses such a call
        # Taken out until the forward is over: a call within the call is not another one.
        recorder = None if is_given_twice else self.recorders.pop(cache, None)
        if recorder is None:
            return call(*args, **kwargs)
        try:
            changed = recorder.forward_starts(given)
            output = call(*args, **kwargs) if changed is None else call(**changed)
            recorder.forward_ends(output)
        finally:
            self.recorders[cache] = recorder
        return output

    @contextmanager
    def lending(self) -> Generator[None, None, None]:
        """See what the original is fed, until the end of the block."""
        with _EXCHANGING:
            self._num_lent += 1
            if self._num_lent == 1:
                self._original.__dict__["forward"] = SeenForward(self, self._original)
        try:
            yield
        finally:
            with _EXCHANGING:
                self._num_lent -= 1
                _take_away(self._original.__dict__)

    @property
    def is_lending(self) -> bool:
        """Whether a cache is on loan."""
        return self._num_lent > 0


_EXCHANGING = threading.Lock()
"""Held while a model's forward is exchanged: several caches may have one model."""


class SeenForward:
    """A model's `forward` while caches are on loan: the one it has otherwise, seen by `watched`.

    `replaced` stood in the model's own attributes before; None where `forward` was its class's alone.
    """

    def __init__(self, watched: Watched, model: Any) -> None:
        functools.update_wrapper(self, model.forward)
        self._forward = model.forward
        self.watched = watched
        self.replaced = model.__dict__.get("forward")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.watched.forward(self._forward, *args, **kwargs)

    def beneath(self) -> Any:
        """Return the `forward` in the model's own attributes but for sessions; None for nothing."""
        replaced = self.replaced
        return replaced.beneath() if isinstance(replaced, SeenForward) else replaced

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._forward.__reduce_ex__(
            protocol
        )  # copied or pickled, it is the one of the model


def _take_away(attributes: dict[str, Any]) -> None:
    """Take away what nobody needs any more of what was put before a model's forward."""
    while (
        isinstance(seen := attributes.get("forward"), SeenForward) and not seen.watched.is_lending
    ):
        if seen.replaced is None:
            del attributes["forward"]
        else:
            attributes["forward"] = seen.replaced


def _stand_in(model: Any, forward: Callable[..., Any]) -> Any:
    """Return an object that is `model` in all but its class, where calls go to `forward`."""

    def call(_: Any, *args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

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
