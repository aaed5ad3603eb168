"""Fixtures of the engine tests."""

from tests.runner.engines.sshrig import net
from tests.runner.onhost.rig import nvml, nvml_library, rig

__all__ = ["net", "nvml", "nvml_library", "rig"]
