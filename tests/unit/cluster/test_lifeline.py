"""Signals that a server holds back until it asks for them: each in a process of its own."""

import subprocess
import sys

import pytest

BEGIN = """
import os, signal, subprocess, sys
from cluster.lifeline import Stopped, raise_if_told, signals_heard, signals_held
def tell(number): os.kill(os.getpid(), number)
"""


def said(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", BEGIN + code], capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.mark.parametrize("number", ["SIGTERM", "SIGINT"])
def test_a_held_signal_is_raised_where_it_is_asked_for(number: str) -> None:
    code = f"""
with signals_held():
    signal.signal(signal.SIGTERM, lambda *_: os._exit(15))  # as Ray's
    tell(signal.{number})
    print("held")
    try:
        raise_if_told()
    except Stopped as stopped:
        print(stopped, stopped.number)
    raise_if_told()
"""
    assert said(code).splitlines() == ["held", f"{number} {15 if number == 'SIGTERM' else 2}"]


def test_a_heard_signal_is_raised_once() -> None:
    code = """
try:
    with signals_held():
        tell(signal.SIGTERM)
        with signals_heard():
            print("not reached")
except Stopped as stopped:
    print("first", stopped)
try:
    with signals_held():
        try:
            with signals_heard():
                tell(signal.SIGINT)
                print("not reached")
        finally:
            tell(signal.SIGTERM)  # an impatient second one does not interrupt the ending
            print("ended in order")
except Stopped as stopped:
    print("then", stopped)
"""
    assert said(code).splitlines() == ["first SIGTERM", "ended in order", "then SIGINT"]


def test_children_that_ray_starts_hear_the_signals() -> None:
    code = """
with signals_held():
    child = subprocess.Popen(["sleep", "600"], preexec_fn=lambda: None)
    child.terminate()
    print(child.wait(60))
"""
    assert said(code) == "-15"


def test_handlers_and_mask_are_as_before() -> None:
    code = """
def state(): return signal.getsignal(signal.SIGTERM), signal.pthread_sigmask(signal.SIG_BLOCK, ())
before = state()
with signals_held():
    with signals_heard():
        pass
print(state() == before)
"""
    assert said(code) == "True"
