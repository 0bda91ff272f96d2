"""Build own operations with the host's C compiler, in seconds: `python -m models.native.build`.

The libraries are in `built/` beside the sources, with a hash of sources and compiler's options in their names.
"""

import contextlib
import hashlib
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import List, Optional, Sequence

HERE = Path(__file__).resolve().parent
BUILT = HERE / "built"
TENSORFLOW = "libtensorflow_framework.so.2"  # has the C interface; loaded before our library
OPTIONS = ("-O3", "-std=gnu11", "-fPIC", "-Wall", "-Wextra", "-Wno-unused-function", "-Wno-unused-parameter")
AVX2 = ("-mavx2", "-mfma")
AVX512 = (*AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mprefer-vector-width=512")
INSTRUCTION_SETS = {
    "avx2": AVX2,
    "avx512": AVX512,
    "avx512_bf16": (*AVX512, "-mavx512bf16", "-DBFLOAT16_ROWS"),
    "amx": (*AVX512, "-mavx512bf16", "-mamx-tile", "-mamx-bf16", "-DBFLOAT16_ROWS", "-DTILES"),
    "amx_in_c": (*AVX2, "-DBFLOAT16_ROWS", "-DTILES"),
}
"""Name -> options with which operations.c is compiled for it."""


def kernels_library() -> Optional[Path]:
    """The functions of native.h alone, for ctypes; None if they are not built from these sources."""
    return _existing("kernels")


def door_library() -> Optional[Path]:
    """The operations for `tf.load_op_library`; None if they are not built from these sources."""
    return _existing("door")


def build(extra: Sequence[str] = (), folder: Optional[Path] = None) -> List[Path]:
    """Compile the libraries that are not built yet, and return all. TensorFlow is not needed.

    `extra` are more options for compiler and linker, `folder` is BUILT by default. Raises OSError without x86-64 Linux
    or a compiler, and subprocess.CalledProcessError if the compiler fails.
    """
    if sys.platform != "linux" or platform.machine() != "x86_64":
        raise OSError(f"own operations must be built on Linux x86-64, got {sys.platform} {platform.machine()}")
    folder = folder or BUILT
    wanted = {name: _path(name, folder) for name in ("kernels", "door")}
    if extra or not all(path.exists() for path in wanted.values()):
        compiler = _compiler()
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            _compile(compiler, Path(scratch), tuple(extra))
            for name, path in wanted.items():
                os.replace(Path(scratch) / name, path)
        for old in {*folder.glob("*.so")} - {*wanted.values()}:
            with contextlib.suppress(OSError):
                old.unlink()
    return list(wanted.values())


def _compile(compiler: List[str], scratch: Path, extra: Sequence[str]) -> None:
    jobs = {"pool": ["pool.c"], "select": ["select.c"], "door": ["door.c"]}
    for name, options in INSTRUCTION_SETS.items():
        if not _knows(compiler, options):
            continue
        names = [f"-DKERNELS=kernels_{name}", f'-DKERNELS_NAME="{name}"', f"-DPASSES=passes_{name}"]
        jobs[name], jobs[f"passes_{name}"] = ["operations.c", *options, *names], ["passes.c", *options, *names]
    compile_ = [*compiler, *OPTIONS, *extra, "-c"]
    running = [
        subprocess.Popen([*compile_, *job, "-o", str(scratch / f"{name}.o")], cwd=HERE) for name, job in jobs.items()
    ]
    for failed in [process for process in running if process.wait()]:
        raise subprocess.CalledProcessError(failed.returncode, failed.args)
    common = [str(scratch / f"{name}.o") for name in jobs if name != "door"]
    link = [*compiler, "-shared", *extra]
    subprocess.run([*link, *common, "-o", str(scratch / "kernels"), "-lpthread"], check=True)
    # An empty library in the place of TensorFlow's: only its name goes into ours.
    tensorflow = scratch / TENSORFLOW
    empty = [*compiler, "-shared", "-x", "c", os.devnull, f"-Wl,-soname,{TENSORFLOW}", "-o", str(tensorflow)]
    subprocess.run(empty, check=True)
    door = [*common, str(scratch / "door.o"), "-Wl,--no-as-needed", str(tensorflow)]
    subprocess.run([*link, *door, "-o", str(scratch / "door"), "-lpthread"], check=True)


def _knows(compiler: List[str], options: Sequence[str]) -> bool:
    """Whether a compiler has an instruction set's options; older ones lack the newest."""
    command = [*compiler, *options, "-E", "-x", "c", os.devnull]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def _compiler() -> List[str]:
    named = next(filter(shutil.which, filter(None, (os.environ.get("CC"), "cc", "gcc", "clang"))), None)
    if named:
        return [named]
    if importlib.util.find_spec("ziglang"):
        return [sys.executable, "-m", "ziglang", "cc", "-target", "x86_64-linux-gnu.2.28", "-fno-sanitize=undefined"]
    raise OSError("own operations must be built by a C compiler, got none; install gcc or `pip install ziglang`")


def _path(name: str, folder: Path) -> Path:
    digest = hashlib.sha256(repr((OPTIONS, INSTRUCTION_SETS)).encode())
    for source in sorted(HERE.glob("*.[ch]")):
        digest.update(source.read_bytes())
    return folder / f"{name}-{digest.hexdigest()[:12]}.so"


def _existing(name: str) -> Optional[Path]:
    path = _path(name, BUILT)
    return path if path.exists() else None


def main() -> None:
    try:
        build()
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"Own operations are not built; TensorFlow's layers compute everything: {error}")


if __name__ == "__main__":
    main()
