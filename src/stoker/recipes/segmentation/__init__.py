"""The segmentation recipe: a small SegFormer over images and masks."""
