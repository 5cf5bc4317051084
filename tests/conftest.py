"""Shared by all tests: one thread per process, no display, nothing written outside temporary folders."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MUJOCO_GL", "egl")
os.environ.setdefault("LP_NUM_THREADS", "1")
os.environ.setdefault("VLA_FLEET_LOG", "INFO")
