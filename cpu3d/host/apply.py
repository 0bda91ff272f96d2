"""The one place that sets up this process for TensorFlow: environment, CPUs, engine, threads,
device.

    host, plan, tf = set_up()                       # on the CPU
    host, plan, tf = set_up("stock", "gpu:0")
    host, plan, tf = set_up(local=(1, 2))           # the second of two workers on this host

Engines: "itex" is TensorFlow with Intel's extension, "stock" without it, None is "itex" if it is
installed, else "stock"."""

import contextlib
import os
import sys
from typing import Any, Dict, Iterator, Optional, Tuple

from cpu3d.errors import InputError
from cpu3d.host.gpu import CPU, use_device
from cpu3d.host.thread_plan import THREADS, ThreadPlan, read_topology, thread_plans
from cpu3d.util.records import versions
from memory_estimator.host import Host
from memory_estimator.installed import how_to_install, itex_is_installed
from models.engine import itex_is_loaded
from models.native.library import native_operations


def apply(plan: ThreadPlan, engine: Optional[str] = None) -> None:
    """Set environment and CPUs of this process and its children by `plan`; the user's own variables
    stay.

    A kernel that refuses CPUs, as in some containers, is no error: the work is the same, only
    slower. `thread_plan.describe` shows what is in force. The engine is a choice of this call,
    so oneDNN follows it and not the environment. Raises RuntimeError when TensorFlow is already
    imported: it has read its environment by then."""
    if "tensorflow" in sys.modules:
        rule = "host.apply must run before TensorFlow is imported"
        raise RuntimeError(f"{rule}; import it through import_tensorflow")
    for name, value in plan.environment.items():
        os.environ.setdefault(name, value)
    if engine is not None:
        os.environ["TF_ENABLE_ONEDNN_OPTS"] = "1"
    major, minor, *_ = versions().get("tensorflow", "99.0").split(".")
    if (int(major), int(minor)) < (2, 16):
        # There it asks for a tf_keras that is not installed, and importing tf.keras fails; tf.keras
        # is Keras 2 anyway.
        os.environ.pop("TF_USE_LEGACY_KERAS", None)
    if plan.cpus and hasattr(os, "sched_setaffinity"):
        for thread in os.listdir("/proc/self/task"):
            with contextlib.suppress(OSError):  # it has ended, or the kernel does not let us
                os.sched_setaffinity(int(thread), plan.cpus)  # threads to come inherit it


def import_tensorflow(engine: Optional[str] = None) -> Any:
    """Import TensorFlow on `engine` with the threads of the environment, and return the module.

    Called again, it checks that the engine is the one asked for and returns the same module. Raises
    InputError when the engine is not installed, when a thread variable is no number, or when
    tf.keras is not Keras 2; RuntimeError when TensorFlow is already running on another engine."""
    if not installed(engine):
        install = f"{how_to_install('itex')} with Python 3.9 to 3.11 on Linux x86-64"
        raise InputError(
            "--engine must be installed, got itex without intel-extension-for-tensorflow; "
            f"{install}, or choose the engine stock"
        )
    threads = {name: os.environ.get(name, "0") for name in THREADS[:2]}  # 0 leaves it to TensorFlow
    for name, value in threads.items():
        if not value.isdigit():
            raise InputError(f"{name} must be a whole number of threads, got {value!r}; unset it")
    fresh = "tensorflow" not in sys.modules
    with _hidden_plugins() if engine == "stock" else contextlib.nullcontext():
        import tensorflow as tf
    if engine is not None and (engine == "itex") != itex_is_loaded():
        rule = "engine must be chosen before TensorFlow is imported"
        raise RuntimeError(f"{rule}, got {engine} on {engine_name(tf)}")
    _check_keras(tf)
    if fresh:
        intra_op, inter_op = map(int, threads.values())
        tf.config.threading.set_intra_op_parallelism_threads(intra_op)
        tf.config.threading.set_inter_op_parallelism_threads(inter_op)
    return tf


def set_up(
    engine: Optional[str] = None, device: str = CPU, local: Tuple[int, int] = (0, 1)
) -> Tuple[Host, ThreadPlan, Any]:
    """Plan for this host, apply the plan, import TensorFlow, hide the cards that are not `device`.

    Every command that computes begins with it. `local` is (index, count) of this process among the
    workers that share the host; it gets its part of the cores, and the host that is returned is all
    of it. If the process has imported TensorFlow before, the plan is only returned; engine and
    device are still checked, and RuntimeError is raised if it computes on another device. Raises
    InputError for numbers of workers that `thread_plans` refuses, and InstructionSetError as
    `native_operations`.
    """
    native_operations()  # which may be built first, and refuses before anything is imported
    topology = read_topology()
    fresh = "tensorflow" not in sys.modules
    index, count = local if fresh else (0, 1)  # later the topology is this process's part already
    plan = thread_plans(topology, count)[index]
    if fresh:
        apply(plan, engine)
    tf = import_tensorflow(engine)
    use_device(tf, device)
    from models.native import operations

    operations.available()  # whether this TensorFlow takes them: plans are made after this
    return topology.host, plan, tf


def in_force(plan: ThreadPlan) -> Dict[str, str]:
    """The plan's variables as they are in this process: a user's own setting has won over the
    plan's."""
    return {name: os.environ[name] for name in plan.environment if name in os.environ}


def engine_name(tf: Any) -> str:
    """The engine that really runs, such as "TensorFlow 2.15.1, oneDNN, ITEX 2.15.0.0".

    From the libraries mapped into this process, and TensorFlow's own answer on oneDNN.
    """
    from tensorflow.python.util import _pywrap_util_port

    onednn = "oneDNN" if _pywrap_util_port.IsMklEnabled() else "no oneDNN"
    name = f"TensorFlow {tf.__version__}, {onednn}"
    if itex_is_loaded():
        name += f", ITEX {versions().get('intel-extension-for-tensorflow')}"
    return name


def installed(engine: Optional[str]) -> bool:
    """Whether an engine is installed; imports nothing."""
    return engine != "itex" or itex_is_installed()


# --- Private helpers ---


@contextlib.contextmanager
def _hidden_plugins() -> Iterator[None]:
    """Let TensorFlow find no plug-in folder while it is imported: it loads every library there,
    ITEX's among them.

    There is no switch for it, but its __init__ asks `os.path.exists` for the folder in each
    site-packages."""
    exists = os.path.exists

    def is_seen(path: Any) -> bool:
        return os.path.basename(path) != "tensorflow-plugins" and exists(path)

    os.path.exists = is_seen
    try:
        yield
    finally:
        os.path.exists = exists


def _check_keras(tf: Any) -> None:
    """tf.keras is lazy: TF_USE_LEGACY_KERAS chooses the package behind it when it is first touched,
    here."""
    try:
        package = tf.keras.layers.Layer.__module__.partition(".")[0]
        version = f"{package} {sys.modules[package].__version__}"
    except ImportError as error:
        package = "none"
        version = str(error)
    if package != "tf_keras" and not version.startswith("keras 2."):
        install = "unset TF_USE_LEGACY_KERAS and install tf_keras of TensorFlow's version"
        raise InputError(
            f"tf.keras must be Keras 2, got {version} with TensorFlow {tf.__version__}; "
            f"{install}, or {how_to_install()}"
        )
