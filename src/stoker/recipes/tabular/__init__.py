"""The tabular recipe: rows or windows of rows to classes or numbers."""

RECIPES = {"tabular": "stoker.recipes.tabular.recipe:TabularRecipe"}
