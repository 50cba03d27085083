"""Recipes of bug tasks: two published versions of a package, pinned by hash. The sources stay outside."""

from pathlib import Path, PurePosixPath
from typing import Annotated, TypeVar

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from evals.fetch import Sdist
from protocol.errors import InvalidInput

_FOLDER = Path(__file__).parent / "recipes"
Model = TypeVar("Model", bound=BaseModel)


def _relative(path: str) -> str:
    pure = PurePosixPath(path)
    if not pure.parts or pure.is_absolute() or ".." in pure.parts:
        raise ValueError(f"{path!r} must be a path inside the source tree")
    return str(pure)


RelativePath = Annotated[str, AfterValidator(_relative)]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Release(_Part):
    """One published version."""

    version: str
    sha256: str


class Layout(_Part):
    """Where things lie in a source tree, and how its tests are run. Shared by recipes and task folders."""

    source: tuple[RelativePath, ...] = Field(min_length=1)  # what a diff may change
    tests: tuple[RelativePath, ...] = Field(
        min_length=1
    )  # replaced by the hidden ones; never taken from a diff
    pytest_args: tuple[str, ...] = ()  # beyond the platform's own
    timeout_s: float = Field(default=60.0, gt=0, le=600)  # of one run of all hidden tests


class Recipe(Layout):
    """How to make one bug task."""

    name: str = Field(pattern=r"^[a-z][a-z0-9_-]{0,31}$")
    package: str
    licence: str
    old: Release
    new: Release
    leave_out: tuple[RelativePath, ...] = ()  # parts of the source tree that no agent needs
    fail_to_pass: tuple[str, ...] = Field(min_length=1)  # ids as `module.path::test`
    num_pass_to_pass: int = Field(ge=20)  # derived: what passes on both sides; the count must agree
    instruction: str = Field(min_length=20)  # written for this task; nothing of the fix in it

    def sdist(self, release: Release) -> Sdist:
        """What to fetch for one of the two versions."""
        return Sdist(package=self.package, version=release.version, sha256=release.sha256)


def recipe_names() -> list[str]:
    """The recipes that ship, sorted."""
    return sorted(path.stem for path in _FOLDER.glob("*.yaml"))


def load_recipe(name: str) -> Recipe:
    """A shipped recipe by its name. Raises `InvalidInput` naming it and the field that does not fit."""
    if name not in recipe_names():
        raise InvalidInput(f"no bug task is called {name!r}", hint=f"there are: {', '.join(recipe_names())}")
    return read_yaml(_FOLDER / f"{name}.yaml", Recipe)


def read_yaml(path: Path, model: type[Model]) -> Model:
    """Reads one YAML document into a model. Raises `InvalidInput` naming the file and the field."""
    try:
        return model.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise InvalidInput(f"{path} cannot be read: {error.strerror}") from error
    except yaml.YAMLError as error:
        reason = " ".join(str(error).split())
        raise InvalidInput(f"{path} is not valid YAML: {reason}") from error
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "document"
        raise InvalidInput(f"{path}: {where}: {first['msg']}") from error
