"""How large everything is that `bench data` works on: as in the sources, or tiny, for a trial of the benchmark."""

from dataclasses import dataclass
from typing import Tuple

Shape3 = Tuple[int, int, int]


@dataclass(frozen=True)
class Scale:
    """Sizes and counts of one benchmark."""

    case: Shape3 = (240, 240, 155)
    """Voxels of a brain, four channels each: BraTS."""
    brains: int = 10
    """Different brains that whole volumes are streamed from."""
    ct: Shape3 = (512, 512, 300)
    """Voxels of a CT, one channel."""
    cts: int = 32
    """Different CTs: S0's training set."""
    patch: Shape3 = (96, 96, 96)
    """S0's patch, cut from a CT or a brain."""
    patches: int = 8
    """Patches of a round, where one alone would be over before the clock has moved."""
    batch: int = 2
    """Patches a training step."""
    filters: int = 2
    depth: int = 4
    """Of the network that is trained on patches: a step of it takes two cores a quarter of a second, about what the
    network of S0's kind takes a GPU. With a longer step loading would hide behind it, whichever way it is done."""
    warm_up: int = 4
    train_steps: int = 40
    """Training steps of a round, after those to warm up."""
    grid_of_ladder: Shape3 = (96, 96, 96)
    """Voxels around a brain's middle that the ladder's network sees."""
    ladder_epochs: int = 2
    """Timed ones a round; one before them is not."""
    wait_steps: int = 12
    """Steps of the trainer's own network, for the wait's share."""
    wait_filters: int = 16
    wait_depth: int = 5
    core_volumes: int = 20
    """Volumes over which the loader's processor time is taken."""
    originals: int = 484
    copies: int = 101
    """Entries of the large store: S4's 484 cases and what it made of each."""
    large_shape: Shape3 = (64, 64, 48)
    """Voxels of the brains that those entries share."""
    large_samples: int = 8000
    """Samples streamed from the large store."""
    peer_volumes: int = 6
    """CTs that MONAI's data sets hold: all 32 decoded to float32 would be 10 GB."""
    peer_epochs: int = 4


FULL = Scale()

TINY = Scale(
    case=(32, 40, 28),
    brains=2,
    ct=(40, 36, 30),
    cts=2,
    patch=(16, 16, 16),
    patches=2,
    filters=2,
    depth=2,
    warm_up=1,
    train_steps=2,
    grid_of_ladder=(16, 16, 16),
    ladder_epochs=1,
    wait_steps=2,
    wait_filters=2,
    wait_depth=2,
    core_volumes=2,
    originals=5,
    copies=3,
    large_shape=(24, 24, 24),
    large_samples=12,
    peer_volumes=2,
    peer_epochs=1,
)
