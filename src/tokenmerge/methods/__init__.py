"""Methods: one file each, with a card in docs/methods and a row in the contract table of the tests. Files register
themselves."""

from __future__ import annotations

import sys

from ..core.matching import View
from ..utils.registry import import_submodules
from .base import METHODS, Method, Rule, Stage, compared_methods, exporting_methods, find_method, register
from .serialization import from_dict, load, load_or_parse, parse, save

__all__ = [
    "METHODS",
    "Method",
    "Rule",
    "Stage",
    "View",
    "compared_methods",
    "exporting_methods",
    "find_method",
    "from_dict",
    "load",
    "load_or_parse",
    "parse",
    "register",
    "save",
]

import_submodules(sys.modules[__name__])
for _name in sorted(METHODS, key=str.lower):  # an order that does not depend on imports
    METHODS[_name] = METHODS.pop(_name)
