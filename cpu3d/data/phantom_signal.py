"""The channels of a phantom: how bright its tissues and its tumour are in MRI."""

from typing import Dict

import numpy as np

from cpu3d.data.phantom_head import Head

SUBSTANCES = ("fluid", "grey", "white", "vessel", "caps", "oedema", "core", "rim", "necrosis")
SIGNALS = {
    "FLAIR": (70, 275, 225, 190, 380, 360, 320, 340, 200),
    "T1w": (130, 320, 430, 300, 400, 290, 250, 310, 180),
    "t1gd": (130, 330, 430, 760, 400, 295, 265, 760, 175),
    "T2w": (640, 380, 285, 200, 330, 540, 500, 430, 600),
}
"""Channel -> brightness of each of `SUBSTANCES`, in the arbitrary units of BraTS volumes."""

LANDMARK = {"FLAIR": 700, "T1w": 900, "t1gd": 700, "T2w": 800}
"""Channel -> brightness of a landmark: above all of `SIGNALS`, so that it is taken for nothing else."""


def signal_of(name: str, head: Head, tissue: Dict[str, np.ndarray], tumour: Dict[str, np.ndarray], rng) -> np.ndarray:
    """One channel in the head's box, int16: tissues mixed, tumour over them, uneven field, Rician noise, no skull."""
    level = {what: value * rng.uniform(0.94, 1.06) for what, value in zip(SUBSTANCES, SIGNALS[name])}
    signal = tissue["fluid"] * level["fluid"] + tissue["grey"] * level["grey"] + tissue["white"] * level["white"]
    for what in ("vessel", "caps"):
        signal += tissue[what] * (level[what] - signal)
    for what in ("oedema", "core", "rim", "necrosis"):
        signal += tumour[what] * (level[what] - signal)
    if "kernel" in tumour:
        signal += tumour["kernel"] * (level["rim"] - signal)
    if "landmark" in tumour:
        signal += tumour["landmark"] * (LANDMARK[name] - signal)
    signal *= 1 + 0.06 * tissue["texture"]
    signal *= np.exp(0.16 * head.field(3)) * rng.uniform(0.7, 1.4)
    brain = head.brain
    sigma = 0.045 * level["white"]
    noise = rng.standard_normal((2, int(np.count_nonzero(brain))), dtype=np.float32) * np.float32(sigma)
    out = np.zeros(head.box, np.int16)
    out[brain] = np.clip(np.rint(np.hypot(signal[brain] + noise[0], noise[1])), 1, 32767)
    return out
