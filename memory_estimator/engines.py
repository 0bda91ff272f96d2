"""Which engine "auto" is here. Imports neither: it is asked on laptops that have no TensorFlow, and by the trainer."""

import importlib.util


def itex_is_installed() -> bool:
    """Whether TensorFlow would load Intel's extension."""
    return importlib.util.find_spec("intel_extension_for_tensorflow") is not None


def installed_engine() -> str:
    """ "itex" unless TensorFlow is installed here without it: a laptop without either plans for the fast engine."""
    return "stock" if importlib.util.find_spec("tensorflow") and not itex_is_installed() else "itex"
