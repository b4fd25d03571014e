"""Export targets: one file each. Files register themselves."""

from __future__ import annotations

import sys

from ...utils.registry import import_submodules
from .base import TARGETS, Target, find_target, register

__all__ = ["TARGETS", "Target", "find_target", "register"]

import_submodules(sys.modules[__name__])
