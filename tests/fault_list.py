"""The faults of `tests/faults.py`: what each breaks, and which tests must notice.

Every one has been made by somebody (`engram-format.md` 0, the field reports) or would be easy to
make here.
"""

from __future__ import annotations

from dataclasses import dataclass

VECTORS = "tests/golden/test_product_vectors.py"
LAYER = "tests/laws/test_layer_laws.py"
OFFSETS = "tests/laws/test_large_offsets.py"
MACHINE = "tests/laws/test_machine.py"
ENGINE = "tests/laws/test_engine_laws.py"
STORE = "tests/laws/test_store_laws.py"
REQUESTS = "tests/refusals/test_requests.py"
CLIENT_DIRECT = "tests/unit/test_client_direct.py"
CLIENT = "tests/unit/test_client_protocol.py"
NATIVE = "tests/native/test_formats.py"
ARRANGED = "tests/native/test_arranged.py"
STORED = "tests/native/test_stored_wkv.py"
GATES = "tests/unit/test_reference_backend.py"
CPU = "tests/native/test_cpu.py"
JUDGE = "tests/native/test_judge.py"
DIRECT = "tests/laws/test_direct_reads.py"
AT_ONCE = "tests/service/test_recall_at_once.py"


@dataclass(frozen=True)
class Fault:
    """One fault. changes: exact old text -> new text; tests: what must fail."""

    name: str
    file: str
    changes: tuple[tuple[str, str], ...]
    tests: tuple[str, ...]


def fault(name: str, file: str, old: str, new: str, *tests: str) -> Fault:
    """A fault of one change."""
    return Fault(name, file, ((old, new),), tests)


HASHING = "engram_core/hashing.py"
HOST_MEMORY = "tests/unit/test_host_memory.py"
PINNED = "tests/service/test_pinned_bodies.py"
SHM = "tests/service/test_shm.py"
QUANT = "engram_core/quant.py"
GATE = "engram_core/backends/gate.py"
REFERENCE = "engram_core/backends/reference.py"
CPU_GATE, CPU_SESSIONS = "csrc/cpu/gate.cc", "csrc/cpu/sessions.cc"
PAGES = "engram_core/pages.py"
SESSIONS = "engram_core/sessions.py"
FENCE = "engram_core/fence.py"
KV_STORE = "engram_core/kv_store.py"

FAULTS = (
    # ------------------------------------------------------------------ hash
    fault(
        "c-remainder",
        HASHING,
        "            np.remainder(mixed[:, None], primes,",
        "            np.fmod(mixed[:, None], primes,",
        VECTORS,
    ),
    fault(
        "look-back-reversed",
        HASHING,
        "block(newest_first, self.tables.pad_id)",
        "block(newest_first[:, ::-1], self.tables.pad_id)",
        VECTORS,
    ),
    fault(
        "blocking-not-sticky",
        HASHING,
        "        blocked |= windows[:, shift] == DEAD\n",
        "        blocked = windows[:, shift] == DEAD\n",
        VECTORS,
    ),
    fault(
        "pad-token-blocks",
        HASHING,
        "        blocked |= windows[:, shift] == DEAD\n",
        "        blocked |= (windows[:, shift] == DEAD) | (windows[:, shift] == pad_id)\n",
        VECTORS,
    ),
    fault(
        "negative-id-accepted",
        HASHING,
        "    bad = ids.view(np.uint64) >= tables.vocab_size\n",
        "    bad = ids >= tables.vocab_size\n",
        "tests/unit/test_hashing.py",
    ),
    fault(
        "dead-id-is-read",
        HASHING,
        "    if mask is not None:\n        bad &= mask\n",
        "",
        VECTORS,
    ),
    fault(
        "pad-mapped-twice",
        "engram_core/hash_constants.py",
        "    return pad_id\n",
        "    return int(token_map[pad_id])\n",
        f"{LAYER}::test_constants_equal_the_oracles",
    ),
    fault(
        "primes-restart-for-each-layer",
        "engram_core/geometry.py",
        "            primes=smallest_primes(base_size, count),\n",
        "            primes=smallest_primes(base_size, count // 2) * 2,\n",
        VECTORS,
    ),
    fault(
        "multipliers-from-the-raw-vocabulary",
        "engram_core/geometry.py",
        "compressed_vocab_size = int(check_token_map(token_map).max()) + 1\n        count",
        "compressed_vocab_size = len(check_token_map(token_map))\n        count",
        f"{LAYER}::test_constants_equal_the_oracles",
    ),
    # ------------------------------------------------------------------ rows
    fault(
        "32-bit-row-offset",
        "engram_core/tables.py",
        "        offset = part.offset + int(ids[first]) * width\n",
        "        offset = part.offset + (int(ids[first]) * width & 0xFFFFFFFF)\n",
        OFFSETS,
    ),
    fault(
        "negative-row-accepted",
        "engram_core/tables.py",
        "    bad = ids.view(np.uint64) >= num_rows\n",
        "    bad = ids >= num_rows\n",
        f"{LAYER}::test_every_row_by_bits",
    ),
    fault(
        "scale-code-0-as-zero",
        QUANT,
        "    values[255] = np.nan\n",
        "    values[255], values[0] = np.nan, 0.0\n",
        VECTORS,
    ),
    fault(
        "scale-255-as-infinity",
        QUANT,
        "    values[255] = np.nan\n",
        "    values[255] = np.inf\n",
        VECTORS,
    ),
    fault(
        "e4m3-subnormals-as-normals",
        QUANT,
        "    magnitude = np.where(exponent == 0, subnormal, normal)\n",
        "    magnitude = normal + 0 * subnormal\n",
        VECTORS,
    ),
    fault(
        "e4m3-7f-as-480",
        QUANT,
        "    magnitude[codes & 127 == 127] = np.nan\n",
        "",
        VECTORS,
    ),
    fault(
        "only-the-first-quant-block-decoded",
        QUANT,
        "        values: NDArray[np.float32] = quant.dequantize_blocks("
        "rows.reshape(-1, block_bytes))\n",
        "        first = np.repeat(rows[:, :block_bytes], rows.shape[1] // block_bytes, axis=0)\n"
        "        values: NDArray[np.float32] = quant.dequantize_blocks(first)\n",
        f"{LAYER}::test_every_row_by_bits",
    ),
    fault(
        "bf16-by-truncation",
        QUANT,
        "    return torch.from_numpy(values).to(torch.bfloat16)\n",
        "    return torch.from_numpy((values.view(np.uint32) & 0xFFFF0000).view(np.float32))"
        ".to(torch.bfloat16)\n",
        VECTORS,
    ),
    fault(
        "wkv-input-not-requantised",
        REFERENCE,
        "            if self._requantize[layer_index]:\n",
        "            if False:\n",
        f"{LAYER}::test_kv_lies_within_its_bound",
    ),
    fault(
        "no-amax-floor",
        QUANT,
        ".clamp_min(AMAX_FLOOR)",
        ".clamp_min(1e-30)",
        f"{LAYER}::test_kv_lies_within_its_bound",
        VECTORS,
    ),
    # ------------------------------------------------------------------ projection, gate
    fault(
        "batch-mates-change-bits",
        "engram_core/backends/projection.py",
        "        padded = -(-num_tokens // _PAD_TOKENS) * _PAD_TOKENS\n",
        "        padded = num_tokens\n",
        f"{LAYER}::test_a_token_is_the_same_in_any_batch",
        "tests/laws/test_true_width.py",
    ),
    fault(
        "eps-1e-6",
        GATE,
        "        self._eps = geometry.eps\n",
        "        self._eps = 1e-6\n",
        f"{GATES}::test_eps_is_so_small_that_a_small_residual_has_the_gate_of_a_large_one",
    ),
    fault(
        "normalised-over-all-streams",
        GATE,
        "        rstd = torch.rsqrt(terms.mean(-1) + self._eps)\n",
        "        rstd = torch.rsqrt(terms.mean((-2, -1)) + self._eps).unsqueeze(-1)\n",
        f"{GATES}::test_streams_are_normalised_one_by_one",
    ),
    fault(
        "sign-instead-of-copysign",
        GATE,
        "torch.copysign(dot.abs().clamp_min(CLAMP).sqrt(), dot)",
        "dot.abs().clamp_min(CLAMP).sqrt() * dot.sign()",
        f"{GATES}::test_the_gate_takes_the_sign_of_zero",
    ),
    fault(
        "fma-in-the-add",
        GATE,
        "        return torch.mul(value, gate.unsqueeze(-1), out=term).add_(h)",
        "        return torch.addcmul(h, value, gate.unsqueeze(-1))",
        f"{GATES}::test_product_and_sum_are_rounded_one_after_the_other",
    ),
    fault(
        "maximum-drops-nan",
        GATE,
        "dot.abs().clamp_min(CLAMP).sqrt()",
        "dot.abs().fmax(torch.tensor(CLAMP)).sqrt()",
        f"{GATES}::test_a_bad_stream_or_key_spoils_its_stream_only",
    ),
    Fault(
        "mask-by-multiplication",
        GATE,
        (
            (
                "        if out.data_ptr() != residual.data_ptr():\n"
                "            places = torch.from_numpy(np.flatnonzero(dead))\n"
                "            out.index_copy_(0, places, residual.index_select(0, places))\n",
                "        places = torch.from_numpy(np.flatnonzero(dead))\n"
                "        kept = residual.index_select(0, places)\n"
                "        value = store[torch.from_numpy(slots[dead])][:, None, -dim:].float()\n"
                "        out.index_copy_(0, places, (kept + 0.0 * value).to(out.dtype))\n",
            ),
        ),
        (f"{GATES}::test_a_dead_position_is_selected_not_multiplied",),
    ),
    # ------------------------------------------------------------------ the order of batches
    fault(
        "small-requests-starve-big-ones",
        "engram_core/queues.py",
        " and not self._small_went_first\n",
        "\n",
        "tests/unit/test_scheduler.py::test_small_requests_leave_every_second_batch_to_big_ones",
    ),
    fault(
        "cancelled-pieces-say-that-nothing-waits",
        "engram_core/queues.py",
        "            if batch or self.num_tokens == before:\n                return batch\n",
        "            return batch if before else []\n",
        "tests/unit/test_scheduler.py"
        "::test_jobs_cancelled_while_a_batch_is_taken_do_not_leave_others_waiting",
    ),
    fault(
        "small-reads-wait-for-a-prefill",
        "engram_core/scheduler.py",
        "        return beside if beside is not None and is_for_beside(job) else self._kv_lane\n",
        "        return self._kv_lane\n",
        "tests/unit/test_beside.py::test_small_reads_do_not_wait_for_a_prefill",
    ),
    fault(
        "prefill-on-the-lane-of-small-reads",
        "engram_core/beside.py",
        "    return len(job.read) <= READ_TOKENS and job.read.windows is not None\n",
        "    return job.read.windows is not None\n",
        "tests/unit/test_beside.py::test_what_is_large_or_of_given_hash_ids_is_for_the_kv_lane",
    ),
    fault(
        "kv-lane-leaves-no-slots-to-the-one-beside-it",
        "engram_core/scheduler.py",
        "            num_slots -= BESIDE_TOKENS\n",
        "            num_slots -= 0\n",
        "tests/unit/test_beside.py::test_batches_of_both_lanes_fit_a_small_store",
    ),
    fault(
        "lane-computes-with-the-asking-threads-count",
        "engram_core/lanes.py",
        "            torch.get_num_threads()\n",
        "",
        "tests/unit/test_beside.py::test_lanes_share_the_cores_that_are_left",
    ),
    fault(
        "lanes-share-a-workspace",
        "engram_core/backends/projection.py",
        "        return Projection(self.wkv, self.wkv.dtype, max_tokens, self.cut)\n",
        "        return self\n",
        "tests/unit/test_reference_backend.py::test_a_projection_beside_another_has_its_own_memory",
    ),
    fault(
        "products-of-any-size-where-bits-depend-on-it",
        "engram_core/backends/projection.py",
        "            for first in range(0, padded, self.cut.max_rows):\n",
        "            for first in range(0, padded, PROJECT_TOKENS):\n",
        "tests/unit/test_reference_backend.py"
        "::test_products_are_cut_so_that_bits_do_not_depend_on_the_batch",
    ),
    fault(
        "products-by-any-number-of-threads",
        "engram_core/backends/projection.py",
        "        with _threads(self.cut.num_threads):\n",
        "        with _threads(None):\n",
        "tests/unit/test_reference_backend.py"
        "::test_products_are_cut_so_that_bits_do_not_depend_on_the_batch",
    ),
    fault(
        "batches-compared-by-one-number-of-threads",
        "engram_core/backends/projection.py",
        "    for num_threads in sorted({1, torch.get_num_threads()}):\n",
        "    for num_threads in (torch.get_num_threads(),):\n",
        "tests/unit/test_reference_backend.py"
        "::test_products_are_cut_so_that_bits_do_not_depend_on_the_batch",
    ),
    fault(
        "loan-takes-what-the-lane-is-making",
        KV_STORE,
        "                if slot >= 0 and self._filled[slot]:\n",
        "                if slot >= 0:\n",
        "tests/unit/test_kv_store.py"
        "::test_what_the_lane_is_about_to_fill_is_computed_once_more_in_a_slot_of_its_own",
    ),
    fault(
        "adopted-over-another-entry",
        KV_STORE,
        "                if key in self._slot_of:\n                    loan.lent.append(slot)\n",
        "                if slot < 0:\n                    loan.lent.append(slot)\n",
        "tests/unit/test_kv_store.py::test_what_two_loans_compute_is_kept_once",
    ),
    fault(
        "adopted-and-made-again-by-the-batch-being-acquired",
        KV_STORE,
        "                loan.pinned.append(slot)\n            self._num_others += 1\n",
        "                loan.pinned.append(slot)\n",
        "tests/unit/test_kv_store.py"
        "::test_what_is_adopted_while_a_large_batch_is_acquired_is_found_there",
    ),
    # ------------------------------------------------------------------ bodies
    fault(
        "body-after-its-refusal-is-read",
        "service/transport.py",
        "if not (self._exchange.more_body or self._exchange.is_told):",
        "if not self._exchange.more_body:",
        "tests/service/test_fast_path.py"
        "::test_too_large_and_no_room_reach_a_client_that_writes_20_mb_first",
    ),
    fault(
        "warm-pages-taken-from-a-body",
        "engram_core/host_memory.py",
        " and self._is_warm and not self.pieces.used_bytes:",
        " and self._is_warm:",
        "tests/unit/test_host_memory.py"
        "::test_large_bodies_find_warm_pages_until_none_comes_for_a_while",
    ),
    # ------------------------------------------------------------------ remembered heads
    fault(
        "remembered-key-is-not-asked-again",
        "service/heads.py",
        "            self._state.access.confirm(known.key)\n",
        "            pass\n",
        f"{AT_ONCE}::test_a_removed_key_is_refused",
    ),
    fault(
        "room-is-kept-for-a-key-that-left",
        "service/admission.py",
        "        return not self._waiting or not self._still_waiting()\n",
        "        return not self._waiting\n",
        "tests/service/test_admission.py"
        "::test_anybody_may_hold_bytes_for_a_moment_unless_there_is_no_room_or_somebody_waits",
    ),
    fault(
        "recall-inside-another-request",
        "service/transport.py",
        "        is_first = self._is_between and (",
        "        is_first = True and (",
        f"{AT_ONCE}::test_inside_another_head_it_is_part_of_that_head",
    ),
    fault(
        "recall-of-what-the-parser-saw-otherwise",
        "service/heads.py",
        "    return headers_of(head.block) == head.headers ",
        '    return head.block != b"" ',
        f"{AT_ONCE}::test_headers_that_the_parser_saw_otherwise_are_not_remembered",
    ),
    fault(
        "recall-takes-the-next-request-for-its-body",
        "service/recall.py",
        "        return num_bytes <= asked.known.num_bytes and self._begin(",
        "        return self._begin(",
        f"{AT_ONCE}::test_two_in_one_packet_are_answered_in_order",
    ),
    fault(
        "recall-without-room",
        "service/recall.py",
        "known.is_placed and known.pool.has_room(known.num_bytes)",
        "known.is_placed",
        f"{AT_ONCE}::test_without_room_it_is_refused",
    ),
    fault(
        "recall-for-a-reader-that-takes-nothing",
        "service/recall.py",
        "        if line.transport.get_write_buffer_size():\n",
        "        if not line.transport:\n",
        f"{AT_ONCE}::test_while_answers_wait_to_be_taken_an_exchange_watches_the_reader",
    ),
    fault(
        "recalled-connection-ends-as-idle",
        "service/transport.py",
        "        self._answered_s = self.loop.time()\n",
        "",
        f"{AT_ONCE}::test_an_answer_at_once_renews_the_connection",
    ),
    fault(
        "recall-that-metrics-do-not-tell",
        "service/metrics.py",
        "        self._count()\n",
        "",
        f"{AT_ONCE}::test_each_is_counted_when_metrics_are_asked_for",
    ),
    # ------------------------------------------------------------------ direct reads
    fault(
        "direct-read-at-a-stale-epoch",
        CPU_SESSIONS,
        "    if (!session.is_fresh(segment[3])) return 0;",
        "    if (appends && !session.is_fresh(segment[3])) return 0;",
        f"{DIRECT}::test_any_read_after_any_program",
    ),
    fault(
        "direct-read-below-the-base",
        CPU_SESSIONS,
        "position < session.base || ",
        "",
        f"{DIRECT}::test_any_read_after_any_program",
    ),
    fault(
        "direct-read-beyond-the-end",
        CPU_SESSIONS,
        "position > session.length - count",
        "position > session.length + 1 - count",
        f"{DIRECT}::test_any_read_after_any_program",
    ),
    fault(
        "direct-read-does-not-renew",
        CPU_SESSIONS,
        "sessions->last_used_s[spot.row] = now_s;",
        "sessions->last_used_s[spot.row] += 0 * now_s;",
        f"{DIRECT}::test_it_renews_the_session",
    ),
    fault(
        "direct-segment-of-nothing",
        CPU_SESSIONS,
        "row < 0 || count < 1 || count > left",
        "row < 0 || count > left",
        f"{JUDGE}::test_any_ask_after_any_program",
    ),
    fault(
        "direct-append-of-an-id-below-zero",
        CPU_SESSIONS,
        "uint64_t(token_ids[i]) >= uint64_t(batch.vocab_size)",
        "token_ids[i] >= batch.vocab_size",
        f"{JUDGE}::test_any_ask_after_any_program",
    ),
    fault(
        "direct-append-anywhere",
        CPU_SESSIONS,
        "position != session.length || count > session.room()",
        "count > session.room()",
        f"{JUDGE}::test_any_ask_after_any_program",
    ),
    fault(
        "direct-read-ends-a-session-where-it-was-judged",
        CPU_SESSIONS,
        "if (spot.length > length) length = spot.length;",
        "length = spot.length;",
        f"{JUDGE}::test_a_batch_takes_what_has_room_and_no_session_twice",
    ),
    fault(
        "direct-read-of-what-is-not-filled",
        KV_STORE,
        "            if not filled[slot]:\n",
        "            if slot < 0:\n",
        f"{DIRECT}::test_it_finds_only_what_is_filled",
    ),
    # ------------------------------------------------------------------ the gate in C++
    fault(
        "cpu-gate-maximum-drops-nan",
        CPU_GATE,
        "size < CLAMP ? CLAMP : size",
        "size > CLAMP ? size : CLAMP",
        f"{CPU}::test_a_bad_stream_stays_in_it",
    ),
    fault(
        "cpu-gate-sign-of-zero",
        CPU_GATE,
        "signbit(dot) ? e : 1.0",
        "dot < 0 ? e : 1.0",
        f"{CPU}::test_the_gate_takes_the_sign_of_zero",
    ),
    fault(
        "cpu-gate-mean-of-the-other-square",
        CPU_GATE,
        "sqrtf(sum.key / size + eps)",
        "sqrtf(sum.h / size + eps)",
        f"{CPU}::test_one_gate_of_the_interval_explains_each_stream",
    ),
    fault(
        "cpu-gate-truncates-to-bf16",
        CPU_GATE,
        "(bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16",
        "bits >> 16",
        f"{CPU}::test_one_gate_of_the_interval_explains_each_stream",
    ),
    fault(
        "cpu-gate-takes-any-slot",
        CPU_GATE,
        "slots[t] >= num_slots",
        "slots[t] > num_slots",
        f"{CPU}::test_a_slot_there_is_not_is_refused_and_nothing_is_written",
    ),
    fault(
        "cpu-keys-blocking-not-sticky",
        CPU_SESSIONS,
        "const int32_t id = is_blocked || at < 0 ?",
        "const int32_t id = at < 0 ?",
        f"{CPU}::test_keys_are_those_of_the_arrays",
    ),
    fault(
        "dead-value-plus-zero",
        REFERENCE,
        "        out[places, hc_mult] = -0.0\n",
        "        out[places, hc_mult] = 0.0\n",
        f"{LAYER}::test_dead_position_keeps_nan_payloads",
    ),
    # ------------------------------------------------------------------ sessions
    fault(
        "look-back-stops-at-each-call",
        PAGES,
        "        before_start = positions < 0\n",
        "        before_start = positions < np.repeat(position, count)[:, None]\n",
        f"{ENGINE}::test_any_chunking_gives_the_same_bits",
        f"{ENGINE}::test_a_segment_is_the_same_in_any_batch",
    ),
    fault(
        "window-reset-on-rewind",
        SESSIONS,
        "        self._move_epoch(rows[judged.moves])\n        return self._pushed(rows, np.zeros",
        "        self._move_epoch(rows[judged.moves])\n"
        "        last = np.arange(max(int(judged.length[0]) - 3, 0), int(judged.length[0]))\n"
        "        self._ids.write(rows, last, np.full(len(last), -1, np.int32))\n"
        "        return self._pushed(rows, np.zeros",
        f"{ENGINE}::test_fork_and_rewind_are_inverses_of_a_detour",
    ),
    fault(
        "epoch-ignored-by-pushes",
        FENCE,
        "    fresh = fence.resolve(asked.epoch) == fence.epoch\n    below",
        "    fresh = fence.known.copy()\n    below",
        MACHINE,
    ),
    fault(
        "epoch-ignored-by-reads",
        FENCE,
        "        (epoch < fence.epoch, Verdict.STALE_EPOCH),\n",
        "",
        MACHINE,
    ),
    fault(
        "future-epoch-reads-the-present",
        FENCE,
        "((epoch > fence.epoch) | (end > fence.length), Verdict.NOT_PUSHED)",
        "((end > fence.length), Verdict.NOT_PUSHED)",
        MACHINE,
    ),
    fault(
        "empty-cut-keeps-the-epoch",
        SESSIONS,
        "            self._move_epoch(rows[judged.moves])\n        self._set",
        "            self._move_epoch(rows[judged.moves & (removed > 0)])\n        self._set",
        MACHINE,
    ),
    fault(
        "retry-of-a-landed-push-refused",
        FENCE,
        "        (~(fresh | in_place), Verdict.STALE_EPOCH),\n",
        "        (~fresh, Verdict.STALE_EPOCH),\n",
        MACHINE,
    ),
    fault(
        "epoch-used-again-at-open",
        SESSIONS,
        "        self._last_epoch = max(self._wall_clock_us(), self._last_epoch + 1)\n",
        "        self._last_epoch = self._wall_clock_us()\n",
        MACHINE,
    ),
    fault(
        "dead-flag-is-no-conflict",
        PAGES,
        "np.flatnonzero(present != ids[starts[segment] + within])",
        "np.flatnonzero((present != (pushed := ids[starts[segment] + within])) & (pushed != DEAD))",
        f"{REQUESTS}::test_push_that_makes_a_held_position_dead",
    ),
    fault(
        "base-ignored-by-reads",
        FENCE,
        "        (asked.position < fence.base, Verdict.HISTORY_TRUNCATED),\n        ((epoch",
        "        ((epoch",
        MACHINE,
    ),
    Fault(
        "step-not-atomic",
        SESSIONS,
        (
            (
                "        _refuse(duplicates(fence, asked)"
                " + refusals(judged.verdict, fence, asked, same))\n",
                "",
            ),
            (
                "written=appended)\n",
                "written=appended)\n"
                "        _refuse(refusals(judged.verdict, fence, asked, same))\n",
            ),
        ),
        (f"{ENGINE}::test_refused_step_changes_no_session", MACHINE),
    ),
    fault(
        "fork-shares-pages",
        PAGES,
        "        by_page[second] = by_page[first]\n",
        "        self._starts[target * self._pages_per_row + index] = first << _SHIFT\n",
        f"{ENGINE}::test_fork_and_rewind_are_inverses_of_a_detour",
    ),
    fault(
        "sessions-of-all-keys-in-one",
        "engram_core/registry.py",
        "        sessions = self._tenants.setdefault(tenant, {})\n",
        '        sessions = self._tenants.setdefault("", {})\n'
        "        self._tenants[tenant] = sessions\n",
        MACHINE,
    ),
    fault(
        "idle-sessions-live-on",
        "engram_core/registry.py",
        "self._clock() - seconds",
        "self._clock() - 10 * seconds",
        MACHINE,
    ),
    fault(
        "refusal-lists-one-segment",
        "engram_core/errors.py",
        "            for index, error in errors\n",
        "            for index, error in errors[:1]\n",
        MACHINE,
    ),
    # ------------------------------------------------------------------ store, batches
    fault(
        "key-without-the-oldest-id",
        KV_STORE,
        "    fields[:, 2:] = windows\n",
        "    fields[:, 2:] = windows\n    fields[:, -1] = 0\n",
        f"{STORE}::test_every_token_gets_the_slot_of_its_own_window",
    ),
    fault(
        "key-without-the-layer",
        KV_STORE,
        "    fields[:, 1] = layer_index\n",
        "    fields[:, 1] = 0\n",
        MACHINE,
    ),
    fault(
        "key-without-the-tenant",
        KV_STORE,
        "    fields[:, 0] = tenants\n",
        "    fields[:, 0] = 0\n",
        f"{STORE}::test_every_token_gets_the_slot_of_its_own_window",
    ),
    Fault(
        "pin-ignored",
        KV_STORE,
        (
            (
                "(self._stamps[slots] == stamps) & (self._pins[slots] == 0)",
                "self._stamps[slots] == stamps",
            ),
            ("(stamps > 0) & (self._pins == 0)", "stamps > 0"),
        ),
        (f"{STORE}::test_pinned_entries_are_never_evicted",),
    ),
    fault(
        "failed-kv-stays-in-the-store",
        KV_STORE,
        "self._forget(lease.slots[lease.compute])",
        "pass",
        f"{STORE}::test_abandoned_computation_is_forgotten",
    ),
    fault(
        "duplicates-computed-for-the-first-only",
        "engram_core/batches.py",
        "self._backend.project(layer, slots, windows=windows[lease.compute])",
        "self._backend.project(layer, slots, windows=windows[: len(slots)])",
        MACHINE,
    ),
    fault(
        "second-layer-gets-the-first-ones-ids",
        "engram_core/jobs.py",
        "hash_ids[self.start : self.stop, self.place]",
        "hash_ids[self.start : self.stop, 0]",
        MACHINE,
    ),
    fault(
        "wait-outlives-its-session",
        "engram_core/engine.py",
        "        self._steps.counts[count] += len(names)\n        self._steps.changed(names)\n",
        "        self._steps.counts[count] += len(names)\n",
        f"{ENGINE}::test_waiting_read_of_a_session_that_is_closed",
    ),
    # ------------------------------------------------------------------ sources of a step
    fault(
        "look-back-of-a-step-reversed",
        "engram_core/reads.py",
        "    before = compress(lookback.ravel()",
        "    lookback = lookback[:, ::-1]\n    before = compress(lookback.ravel()",
        f"{ENGINE}::test_look_back_equals_the_session",
    ),
    fault(
        "hash-id-outside-its-bucket-accepted",
        "engram_core/reads.py",
        "    outside = (hash_ids < first) | (hash_ids >= first + size)\n",
        "    outside = hash_ids < 0\n",
        f"{REQUESTS}::test_hash_id_outside_its_bucket",
    ),
    # ------------------------------------------------------------------ the door
    fault(
        "foreign-host-answered",
        "service/access.py",
        "                check_host(headers)\n",
        "                pass\n",
        f"{REQUESTS}::test_host_of_somebody_else",
    ),
    fault(
        "integers-converted",
        "service/schemas.py",
        'model_config = ConfigDict(strict=True, extra="forbid", frozen=True)',
        'model_config = ConfigDict(extra="forbid", frozen=True)',
        f"{REQUESTS}::test_integer_spelled_otherwise_in_json",
    ),
    fault(
        "duplicate-keys-taken",
        "engram_client/wire.py",
        "    if len(record) != len(pairs):\n",
        "    if False:\n",
        f"{REQUESTS}::test_json_with_duplicate_keys",
    ),
    fault(
        "answer-before-the-body-is-read",
        "service/bodies.py",
        "READ_ON_S = 2.0\n",
        "READ_ON_S = 0.0\n",
        f"{REQUESTS}::test_body_above_half_of_the_pool_after_all_was_written",
    ),
    fault(
        "slow-body-waited-for",
        "service/bodies.py",
        "GRACE_S = 1.0\n",
        "GRACE_S = 60.0\n",
        f"{REQUESTS}::test_body_that_comes_too_slowly",
    ),
    fault(
        "pool-never-full",
        "service/admission.py",
        "        if num_bytes > free or self._exceeds_share(tenant, num_bytes):\n",
        "        if False:\n",
        f"{REQUESTS}::test_no_room_for_another_body",
    ),
    # ------------------------------------------------------------------ operating
    fault(
        "report-of-another-machine-used",
        "service/loading.py",
        "    if elsewhere:\n",
        "    if False:\n",
        "tests/service/test_loading.py",
    ),
    fault(
        "report-of-another-driver-used",
        "engram_core/machine.py",
        '"gpu_gib", "driver")',
        '"gpu_gib")',
        "tests/unit/test_doctor_report.py",
    ),
    fault(
        "auto-ignores-what-was-measured",
        "engram_core/memory.py",
        "            candidates = _fastest_first(candidates, measured)\n",
        "",
        "tests/unit/test_doctor_report.py",
    ),
    fault(
        "auto-goes-to-the-disk-while-memory-comes-back",
        "engram_core/memory.py",
        "        if _fits_when_empty(needs, memory):\n",
        "        if False:\n",
        "tests/unit/test_memory.py",
    ),
    fault(
        "stages-overlap",
        "engram_core/stages.py",
        "        rest = time.perf_counter() - start - sum(parts.values())\n",
        "        rest = time.perf_counter() - start\n",
        "tests/unit/test_stages.py",
    ),
    fault(
        "malloc-keeps-every-thread-s-largest-blocks",
        "service/lifecycle.py",
        "    bound_heap()\n",
        "",
        "tests/service/test_heap.py",
    ),
    fault(
        "malloc-s-mmap-threshold-is-its-own",
        "service/heap.py",
        "mallopt(_M_MMAP_THRESHOLD, MMAP_BYTES) and ",
        "",
        "tests/service/test_heap.py",
    ),
    fault(
        "waiting-read-outlives-its-client",
        "service/routes.py",
        '    if "wait_ms" not in call.query:\n',
        "    if True:\n",
        "tests/service/test_bodies.py",
    ),
    fault(
        "weights-are-decoded-for-nobody",
        "service/bodies.py",
        "        if num_sent < num_bytes and is_gone():\n",
        "        if False:\n",
        "tests/service/test_transport.py",
    ),
    fault(
        "malloc-trims-behind-every-request",
        "service/heap.py",
        " and mallopt(_M_TRIM_THRESHOLD, TRIM_BYTES)",
        "",
        "tests/service/test_heap.py",
    ),
    fault(
        "heap-settings-of-the-environment-are-overruled",
        "service/heap.py",
        "    if any(name in os.environ for name in _NAMES):\n",
        "    if False:\n",
        "tests/service/test_heap.py",
    ),
    fault(
        "failed-self-check-is-a-mistake-of-the-operator",
        "service/lifecycle.py",
        "        if isinstance(loaded, SelfCheckFailed):\n",
        "        if False:\n",
        "tests/service/test_lifecycle.py",
    ),
    fault(
        "every-caller-is-traced",
        "service/tracing.py",
        "    if told is None or not int(told[1], 16) & trace.TraceFlags.SAMPLED:\n",
        "    if told is None:\n",
        "tests/service/test_opentelemetry.py",
    ),
    fault(
        "refusal-keeps-its-body",
        "service/desk.py",
        "        _forget_frames(refusal)\n",
        "",
        "tests/service/test_pinned_bodies.py::test_a_refused_body_is_free_at_once",
    ),
    fault(
        "refusal-keeps-the-body-of-what-it-was-raised-among",
        "service/desk.py",
        "        among.__context__ = None\n        among = before\n",
        "        among = None\n",
        "tests/service/test_pinned_bodies.py::test_a_refused_body_is_free_at_once",
    ),
    fault(
        "stream-keeps-what-it-answered",
        "service/rpc/streams.py",
        "        exchange.work = exchange.error = None\n",
        "",
        "tests/service/test_rpc.py::test_steps_of_a_stream_are_free_when_they_are_answered",
    ),
    fault(
        "traceparent-of-any-byte",
        "service/tracing.py",
        "(-[!-~]*)?",
        "(-.*)?",
        "tests/service/test_tracing.py::test_everything_else_is_not_traced",
    ),
    fault(
        "metadata-is-latin-1",
        "service/rpc/calls.py",
        "else value.encode())",
        'else value.encode("latin-1"))',
        "tests/service/test_rpc.py::test_metadata_beyond_latin_1_is_read",
    ),
    fault(
        "asking-threads-lanes-not-in-the-ledger",
        "engram_core/backends/cuda.py",
        "sizes.num_lanes + NEAR_LANES",
        "sizes.num_lanes",
        "tests/unit/test_loader.py::test_lanes_of_the_asking_thread_are_in_a_gpus_ledger",
    ),
    fault(
        "plain-step-forgets-the-epoch",
        "service/rpc/steps.py",
        "            epoch=plain.epoch,\n",
        "            epoch=-1,\n",
        "tests/service/test_rpc_plain.py",
    ),
    fault(
        "plain-step-of-other-bytes",
        "service/rpc/plain.py",
        "            if raw[at + begin : at + end] != piece:\n",
        "            if not piece:\n",
        "tests/service/test_rpc_plain.py",
    ),
    fault(
        "plain-step-of-the-first-request-id",
        "service/rpc/plain.py",
        "            request_id,\n            _number(",
        "            step.request_id,\n            _number(",
        "tests/service/test_rpc_plain.py",
    ),
    fault(
        "plain-step-admits-its-answer-twice",
        "service/rpc/steps.py",
        " - self._admitted, ",
        ", ",
        "tests/service/test_rpc.py::test_stored_size_of_an_answer_is_admitted",
    ),
    fault(
        "stream-begins-a-write-beside-another",
        "service/rpc/streams.py",
        " and self._idle.is_set() and",
        " and",
        "tests/service/test_rpc_plain.py",
    ),
    fault(
        "stream-keeps-the-bytes-of-what-it-answered-at-once",
        "service/rpc/streams.py",
        "        self._state.pool.give(self.tenant, len(given.reply))\n",
        "",
        "tests/service/test_rpc_plain.py",
    ),
    # ------------------------------------------------------------------ the client
    fault(
        "client-forgets-the-epoch",
        "engram_client/messages.py",
        "    state.base, state.epoch = base, epoch\n",
        "    state.base = base\n",
        CLIENT,
    ),
    fault(
        "client-reopens-with-look-back-reversed",
        "engram_client/state.py",
        "        ids = self.history.read(max(position - width, 0), position).tolist()\n",
        "        ids = self.history.read(max(position - width, 0), position).tolist()[::-1]\n",
        CLIENT,
    ),
    fault(
        "client-forgets-what-is-dead",
        "engram_client/history.py",
        "(ids if mask is None else np.where(mask, ids, DEAD)).tolist()",
        "ids.tolist()",
        CLIENT,
    ),
    fault(
        "client-keeps-ids-behind-a-cut",
        "engram_client/protocol.py",
        "            state.history.cut(position)\n",
        "            pass\n",
        CLIENT,
    ),
    fault(
        "client-gates-dead-positions",
        "engram_client/local.py",
        "if dead is None else dead.cpu().numpy()",
        "",
        "tests/unit/test_local.py",
    ),
    fault(
        "client-takes-any-answer-to-a-residual",
        "engram_client/direct.py",
        "        if told == self._answer:\n",
        "        if told[2] is None:\n",
        CLIENT_DIRECT,
    ),
    fault(
        "client-asks-at-once-while-in-doubt",
        "engram_client/exchange.py",
        "            and state.unsettled is None\n            and not",
        "            and not",
        CLIENT_DIRECT,
    ),
    fault(
        "client-goes-on-with-another-request",
        "engram_client/direct.py",
        "        return request.replica == self.replica and line.encode() == self.line\n",
        "        return request.replica == self.replica and len(line) > 0\n",
        CLIENT_DIRECT,
    ),
    fault(
        "engine-failure-told-as-not-pushed",
        "engram_core/engine.py",
        "            if self._scheduler.failure is None:\n                self._steps.end",
        "            if self is not None:\n                self._steps.end",
        "tests/unit/test_engine.py",
    ),
    fault(
        "400-in-the-place-of-an-answer",
        "service/transport.py",
        "waits=_is_owed(self._running) or _is_owed(self._exchange))",
        "waits=False)",
        "tests/service/test_transport.py",
    ),
    fault(
        "a-failed-backend-told-in-its-words",
        "service/desk.py",
        'problems.SECRET_FAULT if code == "internal" else refusal',
        "refusal",
        "tests/service/test_life.py",
    ),
    fault(
        "client-sends-a-push-whose-answer-has-no-room",
        "engram_client/protocol.py",
        "                facts.check_out(options.output, out, stored=options.stored)\n",
        "                pass\n",
        "tests/unit/test_client.py",
    ),
    fault(
        "client-pushes-to-an-end-that-moved",
        "engram_client/exchange.py",
        "        if length is not None and state.length != length:\n",
        "        if length is not None and state.length < length:\n",
        "tests/unit/test_client_direct_step.py",
    ),
    fault(
        "client-step-pushes-to-an-end-that-moved",
        "engram_client/direct_step.py",
        "            if [state.length for state in self.states] != lengths:\n",
        "            if len(lengths) != len(self.states):\n",
        "tests/unit/test_client_direct_step.py",
    ),
    fault(
        "client-step-marks-nothing-in-doubt",
        "engram_client/direct_step.py",
        "                state.unsettled = position if self.options.truncate else state.length\n",
        "                pass\n",
        "tests/unit/test_client_direct_step.py",
    ),
    fault(
        "client-step-believes-any-length",
        "engram_client/direct_step.py",
        "            if length != expected:\n",
        "            if length < 0:\n",
        "tests/unit/test_client_direct_step.py",
    ),
    fault(
        "client-step-of-another-body",
        "engram_client/direct_step.py",
        '            and b"".join(request.sent_body).endswith(self.numbers)\n',
        "",
        "tests/unit/test_client_direct_step.py",
    ),
    # ------------------------------------------------------------------ kernels' formats and hash
    fault(
        "csrc-q2-k-nibbles-swapped",
        "csrc/formats/q2_k.h",
        "raw.scale & 15u",
        "raw.scale >> 4",
        NATIVE,
    ),
    fault(
        "csrc-q3-k-scales-of-four-bits",
        "csrc/formats/q3_k.h",
        "(low | (high << 4))",
        "(low | (high & 0u))",
        NATIVE,
    ),
    fault(
        "csrc-arranged-fp8-high-bits-misplaced",
        "csrc/formats/arranged.h",
        "(code & 0x70u) << 8",
        "(code & 0x70u) << 7",
        ARRANGED,
    ),
    fault(
        "csrc-arranged-q2-k-word-not-turned",
        "csrc/formats/arranged.h",
        "chunk < 2 ? word : word >> 4 | word << 28",
        "word",
        ARRANGED,
    ),
    fault(
        "csrc-arranged-q3-k-steps-swapped",
        "csrc/formats/arranged_blocks.h",
        "return ((low >> (2 * step)) & 0x33333333u)",
        "return ((low >> (2 - 2 * step)) & 0x33333333u)",
        ARRANGED,
    ),
    fault(
        "csrc-arranged-q4-k-min-of-the-other-unit",
        "csrc/formats/arranged_blocks.h",
        "mul(factor(top >> 16), six(bits.top, 12 * part + 6))",
        "mul(factor(top >> 16), six(bits.top, 18 - 12 * part))",
        ARRANGED,
    ),
    fault(
        "csrc-decoder-q2-k-values-of-the-other-step",
        "csrc/formats/stored_decoders.h",
        "get<0, kUnit % 2 * 2 + kStep>(",
        "get<0, kUnit % 2 * 2 + 1 - kStep>(",
        ARRANGED,
    ),
    fault(
        "csrc-decoder-q4-k-values-of-another-lane",
        "csrc/formats/stored_decoders.h",
        "get<kUnit % 2 * 4, kUnit / 2>(",
        "get<kUnit % 2 * 4, kUnit / 4>(",
        ARRANGED,
    ),
    fault(
        "csrc-arranged-q8-0-off-by-one",
        "csrc/formats/arranged_blocks.h",
        "8388736.0f",
        "8388735.0f",
        ARRANGED,
    ),
    fault(
        "stored-kernel-with-other-bits-serves",
        "engram_core/backends/choices.py",
        "        else:\n            kernels.append(kernel)",
        "        kernels.append(kernel)",
        STORED,
    ),
    fault(
        "stored-passes-read-slots-on-the-host",
        "engram_core/backends/engram_v41.py",
        "piece.slots_on_device = 1",
        "piece.slots_on_device = 0",
        STORED,
    ),
    fault(
        "stored-passes-write-the-first-slots",
        "engram_core/backends/engram_v41.py",
        "piece.slots = params.slots + first * 8",
        "piece.slots = params.slots",
        STORED,
    ),
    fault(
        "ledger-forgets-the-copy-of-other-types",
        "engram_core/backends/cuda.py",
        "if keeps_copy or not stored else 0",
        "if keeps_copy else 0",
        STORED,
    ),
    fault(
        "csrc-e4m3-nan-is-480",
        "csrc/formats/scalar.h",
        "if ((a & 0x7Fu) == 0x7Fu) low = bits_to_float(0x7FC00000u);",
        "",
        NATIVE,
    ),
    fault(
        "csrc-scale-code-0-is-zero",
        "csrc/formats/scalar.h",
        "if (code == 0) return bits_to_float(0x00400000u);",
        "",
        NATIVE,
    ),
    fault(
        "csrc-bf16-truncates",
        "csrc/formats/scalar.h",
        "(bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16",
        "bits >> 16",
        NATIVE,
    ),
    fault(
        "csrc-c-remainder",
        "csrc/hash.h",
        "return is_negative ? prime - 1 - static_cast<int64_t>(rest)",
        "return is_negative ? -static_cast<int64_t>(rest)",
        NATIVE,
    ),
    fault(
        "piece-that-nobody-keeps",
        "engram_core/host_memory.py",
        "            piece = np.frombuffer(self._memory[start : start + num_bytes], np.uint8)\n",
        "            whole = np.asarray(self._memory)\n"
        "            piece = whole[start : start + num_bytes]\n",
        f"{HOST_MEMORY}::test_whatever_refers_to_a_part_keeps_the_whole",
    ),
    fault(
        "piece-given-twice",
        "engram_core/host_memory.py",
        "        self._returned.append((start, size))\n",
        "        self._returned.append((start, size + PAGE_BYTES))\n",
        HOST_MEMORY,
    ),
    fault(
        "answers-made-anywhere",
        "engram_core/dispatch.py",
        "        self._memory = backend.host_memory\n",
        "        self._memory = __import__('engram_core.host_memory').host_memory.PlainMemory()\n",
        PINNED,
    ),
    fault(
        "failed-near-gate-goes-on",
        "engram_core/direct.py",
        "            self._near.fail(failure)\n",
        "",
        "tests/laws/test_direct_reads.py"
        "::test_a_gate_that_cannot_run_here_is_left_to_the_lane_and_one_that_fails_ends_all",
    ),
    fault(
        "near-gate-that-did-nothing-is-an-answer",
        "engram_core/direct.py",
        "        if not is_done:\n",
        "        if is_done is None:\n",
        "tests/laws/test_direct_reads.py"
        "::test_a_gate_that_cannot_run_here_is_left_to_the_lane_and_one_that_fails_ends_all",
    ),
    fault(
        "refusals-of-the-fast-way-count-no-bytes",
        "service/exchange.py",
        "        self._call.sent_bytes = len(refusal.body)\n",
        "",
        "tests/service/test_fast_path.py"
        "::test_refusals_are_counted_by_their_bytes_whichever_way_they_are_told",
    ),
    fault(
        "large-answer-in-one-turn",
        "service/exchange.py",
        "                line.loop.call_soon(self._send_on)\n",
        "                self._send_on()\n",
        "tests/service/test_fast_path.py"
        "::test_a_large_answer_leaves_the_loop_to_others_between_its_pieces",
    ),
    fault(
        "heads-of-any-length-remembered",
        "service/transport.py",
        ", 0, line_end + MAX_KNOWN_BYTES)\n",
        ")\n",
        "tests/service/test_step_recall.py::test_a_long_head_is_not_remembered",
    ),
    fault(
        "one-turn-for-all-of-a-unix-socket",
        "service/calls.py",
        "        peer = self.peer or id(self.connection)",
        "        peer = self.peer",
        "tests/service/test_transport.py::test_connections_of_a_unix_socket_take_turns_like_others",
    ),
    fault(
        "asking-thread-takes-what-a-lane-is-making",
        "engram_core/kv_store.py",
        "            elif not self._filled[slot]:\n",
        "            elif slot is None:\n",
        "tests/unit/test_kv_store.py::test_what_a_lane_is_about_to_compute_is_left_to_it",
    ),
    fault(
        "made-meanwhile-and-made-again",
        "engram_core/kv_store.py",
        "                    if self._num_others != num_others:\n",
        "                    if self._num_others < num_others:\n",
        "tests/unit/test_kv_store.py::test_urgent_work_goes_between_the_parts_of_a_large_batch",
    ),
    fault(
        "large-batch-hurries-past-a-thread-that-answers",
        "engram_core/kv_store.py",
        "        if self._num_urgent or time.monotonic() - self._urgent_s < _BUSY_S:\n",
        "        if self._num_urgent:\n",
        "tests/unit/test_kv_store.py"
        "::test_a_large_batch_pauses_only_where_a_thread_was_in_a_hurry_lately",
    ),
    fault(
        "pinned-twice-by-one-lease",
        "engram_core/kv_store.py",
        "        new = list(set(slots).difference(pinned, (-1,)))\n",
        "        new = list(set(slots).difference((-1,)))\n",
        "tests/unit/test_kv_store.py::test_urgent_work_goes_between_the_parts_of_a_large_batch",
    ),
    fault(
        "hits-evicted-for-what-is-missing-beside-them",
        "engram_core/kv_store.py",
        "            self._pins[hits] += 1  # so that they are not evicted for the others\n",
        "            self._pins[hits] += 0\n",
        "tests/unit/test_kv_store.py::test_a_hit_is_not_evicted_for_what_is_missing_beside_it",
    ),
    fault(
        "slots-of-what-was-not-computed-are-lost",
        "engram_core/kv_store.py",
        "            self._free_again(fresh)\n            return None\n",
        "            return None\n",
        "tests/unit/test_kv_store.py::test_what_could_not_be_computed_leaves_nothing_behind",
    ),
    fault(
        "append-at-the-end-under-a-stale-epoch",
        "engram_core/sessions.py",
        "            or (fence.resolve(asked.epoch) != fence.epoch).any()\n",
        "",
        "tests/unit/test_fence_simulation.py",
        "tests/unit/test_sessions.py",
    ),
    fault(
        "one-session-appended-to-twice-in-a-step",
        "engram_core/sessions.py",
        "            or len(set(rows.tolist())) < len(rows)\n",
        "",
        "tests/unit/test_sessions.py",
    ),
    fault(
        "append-past-the-room-for-ids",
        "engram_core/sessions.py",
        "            or self.held_tokens + len(ids) > self._limits.max_held_tokens\n",
        "",
        "tests/unit/test_sessions.py",
    ),
    fault(
        "append-across-a-page-in-one-write",
        CPU_SESSIONS,
        "return length % PAGE ? PAGE - length % PAGE : 0;",
        "return PAGE;",
        f"{DIRECT}::test_any_push_and_read_after_any_program",
    ),
    fault(
        "direct-append-under-any-epoch",
        CPU_SESSIONS,
        "    if (!session.is_fresh(segment[3])) return 0;",
        "    if (!appends && !session.is_fresh(segment[3])) return 0;",
        f"{DIRECT}::test_any_push_and_read_after_any_program",
    ),
    fault(
        "direct-append-that-nobody-hears-of",
        "engram_core/engine.py",
        "self._steps.appended(ask, answer.sessions)\n",
        "pass\n",
        f"{DIRECT}::test_an_append_made_directly_answers_who_waits_for_it",
    ),
    fault(
        "made-here-and-found-by-a-lane-too-early",
        "engram_core/backends/cuda_near.py",
        "        self.projector.wait()  # a lane's streams know nothing of this one\n",
        "",
        "tests/unit/test_cuda_calls.py::test_what_is_missing_is_projected_and_gated_without_a_lane",
    ),
    fault(
        "layers-left-to-the-lane-are-forgotten",
        "engram_core/near.py",
        "            self._to_lane(job, some)\n",
        "            pass\n",
        "tests/unit/test_near.py::test_layers_that_cannot_be_made_now_are_made_by_the_lane",
    ),
    fault(
        "one-session-pushed-to-twice-by-a-few-segments",
        CPU_SESSIONS,
        "spots[i].row == row && spots[i].length > length",
        "spots[i].row < 0 && spots[i].length > length + row",
        f"{JUDGE}::test_a_batch_takes_what_has_room_and_no_session_twice",
    ),
    fault(
        "keys-of-a-few-asks-in-one-place",
        CPU_SESSIONS,
        "batch->keys + token * (2 + batch->max_ngram_size)",
        "batch->keys",
        f"{JUDGE}::test_a_batch_takes_what_has_room_and_no_session_twice",
    ),
    fault(
        "a-few-segments-that-are-refused-renew-sessions",
        CPU_SESSIONS,
        "    batch->spots[spot++] = {",
        "    sessions->last_used_s[row] += 6;\n    batch->spots[spot++] = {",
        f"{DIRECT}::test_a_few_segments_that_are_refused_renew_nothing",
    ),
    fault(
        "direct-appends-are-not-worked-ahead",
        "engram_core/steps.py",
        "        if not ask.ahead or len(",
        "        if ask.ahead or len(",
        "tests/laws/test_direct_reads.py::test_what_is_appended_directly_is_worked_ahead",
    ),
    fault(
        "landed-body-s-memory-given-to-the-next",
        "service/landing.py",
        "        self._piece = None\n        return piece",
        "        return piece",
        f"{AT_ONCE}::test_bodies_that_landed_are_each_other_s_neighbours_not_their_heirs",
    ),
    fault(
        "idle-connection-holds-where-it-would-have-read",
        "service/transport.py",
        "        return self._landing.space(self._connection.pad)\n",
        "        self._space = self._landing.space(self._connection.pad)\n"
        "        return self._space\n",
        f"{AT_ONCE}::test_a_connection_that_read_nothing_holds_no_memory",
    ),
    fault(
        "body-that-is-no-http-is-waited-for",
        "service/transport.py",
        "            self._running.disconnected = True\n"
        "            self._running.message_event.set()\n"
        "        self.transport.write(self._refusal)\n",
        "            pass\n        self.transport.write(self._refusal)\n",
        "tests/service/test_transport.py"
        "::test_request_whose_body_is_no_http_is_told_that_its_peer_is_gone",
    ),
    fault(
        "client-repeats-a-fault-of-the-service-for-a-minute",
        "engram_client/retry.py",
        "            if self._has_seen_fault:\n",
        "            if False:\n",
        "tests/unit/test_client_protocol.py"
        "::test_a_fault_of_the_service_is_told_after_one_repetition",
    ),
    fault(
        "client-takes-any-owner",
        "engram_client/setup.py",
        "        if not _OWNER.fullmatch(owner):\n",
        "        if False:\n",
        "tests/unit/test_client.py::test_an_owner_that_no_service_takes_is_refused_at_once",
    ),
    fault(
        "weights-are-sent-to-who-names-their-tag-weakly",
        "service/weights.py",
        '[tag.removeprefix("W/") for tag in tags]',
        "tags",
        "tests/service/test_routes.py::test_weights_are_served_once_per_table",
    ),
    fault(
        "connection-lingers-for-a-peer-that-said-all",
        "service/transport.py",
        "        if self._has_said_all or not self.transport.can_write_eof():\n",
        "        if not self.transport.can_write_eof():\n",
        "tests/service/test_transport.py"
        "::test_client_that_said_all_is_waited_for_no_longer_than_its_answer_takes",
    ),
    fault(
        "connection-is-closed-behind-a-refusal-at-once",
        "service/transport.py",
        "        self._connection.linger()\n",
        "        self._transport.close()\n",
        "tests/service/test_transport.py"
        "::test_refusal_takes_no_earlier_answer_from_a_slow_pipelining_peer",
    ),
    fault(
        "large-bodies-land-askew",
        "service/exchange.py",
        "        line.pad = -came.begin % ALIGNMENT\n",
        "        line.pad = 0\n",
        f"{AT_ONCE}::test_a_large_body_like_the_last_one_is_received_where_it_landed",
    ),
    fault(
        "turn-takes-more-ids-than-there-is-room-for",
        CPU_SESSIONS,
        "sessions->held_tokens + batch->num_ids;",
        "sessions->held_tokens;",
        f"{DIRECT}::test_a_turn_keeps_to_the_room_for_ids",
    ),
    fault(
        "direct-append-past-the-room-for-ids",
        CPU_SESSIONS,
        "ask->num_ids > sessions->max_held_tokens - held",
        "ask->num_ids > sessions->max_held_tokens - 0 * held",
        f"{DIRECT}::test_a_direct_append_keeps_to_the_room_for_ids",
    ),
    fault(
        "direct-append-of-fewer-ids-than-came",
        CPU_SESSIONS,
        "  if (appends && left) return 0;\n",
        "",
        f"{JUDGE}::test_any_ask_after_any_program",
    ),
    fault(
        "direct-appends-are-not-counted-as-held",
        CPU_SESSIONS,
        "  sessions->held_tokens += batch->num_ids;\n",
        "  sessions->held_tokens += 0 * batch->num_ids;\n",
        f"{JUDGE}::test_any_ask_after_any_program",
    ),
    fault(
        "gates-apart-not-waited-for",
        "engram_core/backends/cuda_near.py",
        "        near.projector.wait()\n        return True",
        "        return True",
        "tests/unit/test_cuda_calls.py"
        "::test_residuals_that_lie_apart_are_gated_by_a_launch_each_and_one_wait",
    ),
    fault(
        "gates-apart-of-kv-that-a-lane-writes",
        "engram_core/backends/cuda_near.py",
        "        if count > INLINE_TOKENS or not near.is_there(self._places[:count]):\n",
        "        if count > INLINE_TOKENS:\n",
        "tests/unit/test_cuda_calls.py"
        "::test_residuals_that_lie_apart_are_gated_by_a_launch_each_and_one_wait",
    ),
    fault(
        "what-cannot-be-made-together-is-not-made-in-parts",
        "engram_core/direct.py",
        "        if not half:\n            return [None]\n",
        "        if half >= 0:\n            return [None] * len(asks)\n",
        "tests/laws/test_direct_reads.py::test_what_cannot_be_made_together_is_made_in_parts",
    ),
    fault(
        "residuals-apart-gated-as-one",
        "engram_core/direct.py",
        "is_f32 == ask.is_f32 and end == ask.residual:",
        "is_f32 == ask.is_f32 and end <= ask.residual:",
        "tests/laws/test_direct_reads.py::test_what_is_asked_in_one_turn_is_answered_as_one_after_the_other",
    ),
    fault(
        "asked-for-whoever-has-left",
        "service/turn.py",
        "        gone = [each for each in asked if each.line.is_gone]\n",
        "        gone: list[_Asked] = []\n",
        "tests/service/test_step_recall.py::test_whoever_leaves_before_the_end_of_the_turn_has_asked_nothing",
    ),
    fault(
        "next-request-before-the-one-that-waits",
        "service/transport.py",
        "        if self.is_waiting and self.fast_path is not None:\n",
        "        if self.is_waiting and self.fast_path is None:\n",
        "tests/service/test_step_recall.py"
        "::test_what_is_asked_is_answered_before_anything_else_happens_on_its_connection",
    ),
    fault(
        "answer-left-where-the-next-turn-is-placed",
        "service/step_recall.py",
        "        if min(num_bytes, known.num_bytes) <= AT_ONCE_BYTES:\n",
        "        if num_bytes <= AT_ONCE_BYTES:\n",
        "tests/service/test_step_recall.py"
        "::test_an_answer_longer_than_its_request_is_not_kept_where_the_next_is_placed",
    ),
    fault(
        "idle-timer-closes-what-the-lane-will-answer",
        "service/transport.py",
        "            return  # what has come in this turn is still to be answered\n",
        "            self.is_waiting = False\n",
        "tests/service/test_step_recall.py"
        "::test_an_idle_connection_is_not_closed_before_the_lane_has_answered",
    ),
    fault(
        "turn-s-fault-is-asked-again",
        "service/heads.py",
        "        if fault is not None:  # not asked again: in shared memory it may be updated\n",
        "        if self is None:\n",
        "tests/service/test_step_recall.py::test_a_fault_in_a_turn_is_told_to_everybody",
    ),
    fault(
        "requests-of-a-turn-answered-one-by-one",
        "service/turn.py",
        "            if is_alone or not engine.gains_by_company:\n",
        "            if engine.gains_by_company:\n",
        "tests/service/test_step_recall.py::test_what_came_in_one_turn_is_one_batch",
    ),
    fault(
        "work-ahead-before-the-turn-s-reads",
        "engram_core/near.py",
        "        for urgency, layer in sorted(batches):\n",
        "        for urgency, layer in sorted(batches, reverse=True):\n",
        "tests/unit/test_near.py::test_small_work_ahead_is_done_behind_the_turn_s_reads",
    ),
    fault(
        "a-body-read-as-long-as-it-comes",
        "service/transport.py",
        "        return self._exchange.space()[:READ_BYTES]\n",
        "        return self._exchange.space()\n",
        "tests/service/test_fast_path.py::test_a_large_body_leaves_the_loop_to_others_between_its_pieces",
    ),
    fault(
        "pieces-of-a-body-in-one-turn",
        "service/transport.py",
        "        elif nbytes == READ_BYTES:",
        "        elif nbytes > READ_BYTES:",
        "tests/service/test_fast_path.py::test_a_large_body_leaves_the_loop_to_others_between_its_pieces",
    ),
    fault(
        "loop-waits-for-the-chunks-of-a-prefill",
        "engram_core/backends/cuda_near.py",
        "                self._lane.under_way() <= _WAITED_TOKENS\n",
        "                self._lane.under_way() >= 0\n",
        "tests/unit/test_cuda_calls.py::test_little_is_begun_beside_the_chunks_of_a_prefill",
    ),
    fault(
        "slot-written-from-two-streams",
        "engram_core/backends/cuda_near.py",
        "            and self._lane.are_ended(slots)\n",
        "",
        "tests/unit/test_cuda_calls.py::test_little_is_begun_beside_the_chunks_of_a_prefill",
    ),
    fault(
        "plain-step-with-a-mask",
        "service/plain_steps.py",
        "    if not num_tokens or specs != {",
        "    if not num_tokens or {name: specs.get(name) for name, _ in columns} != {",
        "tests/service/test_step_at_once.py::test_what_is_unusual_is_answered_or_refused_as_ever",
        "tests/service/test_step_at_once.py::test_pushes_that_are_unusual_are_answered_as_ever",
    ),
    fault(
        "plain-step-that-truncates",
        "service/plain_steps.py",
        "    if options.truncate or not (is_residual",
        "    if not (is_residual",
        "tests/service/test_step_at_once.py::test_what_is_unusual_is_answered_or_refused_as_ever",
    ),
    fault(
        "shared-tables-checked-where-they-lie",
        "service/steps.py",
        "    if not is_shared:\n",
        "    if is_shared is not None:\n",
        f"{SHM}::test_what_was_checked_is_what_is_used",
    ),
    fault(
        "shared-size-not-sealed",
        "service/shm.py",
        "_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL",
        "_SEALS = fcntl.F_SEAL_GROW",
        f"{SHM}::test_nobody_can_change_a_region_s_size",
    ),
    fault(
        "shared-place-unchecked",
        "service/shm.py",
        "offset + num_bytes > self.num_bytes:",
        "offset > self.num_bytes:",
        f"{SHM}::test_a_place_outside_the_region_is_refused",
    ),
    fault(
        "shared-with-every-key",
        "service/shm.py",
        "    if region is None or region.tenant != tenant:\n",
        "    if region is None:\n",
        f"{SHM}::test_a_region_is_its_key_s_alone",
    ),
    fault(
        "shared-pages-left-to-the-client",
        "service/shm.py",
        "            mapped.madvise(mmap.MADV_REMOVE)\n",
        "            pass\n",
        f"{SHM}::test_a_region_ends_with_its_connection_and_takes_its_pages_along",
    ),
    fault(
        "shared-room-not-counted",
        "service/shm.py",
        "            if self._used_bytes + size > self.total_bytes:\n",
        "            if size > self.total_bytes:\n",
        f"{SHM}::test_no_room_for_more_regions_is_told_and_given_back",
    ),
    fault(
        "shared-region-outlives-its-connection",
        "service/transport.py",
        "        self.region = None\n        if self._exchange",
        "        if self._exchange",
        f"{SHM}::test_a_region_ends_with_its_connection_and_takes_its_pages_along",
    ),
    fault(
        "cuda-graphs-not-told",
        "engram_core/loader.py",
        "            graphs=graphs,\n",
        "",
        "tests/unit/test_loader.py::test_cuda_is_told_where_and_whether_by_graphs",
    ),
    fault(
        "cuda-disk-rows-in-another-order",
        "engram_core/backends/disk_rows.py",
        "self._table.gather_stored(hash_ids.reshape(-1))",
        "self._table.gather_stored(np.sort(hash_ids.reshape(-1)))",
        "tests/unit/test_cuda_calls.py",
    ),
    fault(
        "cuda-graphs-over-a-table-on-disk",
        "engram_core/backends/cuda_backend.py",
        "or not self.num_slots or self._is_on_disk:",
        "or not self.num_slots:",
        "tests/unit/test_cuda_calls.py",
    ),
    fault(
        "cublaslt-with-other-bits-serves",
        "engram_core/backends/choices.py",
        "        if not different:\n",
        "        if True:\n",
        "tests/unit/test_cuda_start.py",
    ),
    fault(
        "device-without-an-image-loaded",
        "engram_core/backends/engram_v41.py",
        "    if not device.has_image:\n",
        "    if False:\n",
        "tests/unit/test_cuda_start.py",
    ),
    fault(
        "launch-waited-for-without-end",
        "engram_core/backends/device.py",
        "self._native.event_wait(self.handle, WATCHDOG_MS)",
        "self._native.event_wait(self.handle, 1 << 40)",
        "tests/unit/test_cuda_start.py",
    ),
    fault(
        "idle-timer-beside-a-request",
        "service/transport.py",
        "            and (self.cycle is None or self.cycle.response_complete)\n"
        "        ):\n            self._watch",
        "            and True\n        ):\n            self._watch",
        "tests/service/test_while_busy.py",
    ),
    fault(
        "idle-while-the-end-of-the-turn-is-waited-for",
        "service/transport.py",
        "        is_idle &= not (self.is_waiting or self.transport.get_write_buffer_size())\n",
        "        is_idle &= not self.transport.get_write_buffer_size()\n",
        "tests/service/test_step_recall.py"
        "::test_a_connection_that_waits_for_the_end_of_the_turn_is_not_idle",
    ),
    fault(
        "two-engines-over-one-backend",
        "engram_core/engine.py",
        "    if not backend.serving.acquire(blocking=False):\n",
        "    if False:\n",
        "tests/unit/test_engine.py::test_a_backend_serves_one_engine_at_a_time",
    ),
    fault(
        "csrc-float-scales-a-byte-apart",
        "csrc/formats/blocks32.h",
        "static constexpr int kScaleBytes = 4;",
        "static constexpr int kScaleBytes = 1;",
        NATIVE,
    ),
    fault(
        "csrc-block33-scale-behind-its-codes",
        "csrc/formats/blocks32.h",
        "return {load_bytes8(block + 1 + group * 8), load<uint8_t>(block)};\n  }\n};\n\n}",
        "return {load_bytes8(block + group * 8), load<uint8_t>(block + 32)};\n  }\n};\n\n}",
        NATIVE,
    ),
    fault(
        "csrc-no-floor-under-the-input-scale",
        "csrc/formats/requantize.h",
        "amax < 1e-4f ? 1e-4f : amax",
        "amax",
        NATIVE,
    ),
)
