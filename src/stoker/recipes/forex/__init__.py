"""The forex recipe: windows of several timeframes to the direction and size of the next move."""

RECIPES = {"forex": "stoker.recipes.forex.recipe:ForexRecipe"}
