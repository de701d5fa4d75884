"""The tabular recipe: predicts classes or numbers from rows or windows of rows."""

RECIPES = {"tabular": "stoker.recipes.tabular.recipe:TabularRecipe"}
