"""The relocation gate's result for a model."""

from dataclasses import dataclass

from quire.tensors.rotary import Rotation

_DEEP = 0.75


@dataclass(frozen=True, slots=True)
class Relocation:
    """Rotations and range with which a model's passages are moved.

    rotations    how each layer's keys are turned; None: not at all
    positions    moves are exact for positions below this
    error        the largest error of K or V of a layer that the gate has measured
    beyond       why larger positions are not vouched for; None: the model has no more
    drops_rows   None: rows can be left out behind a layer; else why not
    shows        None: layers show their attention probabilities; else why not
    """

    rotations: tuple[Rotation | None, ...]
    positions: int
    error: float
    beyond: str | None
    drops_rows: str | None
    shows: str | None

    @property
    def num_layers(self) -> int:
        """Layers of the model."""
        return len(self.rotations)

    @property
    def check_layer(self) -> int:
        """The check layer of selectors that name none: behind three quarters of the layers."""
        return max(min(int(self.num_layers * _DEEP), self.num_layers - 1), 1)
