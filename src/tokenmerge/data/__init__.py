"""Images, weights and models by name."""
