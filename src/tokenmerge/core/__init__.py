"""Tensors only: no model, no method, no file."""
