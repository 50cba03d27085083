"""Prometheus metrics, under vLLM's names where they mean the same."""

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from gateway.chat_reply import ChoiceResult
from gateway.worker_metrics import WorkerMetrics
from protocol.stages import STAGES
from protocol.wire import Tokens
from protocol.worker_counts import WorkerCounts

# vLLM's.
_FIRST_TOKEN_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160,
    640, 2560,
)  # fmt: skip
_TOKEN_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_REQUEST_S = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
# Ours.
_STAGE_S = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)


class GatewayMetrics:
    """One registry a gateway, so that two in one process (tests) do not collide."""

    def __init__(self, model: str) -> None:
        self._registry = CollectorRegistry()
        self._model = model
        self._workers = WorkerMetrics(model)
        self._registry.register(self._workers)
        self._prompt = self._counter("vllm:prompt_tokens", "Prefill tokens")
        self._generated = self._counter("vllm:generation_tokens", "Decoded tokens")
        self._queried = self._counter("vllm:prefix_cache_queries", "Tokens of prompts that have ended")
        self._hit = self._counter("vllm:prefix_cache_hits", "Tokens of those out of a cache, of any tier")
        self._finished = self._counter("vllm:request_success", "Finished choices", "finished_reason")
        self._failed = self._counter("dockyard:request_failures", "Requests ended in an error", "code")
        self._running = self._gauge("vllm:num_requests_running", "Choices with a first token")
        self._waiting = self._gauge(
            "vllm:num_requests_waiting", "Choices queued or in prefill, without a token yet"
        )
        self._first = self._histogram(
            "vllm:time_to_first_token_seconds", "Arrival to first token", _FIRST_TOKEN_S
        )
        self._token = self._histogram(
            "vllm:request_time_per_output_token_seconds", "Time a token behind a choice's first", _TOKEN_S
        )
        self._whole = self._histogram("vllm:e2e_request_latency_seconds", "Arrival to last token", _REQUEST_S)
        self._queue = self._histogram(
            "vllm:request_queue_time_seconds", "Arrival to a request's first step", _REQUEST_S
        )
        self._prefill = self._histogram(
            "vllm:request_prefill_time_seconds", "First step to first token", _REQUEST_S
        )
        self._decode = self._histogram(
            "vllm:request_decode_time_seconds", "First token to last, a hand-off among them", _REQUEST_S
        )
        self._stage = self._histogram(
            "dockyard:request_stage_seconds", "Time that a choice's steps spent in a stage", _STAGE_S, "stage"
        )

    def prefilled(self, num_prompt: int) -> None:
        """A request's first token is there: its prompt has been computed, once for all of its choices."""
        self._prompt.labels(self._model).inc(num_prompt)

    def finished(self, result: ChoiceResult) -> None:
        """A choice has ended by itself."""
        self._generated.labels(self._model).inc(result.num_tokens)
        self._finished.labels(self._model, result.finish_reason).inc()
        if result.last.choice == 0:  # choices share their prompt
            self._queried.labels(self._model).inc(result.num_prompt)
            self._hit.labels(self._model).inc(result.last.num_cached)
        self._observe(result.last, result.num_tokens)

    def aborted(self, num_choices: int) -> None:
        """The client has hung up before these choices had ended."""
        self._finished.labels(self._model, "abort").inc(num_choices)

    def failed(self, code: str) -> None:
        """A request has ended in an error."""
        self._failed.labels(self._model, code).inc()

    def render(
        self, running: int, waiting: int, workers: Sequence[tuple[str, WorkerCounts | None]] = ()
    ) -> bytes:
        """The exposition text. `workers`: what each role has counted, None where it does not answer."""
        self._running.labels(self._model).set(running)
        self._waiting.labels(self._model).set(waiting)
        self._workers.counts = workers
        return generate_latest(self._registry)

    def _observe(self, last: Tokens, num_tokens: int) -> None:
        """Where a choice's time went, each part in the histogram of that name."""
        for histogram, start_ns, end_ns in (
            (self._first, last.arrived_ns, last.prefilled_ns),
            (self._whole, last.arrived_ns, last.produced_ns),
            (self._queue, last.arrived_ns, last.scheduled_ns),
            (self._prefill, last.scheduled_ns, last.prefilled_ns),
            (self._decode, last.prefilled_ns, last.produced_ns),
        ):
            histogram.labels(self._model).observe((end_ns - start_ns) / 1e9)
        if num_tokens > 1:
            token_ns = (last.produced_ns - last.prefilled_ns) / (num_tokens - 1)
            self._token.labels(self._model).observe(token_ns / 1e9)
        if last.stages is not None:
            for stage in STAGES:
                self._stage.labels(self._model, stage).observe(last.stages.of(stage) / 1e9)

    def _counter(self, name: str, about: str, *labels: str) -> Counter:
        return Counter(name, about, ["model_name", *labels], registry=self._registry)

    def _gauge(self, name: str, about: str) -> Gauge:
        return Gauge(name, about, ["model_name"], registry=self._registry)

    def _histogram(self, name: str, about: str, buckets: Sequence[float], *labels: str) -> Histogram:
        return Histogram(name, about, ["model_name", *labels], buckets=buckets, registry=self._registry)
