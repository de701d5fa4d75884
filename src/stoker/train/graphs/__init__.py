"""A training step as one CUDA graph: captured, compared with the eager step before it is trusted, watched after that.

`graphed_step` does it, `trainer_step` for the `Trainer`, `function` for anybody's loop (`stoker.capture`).
"""
