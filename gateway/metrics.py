"""Prometheus metrics, under vLLM's names where they mean the same."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from gateway.chat_reply import ChoiceResult


class GatewayMetrics:
    """One registry a gateway, so that two in one process (tests) do not collide."""

    def __init__(self, model: str) -> None:
        self._registry = CollectorRegistry()
        self._model = model
        names = ["model_name"]
        buckets = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
        self._prompt = Counter("vllm:prompt_tokens", "Prefill tokens", names, registry=self._registry)
        self._generated = Counter("vllm:generation_tokens", "Decoded tokens", names, registry=self._registry)
        self._finished = Counter(
            "vllm:request_success", "Finished choices", [*names, "finished_reason"], registry=self._registry
        )
        self._failed = Counter(
            "dockyard:request_failures",
            "Requests ended in an error",
            [*names, "code"],
            registry=self._registry,
        )
        self._running = Gauge(
            "vllm:num_requests_running", "Choices with a first token", names, registry=self._registry
        )
        self._waiting = Gauge(
            "vllm:num_requests_waiting",
            "Choices queued or in prefill, without a token yet",
            names,
            registry=self._registry,
        )
        self._first = Histogram(
            "vllm:time_to_first_token_seconds",
            "Arrival to first token",
            names,
            buckets=buckets,
            registry=self._registry,
        )

    def prefilled(self, num_prompt: int) -> None:
        """A request's first token is there: its prompt has been computed, once for all of its choices."""
        self._prompt.labels(self._model).inc(num_prompt)

    def finished(self, result: ChoiceResult) -> None:
        """A choice has ended by itself."""
        self._generated.labels(self._model).inc(result.num_tokens)
        self._finished.labels(self._model, result.finish_reason).inc()
        self._first.labels(self._model).observe((result.last.prefilled_ns - result.last.arrived_ns) / 1e9)

    def aborted(self, num_choices: int) -> None:
        """The client has hung up before these choices had ended."""
        self._finished.labels(self._model, "abort").inc(num_choices)

    def failed(self, code: str) -> None:
        """A request has ended in an error."""
        self._failed.labels(self._model, code).inc()

    def render(self, running: int, waiting: int) -> bytes:
        """The exposition text."""
        self._running.labels(self._model).set(running)
        self._waiting.labels(self._model).set(waiting)
        return generate_latest(self._registry)
