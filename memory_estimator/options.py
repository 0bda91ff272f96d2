"""The command line of a network: options of UNetConfig, for the estimator and for what measures its predictions."""

import argparse

from models.config import NETWORKS, NORMS, UPS, UNetConfig


def add_network_options(parser: argparse.ArgumentParser) -> None:
    """Add every setting of the network that memory and time depend on, the batch and the input shape aside."""
    parser.add_argument("--channels", type=int, default=4, metavar="C", help="image channels (default: 4)")
    parser.add_argument("--classes", type=int, default=3, metavar="K", help="output regions (default: 3)")
    parser.add_argument("--filters", type=int, default=16, metavar="F", help="default: 16")
    parser.add_argument("--depth", type=int, default=5, metavar="L", help="default: 5")
    parser.add_argument("--network", choices=NETWORKS, default="unet3d", help="default: unet3d")
    parser.add_argument("--norm", choices=NORMS, default="instance", help="default: instance")
    parser.add_argument("--up", choices=UPS, default="transposed", help="default: transposed")
    parser.add_argument("--residual", action="store_true", help="residual blocks")
    parser.add_argument("--deep-supervision", action="store_true", help="a loss at every decoder level")


def network_from(args: argparse.Namespace, dtype: str) -> UNetConfig:
    """The network of the options of `add_network_options`. Raises ValueError for settings out of range."""
    return UNetConfig(
        channels=args.channels,
        outputs=args.classes,
        filters=args.filters,
        depth=args.depth,
        network=args.network,
        norm=args.norm,
        up=args.up,
        residual=args.residual,
        deep_supervision=args.deep_supervision,
        dtype=dtype,
    )
