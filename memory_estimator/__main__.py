"""What a training step holds in memory, itemised, before anything is allocated. Needs no TensorFlow.

    python -m memory_estimator --shape 240 240 160 --channels 4 --filters 16 --batch 1 --dtype bfloat16

So far: what is held when the forward pass ends, exact or derived line by line. Not yet counted: what lives only
during one op (gradients of maps, scratch), the runtime and the allocator. The peak of a step is therefore higher.
"""

import argparse
import dataclasses
import json
import sys
from typing import List, Optional

from memory_estimator.components import OPTIMIZER_SLOTS, bill
from memory_estimator.options import add_network_options, network_from
from models.config import DTYPES

GIB = 2**30


def main(argv: Optional[List[str]] = None) -> int:
    """Print the bill. Exit codes: 0 done, 2 bad input."""
    args = _parser().parse_args(argv)
    try:
        if args.batch < 1:
            raise ValueError(f"batch must be at least 1, got {args.batch}; give a positive number")
        config = network_from(args, args.dtype)
        lines = bill(config, tuple(args.shape), batch=args.batch, optimizer=args.optimizer)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    total = sum(line.bytes for line in lines)
    if args.json:
        print(json.dumps({"components": [dataclasses.asdict(line) for line in lines], "held_bytes": total}))
        return 0
    for line in lines:
        print(f"{line.name:24} {line.bytes / GIB:10.3f} GiB   {line.source}")
    print(f"{'held after forward':24} {total / GIB:10.3f} GiB   the peak of a step is higher; see --help")
    return 0


# --- Private helpers ---


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m memory_estimator",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--shape", type=int, nargs=3, required=True, metavar=("X", "Y", "Z"), help="voxels")
    parser.add_argument("--batch", type=int, default=1, metavar="B", help="default: 1")
    add_network_options(parser)
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--optimizer", choices=tuple(OPTIMIZER_SLOTS), default="adam")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


if __name__ == "__main__":
    sys.exit(main())
