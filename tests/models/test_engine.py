"""What computes in bfloat16: the layers of TensorFlow and ITEX do on some CPUs alone."""

import pytest

from memory_estimator.host import read_host
from models.config import UNetConfig
from models.engine import layers_have_bfloat16
from models.native import operations
from models.native.library import InstructionSetError, NativeOperations
from models.unet3d import build_unet3d


@pytest.mark.parametrize("variable", ["ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"])
def test_layers_that_cannot_compute_in_bfloat16_are_not_asked_to(monkeypatch, variable):
    """On a host without native operations, whose oneDNN may not use AVX-512."""
    monkeypatch.setenv(variable, "AVX2")
    monkeypatch.setattr(operations, "available", lambda: False)
    monkeypatch.setattr("memory_estimator.host.native_operations", NativeOperations)
    assert not layers_have_bfloat16()
    assert read_host().best_dtype == "float32"
    with pytest.raises(InstructionSetError, match=r"dtype must be float32 .*, got bfloat16; "):
        build_unet3d(UNetConfig(filters=2, depth=2, dtype="bfloat16"), (8, 8, 8), 1)


def test_an_engine_that_ends_the_process_is_known_by_the_cpu(monkeypatch):
    monkeypatch.setattr("models.engine.is_held_below_avx512", lambda: False)
    monkeypatch.setattr("models.engine.itex_is_loaded", lambda: True)
    monkeypatch.setattr("pathlib.Path.read_text", lambda *_, **__: "flags : fma avx avx2 f16c")
    assert not layers_have_bfloat16()
    monkeypatch.setattr("models.engine.itex_is_loaded", lambda: False)
    assert layers_have_bfloat16()


def test_emulated_products_do_not_make_bfloat16_the_default(needs_native, monkeypatch):
    monkeypatch.setenv("CPU3D_INSTRUCTION_SET", "amx_in_c")
    host = read_host()
    assert (host.native.bfloat16, host.best_dtype) == ("amx_in_c", "float32")
