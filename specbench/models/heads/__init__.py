"""Trained draft heads: checkpoints and forward passes; methods that draft with them follow."""
