"""Merged models outside of this process: exported files, runtimes, batch prediction."""
