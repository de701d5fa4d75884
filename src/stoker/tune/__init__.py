"""Finds the settings with the highest throughput by running them.

Enters: a config with a ready job, or any DataLoader with a training step. Leaves: settings that were run, with their
results. Costs the given number of seconds for each try.
"""
