"""The images recipe: classifies pictures."""

RECIPES = {"images": "stoker.recipes.images.recipe:ImagesRecipe"}
