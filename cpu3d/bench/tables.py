"""Print the README's tables from benchmark records, as Markdown.

./run.sh bench tables --records records
"""

import argparse
from pathlib import Path
from typing import Any, Dict, List, Optional

from cpu3d.bench.engines import ENGINE_NAMES
from cpu3d.bench.record import read_records

GIB = 2**30


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--records", type=Path, required=True, metavar="DIR", help="folder of .jsonl records")


def run(args: argparse.Namespace) -> int:
    print("\n".join(tables(args.records)))
    return 0


def tables(folder: Path) -> List[str]:
    """The lines of all tables: the newest record of each kind counts."""
    step, engines = (read_records(folder / f"{kind}.jsonl", kind)[-1] for kind in ("step", "engines"))
    return [*step_table(step), "", *engine_table(engines)]


def step_table(record: Dict[str, Any]) -> List[str]:
    """Our step beside its peers."""
    unet = record["unet"]
    lines = [
        f"{_shape(record)} x {unet['channels']}, {unet['filters']} filters, batch {record['batch']}, {unet['dtype']}, "
        f"{unet['norm']} norm, {record['host']['cores']} cores of {record['host']['cpu']}:",
        "",
        "| | s a step | process peak | against ours |",
        "|---|---|---|---|",
        f"| this project, {record['engine_name']} | {record['step_s']:.2f} | {_gib(record['process_peak_bytes'])} | |",
    ]
    for peer in record["peers"]:
        lines.append(
            f"| {peer['peer']}, {'compiled' if '--compile' in peer['options'] else 'eager'} | {peer['step_s']:.2f} | "
            f"{_gib(peer['process_peak_bytes'])} | {peer['ratio']:.2f} ({peer['ratio_min']:.2f} to "
            f"{peer['ratio_max']:.2f}) |"
        )
    lines += [
        "",
        f"Our step runs at {record['gflops']:.0f} GFLOP/s, {record['matmul_peak_share']:.0%} of the matrix product of "
        f"this host ({record['matmul_gflops']:.0f}).",
    ]
    return lines


def engine_table(record: Dict[str, Any]) -> List[str]:
    """The paper's Fig. 2: every engine and dtype against stock TensorFlow without oneDNN in float32."""
    lines = [
        f"{_shape(record)}, the same network, each in a fresh process:",
        "",
        "| engine | dtype | s a step | speed-up | process peak |",
        "|---|---|---|---|---|",
    ]
    for row in record["rows"]:
        name, dtype = ENGINE_NAMES[row["engine"]], row["unet"]["dtype"]
        if row["step_s"] is None:
            lines.append(f"| {name} | {dtype} | cannot | - | - |")
        else:
            peak = _gib(row["process_peak_bytes"])
            lines.append(f"| {name} | {dtype} | {row['step_s']:.2f} | {row['speedup']:.1f} | {peak} |")
    return lines


# --- Private helpers ---


def _shape(record: Dict[str, Any]) -> str:
    return " x ".join(map(str, record["shape"]))


def _gib(size_bytes: Optional[int]) -> str:
    return "-" if size_bytes is None else f"{size_bytes / GIB:.1f} GiB"
