"""The C functions; CPU3D_KERNELS names a library that is built otherwise."""

import pytest

from models.native.build import existing
from tests.models.native.reference import DTYPES, KERNELS, LIBRARY, Kernel, load


@pytest.fixture(scope="session")
def library():
    pair = existing()
    if not LIBRARY and pair is None:
        pytest.skip("needs native operations: run python -m models.native.build")
    return load(LIBRARY or pair.kernels)


@pytest.fixture(params=KERNELS, ids="-".join)
def kernel(request, library):
    name, dtype = request.param
    if not library.native_kernels(name.encode(), DTYPES[dtype][0]):
        pytest.skip(f"needs a CPU with {name}")
    return Kernel(library, name, dtype)
