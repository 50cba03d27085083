"""Models and kernels that tests of several folders share; and that a run ends."""

import faulthandler
import gc
import sys
from pathlib import Path

import pytest
from hypothesis import settings
from thread_shortage import WAYS, run_short
from tiny_gguf import write_tiny_gguf

from engine.chat.tokenizer import ChatTokenizer, tokenizer_from_gguf
from engine.gguf_file import open_gguf
from engine.model_path import model_path
from kernels.cpu.build import build

# No example fails for being slow: the machine is shared.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


def pytest_collection_finish() -> None:
    """What thousands of tests are made of stays to the end, and no collection need go through it: those that
    look for leaks collect hundreds of times."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """A thread that a test has left would keep the interpreter for ever: it is shown, and the run fails."""
    gc.unfreeze()  # the interpreter's own end goes through it
    assert sys.__stderr__ is not None
    faulthandler.dump_traceback_later(60, exit=True, file=sys.__stderr__)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random llama of two layers: see tiny_gguf."""
    return write_tiny_gguf(tmp_path_factory.mktemp("tiny") / "tiny.gguf")


@pytest.fixture(scope="session")
def tiny_tokenizer(tiny_model: Path) -> ChatTokenizer:
    return tokenizer_from_gguf(open_gguf(tiny_model))


@pytest.fixture(scope="session")
def cpu_library() -> Path:
    """The C kernels of this processor, built if they are not."""
    return build()


@pytest.fixture(scope="session")
def smollm2_file(cpu_library: Path) -> Path:
    """The real model, to run on the C kernels."""
    return model_path("smollm2")


@pytest.fixture(params=WAYS)
def shortage(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """No thread comes up, until it is undone."""
    run_short(monkeypatch, request.param)
    return monkeypatch
