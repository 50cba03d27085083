"""Where a sequence starts behind what is known of it, and over which rows it passes from there.

A sequence's lineage is `resumed`: the positions at which windows were run again, not taken as they were.
It decides the bits of everything behind them, so it is fixed when the sequence first runs, and recomputation
goes through the same places.
"""

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass

from engine.model.bounds import Bounds, ResumeRules

_ROWS_WORTH = 4  # in windows: the rows that are run rather than the last window again

KeptWindows = Callable[[int], int]
"""The last position up to a limit for which windows are kept; 0 where there is none."""


@dataclass(frozen=True, slots=True)
class Pass:
    """Rows from `bounds.start` up to `stop`, or to the newest token where that is None."""

    bounds: Bounds
    stop: int | None = None


@dataclass(frozen=True, slots=True)
class Start:
    """How a sequence (re)starts. `num_known` positions are shared.

    `windows_at`: the position whose kept windows it takes, or 0.
    """

    passes: tuple[Pass, ...]
    resumed: tuple[int, ...]
    num_known: int
    windows_at: int

    @property
    def position(self) -> int:
        return self.passes[0].bounds.start


def first_start(
    rules: ResumeRules, num_prompt: int, num_known: int, path: tuple[int, ...], kept: KeptWindows
) -> Start:
    """Of a sequence that has not run: `num_known` positions are known along a `path` of resumed ones.

    Kept windows come first, as they change no bit, unless too many rows lie between them and what is known.
    Else the last window runs again, if the model may.
    """
    most = _ROWS_WORTH * rules.window
    as_it_is = next_start(rules, num_prompt, num_known, path, kept)
    again = num_known - as_it_is.position
    if again == 0 or (as_it_is.position > 0 and again <= most):
        return as_it_is
    if rules.replay and num_known > rules.window:
        return next_start(rules, num_prompt, num_known, (*path, num_known), kept)
    exact = min(num_known, path[0]) if path else num_known
    return next_start(rules, num_prompt, exact, (), kept)


def next_start(
    rules: ResumeRules, num_prompt: int, num_known: int, resumed: tuple[int, ...], kept: KeptWindows
) -> Start:
    """Of a sequence with a lineage: as far on as what is known allows, to the same bits.

    Where entries before a resumed place are gone, rows up to it run again by the encoder alone, and then the
    window before it once more.
    """
    if rules.window == 0:
        return Start((Pass(Bounds(num_known, num_known)),), resumed, num_known, 0)
    stage = bisect_right(resumed, num_known)
    begin = resumed[stage - 1] if stage else 0
    last = stage == len(resumed)
    limit = min(num_known, rules.decoder_from(num_prompt)) if last and rules.decoder else num_known
    found = kept(limit)
    windows_at = found if found > begin else 0
    window_from = max(begin - rules.window, 0)
    first = Bounds(windows_at or window_from, num_known, window_from)
    stops = (*resumed[stage:], None)
    passes = [_pass(rules, num_prompt, first, stops[0])]
    for place, stop in zip(resumed[stage:], stops[1:], strict=True):
        bounds = Bounds(place - rules.window, place, place - rules.window)
        passes.append(_pass(rules, num_prompt, bounds, stop))
    return Start(tuple(passes), resumed, num_known, windows_at)


def _pass(rules: ResumeRules, num_prompt: int, bounds: Bounds, stop: int | None) -> Pass:
    decoder_from = rules.decoder_from(num_prompt) if stop is None else stop
    return Pass(Bounds(bounds.start, bounds.write_from, bounds.window_from, decoder_from), stop)
