"""Build native operations with the host's C compiler, in seconds: `python -m models.native.build`.

CC names the compiler, with its options if need be: `CC="gcc-13 -m64"`; CFLAGS is not read.
Libraries are in `built/` beside the sources, in a pair: "kernels" for ctypes and "tf_ops" for
TensorFlow, such as kernels-SOURCES.INSTRUCTION+SETS.so. They need this host's C library or a newer
one: hosts that share a checkout build them on the oldest.
"""

import contextlib
import ctypes
import hashlib
import importlib.util
import itertools
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Dict, List, NamedTuple, Optional, Sequence, Tuple

from models.native.instruction_sets import INSTRUCTION_SETS
from models.native.shared import header

HERE = Path(__file__).resolve().parent
BUILT = HERE / "built"
TENSORFLOW = "libtensorflow_framework.so.2"  # has the C interface; loaded before our library
OPTIONS = (
    *("-O3", "-std=gnu11", "-fPIC"),
    *("-Wall", "-Wextra", "-Wno-unused-function", "-Wno-unused-parameter"),
)
EXACT = ("-ffp-contract=off", "-fno-trapping-math", "-fno-math-errno")  # of `build_library`
ENTRIES = ("POINTWISE", "LOSS", "ORTHOGONALIZE", "DIRECT_FILTERS", "DIRECT_UP", "DIRECT_UP_FILTERS")
"""Functions of a file, of which every instruction set has one of its own name."""
INLINED = "-DALWAYS_INLINE=static inline"  # of answers: they compile in a third of the time


class Libraries(NamedTuple):
    """A pair of libraries, built together."""

    kernels: Path  # the functions of native.h alone, for ctypes
    tf_ops: Path  # the operations, for `tf.load_op_library`
    instruction_sets: Tuple[str, ...]  # that its compiler knew


def existing(folder: Optional[Path] = None) -> Optional[Libraries]:
    """The pair in a folder, by default BUILT, that is built from these sources; None without."""
    for kernels in (folder or BUILT).glob(f"kernels-{_digest()}.*.so"):
        tf_ops = kernels.with_name(kernels.name.replace("kernels", "tf_ops", 1))
        return Libraries(kernels, tf_ops, tuple(kernels.name.split(".")[1].split("+")))
    return None


def build(extra: Sequence[str] = (), folder: Optional[Path] = None) -> Libraries:
    """Compile a pair of libraries with all instruction sets that the compiler knows, put it into a
    folder, by default BUILT, in the place of any other, and return it. TensorFlow is not needed.

    `extra` are more options for compiler and linker. Raises OSError without x86-64 Linux or a
    compiler, and subprocess.CalledProcessError if the compiler fails.
    """
    folder = folder or BUILT
    check_platform()
    compiler = find_compiler()
    sets = tuple(name for name, each in INSTRUCTION_SETS.items() if _knows(compiler, each.options))
    if not sets:
        rule = "the C compiler must know AVX2, for which the least of the operations is"
        raise OSError(f"{rule}, got {shlex.join(compiler)}; install another, or name it in CC")
    name = f"{_digest()}.{'+'.join(sets)}.so"
    with tempfile.TemporaryDirectory() as scratch:
        _compile(compiler, sets, Path(scratch), tuple(extra))
        # The kernels last: where they are, tf_ops is.
        tf_ops = _install(Path(scratch) / "tf_ops", folder / f"tf_ops-{name}")
        kernels = _install(Path(scratch) / "kernels", folder / f"kernels-{name}")
    return Libraries(kernels, tf_ops, sets)


def build_library(sources: Path, name: str) -> ctypes.CDLL:
    """Load the library of a folder of C files that are no operations, compiled into the folder's
    `built/` if there is none of these sources or, as it is of a newer C library, it does not load.

    It is for AVX2, the least that operations need, and every product and sum is rounded as it is
    written, so that all hosts compute the same. Raises as `build`.
    """
    check_platform()
    options = (*OPTIONS, *EXACT, *INSTRUCTION_SETS["avx2"].options)
    library = sources / BUILT.name / f"{name}-{_digest(sources, options)}.so"
    with contextlib.suppress(OSError):
        return ctypes.CDLL(str(library))
    with tempfile.TemporaryDirectory() as scratch:
        made = Path(scratch) / name
        files = map(str, sorted(sources.glob("*.c")))
        command = [*find_compiler(), *options, "-shared", *files, "-o", str(made), "-lm"]
        subprocess.run(command, check=True)
        return ctypes.CDLL(str(_install(made, library)))


def check_platform() -> None:
    """Raise OSError where native operations cannot run."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        here = f"{sys.platform} {platform.machine()}"
        raise OSError(f"native operations must be built on Linux x86-64, got {here}")


def find_compiler() -> List[str]:
    """The words that the command line of the C compiler begins with. Raises OSError without one,
    and for a CC that names none."""
    chosen = os.environ.get("CC", "").strip()
    if chosen:
        words = [chosen] if shutil.which(chosen) else chosen.split()  # a path may have blanks
        if not shutil.which(words[0]):
            rule = f"CC must name a C compiler, got {chosen!r}"
            raise OSError(f"{rule}; unset it, or name one that is there")
        return words
    named = next(filter(shutil.which, ("cc", "gcc", "clang")), None)
    if named:
        return [named]
    if importlib.util.find_spec("ziglang"):
        target = ("-target", "x86_64-linux-gnu.2.28", "-fno-sanitize=undefined", "-g0")
        return [sys.executable, "-m", "ziglang", "cc", *target]
    rule = "native operations must be built by a C compiler, got none"
    raise OSError(f"{rule}; install gcc or `pip install ziglang`")


def _compile(compiler: List[str], sets: Sequence[str], scratch: Path, extra: Sequence[str]) -> None:
    (scratch / "shared.h").write_text(header(), encoding="utf-8")
    jobs: Dict[str, List[str]] = {name: [f"{name}.c"] for name in ("pool", "select", "tf_ops")}
    for name, kind in itertools.product(sets, ("kernels", "answers")):
        each = INSTRUCTION_SETS[name]
        options = each.options
        if kind == "answers":  # to what scratch is taken, on any CPU: nothing is computed
            defined = (option for option in each.options if option.startswith("-D"))
            options = ("-O0", "-Wno-psabi", f"-DLANES={each.lanes}", INLINED, *defined)
        names = [f"-DKERNELS={kind}_{name}", f'-DKERNELS_NAME="{name}"']
        names += [f"-D{entry}={entry.lower()}_{kind}_{name}" for entry in ENTRIES]
        for source in each.sources:
            jobs[f"{source}_{kind}_{name}"] = [f"{source}.c", *options, *names]

    def compile_file(name: str) -> None:
        command = [*compiler, *OPTIONS, *extra, f"-I{scratch}", "-c", *jobs[name]]
        subprocess.run([*command, "-o", str(scratch / f"{name}.o")], cwd=HERE, check=True)

    # One for each CPU: a compiler takes up to 150 MB.
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        list(pool.map(compile_file, jobs))
    common = [str(scratch / f"{name}.o") for name in jobs if name != "tf_ops"]
    link = [*compiler, "-shared", *extra]
    subprocess.run([*link, *common, "-o", str(scratch / "kernels"), "-lpthread"], check=True)
    # An empty library in the place of TensorFlow's: only its name goes into ours.
    tensorflow = scratch / TENSORFLOW
    soname = f"-Wl,-soname,{TENSORFLOW}"
    empty = [*compiler, "-shared", "-x", "c", os.devnull, soname, "-o", str(tensorflow)]
    subprocess.run(empty, check=True)
    tf_ops = [*common, str(scratch / "tf_ops.o"), "-Wl,--no-as-needed", str(tensorflow)]
    subprocess.run([*link, *tf_ops, "-o", str(scratch / "tf_ops"), "-lpthread"], check=True)


def _install(made: Path, library: Path) -> Path:
    """Put a library in its place at once, also beside a process that computes with the one before;
    others go."""
    folder = library.parent
    folder.mkdir(exist_ok=True, parents=True)
    partial = folder / f".{library.name}.{os.getpid()}"
    shutil.copy(made, partial)
    os.replace(partial, library)
    for old in folder.glob(f"{library.name.partition('-')[0]}-*.so"):
        if old != library:
            old.unlink(missing_ok=True)
    return library


def _knows(compiler: List[str], options: Sequence[str]) -> bool:
    """Whether a compiler has an instruction set's options; older ones lack the newest."""
    command = [*compiler, *options, "-E", "-x", "c", os.devnull]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def _digest(sources: Path = HERE, options: object = (OPTIONS, INSTRUCTION_SETS, header())) -> str:
    """Of all that libraries are made from but the compiler."""
    digest = hashlib.sha256(repr(options).encode())
    for source in sorted(sources.glob("*.[ch]")):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:12]


def main() -> None:
    try:
        build()
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"Native operations are not built; TensorFlow's layers compute everything: {error}")


if __name__ == "__main__":
    main()
