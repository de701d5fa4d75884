"""A training step as one CUDA graph: captured, compared with the eager step before it is used, and watched afterwards.

`graphed_step` is the common part, `trainer_step` is for the `Trainer`, `function` for other loops (`stoker.capture`).
"""
