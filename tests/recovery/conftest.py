"""Jobs that meet in a temporary folder, as in tests/runtime."""

from runtime.conftest import between, brief

__all__ = ["between", "brief"]
