"""One stratum of the data in its part of the memory: whole when it fits, else a window of it that moves on.

| mode | in memory | draws |
|---|---|---|
| resident | everything eligible | independent, by weight |
| filling | what a first sweep has reached; it stays; then resident | from the sweep, each step about once |
| sweeping | the window of the sweep | from the sweep |

What fits is resident from the first batch on, unless there is so much that the first batch would wait long for it.

Segments that came after the sweep's pass began are *late*: they are in memory as long as they are late, and get their
part of the draws by weight, independently. When they take too much room they join the pass.
"""

from __future__ import annotations

import msgspec
import numpy as np

from cloud_learner.buffer.sampling.cache_ops import CacheOps
from cloud_learner.buffer.sampling.epoch import Block, Epoch, EpochState, Population, block_mass, cut
from cloud_learner.buffer.sampling.independent import LARGEST_BLOCK, Base, IndependentSampler
from cloud_learner.buffer.sampling.snapshot import Choice, SamplingSnapshot, StratumView
from cloud_learner.buffer.sampling.windowed_shuffle import WindowedShuffle, WindowedShuffleState

FILLING, RESIDENT, SWEEPING = "filling", "resident", "sweeping"
_WINDOW = 0.75
"""of a stratum's bytes are for the window of its sweep"""
_LATE = 0.25
"""of them for late segments, before these join the pass"""
_AT_ONCE = 256 * 1024 * 1024
"""bytes of a stratum that is read whole before the first batch, in seconds; a larger one is filled meanwhile"""
_BLOCKS = 16
"""so many blocks fit a window at least, unless segments are larger"""
_TOKENS_OF_BLOCK = 65536
"""a pass is shorter where one block would get more draws than that"""
_DRIFT = 0.1
"""a pass ends early when the target has moved that far (total variation) since it began"""


class StratumState(msgspec.Struct, frozen=True):
    """What a stratum must know to go on."""

    mode: str
    allotted: int
    passes: int
    below: int
    """ledger row: what is drawn independently and older has entered memory"""
    sweep: WindowedShuffleState | None
    base: Base | None


class Stratum:
    """Draws from one stratum. `moves` collects what enters and leaves memory."""

    def __init__(self, scope: SamplingSnapshot, number: int, moves: CacheOps) -> None:
        self._scope, self._number, self._moves = scope, number, moves
        self.mode = ""
        """'' while there is nothing to draw"""
        self.allotted = 0
        """bytes it may use"""
        self.passes = 0
        """begun so far"""
        self._sweep: WindowedShuffle | None = None
        self._loose = IndependentSampler(scope, number, moves)
        self._in_pass: np.ndarray = np.zeros(0, bool)
        self._pass_mass = 0.0
        self._stuck = False

    @property
    def _view(self) -> StratumView:
        return self._scope.views[self._number]

    @property
    def _added(self) -> np.ndarray:
        return self._scope.added[self._number]

    @property
    def blocks(self) -> list[Block]:
        """All that are in memory."""
        return (self._sweep.blocks if self._sweep else []) + self._loose.blocks

    @property
    def late_segments(self) -> int:
        """In memory because they came late."""
        return len(self._loose.blocks) if self._sweep else 0

    def need(self) -> int:
        """Bytes of everything eligible, and of what else lies in the blocks of a resident stratum."""
        if self.mode != RESIDENT:
            return self._view.bytes
        if self._scope.only_grew:
            return self._loose.bytes + int(self._scope.cost[self._scope.segments_of(self._added)].sum())
        return self._loose.bytes_of(self._view.segments)

    def masses(self) -> tuple[float, float]:
        """Sums of the weights now of the steps drawn by `take` and by `take_late`."""
        loose = self._loose.mass
        return (self._pass_mass, loose) if self._sweep else (loose, 0.0)

    # --- between batches ------------------------------------------------------------------------------------------

    def refresh(self, allotted: int, whole: bool) -> None:
        """After the scope moved: `allotted` bytes may be used; `whole`: everything fits them."""
        self.allotted, self._loose.in_batch = allotted, False
        if self.mode and (whole != (self.mode != SWEEPING) or self._stuck):
            self.clear()
        if not self.mode:
            self._start(whole)
        elif self._sweep:
            self._sweep.start_batch()
            self._sweep.look_again()
            self._refresh_sweep(self._sweep)
        else:
            if self._scope.only_grew:
                self._loose.add(self._added)
            else:
                self._loose.set(self._view.runs)
            if self._loose.scattered:
                self._settle(self._loose.blocks)

    def clear(self) -> None:
        """Between batches: hold nothing; the next refresh begins anew."""
        self._loose.in_batch = False
        self._loose.clear()
        if self._sweep:
            self._moves.drop += self._sweep.blocks
        self.mode, self._sweep, self._stuck = "", None, False

    def _start(self, whole: bool) -> None:
        if whole and self._view.bytes <= _AT_ONCE:
            self._loose.entered = self._scope.segments
            self._settle([])
            return
        self.mode = FILLING if whole else SWEEPING
        self._sweep = WindowedShuffle(self._make_pass, self._costs, self._moves, keep=whole)
        self._sweep.begin()

    def _refresh_sweep(self, sweep: WindowedShuffle) -> None:
        grown = len(self._scope.weight) - len(self._in_pass)
        self._in_pass = np.append(self._in_pass, np.zeros(grown, bool))
        drifted = not self._scope.only_grew and self._drift(sweep.newest) > _DRIFT
        if drifted and sweep.keep:
            self.clear()
            self._start(True)
            return
        if drifted:
            sweep.begin()
        if self._scope.only_grew:
            self._loose.add(self._added)
        else:
            self._find_late()
        if not sweep.keep:
            if self._too_late():
                self._join(sweep)
            if self._too_late() or sweep.largest_ahead > self._room():
                sweep.begin()
            sweep.shrink(self._room())

    def _drift(self, newest: Epoch) -> float:
        """Total variation between the pass's target and the one of now, over the steps of the pass."""
        counts = self._scope.universe.run_count[newest.runs]
        then, now = newest.weights * counts, self._scope.weight[newest.runs] * counts
        if not (total := now.sum()) > 0:
            return 1.0
        return float(np.abs(then / then.sum() - now / total).sum()) / 2

    def _too_late(self) -> bool:
        """Whether late segments take more than their part, or leave no room for the largest segment."""
        return self._loose.bytes > min(_LATE * self.allotted, self.allotted - self._view.largest)

    def _room(self) -> int:
        """Bytes for the sweep."""
        return self.allotted - self._loose.bytes

    # --- one batch ------------------------------------------------------------------------------------------------

    def start_batch(self) -> None:
        """Once before the draws of a batch, also when it draws nothing here."""
        self._loose.start_batch()
        if self._sweep:
            self._sweep.start_batch()

    def take(self, count: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """(runs, offsets) int64 of up to `count` draws; fewer only if the budget has no room for more in one batch."""
        if self._sweep is None:
            return self._loose.draw(count, rng)
        runs, offsets = self._sweep.take(count, self._room(), self._scope.alive)
        if self._sweep.keep and self._sweep.finished:
            before = self.blocks
            self._sweep = None
            self._settle(before)
            more = self._loose.draw(count - len(runs), rng)
            return np.append(runs, more[0]), np.append(offsets, more[1])
        self._stuck = self._sweep.keep and len(runs) < count
        return runs, offsets

    def take_late(self, count: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """(runs, offsets) int64[count] of late segments. Their mass must be above 0."""
        return self._loose.draw(count, rng)

    def _costs(self, block: Block) -> list[int]:
        return self._scope.cost[list(block)].tolist()

    # --- passes ---------------------------------------------------------------------------------------------------

    def _make_pass(self) -> Epoch:
        """A pass over all there is; nothing is late any more."""
        scope = self._scope
        if self._sweep and self.mode == SWEEPING and self._loose.mass:
            # what waits must hold its part of what was late
            self._join(self._sweep)
        window_bytes = int(_WINDOW * self.allotted) if self.mode == SWEEPING else 0
        state = EpochState(
            number=self.passes,
            newest_version=scope.newest_version,
            scale=0.0,
            window_bytes=window_bytes,
            block_bytes=min(LARGEST_BLOCK, window_bytes // _BLOCKS) if window_bytes else LARGEST_BLOCK,
            legs=[(scope.watermark, 0)],
        )
        population = scope.population(self._number, scope.watermark, scope.newest_version, None)
        # filling: independent draws may begin after one draw of each step
        echo = scope.echo if window_bytes else min(1.0, scope.echo)
        draws = max(scope.batch, min(echo * float(population.count.sum()), _most_draws(population, state)))
        state.scale = draws / population.mass
        made = Epoch(state, (scope.seed, 2, self._number))
        made.join(population)
        self.passes += 1
        self._in_pass = np.zeros(len(scope.weight), bool)
        self._in_pass[population.run] = True
        self._loose.entered = scope.segments
        self._find_late()
        return made

    def _remake_pass(self, state: EpochState) -> Epoch:
        """The same pass from its state; what is late is then counted from it."""
        self._in_pass = np.zeros(len(self._scope.weight), bool)
        made = Epoch(state, (self._scope.seed, 2, self._number))
        for watermark, head in state.legs:
            made.head = head
            made.join(self._next_leg(state, watermark))
        return made

    def _join(self, sweep: WindowedShuffle) -> None:
        """Late segments take part in what is left of the pass."""
        state = sweep.newest.state
        state.legs.append((self._scope.watermark, sweep.newest.head))
        sweep.join(self._next_leg(state, self._scope.watermark), self._scope.alive)
        self._find_late()

    def _next_leg(self, state: EpochState, watermark: int) -> Population:
        """What was eligible at `watermark` and had not joined yet; it has now."""
        population = self._scope.population(self._number, watermark, state.newest_version, self._in_pass)
        self._in_pass[population.run] = True
        return population

    def _find_late(self) -> None:
        """Late is what is eligible but not in the pass."""
        scope = self._scope
        in_pass = self._in_pass[self._view.runs]
        self._pass_mass = Choice(scope, self._view.runs[in_pass]).mass()
        self._loose.set(self._view.runs[~in_pass])

    def _settle(self, before: list[Block]) -> None:
        """Everything is in memory, in the blocks `before`: hold it in blocks that do not depend on how it came."""
        scope = self._scope
        self.mode = RESIDENT
        self._loose.settle(Base(scope.watermark, scope.newest_version, scope.row_of(self._loose.entered)))
        self._loose.set(self._view.runs)
        self._moves.release += before

    # --- going on later -------------------------------------------------------------------------------------------

    def state(self) -> StratumState:
        """JSON-able through msgspec."""
        return StratumState(
            mode=self.mode,
            allotted=self.allotted,
            passes=self.passes,
            below=self._scope.row_of(self._loose.entered),
            sweep=self._sweep.state() if self._sweep else None,
            base=self._loose.base,
        )

    def restore(self, state: StratumState) -> None:
        """On a fresh stratum whose scope is where it was: go on from `state`, with everything admitted again."""
        self.mode, self.allotted, self.passes = state.mode, state.allotted, state.passes
        self._loose.entered = int(np.searchsorted(self._scope.universe.row, state.below))
        if state.sweep:
            self._sweep = WindowedShuffle(self._make_pass, self._costs, self._moves, keep=state.mode == FILLING)
            self._sweep.restore(state.sweep, self._remake_pass)
            self._find_late()
        elif state.base:
            self._loose.settle(state.base)
            self._loose.set(self._view.runs)


def _most_draws(population: Population, state: EpochState) -> float:
    """So many draws that no block gets more than `_TOKENS_OF_BLOCK`."""
    bounds = cut(population.segment, population.count, population.cost, state.block_bytes)
    return _TOKENS_OF_BLOCK * population.mass / float(block_mass(population, bounds).max())
