"""Merge maps, figures and the HTML report."""
