"""A bug task in memory: what agents see, what stays hidden, and how to tell whether it is solved."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import ConfigDict, Field

from evals.bugs.recipe import Layout, Recipe, read_yaml
from evals.fetch import MAX_FILES, MAX_UNPACKED_BYTES, fetch_sdist, unpack
from protocol.errors import InvalidInput
from teams.workspace import Tree, within


@dataclass(frozen=True, slots=True)
class BugTask:
    """One task. Test ids are `module.path::test`, as pytest's JUnit report names them."""

    name: str
    instruction: str
    licence: str
    layout: Layout
    workspace: Tree  # the old source with its own tests: the clean image
    hidden: Tree  # the new version's tests
    fixed: Tree | None  # the new source, for the acceptance check; None where a task folder has none
    fail_to_pass: tuple[str, ...]
    pass_to_pass: tuple[str, ...] = ()  # empty in a task of a recipe until it is accepted
    num_pass_to_pass: int | None = None  # what the recipe promises


class FolderTask(Layout):
    """`task.yaml` of a task folder; `workspace/` and `tests/` lie beside it, `fixed/` may."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    name: str = Field(pattern=r"^[a-z][a-z0-9_-]{0,31}$")
    licence: str = "unknown"
    instruction: str = Field(min_length=1)
    fail_to_pass: tuple[str, ...] = Field(min_length=1)
    pass_to_pass: tuple[str, ...] = ()


def build_task(recipe: Recipe, cache_dir: Path) -> BugTask:
    """Makes a recipe's task. Blocks; fetches both sources unless `cache_dir` has them.

    Raises `FetchError`, and `InvalidInput` where the sources are not as the recipe says.
    """
    old = unpack(fetch_sdist(recipe.sdist(recipe.old), cache_dir))
    new = unpack(fetch_sdist(recipe.sdist(recipe.new), cache_dir))
    hidden = only(new, recipe.tests)
    if not hidden.files:
        raise InvalidInput(f"{recipe.package} {recipe.new.version} has no tests at {', '.join(recipe.tests)}")
    if not only(old, recipe.source).files:
        raise InvalidInput(
            f"{recipe.package} {recipe.old.version} has no source at {', '.join(recipe.source)}"
        )
    return BugTask(
        name=recipe.name,
        instruction=recipe.instruction,
        licence=recipe.licence,
        layout=recipe,
        workspace=without(old, recipe.leave_out),
        hidden=hidden,
        fixed=without(new, recipe.leave_out),
        fail_to_pass=recipe.fail_to_pass,
        num_pass_to_pass=recipe.num_pass_to_pass,
    )


def load_folder(folder: Path) -> BugTask:
    """Loads a task from a plain folder. Raises `InvalidInput` naming the folder and what it lacks.

    `tests/` mirrors the workspace: it holds the hidden files at their workspace-relative paths.
    """
    for part, kind in (("task.yaml", "file"), ("workspace", "folder"), ("tests", "folder")):
        path = folder / part
        if not (path.is_file() if kind == "file" else path.is_dir()):
            raise InvalidInput(f"task folder {folder} has no {part}", hint=f"add the {kind} {part}")
    task = read_yaml(folder / "task.yaml", FolderTask)
    hidden = only(read_tree(folder / "tests"), task.tests)
    if not any(Path(path).suffix == ".py" for path in hidden.files):
        where = ", ".join(f"tests/{root}" for root in task.tests)
        raise InvalidInput(f"task folder {folder} has no tests", hint=f"put the hidden tests at {where}")
    fixed = folder / "fixed"
    return BugTask(
        name=task.name,
        instruction=task.instruction,
        licence=task.licence,
        layout=task,
        workspace=read_tree(folder / "workspace"),
        hidden=hidden,
        fixed=read_tree(fixed) if fixed.is_dir() else None,
        fail_to_pass=task.fail_to_pass,
        pass_to_pass=task.pass_to_pass,
    )


def read_tree(folder: Path) -> Tree:
    """A folder of this machine as a tree. Links are noted and not followed; raises for too much."""
    files: dict[str, bytes] = {}
    irregular: list[str] = []
    total = 0
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            irregular.append(name)
        elif path.is_file():
            total += path.stat().st_size
            if total > MAX_UNPACKED_BYTES or len(files) >= MAX_FILES:
                raise InvalidInput(f"folder {folder} holds too much for a task")
            files[name] = path.read_bytes()
    return Tree(files, tuple(irregular))


def only(tree: Tree, roots: Sequence[str]) -> Tree:
    """The files at or under `roots`."""
    return Tree({path: data for path, data in tree.files.items() if within(path, roots)})


def without(tree: Tree, roots: Sequence[str]) -> Tree:
    """The files that are neither at nor under `roots`."""
    return Tree({path: data for path, data in tree.files.items() if not within(path, roots)})
