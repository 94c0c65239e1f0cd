"""Work ahead: projections enqueued in chunks, on a stream that gates overtake."""

from __future__ import annotations

from contextlib import ExitStack

import numpy as np
from numpy.typing import NDArray

from engram_core.backends.device import Stream
from engram_core.backends.disk_rows import disk_readers
from engram_core.backends.engram_v41 import EngramV41
from engram_core.backends.projections import Projections
from engram_core.backends.staging import ControlRing, address_of, control_bytes_of, fits_inline
from engram_core.backends.timing import ProjectionTimer
from engram_core.geometry import EngramHashTables
from engram_core.hashing import hash_windows

_CONTROLS = 8
"""Control arrays on their way: more than there are projections under way."""


class ProjectQueue:
    """One thread enqueues. max_tokens: of a chunk"""

    def __init__(
        self,
        engram: EngramV41,
        hash_tables: EngramHashTables,
        stream: Stream,
        projections: Projections,
        *,
        max_tokens: int,
    ) -> None:
        self._engram, self._hash_tables = engram, hash_tables
        self._stream, self._projections = stream, projections
        geometry = engram.geometry
        with ExitStack() as made:
            size = control_bytes_of(geometry, max_tokens)
            self._control = ControlRing(engram.native, size, _CONTROLS)
            made.callback(self._control.close)
            tables = [engram.layer(i).on_disk for i in range(geometry.num_layers)]
            columns = geometry.n_hash_cols
            self._disk = disk_readers(engram.native, tables, columns, max_tokens, made)
            self._owned = made.pop_all()

    def project(
        self,
        layer_index: int,
        slots: NDArray[np.int64],
        windows: NDArray[np.int32] | None,
        hash_ids: NDArray[np.int64] | None,
        *,
        timer: ProjectionTimer | None = None,
    ) -> None:
        """Enqueue the kv of one chunk. Contiguous, T >= 1; exactly one of windows and hash_ids.

        timer: marks the stages of this one
        """
        stream, count = self._stream, len(slots)
        disk, table = self._disk[layer_index], None
        if disk is not None:
            if hash_ids is None:
                assert windows is not None
                hash_ids = hash_windows(windows, self._hash_tables, [layer_index])[:, 0]
            table, windows = disk.read(hash_ids), None
        number = self._projections.begin(count)
        is_inline = fits_inline(count)
        first = int(slots[0])
        is_run = count > 1 and int(slots[-1]) - first == count - 1
        is_run = is_run and bool((np.diff(slots) == 1).all())
        sent, control = [a for a in (windows, hash_ids) if a is not None], self._control
        is_sent = True
        if disk is not None:
            is_sent = not is_inline
            sent_slots = [address_of(slots)] if is_inline else control.send(stream, slots)
            places = [disk.places, *sent_slots]
        elif is_inline and windows is not None and windows.shape[1] <= 4:
            is_sent = False
            places = [address_of(windows), address_of(slots)]
        elif is_inline:
            places = [*control.send(stream, *sent), address_of(slots)]
        else:
            places = control.send(stream, *sent, slots)
        if timer is not None:
            timer.mark(0, stream)
        self._engram.rows_from_windows(
            layer_index,
            count,
            stream,
            windows=places[0] if windows is not None else 0,
            hash_ids=places[0] if hash_ids is not None else 0,
            table=table,
        )
        if disk is not None:
            disk.release(stream)
        if timer is not None:
            timer.mark(1, stream)
        self._engram.project(
            layer_index, count, stream, slots=places[1], first_slot=first if is_run else None
        )
        if is_sent:
            control.release(stream)
        if timer is not None:
            timer.mark(2, stream)
        self._projections.end(number, stream, slots)

    def close(self) -> None:
        """Free what chunks pass through."""
        self._owned.close()
