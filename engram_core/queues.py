"""The order of work: which pieces make the next batch of one layer."""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from collections.abc import Hashable, Iterator
from typing import Protocol

from engram_core.jobs import Job, Piece

SMALL_TOKENS = 16
"""A read of at most so many positions is small."""


class Queue(Protocol):
    """Pieces that wait. Not thread-safe: a lane's lock guards it."""

    num_tokens: int
    """Tokens in it, those of cancelled jobs included until they are met."""

    def push(self, piece: Piece) -> None:
        """Add a piece."""

    def take(self, limit: int) -> list[Piece]:
        """Remove the next batch: pieces of one layer, `limit` tokens at most; [] = none waits."""

    def clear(self) -> set[Job]:
        """Remove everything; returns the jobs it belonged to."""


class FairQueue:
    """Clients take turns.

    The client whose turn it is says the layer: that of its oldest piece. Every client that has work
    for that layer then gives up to `share` tokens, so all that waits for a layer is one batch, and
    a big request delays a small one by one share. Whoever gave goes to the end of the line.

    Where small requests (decode) and big ones (prefill) wait, the small ones go first, alone: in
    one batch with a share of a prefill they would take as long as it does. Then it is the line's
    turn again, so big ones get at least every second batch.
    """

    def __init__(self, share: int) -> None:
        self._small_went_first = False
        self.num_tokens = 0
        self._share = share
        self._arrivals = 0
        # client -> layer -> (arrival, piece); clients in the order of their turns
        self._line: OrderedDict[Hashable, dict[int, deque[tuple[int, Piece]]]] = OrderedDict()

    def push(self, piece: Piece) -> None:
        """Queue a piece behind its client's others."""
        layers = self._line.setdefault(piece.job.client, {})
        layers.setdefault(piece.layer, deque()).append((self._arrivals, piece))
        self._arrivals += 1
        self.num_tokens += piece.num_tokens

    def take(self, limit: int) -> list[Piece]:
        """Return a batch of one layer, at most `limit` tokens, each client's share in turn."""
        self._drop_unwanted()
        while self._line:
            before = self.num_tokens
            batch = self._take_layer(limit)
            # Nothing but pieces that were cancelled since: [] would say that nothing waits.
            if batch or self.num_tokens == before:
                return batch
        return []

    def _take_layer(self, limit: int) -> list[Piece]:
        clients = self._next_clients()
        first = self._line[clients[0]]
        layer = min(first, key=lambda layer: first[layer][0][0])
        batch: list[Piece] = []
        for client in clients:
            given = self._give(client, layer, min(self._share, limit))
            batch += given
            limit -= sum(piece.num_tokens for piece in given)
        return batch

    def clear(self) -> set[Job]:
        """Empty it; return whose pieces there were."""
        jobs = {piece.job for pieces in self._deques() for _, piece in pieces}
        self._line.clear()
        self.num_tokens = 0
        return jobs

    def _next_clients(self) -> list[Hashable]:
        """Whose pieces the next batch is of, in the order of the line."""
        line = list(self._line)
        small = [client for client in line if self._is_small(client)]
        self._small_went_first = 0 < len(small) < len(line) and not self._small_went_first
        return small if self._small_went_first else line

    def _is_small(self, client: Hashable) -> bool:
        """Whether all that a client waits for is small."""
        deques = self._line[client].values()
        return all(len(pieces[0][1].job.read) <= SMALL_TOKENS for pieces in deques)

    def _give(self, client: Hashable, layer: int, room: int) -> list[Piece]:
        """Take a client's pieces of a layer; moves it to the end of the line, or out of it."""
        layers = self._line[client]
        pieces = layers.get(layer, deque())
        given: list[Piece] = []
        while pieces and pieces[0][1].num_tokens <= room:
            piece = self._pop(pieces)
            if piece.job.is_wanted:
                given.append(piece)
                room -= piece.num_tokens
        if given:
            self._line.move_to_end(client)
        if not pieces:
            layers.pop(layer, None)
        if not layers:
            del self._line[client]
        return given

    def _drop_unwanted(self) -> None:
        """Make every deque begin with a piece that somebody waits for."""
        for client, layers in list(self._line.items()):
            for layer, pieces in list(layers.items()):
                while pieces and not pieces[0][1].job.is_wanted:
                    self._pop(pieces)
                if not pieces:
                    del layers[layer]
            if not layers:
                del self._line[client]

    def _pop(self, pieces: deque[tuple[int, Piece]]) -> Piece:
        _, piece = pieces.popleft()
        self.num_tokens -= piece.num_tokens
        return piece

    def _deques(self) -> Iterator[deque[tuple[int, Piece]]]:
        for layers in self._line.values():
            yield from layers.values()


class ChunkQueue:
    """By (chunk, layer): prompts advance together, each through all layers of a chunk at once."""

    def __init__(self) -> None:
        self.num_tokens = 0
        self._arrivals = 0
        self._heap: list[tuple[int, int, int, Piece]] = []

    def push(self, piece: Piece) -> None:
        """Queue a piece by chunk, then layer."""
        heapq.heappush(self._heap, (piece.start, piece.place, self._arrivals, piece))
        self._arrivals += 1
        self.num_tokens += piece.num_tokens

    def take(self, limit: int) -> list[Piece]:
        """Return a batch of one chunk and layer, at most `limit` tokens."""
        batch: list[Piece] = []
        while self._heap:
            piece = self._heap[0][-1]
            if piece.job.is_wanted:
                if batch and (piece.layer != batch[0].layer or piece.start != batch[0].start):
                    break
                if piece.num_tokens > limit:
                    break
                batch.append(piece)
                limit -= piece.num_tokens
            heapq.heappop(self._heap)
            self.num_tokens -= piece.num_tokens
        return batch

    def clear(self) -> set[Job]:
        """Empty it; return whose pieces there were."""
        jobs = {entry[-1].job for entry in self._heap}
        self._heap.clear()
        self.num_tokens = 0
        return jobs
