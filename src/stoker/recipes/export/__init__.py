"""A trained recipe as a file for others: ONNX graphs (`trained.py`, `graph.py`), safetensors (`weights_file.py`)."""
