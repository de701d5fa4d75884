"""The segmentation recipe: a small SegFormer over images and masks."""

RECIPES = {"segmentation": "stoker.recipes.segmentation.recipe:SegmentationRecipe"}
