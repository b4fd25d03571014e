"""Optional dependencies: checked before a long run starts, not when it ends."""

from __future__ import annotations

from importlib.util import find_spec

EXTRA = {
    "numba": "fast",
    "matplotlib": "plot",
    "optuna": "tune",
    "transformers": "hf",
    "open_clip": "open_clip",
    "accelerate": "train",
    "pyarrow": "predict",
    "ray": "ray",
    "gradio": "demo",
    "onnxscript": "export",
    "onnxruntime": "export",
    "openvino": "export",
    "prometheus_client": "canary",
}


def require_package(package: str, purpose: str) -> None:
    """Raise if the package is not installed. `purpose` is a plural noun: "plots"."""
    if find_spec(package) is None:
        source = f"'tokenmerge[{EXTRA[package]}]'" if package in EXTRA else package
        raise ValueError(f"{purpose} need {package}, which is not installed: pip install {source}")
