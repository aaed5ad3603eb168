"""Fixtures the runner's tests share: real supervisors, the NVML stand-in, ssh hosts. Defined beside what they make."""

from tests.runner.engines.sshrig import net
from tests.runner.onhost.rig import nvml, nvml_library, rig, small_disk

__all__ = ["net", "nvml", "nvml_library", "rig", "small_disk"]
