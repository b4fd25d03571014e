"""Kernels that select and merge the tokens of a layer in few calls; see ../fused.py."""
