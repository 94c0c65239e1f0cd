"""The oracle: the whole Engram layer from the papers, sharing no code with the product.

From the two reference modules, `engram-format.md` and `NUMBERS.md`: token map, hash (Python
integers in scalar loops), rows (`oracle_files.py`), the wkv input, the projection in float64 with
the bound of NUMBERS.md C, and the gate by the reference module's own lines. Slow, short and meant
to be read beside the papers. Imports nothing of ours (`unit/test_architecture.py` checks that).
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import ml_dtypes
import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer

from tests.oracle_files import Files, Stored, read_gguf, read_safetensors

DEAD = -1
INT64_MAX = 2**63 - 1
Ids = Sequence[int]

# ---------------------------------------------------------------------- token map (2.1)

_WHITE_SPACE = "\t\n\v\f\r \x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000" + "".join(
    map(chr, range(0x2000, 0x200B))
)
"""Unicode's White_Space, which is not what `str.strip()` takes away by itself."""


def normalise(text: str) -> str:
    """NFKC, NFD, StripAccents, Lowercase, white-space runs to one space, Strip; one space stays."""
    text = unicodedata.normalize("NFD", unicodedata.normalize("NFKC", text))
    text = "".join(c for c in text if not unicodedata.category(c).startswith("M"))
    text = "".join(c.lower() for c in text)
    text = re.sub(r"[ \t\r\n]+", " ", text)
    text = "\ue000" if text == " " else text
    return text.strip(_WHITE_SPACE).replace("\ue000", " ")


def token_map(tokenizer_json: Path) -> list[int]:
    """Compressed id of every token, numbered by first appearance of its key."""
    tokenizer = Tokenizer.from_file(str(tokenizer_json))
    numbers: dict[str, int] = {}
    compressed = []
    for token_id in range(tokenizer.get_vocab_size(with_added_tokens=True)):
        text = tokenizer.decode([token_id], skip_special_tokens=False)
        partial = "\ufffd" in text  # a piece of a UTF-8 character
        key = tokenizer.id_to_token(token_id) if partial else normalise(text) or text
        compressed.append(numbers.setdefault(key, len(numbers)))
    return compressed


# ---------------------------------------------------------------------- hash (2.2 - 2.5)


def is_prime(n: int) -> bool:
    """Trial division, good for the sizes of hash buckets."""
    return n > 1 and all(n % d for d in range(2, int(n**0.5) + 1))


def derive_hash(
    layer_ids: Ids, max_ngram_size: int, num_heads: int, base: int, compressed_vocab_size: int
) -> tuple[list[list[int]], list[list[list[int]]], list[list[int]]]:
    """Multipliers [L][N], primes [L][N-1][heads], offsets [L][(N-1)*heads]."""
    bound = max(1, INT64_MAX // compressed_vocab_size // 2)
    multipliers, primes, offsets, seen = [], [], [], set()
    for layer in layer_ids:
        draw = np.random.default_rng(10007 * layer).integers(0, bound, max_ngram_size, np.int64)
        multipliers.append([2 * int(v) + 1 for v in draw])
        orders = []
        for _ in range(max_ngram_size - 1):
            candidate, heads = base - 1, []
            for _ in range(num_heads):
                candidate += 1
                while candidate in seen or not is_prime(candidate):
                    candidate += 1
                seen.add(candidate)
                heads.append(candidate)
            orders.append(heads)
        primes.append(orders)
        flat = [p for heads in orders for p in heads]
        offsets.append([sum(flat[:i]) for i in range(len(flat))])
    return multipliers, primes, offsets


def wrap_int64(value: int) -> int:
    """Two's complement of 64 bits."""
    return (value + 2**63) % 2**64 - 2**63


def window(compressed: Ids, position: int, max_ngram_size: int, pad_id: int) -> list[int]:
    """The compressed id at `position` and its look-back, newest first, after blocking (sticky)."""
    blocked, result = False, []
    for shift in range(max_ngram_size):
        blocked = blocked or position < shift or compressed[position - shift] == DEAD
        result.append(pad_id if blocked else compressed[position - shift])
    return result


def hash_window(terms: Ids, multipliers: Ids, primes: Sequence[Ids], offsets: Ids) -> list[int]:
    """Row ids of one window in one layer: orders 2..N, each with its heads."""
    ids: list[int] = []
    mixed = wrap_int64(terms[0] * multipliers[0])
    for i in range(1, len(multipliers)):
        mixed ^= wrap_int64(terms[i] * multipliers[i])
        for prime in primes[i - 1]:
            ids.append(mixed % prime + offsets[len(ids)])  # Python's % is the floor remainder
    return ids


# ---------------------------------------------------------------------- projection (5)


def input_scale(amax: NDArray[np.float32]) -> NDArray[np.float32]:
    """2^ceil(log2(amax / 448)) with amax at least 1e-4; a power of two stays as it is."""
    floored = np.maximum(amax, np.float32(1e-4))  # keeps NaN
    mantissa, exponent = np.frexp(floored * (np.float32(1) / np.float32(448)))
    return np.ldexp(np.float32(1), np.where(mantissa == 0.5, exponent - 1, exponent))


def quantised_input(x: torch.Tensor) -> torch.Tensor:
    """The official model's e4m3 wkv input per 32 values, as the numbers it stands for (float32).

    x: bfloat16 [T, K]
    """
    groups = x.float().numpy().reshape(len(x), -1, 32)
    scale = input_scale(np.abs(groups).max(axis=-1, keepdims=True))
    codes = np.clip(groups / scale, -448, 448).astype(ml_dtypes.float8_e4m3fn)
    return torch.from_numpy((codes.astype(np.float32) * scale).reshape(x.shape))


def bf16_below(values: torch.Tensor) -> torch.Tensor:
    """Round float64 down to float32, then to the nearest bfloat16: monotone."""
    f32 = values.float()
    return torch.where(f32.double() > values, f32.nextafter(f32.new_tensor(-torch.inf)), f32).to(
        torch.bfloat16
    )


def bf16_above(values: torch.Tensor) -> torch.Tensor:
    """The mirror of `bf16_below`."""
    return -bf16_below(-values)


@dataclass(frozen=True)
class Interval:
    """Lowest and highest permitted tensors; NaN where NaN is demanded."""

    low: torch.Tensor
    high: torch.Tensor

    def outside(self, got: torch.Tensor) -> torch.Tensor:
        """bool: where `got` leaves the interval."""
        inside = (got >= self.low) & (got <= self.high)
        nan_due = torch.isnan(self.low) | torch.isnan(self.high)
        return ~torch.where(nan_due, torch.isnan(got), inside)

    @property
    def width(self) -> float:
        """The largest distance between low and high."""
        distance = (self.high.double() - self.low.double()).nan_to_num(0)
        return float(distance.max()) if distance.numel() else 0.0


def project(x: torch.Tensor, wkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """kv64 and the permitted distance of a float32 accumulator, before its rounding to bfloat16.

    x: float32 [T, K] (values of bfloat16 or e4m3 x 2^k); wkv: bfloat16 [out, K]
    Source: NUMBERS.md C: 2^-22 (K/16 + 1) sum|x||w| + 2^-126 (sum|w| + sum|x|).
    """
    kv, error = [], []
    x64, x_abs = x.double(), x.abs()
    for some in wkv.split(512):
        w = some.double()
        kv.append(x64 @ w.T)
        spread = (x_abs @ some.float().abs().T).double() * (1 + 2.0**-10)  # its own rounding
        tiny = w.abs().sum(1) + x_abs.double().sum(1, keepdim=True)
        distance = 2.0**-22 * (x.shape[1] / 16 + 1) * spread + 2.0**-126 * tiny
        error.append(torch.where(kv[-1].isfinite(), distance, 0))
    return torch.cat(kv, 1), torch.cat(error, 1)


# ---------------------------------------------------------------------- gate (5, reference module)


def gate_reference(
    x: torch.Tensor, kv: torch.Tensor, weight: torch.Tensor, eps: float, dead: torch.Tensor
) -> torch.Tensor:
    """`Engram.forward` after its `kv = ...` line, in the reference module's own words.

    x: bfloat16 or float32 [T, hc, dim]; kv: bfloat16 [T, hc + 1, dim]; weight: float32 [hc, dim]
    dead: bool [T]. Deviation: a dead position keeps its bits (NUMBERS.md), no NaN * 0.
    """
    hc_mult, dim = x.shape[-2:]
    key, value = kv.flatten(-2).split([hc_mult * dim, dim], dim=-1)
    key = key.float().unflatten(-1, (hc_mult, dim))
    h = x.float()
    rstd = torch.rsqrt(h.square().mean(-1) + eps) * torch.rsqrt(key.square().mean(-1) + eps)
    dot = (h * weight * key).sum(-1) * rstd * dim**-0.5
    gate = torch.sigmoid(torch.copysign(dot.abs().clamp_min(1e-6).sqrt(), dot))
    out = (h + gate.unsqueeze(-1) * value.float().unsqueeze(-2)).to(x.dtype)
    return torch.where(dead[:, None, None], x, out)


def gate_interval(x: torch.Tensor, key: Interval, weight: torch.Tensor, eps: float) -> Interval:
    """The gates (float32) that some keys of the interval give, with any order of float32 sums.

    x: [T, hc, dim]; key: bfloat16 [T, hc, dim]; returns float32 [T, hc].
    A sum of `dim` terms is taken as at most dim/16 + 32 roundings deep.
    """
    dim = x.shape[-1]
    h, low, high = x.double(), key.low.double(), key.high.double()
    hw = h * weight.double()
    first, second = hw * low, hw * high
    rounding = (dim / 16 + 40) * 2.0**-24
    size = torch.maximum(first.abs(), second.abs()).sum(-1)
    size = size * rounding + torch.where(size > 0, dim * 2.0**-126, 0)
    dot_low = torch.minimum(first, second).sum(-1) - size
    dot_high = torch.maximum(first, second).sum(-1) + size
    smallest = torch.where((low <= 0) & (high >= 0), 0, torch.minimum(low.abs(), high.abs()))
    largest = torch.maximum(low.abs(), high.abs())
    scale = torch.rsqrt(h.square().mean(-1) + eps) * dim**-0.5
    norms = [torch.rsqrt(k.square().mean(-1) + eps) * scale for k in (largest, smallest)]
    corners = [d * n for d in (dot_low, dot_high) for n in norms]
    s_low = torch.stack(corners).amin(0)
    s_high = torch.stack(corners).amax(0)
    s_low, s_high = s_low - s_low.abs() * rounding, s_high + s_high.abs() * rounding
    ends = []
    for s, sign in ((s_low, -1.0), (s_high, 1.0)):
        g = torch.copysign(s.abs().clamp_min(1e-6).sqrt(), s)
        # at s == 0 both signs of zero are inside; the jump is sigmoid(-+0.001)
        g = torch.where(s == 0, torch.full_like(g, sign * 1e-3), g)
        slack = sign * (2.0**-22 * (4 + g.abs()))  # float32 sqrt, exp and division
        ends.append(torch.sigmoid(g) * (1 + slack) + sign * 2.0**-126)
    return Interval(ends[0].float().clamp_min(0), ends[1].float().clamp_max(1))


def residual_interval(
    x: torch.Tensor, gate: Interval, value: Interval, dead: torch.Tensor
) -> Interval:
    """rn_dtype(rn_f32(h + rn_f32(gate * value))) over both intervals: each step is monotone.

    x: [T, hc, dim]; gate: float32 [T, hc]; value: bfloat16 [T, dim]; dead: bool [T]
    """
    h = x.float()
    corners = torch.stack(
        [
            g.unsqueeze(-1) * v.float().unsqueeze(-2)
            for g in (gate.low, gate.high)
            for v in (value.low, value.high)
        ]
    )
    ends = [(h + c).to(x.dtype) for c in (corners.amin(0), corners.amax(0))]
    keep = dead[:, None, None]
    return Interval(*(torch.where(keep, x, end) for end in ends))


def explained_by_one_gate(
    x: torch.Tensor, value: torch.Tensor, gate: Interval, out: torch.Tensor
) -> torch.Tensor:
    """bool [T, hc]: does one float32 gate of the interval give every element of `out`, by bits?

    It is what tells two roundings from one (an FMA): no gate explains a contracted add.
    x, out: [T, hc, dim]; value: bfloat16 [T, dim]; gate: float32 [T, hc]
    """
    answer = torch.zeros(x.shape[:2], dtype=torch.bool)
    for t, c in np.ndindex(*x.shape[:2]):
        first, last = (int(e[t, c].view(torch.int32)) for e in (gate.low, gate.high))
        candidates = torch.arange(first, last + 1, dtype=torch.int32).view(torch.float32)
        made = x[t, c].float() + candidates[:, None] * value[t].float()
        answer[t, c] = (made.to(x.dtype) == out[t, c]).all(-1).any()
    return answer


# ---------------------------------------------------------------------- a checkpoint's layer


class Oracle:
    """The layer of one checkpoint. Layers are named by the model's layer ids everywhere."""

    def __init__(self, files: Files) -> None:
        self.files = files
        self.layer_ids = files.layer_ids
        self.max_ngram_size = files.max_ngram_size
        self.num_hash_cols = (files.max_ngram_size - 1) * files.num_heads
        self.head_dim, self.eps, self.pad_id = files.head_dim, files.eps, files.pad_id
        self._wkv: dict[int, torch.Tensor] = {}

    @classmethod
    def open(cls, path: str | Path) -> Oracle:
        """A GGUF file, or a directory with config.json, tokenizer.json and safetensors."""
        path = Path(path)
        if path.is_file():
            return cls(read_gguf(path))
        return cls(read_safetensors(path, token_map(path / "tokenizer.json"), derive_hash))

    @cached_property
    def hc_mult(self) -> int:
        return int(self.weight(self.layer_ids[0]).shape[0])

    @cached_property
    def dim(self) -> int:
        return int(self.weight(self.layer_ids[0]).shape[1])

    def table(self, layer_id: int) -> Stored:
        return self.files.tables[layer_id]

    def weight(self, layer_id: int) -> torch.Tensor:
        """q * k, float32 [hc_mult, dim]."""
        return self.files.q[layer_id].float() * self.files.k[layer_id].float()

    def wkv(self, layer_id: int) -> torch.Tensor:
        """bfloat16 [(hc_mult + 1) * dim, num_hash_cols * head_dim]."""
        if layer_id not in self._wkv:
            self._wkv[layer_id] = self.files.wkv[layer_id]()
        return self._wkv[layer_id]

    def compress(self, token_ids: Ids, mask: Sequence[bool] | None = None) -> list[int]:
        """Compressed ids; DEAD where the mask is False (the id there is not read)."""
        alive = [True] * len(token_ids) if mask is None else mask
        vocab = len(self.files.token_map)
        bad = [t for t, a in zip(token_ids, alive, strict=True) if a and not 0 <= t < vocab]
        if bad:
            raise ValueError(f"token id {bad[0]} outside 0..{vocab - 1}")
        return [
            self.files.token_map[t] if a else DEAD for t, a in zip(token_ids, alive, strict=True)
        ]

    def windows(self, compressed: Ids, first: int = 0) -> list[list[int]]:
        """Windows of positions first..end of one sequence, newest first."""
        return [
            window(compressed, p, self.max_ngram_size, self.pad_id)
            for p in range(first, len(compressed))
        ]

    def hash_ids(self, compressed: Ids, first: int = 0) -> NDArray[np.int64]:
        """int64 [T, layers, num_hash_cols] of positions first..end of one sequence."""
        files, rows = self.files, []
        for terms in self.windows(compressed, first):
            rows.append(
                [
                    hash_window(terms, files.multipliers[i], files.primes[i], files.offsets[i])
                    for i in range(len(self.layer_ids))
                ]
            )
        shape = (len(rows), len(self.layer_ids), self.num_hash_cols)
        return np.array(rows, dtype=np.int64).reshape(shape)

    def layer_hash_ids(self, layer_id: int, compressed: Ids, first: int = 0) -> NDArray[np.int64]:
        """int64 [T, num_hash_cols]."""
        return self.hash_ids(compressed, first)[:, self.layer_ids.index(layer_id)]

    def rows(self, layer_id: int, hash_ids: NDArray[np.int64]) -> torch.Tensor:
        """bfloat16 [T, num_hash_cols, head_dim] of int64 [T, num_hash_cols]."""
        flat = self.table(layer_id).rows(hash_ids.reshape(-1))
        return flat.reshape(*hash_ids.shape, self.head_dim)

    def stored_rows(self, layer_id: int, hash_ids: NDArray[np.int64]) -> NDArray[np.uint8]:
        """uint8 [T, num_hash_cols, row_bytes]."""
        flat = self.table(layer_id).stored(hash_ids.reshape(-1))
        return flat.reshape(*hash_ids.shape, flat.shape[-1])

    def wkv_input(self, layer_id: int, rows: torch.Tensor) -> torch.Tensor:
        """float32 [T, K]: the bfloat16 rows, re-quantised where wkv is FP8."""
        x = rows.flatten(1)
        return quantised_input(x) if self.files.requantize_input[layer_id] else x.float()

    def kv64(self, layer_id: int, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """float64 [T, hc_mult + 1, dim] twice: kv, and the accumulator's permitted distance."""
        kv, error = project(self.wkv_input(layer_id, rows), self.wkv(layer_id))
        shape = (len(rows), self.hc_mult + 1, self.dim)
        return kv.reshape(shape), error.reshape(shape)

    def kv_interval(
        self, layer_id: int, rows: torch.Tensor, dead: torch.Tensor | None = None
    ) -> Interval:
        """bfloat16 [T, hc_mult + 1, dim] twice. Rounding is monotone, so an accumulator within its
        distance of kv64 rounds to a value between these two (tighter than + ulp/2).
        Dead positions are keys 0 and value -0.0."""
        kv, error = self.kv64(layer_id, rows)
        ends = bf16_below(kv - error), bf16_above(kv + error)
        if dead is not None:
            nothing = torch.zeros_like(ends[0])
            nothing[:, -1] = -0.0
            ends = tuple(torch.where(dead[:, None, None], nothing, end) for end in ends)
        return Interval(*ends)

    def kv_reference(self, layer_id: int, rows: torch.Tensor) -> torch.Tensor:
        """bfloat16 [T, hc_mult + 1, dim]: a float32 product rounded once."""
        x = self.wkv_input(layer_id, rows)
        kv = (x @ self.wkv(layer_id).float().T).to(torch.bfloat16)
        return kv.reshape(len(rows), self.hc_mult + 1, self.dim)

    def residual_interval(
        self, layer_id: int, x: torch.Tensor, kv: Interval, dead: torch.Tensor
    ) -> Interval:
        """Where a residual may come out. kv with low == high: the served bits, tight."""
        gate = self.gate_interval(layer_id, x, kv)
        return residual_interval(x, gate, Interval(kv.low[:, -1], kv.high[:, -1]), dead)

    def gate_interval(self, layer_id: int, x: torch.Tensor, kv: Interval) -> Interval:
        """float32 [T, hc_mult] twice."""
        keys = Interval(kv.low[:, :-1], kv.high[:, :-1])
        return gate_interval(x, keys, self.weight(layer_id), self.eps)

    def apply_reference(
        self, layer_id: int, x: torch.Tensor, kv: torch.Tensor, dead: torch.Tensor
    ) -> torch.Tensor:
        """The residual by the reference module's lines over given kv bits."""
        return gate_reference(x, kv, self.weight(layer_id), self.eps, dead)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal shape, dtype and bits (so -0.0 is not 0.0, and NaNs have payloads)."""
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(_bits(a), _bits(b))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    views = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    size = tensor.element_size()
    return tensor.contiguous().view(views[size]) if size in views else tensor
