"""A model under test: its engines, what they answer, and what the plain one answers."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from bench.equivalence_cells.prompts import Case
from engine import Engine, EngineConfig, Request, SamplingParams
from engine.model.base import Model
from engine.results import StepResult

GREEDY = SamplingParams(max_tokens=64, ignore_eos=True, logprobs=0)
WARM = replace(GREEDY, max_tokens=1)


@dataclass(slots=True)
class Answer:
    """Tokens, and of each the logarithm of its probability, which differs where any bit of the path does."""

    token_ids: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    num_cached: int = 0
    resumed: tuple[int, ...] = ()


Answers = dict[str, Answer]


@dataclass(frozen=True, slots=True)
class Found:
    """`proof` are the engine's own counters; `proved`, whether they show that the path was taken.

    `expected`: where that is not what the plain engine answers.
    """

    answers: Answers
    proof: dict[str, int]
    proved: bool
    expected: Answers | None = None


@dataclass(slots=True)
class Subject:
    """The plain engine takes each prompt whole, alone, and knows no prefix."""

    name: str
    model: Model
    replay: bool
    cases: list[Case]
    threads: int
    kv_cache_bytes: int
    _plain: Answers = field(default_factory=Answers)
    _resumed: dict[tuple[str, tuple[int, ...]], Answer] = field(
        default_factory=dict[tuple[str, tuple[int, ...]], Answer]
    )

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

    def plain(self) -> Answers:
        """Worked out once."""
        if not self._plain:
            for case in self.cases:
                self._plain |= self.answer([self.engine()], [case])
        return self._plain

    def resumed_plainly(self, answers: Answers) -> Answers:
        """What the plain engine answers when its windows run again at the same places as these answers' did.

        Worked out once for a case and its places.
        """
        found: Answers = {}
        for case in self.cases:
            places = answers[case.name].resumed
            if not places:
                found[case.name] = self.plain()[case.name]
                continue
            if (case.name, places) not in self._resumed:
                self._resumed[case.name, places] = self._resume(case, places)
            found[case.name] = self._resumed[case.name, places]
        return found

    def _resume(self, case: Case, places: tuple[int, ...]) -> Answer:
        """By turns that end at each of the places, whose windows are not kept."""
        engine = self.engine(tiers={"window_bytes": 0})
        for place in places:
            engine.add(Request("turn", case.prompt_ids[: place + 1], WARM, cache_salt=case.name))
            collect([engine])
        answer = self.answer([engine], [case])[case.name]
        assert answer.resumed == places, f"the plain engine resumed at {answer.resumed}, not at {places}"
        return answer

    def answer(
        self, engines: list[Engine], cases: Iterable[Case], sampling: SamplingParams = GREEDY, salt: str = ""
    ) -> Answers:
        """Cases side by side through an engine, or a prefill and a decode engine, sharing no prefix."""
        for case in cases:
            engines[0].add(Request(case.name, case.prompt_ids, sampling, cache_salt=salt + case.name))
        return collect(engines)

    def long_enough(self) -> int:
        """Cases that a cached prefix can serve: by more than a block behind a window."""
        return sum(case.length > self.window + 32 for case in self.cases)


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
        answer = found.setdefault(name, Answer())
        answer.token_ids += output.token_ids
        answer.logprobs.append(output.logprobs.logprob if output.logprobs else 0.0)
        answer.num_cached, answer.resumed = output.num_cached, output.resumed
