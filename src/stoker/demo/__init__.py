"""`stoker demo`: every command run on generated data, with measurements; see `story.py`.

stoker is compared with a usual training: windows written out to HDF5, a torch DataLoader that reads them sample by
sample, and a plain training loop.
"""
