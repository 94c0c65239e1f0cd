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
QUANT = "engram_core/quant.py"
GATE = "engram_core/backends/gate.py"
REFERENCE = "engram_core/backends/reference.py"

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
        f"{LAYER}::test_residual_of_any_size",
    ),
    fault(
        "normalised-over-all-streams",
        GATE,
        "        rstd = torch.rsqrt(terms.mean(-1) + self._eps)\n",
        "        rstd = torch.rsqrt(terms.mean((-2, -1)) + self._eps).unsqueeze(-1)\n",
        f"{LAYER}::test_residual_lies_within_its_interval",
    ),
    fault(
        "sign-instead-of-copysign",
        GATE,
        "torch.copysign(dot.abs().clamp_min(CLAMP).sqrt(), dot)",
        "dot.abs().clamp_min(CLAMP).sqrt() * dot.sign()",
        f"{LAYER}::test_zero_residual_takes_the_sign_of_its_zero",
    ),
    fault(
        "fma-in-the-add",
        GATE,
        "        return torch.mul(value, gate.unsqueeze(-1), out=term).add_(h)",
        "        return torch.addcmul(h, value, gate.unsqueeze(-1))",
        f"{LAYER}::test_add_is_never_contracted",
    ),
    fault(
        "maximum-drops-nan",
        GATE,
        "dot.abs().clamp_min(CLAMP).sqrt()",
        "dot.abs().fmax(torch.tensor(CLAMP)).sqrt()",
        f"{LAYER}::test_bad_residual_stays_in_its_stream",
    ),
    Fault(
        "mask-by-multiplication",
        REFERENCE,
        (
            (
                "        if out.data_ptr() != residual.data_ptr():\n"
                "            places = torch.from_numpy(np.flatnonzero(dead))\n"
                "            out.index_copy_(0, places, residual.index_select(0, places))\n",
                "        places = torch.from_numpy(np.flatnonzero(dead))\n"
                "        kept = residual.index_select(0, places)\n"
                "        value = self._read(slots[dead])[:, -1:].to(kept.dtype)\n"
                "        out.index_copy_(0, places, kept + 0.0 * value)\n",
            ),
        ),
        (f"{LAYER}::test_dead_position_keeps_nan_payloads",),
    ),
    fault(
        "dead-value-plus-zero",
        REFERENCE,
        "        out[places, hc_mult] = -0.0\n",
        "        out[places, hc_mult] = 0.0\n",
        f"{LAYER}::test_dead_position_keeps_nan_payloads",
    ),
)
