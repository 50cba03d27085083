"""The verdict on slowed runs: true figures pass, and each way of being wrong fails its own claim."""

from dataclasses import replace

import pytest

from bench.critical_path_verdict import Figures, Round, baseline_spread_s, runs_of, verdict

BASE = Figures(
    makespan_s=10.0,
    wall_s=10.01,
    length_error_s=0.0,
    untraced=0.0,
    gaps=0.01,
    model_s=6.0,
    path_tool_s=0.01,
    slack_tool_s=0.0,
    slack_s=5.0,
    what_if_slow_s=15.0,
    what_if_path_s=12.0,
    what_if_slack_s=10.0,
    others=0.0,
    diverged=False,
)


def lasting(makespan_s, **changes):
    return replace(BASE, makespan_s=makespan_s, wall_s=makespan_s + 0.01, **changes)


TRUE = Round(
    BASE,
    on_path=lasting(12.05, path_tool_s=2.01),
    in_slack=lasting(10.1),
    slow_decode=lasting(15.6, gaps=0.02),
)


def met(*rounds):
    return [part.met for part in verdict(rounds)]


def test_a_path_that_tells_the_truth_passes():
    assert met(TRUE) == [True, True, True, True]


@pytest.mark.parametrize(
    ("claim", "wrong"),
    [
        (0, replace(TRUE, on_path=lasting(11.7, path_tool_s=2.01))),  # grew by too little
        (0, replace(TRUE, on_path=lasting(12.0, path_tool_s=0.01))),  # charged to something else
        (1, replace(TRUE, in_slack=lasting(12.0))),  # what had slack made the run longer
        (1, replace(TRUE, in_slack=lasting(10.0, slack_tool_s=0.5))),  # it was on the path after all
        (1, replace(TRUE, baseline=replace(BASE, slack_s=2.9))),  # too little slack to show anything
        (2, replace(TRUE, slow_decode=lasting(17.0))),
        (2, replace(TRUE, slow_decode=lasting(13.0))),
        (3, replace(TRUE, baseline=replace(BASE, untraced=0.02))),
        (3, replace(TRUE, baseline=replace(BASE, wall_s=10.2))),  # time that the events do not know
        (3, replace(TRUE, on_path=lasting(12.0, path_tool_s=2.0, gaps=0.06))),
        (3, replace(TRUE, in_slack=lasting(10.0, length_error_s=0.002))),
        (3, replace(TRUE, slow_decode=lasting(15.0, diverged=True))),
    ],
)
def test_each_untruth_fails_its_claim_alone(claim, wrong):
    assert met(wrong) == [number != claim for number in range(4)]


def test_the_median_of_the_rounds_decides():
    disturbed = replace(TRUE, on_path=lasting(14.0, path_tool_s=2.0))
    assert met(TRUE, disturbed, TRUE)[0]
    assert not met(disturbed, TRUE, disturbed)[0]


def test_a_round_is_compared_with_its_own_baseline():
    slower = Round(lasting(20.0), on_path=lasting(22.0, path_tool_s=2.01))
    assert verdict([TRUE, slower])[0].found["makespan_grows_s"] == pytest.approx(2.025)
    assert baseline_spread_s([TRUE, slower]) == 10.0


def test_growth_of_the_model_is_told_apart():
    on_path = lasting(12.5, path_tool_s=2.0, model_s=6.5)
    assert verdict([replace(TRUE, on_path=on_path)])[0].found["apart_from_model_s"] == pytest.approx(2.0)


def test_where_model_time_does_not_repeat_the_rest_of_the_path_is_judged():
    slower_model = replace(TRUE, on_path=lasting(12.9, path_tool_s=2.01, model_s=6.9))
    assert not verdict([slower_model])[0].met
    assert verdict([slower_model], "apart_from_model")[0].met
    longer_path = replace(TRUE, in_slack=lasting(10.5))
    assert not verdict([longer_path], "apart_from_model")[1].met


def test_runs_that_time_cut_off_are_left_out():
    assert len(runs_of([TRUE, Round(BASE)])) == 5
    assert met(TRUE, Round(BASE)) == [True] * 4
