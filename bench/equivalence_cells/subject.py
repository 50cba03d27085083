"""A model under test: its engines, what they answer, and whether that is right."""

import json
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from bench.equivalence_cells.prompts import BLOCK, Case
from bench.equivalence_cells.reference import continue_greedily
from engine import Engine, EngineConfig, Request, SamplingParams
from engine.checkpoint.checksums import write_sums
from engine.checkpoint.folder import WEIGHTS
from engine.model.base import Model
from engine.model.registry import load_model
from engine.model_path import model_path
from engine.results import StepResult

GREEDY = SamplingParams(max_tokens=64, ignore_eos=True, logprobs=0)
WARM = replace(GREEDY, max_tokens=1)
HOST = {"host_bytes": 1 << 30}
NO_WINDOWS = {"window_bytes": 0}  # chunks end where windows are kept
_SAME_END = 16 << 10  # bytes at each end of a tensor whose middle is changed


@dataclass(slots=True)
class Answer:
    """Tokens, and of each the logarithm of its probability, which differs where any bit of the path does.

    `first`: the number of tokens that the request had before these.
    """

    token_ids: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    num_cached: int = 0
    resumed: tuple[int, ...] = ()
    first: int = -1


Answers = dict[str, Answer]


@dataclass(frozen=True, slots=True)
class Proof:
    """The engine's own counters. `taken`: each with the least, above 0, that shows the path of every prompt.

    A count of prompts (`…_prompts`) has all of them as its least; one of steps, rows or blocks is what all of
    them together take, and where one could make up for another, what is beyond it is absent. `absent`: of
    what is not on the path, and so 0.
    """

    taken: Mapping[str, tuple[int, int]]
    absent: Mapping[str, int] = field(default_factory=dict[str, int])

    @property
    def holds(self) -> bool:
        reached = all(count >= least > 0 for count, least in self.taken.values())
        return bool(self.taken) and reached and not any(self.absent.values())


@dataclass(frozen=True, slots=True)
class Found:
    """Answers by the name of their case; a further one of a case is named `case#more`.

    `due`: their names, of which none may be missing; unset: those of all cases. `may_resume`: windows may
    have run again on this path, at the places that the engine tells. `judge`: the subject whose answers
    these are, where it is another one.
    """

    answers: Answers
    proof: Proof
    due: Sequence[str] | None = None
    may_resume: bool = False
    judge: "Subject | None" = None


@dataclass(slots=True)
class Subject:
    """Its model is its owner's to close; `close` ends what it has made of it."""

    name: str
    model: Model
    replay: bool
    cases: list[Case]
    threads: int
    kv_cache_bytes: int
    _right: dict[tuple[str, tuple[int, ...]], Answer] = field(
        default_factory=dict[tuple[str, tuple[int, ...]], Answer]
    )
    _changed: "Subject | None" = None
    _folder: Path | None = None

    @property
    def matrix(self) -> str:
        return self.name if self.window == 0 else f"{self.name}, replay {'on' if self.replay else 'off'}"

    @property
    def window(self) -> int:
        return self.model.resume_rules.window

    @property
    def longest(self) -> int:
        return max(case.length for case in self.cases)

    def engine(self, **settings: object) -> Engine:
        values: dict[str, object] = {
            "model": self.name, "threads": self.threads, "kv_cache_bytes": self.kv_cache_bytes,
            "token_budget": 8192, "replay": self.replay, **settings,
        }  # fmt: skip
        return Engine(EngineConfig.model_validate(values), model=self.model)

    def compare(self, name: str, answer: Answer, resumed: tuple[int, ...]) -> tuple[bool, bool]:
        """Whether an answer has the right tokens, and the right bits. `resumed`: where windows ran again.

        What is right is worked out once for a case and its places.
        """
        case = next(case for case in self.cases if case.name == name.partition("#")[0])
        if len(answer.token_ids) != GREEDY.max_tokens:
            return False, False
        right = self._right.get((case.name, resumed))
        if right is None:
            right = Answer(*continue_greedily(
                self.model, case.prompt_ids, answer.token_ids, resumed, replay=self.replay
            ))  # fmt: skip
            if right.token_ids == answer.token_ids:
                self._right[case.name, resumed] = right
        return answer.token_ids == right.token_ids, answer.logprobs == right.logprobs

    def changed(self) -> "Subject":
        """The same cases, and a model that differs in the middle of one tensor. Made once."""
        if self._changed is None:
            self._folder = Path(tempfile.mkdtemp(prefix="dockyard-other-weights-"))
            other = change_weights(model_path(self.name), self._folder / "other")
            model = load_model(str(other), threads=self.threads, replay=self.replay)
            self._changed = Subject(
                str(other), model, self.replay, self.cases, self.threads, self.kv_cache_bytes
            )
        return self._changed

    def close(self) -> None:
        if self._changed is not None:
            self._changed.model.close()
        if self._folder is not None:
            shutil.rmtree(self._folder)

    def answer(
        self, engines: list[Engine], cases: Iterable[Case], sampling: SamplingParams = GREEDY, salt: str = ""
    ) -> Answers:
        """Cases side by side through an engine, or a prefill and a decode engine, sharing no prefix."""
        for case in cases:
            engines[0].add(Request(case.name, case.prompt_ids, sampling, cache_salt=salt + case.name))
        return collect(engines)

    def room_for_all(self) -> int:
        """Bytes in which every case stays cached, with all that it gives out and a block begun."""
        positions = sum(case.length + GREEDY.max_tokens + 64 for case in self.cases)
        return max(self.kv_cache_bytes, int(self.model.cache_bytes_per_token() * positions))

    def positions_found(self, answer: Answer) -> int:
        """That were known when it began. Where a decoder sees a window alone, the last one before them runs
        again, and does not count as cached; where windows ran again, it does."""
        if answer.num_cached == 0 or answer.resumed or not self.replay:
            return answer.num_cached
        return answer.num_cached + self.window

    def positions_left(self, case: Case) -> int:
        """That it finds of itself when it comes again. Where windows do not run again, up to a kept one: at
        the end of its last block, which serves a next turn alone where that is the prompt's end, and a window
        before."""
        if self.replay or self.window == 0 or case.length % BLOCK:
            return case.num_known
        return (case.length - self.window) // BLOCK * BLOCK

    def long_cases(self) -> list[Case]:
        """Those that a cached prefix can serve: by more than a block behind a window."""
        return [case for case in self.cases if case.length > self.window + 32]


def request_of(case: Case, sampling: SamplingParams = GREEDY, priority: int = 0) -> Request:
    """Its own salt keeps other cases' prefixes away, which cells do not mean to hit."""
    return Request(case.name, case.prompt_ids, sampling, priority, cache_salt=case.name)


def rows_of(case: Case) -> int:
    """That its prompt and its answer take, each once; the last token is given out and not run."""
    return case.length + GREEDY.max_tokens - 1


def collect(engines: list[Engine], each_step: Callable[[StepResult], None] | None = None) -> Answers:
    """Step until nothing is left, and check the books. Further outputs are named `name#number`."""
    found: Answers = {}
    while any(engine.has_work for engine in engines):
        for engine in engines:
            result = engine.step()
            gather(result, found)
            for handoff in result.handoffs:
                engines[-1].adopt(handoff)
            if each_step is not None:
                each_step(result)
    for engine in engines:
        engine.check_integrity()
        assert engine.statistics().pool.held == 0, "blocks stay held when all requests have ended"
    return found


def gather(result: StepResult, found: Answers) -> None:
    for output in result.tokens:
        name = f"{output.request_id}#{output.choice}" if output.choice else output.request_id
        answer = found.setdefault(name, Answer(first=output.index))
        answer.token_ids += output.token_ids
        answer.logprobs.append(output.logprobs.logprob if output.logprobs else 0.0)
        answer.num_cached, answer.resumed = output.num_cached, output.resumed


def change_weights(source: Path, target: Path) -> Path:
    """A copy of a model's folder in which the middle of the matrix that mixes the first layer's streams has
    other values; its ends, and all else, are the same."""
    shutil.copytree(source, target)
    data = bytearray((target / WEIGHTS).read_bytes())
    length = int.from_bytes(data[:8], "little")
    start, stop = json.loads(data[8 : 8 + length])["layers.0.hc_attn_fn"]["data_offsets"]
    for index in range(8 + length + start + _SAME_END, 8 + length + stop - _SAME_END, 4):
        data[index + 2] ^= 0x40  # of a float32's fraction
    (target / WEIGHTS).write_bytes(data)
    write_sums(target)  # or the folder is refused as spoilt
    return target
