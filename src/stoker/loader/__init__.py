"""Batches that are already on the device, from data that is stored once."""
