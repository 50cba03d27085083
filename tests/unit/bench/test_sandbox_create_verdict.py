"""What decides whether making a sandbox is quick enough."""

from bench.sandbox_create import verdict


def _rows(**ratios):
    return {
        clients.strip("_"): {"container": {"p50_ms": 10.0 * ratio}, "crun": {"p50_ms": 10.0}}
        for clients, ratio in ratios.items()
    }


def test_every_number_of_clients_is_judged():
    found = verdict(_rows(_1=1.2, _2=1.3, _8=0.9, _32=1.0))
    assert (found.ratios, found.met) == ({"1": 1.2, "2": 1.3, "8": 0.9, "32": 1.0}, True)
    assert verdict(_rows(_1=1.2, _2=1.0, _8=1.31, _32=1.0)).met is False
