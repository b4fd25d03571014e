"""Fine-tuning with merging on."""
