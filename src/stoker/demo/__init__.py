"""`stoker demo`: the whole story on made-up data, measured; see `story.py`.

The other way is that of S0 before its chunk loader: windows written out to HDF5, a torch DataLoader that reads
them sample by sample, a plain loop.
"""
