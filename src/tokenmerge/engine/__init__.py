"""Methods and backbones together: patch a model, run it, trace it, count its cost."""
