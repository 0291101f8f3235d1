"""The relocation gate's result for a model."""

from dataclasses import dataclass

from quire.tensors.rotary import Rotation


@dataclass(frozen=True, slots=True)
class Relocation:
    """Rotations, range and check layer with which a model's passages are moved.

    rotations    how each layer's keys are turned; None: not at all
    positions    moves are exact for positions below this
    error        the largest error of K or V of a layer that the gate has measured
    beyond       why larger positions are not vouched for; None: the model has no more
    check_layer  layer whose K and V of moved rows tell which of them to compute again
    drops_rows   None: rows can be left out behind that layer; else why not
    """

    rotations: tuple[Rotation | None, ...]
    positions: int
    error: float
    beyond: str | None
    check_layer: int
    drops_rows: str | None

    @property
    def num_layers(self) -> int:
        """Layers of the model."""
        return len(self.rotations)
