"""Tasks made of real bugs: a published version, the tests of the next one, and a judge that trusts neither.

A task gives agents the old version's source; the new version's tests stay hidden and decide.
"""

from evals.bugs.accept import Accepted, NotAcceptedError, accept, prepare
from evals.bugs.grade import gradable, grade, verifier
from evals.bugs.recipe import Recipe, load_recipe, recipe_names
from evals.bugs.task import BugTask, build_task, load_folder

__all__ = [
    "Accepted",
    "BugTask",
    "NotAcceptedError",
    "Recipe",
    "accept",
    "build_task",
    "gradable",
    "grade",
    "load_folder",
    "load_recipe",
    "prepare",
    "recipe_names",
    "verifier",
]
