"""An interpreter that has done its imports and waits: `python warm.py GATE_FD MODULES script.py args…`, started by a waiting
supervisor.

Imports of torch take 8-9 s on a GPU host; done while the run before still trains, they cost no slot time. Imported modules must not
open the GPU at import.
"""

import importlib
import os
import runpy
import sys


def main() -> None:
    gate, modules, argv = int(sys.argv[1]), sys.argv[2].split(","), sys.argv[3:]
    sys.path[0] = os.getcwd()  # as for `python script.py` in the run's folder; our own folder has no business there
    for name in modules:
        try:
            importlib.import_module(name)
        except Exception:  # noqa: BLE001 - the script will meet the same failure and report it in its own words
            break
    go = os.read(gate, 16)
    os.close(gate)
    if not go:
        raise SystemExit(0)  # withdrawn
    sys.argv = argv
    runpy.run_path(argv[0], run_name="__main__")


main()
