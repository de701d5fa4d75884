"""Every name, signature and file layout of the mission's documents, thin over the rooms that do the work.

Enters: what the documents' readers type. Leaves: the same as the rooms give. Costs what they cost.

Codes such as S0-12 (chapter and item of those documents) stand in this room only; `docs/documents.md` lists what
became of each of their ideas. Nothing in stoker below this room imports it.

Files: `chunk_loader.py` S0's `ChunkDataLoader`; `massspec.py`, `massspec_memory.py` S1's loaders and its memory
table; `basics.py` S2's family; `augmentation.py` S3's classes; `max_batch.py` S2's batch search; `migrate.py` the
documents' YAML layouts; `published.py` the figures they publish, computed; `transforms.py`, `quantization.py`.
"""
