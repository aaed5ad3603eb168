"""Fixtures of the engine tests."""

from tests.runner.onhost.rig import nvml, nvml_library, rig

__all__ = ["nvml", "nvml_library", "rig"]
