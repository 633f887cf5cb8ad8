"""The engine is tested as the server runs it: on a CPU with its BLAS and attention in place, on a GPU untouched."""

import pytest

from mlxcel.engine import cpu


@pytest.fixture(scope="session", autouse=True)
def prepared():
    cpu.prepare()
