"""Where a learner's batches come from in tests."""

import itertools


class Batches:
    """A `BatchSource`: the given batches, again and again."""

    def __init__(self, *batches):
        self._batches = itertools.cycle(batches)
        self.drawn = 0
        self.noted = []

    def next(self):
        self.drawn += 1
        return next(self._batches)

    def note_losses(self, batch, losses):
        self.noted.append((batch, losses))
