"""The C functions, built on first use; CPU3D_KERNELS names a library that is built otherwise."""

import pytest

from models.native.build import build
from tests.models.native.reference import LIBRARY, load


@pytest.fixture(scope="session")
def library():
    try:
        return load(LIBRARY or build().kernels)
    except OSError as error:
        pytest.skip(str(error))
