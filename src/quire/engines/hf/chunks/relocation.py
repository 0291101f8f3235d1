"""What the relocation gate has found of a model."""

from dataclasses import dataclass

from quire.tensors.rotary import Rotation


@dataclass(frozen=True, slots=True)
class Relocation:
    """How a model's keys are moved, how far, and where it is told which rows to compute again.

    rotations    how each layer's keys are turned; None: not at all
    positions    positions below this are vouched for
    error        the largest distance of K or V of a layer, of those the gate has met
    beyond       why positions behind that are not; None: the model has no more
    check_layer  where K and V of moved rows tell which of them to compute again
    drops_rows   whether rows can be left out behind that layer; else why not
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
