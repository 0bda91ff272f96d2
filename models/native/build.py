"""Build own operations with the host's C compiler, in seconds: `python -m models.native.build`.

CC names the compiler, with its options if need be: `CC="gcc-13 -m64"`; CFLAGS is not read.
Libraries are in `built/` beside the sources, in pairs: "kernels" for ctypes and "door" for
TensorFlow. The names of a pair tell what it is:

    kernels-SOURCES.PLATFORM.INSTRUCTION+SETS.CHECKSUM.so
    door-SOURCES.PLATFORM.INSTRUCTION+SETS.CHECKSUM_OF_KERNELS.CHECKSUM.so

Hosts that share a checkout may each have a pair of their own there.
"""

import contextlib
import ctypes
import hashlib
import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

from models.native.instruction_sets import INSTRUCTION_SETS
from models.native.shared import header

HERE = Path(__file__).resolve().parent
BUILT = HERE / "built"
LIBRARIES = ("kernels", "door")
TENSORFLOW = "libtensorflow_framework.so.2"  # has the C interface; loaded before our library
OPTIONS = (
    *("-O3", "-std=gnu11", "-fPIC"),
    *("-Wall", "-Wextra", "-Wno-unused-function", "-Wno-unused-parameter"),
)
EXACT = ("-ffp-contract=off", "-fno-trapping-math", "-fno-math-errno")  # of `build_library`
ENTRIES = ("POINTWISE", "LOSS", "ORTHOGONALIZE", "DIRECT_FILTERS", "DIRECT_UP", "DIRECT_UP_FILTERS")
"""Functions of a file, of which every instruction set has one of its own name."""
LOCK_WAIT_S = 300.0  # for another process that builds in the same folder


class Libraries(NamedTuple):
    """A pair of libraries, built together."""

    kernels: Path  # the functions of native.h alone, for ctypes
    door: Path  # the operations, for `tf.load_op_library`
    platform: str  # that it was built on
    instruction_sets: Tuple[str, ...]  # that its compiler knew


def existing(folder: Optional[Path] = None) -> List[Libraries]:
    """The pairs that are built from these sources and undamaged, those of this platform and with
    most instruction sets first."""
    pairs = []
    for kernels in (folder or BUILT).glob(f"kernels-{_digest()}.*.so"):
        about, checksum, _ = kernels.name.split(".", 1)[1].rsplit(".", 2)
        beside = kernels.parent.glob(f"door-{_digest()}.{about}.{checksum}.*.so")
        doors = list(filter(_is_whole, beside))
        if doors and _is_whole(kernels):
            built_on, _, sets = about.rpartition(".")
            pairs.append(Libraries(kernels, doors[0], built_on, tuple(sets.split("+"))))

    def order(pair: Libraries) -> Tuple[bool, int, Path]:
        return pair.platform != platform_name(), -len(pair.instruction_sets), pair.kernels

    return sorted(pairs, key=order)


def are_left(folder: Optional[Path] = None) -> bool:
    """Whether there are libraries of these sources at all, damaged ones and those for other hosts
    included."""
    return any((folder or BUILT).glob(f"*-{_digest()}.*.so"))


def kernels_library() -> Optional[Path]:
    """The first pair's functions of native.h; None if none is built from these sources."""
    return next((pair.kernels for pair in existing()), None)


def door_library() -> Optional[Path]:
    """The first pair's operations; None if none is built from these sources."""
    return next((pair.door for pair in existing()), None)


def build(
    extra: Sequence[str] = (),
    folder: Optional[Path] = None,
    refused: Sequence[Libraries] = (),
) -> List[Path]:
    """Compile the pair of libraries for this platform, unless there is one with all instruction
    sets that the compiler knows, and return it. TensorFlow is not needed. Other pairs of these
    sources stay beside it; damaged ones, those of other sources, and what a killed build has left,
    are removed.

    `extra` are more options for compiler and linker, `folder` is BUILT by default, `refused` are
    pairs that do not load here. Raises OSError without x86-64 Linux or a compiler, and
    subprocess.CalledProcessError if the compiler fails.
    """
    folder = folder or BUILT
    check_platform()
    compiler = find_compiler()
    sets = tuple(name for name, each in INSTRUCTION_SETS.items() if _knows(compiler, each.options))
    if not sets:
        rule = "the C compiler must know AVX2, for which the least of the operations is"
        raise OSError(f"{rule}, got {shlex.join(compiler)}; install another, or name it in CC")
    about = f"{_digest()}.{platform_name()}.{'+'.join(sets)}"
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder) as is_held:  # whoever waited finds what the other one has built
        _remove_left(folder, at_least_s=0.0 if is_held else LOCK_WAIT_S)
        usable = [pair for pair in existing(folder) if pair not in refused]
        own = [pair for pair in usable if pair.platform == platform_name()]
        done = [pair for pair in own if set(sets) <= set(pair.instruction_sets)]
        if done and not extra:
            return [done[0].kernels, done[0].door]
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            _compile(compiler, sets, Path(scratch), tuple(extra))
            made = [Path(scratch) / name for name in LIBRARIES]
            kernels, door = map(_checksum, made)
            wanted = [folder / f"kernels-{about}.{kernels}.so"]
            wanted += [folder / f"door-{about}.{kernels}.{door}.so"]
            for path, name in zip(made, wanted):
                os.replace(path, name)
        _remove_others(folder, _digest(), wanted)
        return wanted


def build_library(sources: Path, name: str) -> Path:
    """The library, for ctypes, of a folder of C files that are no operations: the one of these
    sources that loads here, compiled first if there is none, into the folder's `built/`.

    It is for AVX2, the least that operations need, and every product and sum is rounded as it is
    written, so that all hosts compute the same. Raises as `build`.
    """
    check_platform()
    folder = sources / BUILT.name
    options = (*OPTIONS, *EXACT, *INSTRUCTION_SETS["avx2"].options)
    digest = _digest(sources, options)

    def usable() -> Optional[Path]:
        return next(filter(_loads, sorted(folder.glob(f"{name}-{digest}.*.so"))), None)

    library = usable()
    if library:
        return library
    compiler = find_compiler()
    folder.mkdir(exist_ok=True)
    with _locked(folder) as is_held:
        _remove_left(folder, at_least_s=0.0 if is_held else LOCK_WAIT_S)
        library = usable()
        if library:  # of the process that held the folder
            return library
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            made = Path(scratch) / name
            files = map(str, sorted(sources.glob("*.c")))
            command = [*compiler, *options, "-shared", *files, "-o", str(made), "-lm"]
            subprocess.run(command, check=True)
            library = folder / f"{name}-{digest}.{platform_name()}.{_checksum(made)}.so"
            os.replace(made, library)
        _remove_others(folder, digest, (library,))
    return library


def check_platform() -> None:
    """Raise OSError where own operations cannot run."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        here = f"{sys.platform} {platform.machine()}"
        raise OSError(f"own operations must be built on Linux x86-64, got {here}")


def platform_name() -> str:
    """This system and its C library, such as "x86_64-glibc2.36": a library may need this one or a
    newer one."""
    library, version = platform.libc_ver()
    return f"{platform.machine()}-{library or 'libc'}{version}"


def find_compiler() -> List[str]:
    """The words that the command line of the C compiler begins with. Raises OSError without one,
    and for a CC that names none."""
    chosen = os.environ.get("CC", "").strip()
    if chosen:
        try:
            # A path may have blanks.
            words = [chosen] if shutil.which(chosen) else shlex.split(chosen)
        except ValueError:  # of quotes
            words = []
        if not words or not shutil.which(words[0]):
            rule = f"CC must name a C compiler, got {chosen!r}"
            raise OSError(f"{rule}; unset it, or name one that is there")
        return words
    named = next(filter(shutil.which, ("cc", "gcc", "clang")), None)
    if named:
        return [named]
    if importlib.util.find_spec("ziglang"):
        target = ("-target", "x86_64-linux-gnu.2.28", "-fno-sanitize=undefined")
        return [sys.executable, "-m", "ziglang", "cc", *target]
    rule = "own operations must be built by a C compiler, got none"
    raise OSError(f"{rule}; install gcc or `pip install ziglang`")


def _compile(compiler: List[str], sets: Sequence[str], scratch: Path, extra: Sequence[str]) -> None:
    (scratch / "shared.h").write_text(header(), encoding="utf-8")
    jobs: Dict[str, List[str]] = {name: [f"{name}.c"] for name in ("pool", "select", "door")}
    for name in sets:
        each = INSTRUCTION_SETS[name]
        names = [f"-DKERNELS=kernels_{name}", f'-DKERNELS_NAME="{name}"']
        names += [f"-D{operations}={operations.lower()}_{name}" for operations in ENTRIES]
        for source in each.sources:
            jobs[f"{source}_{name}"] = [f"{source}.c", *each.options, *names]

    def compile_file(name: str) -> None:
        command = [*compiler, *OPTIONS, *extra, f"-I{scratch}", "-c", *jobs[name]]
        subprocess.run([*command, "-o", str(scratch / f"{name}.o")], cwd=HERE, check=True)

    # One for each CPU: a compiler takes up to 150 MB.
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        list(pool.map(compile_file, jobs))
    common = [str(scratch / f"{name}.o") for name in jobs if name != "door"]
    link = [*compiler, "-shared", *extra]
    subprocess.run([*link, *common, "-o", str(scratch / "kernels"), "-lpthread"], check=True)
    # An empty library in the place of TensorFlow's: only its name goes into ours.
    tensorflow = scratch / TENSORFLOW
    soname = f"-Wl,-soname,{TENSORFLOW}"
    empty = [*compiler, "-shared", "-x", "c", os.devnull, soname, "-o", str(tensorflow)]
    subprocess.run(empty, check=True)
    door = [*common, str(scratch / "door.o"), "-Wl,--no-as-needed", str(tensorflow)]
    subprocess.run([*link, *door, "-o", str(scratch / "door"), "-lpthread"], check=True)


def _remove_left(folder: Path, at_least_s: float) -> None:
    """Remove what killed builds have left, of at least that age: where nothing can be locked, a
    young folder may be that of a build that is running."""
    for left in folder.glob("tmp*"):
        with contextlib.suppress(OSError):
            if time.time() - left.stat().st_mtime >= at_least_s:
                shutil.rmtree(left)


def _remove_others(folder: Path, digest: str, wanted: Sequence[Path]) -> None:
    """Remove libraries of other sources and damaged ones. A whole one of these stays: a process on
    another host may compute with it."""
    for old in {*folder.glob("*.so")} - {*wanted}:
        if digest not in old.name or not _is_whole(old):
            with contextlib.suppress(OSError):
                old.unlink()


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


def _checksum(path: Path) -> str:
    return f"{zlib.crc32(path.read_bytes()):08x}"


def _is_whole(path: Path) -> bool:
    """Whether a library is as it was built: a full disk or a broken copy would have changed it."""
    try:
        return path.name.split(".")[-2] == _checksum(path)
    except OSError:
        return False


def _loads(path: Path) -> bool:
    """Whether a library is whole, and its platform is ours or an older one."""
    try:
        return _is_whole(path) and bool(ctypes.CDLL(str(path)))
    except OSError:
        return False


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[bool]:
    """Hold a folder while building in it; false on a file system without locks, where nothing is
    held. The system lets go of it when the process ends, however that ends."""
    import fcntl  # which Windows has not

    handle = os.open(folder, os.O_RDONLY)
    end = time.monotonic() + LOCK_WAIT_S
    is_held = False
    try:
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                is_held = True
                break
            except BlockingIOError:
                if time.monotonic() >= end:
                    rule = f"{folder} must be free within {LOCK_WAIT_S:.0f} s to build in"
                    todo = "end the process that builds there"
                    raise OSError(f"{rule}, got a build that has not ended; {todo}") from None
                time.sleep(0.1)
            except OSError:
                break
        yield is_held
    finally:
        os.close(handle)


def main() -> None:
    try:
        build()
    except (OSError, subprocess.CalledProcessError) as error:
        if not existing():
            print(f"Own operations are not built; TensorFlow's layers compute everything: {error}")


if __name__ == "__main__":
    main()
