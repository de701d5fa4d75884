"""Training at full speed that survives what goes wrong; see docs/training.md."""
