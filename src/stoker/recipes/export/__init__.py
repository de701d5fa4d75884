"""A trained recipe as a file for others: ONNX graphs (`trained.py`, `graph.py`, `onnx_file.py`), safetensors."""
