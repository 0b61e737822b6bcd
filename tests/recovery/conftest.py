"""Jobs that meet in a temporary folder, as in tests/regions."""

from regions.conftest import between, brief

__all__ = ["between", "brief"]
