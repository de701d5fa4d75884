"""Export of trained recipes for other programs: ONNX (`trained.py`, `graph.py`), safetensors (`weights_file.py`)."""
