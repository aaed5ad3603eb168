"""What the screen remembers between openings: theme, class, columns, the folder of exports.

One small JSON file in the lab, never needed for anything else.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from runner.errors import LabError
from runner.lab import write_private


class Memory:
    """A few choices by name; a file that cannot be read or written is no reason to stop."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self._values: dict[str, Any] = {}
        if path is not None:
            try:
                found = json.loads(path.read_text(encoding="utf-8"))
                self._values = found if isinstance(found, dict) else {}
            except (OSError, ValueError):
                self._values = {}

    def get(self, name: str, default: Any = None) -> Any:
        """A choice made before."""
        return self._values.get(name, default)

    def put(self, name: str, value: Any) -> None:
        """Remember a choice."""
        self._values[name] = value
        if self.path is None or not self.path.parent.is_dir():
            return
        try:
            write_private(self.path, json.dumps(self._values).encode(), replace=True)
        except LabError:
            self.path = None  # a read-only or full disk: the choice holds until the screen closes
