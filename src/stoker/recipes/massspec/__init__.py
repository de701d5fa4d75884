"""The mass-spectrum recipes: a fingerprint student and a graph teacher that predict EI spectra."""

RECIPES = {
    "massspec": "stoker.recipes.massspec.recipe:MassSpecRecipe",
    "massspec-teacher": "stoker.recipes.massspec.recipe:MassSpecTeacherRecipe",
}
