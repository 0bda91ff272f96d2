"""Train on whole volumes by plain Keras: compile, fit, save, load, continue. Half a minute on
made-up brains.

PYTHONPATH=. python examples/plain_keras.py --out /tmp/keras                    # makes six brains
PYTHONPATH=. python examples/plain_keras.py --out /tmp/keras --store STORE      # of `prepare`
"""

import argparse
from pathlib import Path

from cpu3d.host.apply import set_up

set_up()  # before TensorFlow: this host's threads, oneDNN, and Keras 2 if tf.keras would be Keras 3

import tensorflow as tf

from cpu3d.data.phantoms.command import write_phantom
from cpu3d.data.source import open_store, volume_dataset
from cpu3d.data.stores.prepare import prepare
from cpu3d.training.losses import DiceCrossEntropy, RegionDice
from models.config import UNetConfig
from models.unet3d import build_unet3d


def main(store_folder: Path, out: Path, epochs: int) -> list:
    """Loss of each epoch. `out` gets `best.keras`, by the held-out loss, and `last.keras`."""
    store = open_store(store_folder)
    regions = store.manifest.regions
    cases = len(store.cases("train"))
    channels = len(store.manifest.channels)
    unet = UNetConfig(channels=channels, outputs=len(regions), filters=8, depth=3)
    sizes = {"multiple": unet.divisors}  # each volume has its own, which the network can halve

    model = build_unet3d(unet, batch_size=1)
    model.compile(
        optimizer=tf.keras.optimizers.Adam(3e-3),
        loss=DiceCrossEntropy(),
        metrics=[RegionDice(index, name) for index, name in enumerate(regions)],
    )
    held_out = volume_dataset(store, split="val", shuffle=False, **sizes)
    keep_best = tf.keras.callbacks.ModelCheckpoint(str(out / "best.keras"), save_best_only=True)
    fit = {
        "steps_per_epoch": cases,
        "validation_data": held_out,
        "callbacks": [keep_best],
        "verbose": 2,
    }
    # One dataset for all epochs: a dataset of one epoch would give each the same order.
    half = epochs // 2
    volumes = volume_dataset(store, stop=half * cases, **sizes)
    history = model.fit(volumes, epochs=half, **fit).history
    model.save(str(out / "last.keras"))

    # Later, in another process: the same weights, optimizer, loss and metrics, and the next
    # volumes.
    model = tf.keras.models.load_model(str(out / "last.keras"))
    rest = volume_dataset(store, start=half * cases, stop=epochs * cases, **sizes)
    again = model.fit(rest, initial_epoch=half, epochs=epochs, **fit).history
    model.save(str(out / "last.keras"))

    for image, _ in held_out:
        shares = tf.reduce_mean(tf.sigmoid(model(image, training=False)), (0, 1, 2, 3))
        listed = ", ".join(f"{name} {share:.2%}" for name, share in zip(regions, shares.numpy()))
        print(f"{listed} of {' x '.join(map(str, image.shape[1:4]))} voxels")
    return history["loss"] + again["loss"]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--store", type=Path, help="a store that `prepare` made; without it, one of made-up brains"
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for the models")
    parser.add_argument("--epochs", type=int, default=6, help="passes over the cases (default 6)")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.store is None:
        args.store = args.out / "store"
        write_phantom(args.out / "brains", cases=6, shape=(40, 48, 36), seed=5, workers=1)
        prepare(args.out / "brains", args.store, workers=1)
    main(args.store, args.out, args.epochs)
