"""Fixtures of the on-host tests."""

from tests.runner.onhost.rig import nvml, nvml_library, rig, small_disk

__all__ = ["nvml", "nvml_library", "rig", "small_disk"]
