"""The forex recipe: predicts direction and size of the next move from windows of several timeframes."""

RECIPES = {"forex": "stoker.recipes.forex.recipe:ForexRecipe"}
