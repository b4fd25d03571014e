"""tokenmerge: Vision Transformers, cheaper at inference, without retraining.

    tokenmerge.apply(model, tokenmerge.ATM(alpha=0.98, beta=0.035, theta_min=0.84))

Names are loaded when they are first used, so that `tokenmerge --help` need not wait for torch. (For that, no module may
bear the name of a function: importing it would put the module in the function's place.)
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .analysis import Impact, analyze
    from .backbones import Unsupported
    from .benchmarking import Timing, bench
    from .calibration import Calibration, Frozen, calibrate, freeze
    from .checkpoints import load_model
    from .cost import Cost
    from .evaluation import Result, evaluate
    from .exporting import Exported, export
    from .loading import Images, load_images
    from .methods import (
        ATM,
        ATS,
        MCTF,
        PPT,
        ConstantThreshold,
        DiffRate,
        EViT,
        Method,
        NoMerge,
        PiToMe,
        RandomMerge,
        ToFu,
        ToMe,
        TopR,
        ZeroTPrune,
        load,
        parse,
        save,
    )
    from .optimizing import Outcome, optimize
    from .presets import paper_rows
    from .proving import Proof, prove
    from .surgery import apply, remove
    from .theory import merging_error, merging_error_bounds, merging_error_of
    from .tokens import restore
    from .tracing import Trace, trace
    from .tuning import Tuned, tune
    from .visualization import draw_maps, merge_map

__version__ = "0.1.0"

_HOME = {
    "ATM": "methods",
    "ATS": "methods",
    "Calibration": "calibration",
    "ConstantThreshold": "methods",
    "Cost": "cost",
    "DiffRate": "methods",
    "EViT": "methods",
    "Exported": "exporting",
    "Frozen": "calibration",
    "Images": "loading",
    "Impact": "analysis",
    "MCTF": "methods",
    "Method": "methods",
    "NoMerge": "methods",
    "Outcome": "optimizing",
    "PPT": "methods",
    "PiToMe": "methods",
    "Proof": "proving",
    "RandomMerge": "methods",
    "Result": "evaluation",
    "Timing": "benchmarking",
    "ToFu": "methods",
    "ToMe": "methods",
    "TopR": "methods",
    "Trace": "tracing",
    "Tuned": "tuning",
    "Unsupported": "backbones",
    "ZeroTPrune": "methods",
    "analyze": "analysis",
    "apply": "surgery",
    "bench": "benchmarking",
    "calibrate": "calibration",
    "draw_maps": "visualization",
    "evaluate": "evaluation",
    "export": "exporting",
    "freeze": "calibration",
    "load": "methods",
    "load_images": "loading",
    "load_model": "checkpoints",
    "merge_map": "visualization",
    "merging_error": "theory",
    "merging_error_bounds": "theory",
    "merging_error_of": "theory",
    "optimize": "optimizing",
    "paper_rows": "presets",
    "parse": "methods",
    "prove": "proving",
    "remove": "surgery",
    "restore": "tokens",
    "save": "methods",
    "trace": "tracing",
    "tune": "tuning",
}

__all__ = [
    "ATM",
    "ATS",
    "MCTF",
    "PPT",
    "Calibration",
    "ConstantThreshold",
    "Cost",
    "DiffRate",
    "EViT",
    "Exported",
    "Frozen",
    "Images",
    "Impact",
    "Method",
    "NoMerge",
    "Outcome",
    "PiToMe",
    "Proof",
    "RandomMerge",
    "Result",
    "Timing",
    "ToFu",
    "ToMe",
    "TopR",
    "Trace",
    "Tuned",
    "Unsupported",
    "ZeroTPrune",
    "analyze",
    "apply",
    "bench",
    "calibrate",
    "draw_maps",
    "evaluate",
    "export",
    "freeze",
    "load",
    "load_images",
    "load_model",
    "merge_map",
    "merging_error",
    "merging_error_bounds",
    "merging_error_of",
    "optimize",
    "paper_rows",
    "parse",
    "prove",
    "remove",
    "restore",
    "save",
    "trace",
    "tune",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f".{_HOME[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*globals(), *__all__]
