"""Runs a module as a program that dies with its parent: ``python -P -m pipelines.tied PARENT MODULE ...``.

A pull that is killed must not leave a pip behind that goes on filling the disk.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys

_PR_SET_PDEATHSIG = 1  # prctl(2)


def main() -> None:
    """Ties this process to its parent, then becomes the module."""
    parent, module = int(sys.argv[1]), sys.argv[2]
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it was faster
        sys.exit(1)
    sys.argv = [module, *sys.argv[3:]]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
