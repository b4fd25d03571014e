"""What a config costs and changes, compared with the baseline."""
