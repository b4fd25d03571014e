"""tokenmerge: Vision Transformers, cheaper at inference, without retraining.

    tokenmerge.apply(model, tokenmerge.ATM(alpha=0.98, beta=0.035, theta_min=0.84))

Names are loaded when they are first used, so that `tokenmerge --help` need not wait for torch. (For that, no module may
bear the name of a function: importing it would put the module in the function's place.)
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .backbones import Unsupported
    from .benchmarking import Timing, bench
    from .cost import Cost
    from .evaluation import Result, evaluate
    from .loading import load_images, load_model
    from .methods import ATM, ConstantThreshold, Method, NoMerge, ToMe, TopR, load, parse, save
    from .presets import paper_rows
    from .surgery import apply, remove
    from .theory import merging_error, merging_error_bounds, merging_error_of
    from .tokens import restore
    from .tracing import Trace, trace
    from .visualization import merge_map

__version__ = "0.1.0"

_HOME = {
    "ATM": "methods",
    "ConstantThreshold": "methods",
    "Cost": "cost",
    "Method": "methods",
    "NoMerge": "methods",
    "Result": "evaluation",
    "Timing": "benchmarking",
    "ToMe": "methods",
    "TopR": "methods",
    "Trace": "tracing",
    "Unsupported": "backbones",
    "apply": "surgery",
    "bench": "benchmarking",
    "evaluate": "evaluation",
    "load": "methods",
    "load_images": "loading",
    "load_model": "loading",
    "merge_map": "visualization",
    "merging_error": "theory",
    "merging_error_bounds": "theory",
    "merging_error_of": "theory",
    "paper_rows": "presets",
    "parse": "methods",
    "remove": "surgery",
    "restore": "tokens",
    "save": "methods",
    "trace": "tracing",
}

__all__ = [
    "ATM",
    "ConstantThreshold",
    "Cost",
    "Method",
    "NoMerge",
    "Result",
    "Timing",
    "ToMe",
    "TopR",
    "Trace",
    "Unsupported",
    "apply",
    "bench",
    "evaluate",
    "load",
    "load_images",
    "load_model",
    "merge_map",
    "merging_error",
    "merging_error_bounds",
    "merging_error_of",
    "paper_rows",
    "parse",
    "remove",
    "restore",
    "save",
    "trace",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f".{_HOME[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*globals(), *__all__]
