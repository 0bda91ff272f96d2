"""The C functions; CPU3D_KERNELS names a library that is built otherwise."""

import pytest

from models.native.build import existing
from tests.models.native.reference import LIBRARY, load


@pytest.fixture(scope="session")
def library():
    pair = existing()
    if not LIBRARY and pair is None:
        pytest.skip("needs native operations: run python -m models.native.build")
    return load(LIBRARY or pair.kernels)
