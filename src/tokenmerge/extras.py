"""Libraries that only some jobs need: asked for before a long run, not after it."""

from __future__ import annotations

from importlib.util import find_spec

EXTRA = {
    "matplotlib": "plot",
    "optuna": "tune",
    "transformers": "hf",
    "accelerate": "train",
    "pyarrow": "predict",
    "ray": "ray",
    "gradio": "demo",
    "onnxscript": "export",
    "onnxruntime": "export",
    "openvino": "export",
}


def need(package: str, what: str) -> None:
    """Raise if the package is not installed; `what` it is for, in the plural: "plots"."""
    if find_spec(package) is None:
        source = f"'tokenmerge[{EXTRA[package]}]'" if package in EXTRA else package
        raise ValueError(f"{what} need {package}, which is not installed: pip install {source}")
