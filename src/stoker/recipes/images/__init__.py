"""The images recipe: one class for every picture."""

RECIPES = {"images": "stoker.recipes.images.recipe:ImagesRecipe"}
