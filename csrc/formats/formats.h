// Every row format under one roof: sizes, and a visit that turns engram_format into a type.
#pragma once

#include "../engram.h"
#include "blocks32.h"
#include "plain.h"
#include "q2_k.h"
#include "q3_k.h"
#include "q4_k.h"
#include "q6_k.h"

namespace engram {

template <class Format>
struct Tag {
  using type = Format;
};

// Calls visitor(Tag<Format>{}); false if there is no such format.
template <class Visitor>
bool visit_format(int32_t format, Visitor&& visitor) {
  switch (format) {
    case ENGRAM_F32:
      visitor(Tag<F32>{});
      return true;
    case ENGRAM_F16:
      visitor(Tag<F16>{});
      return true;
    case ENGRAM_BF16:
      visitor(Tag<BF16>{});
      return true;
    case ENGRAM_Q8_0:
      visitor(Tag<Q80>{});
      return true;
    case ENGRAM_Q2_K:
      visitor(Tag<Q2K>{});
      return true;
    case ENGRAM_Q3_K:
      visitor(Tag<Q3K>{});
      return true;
    case ENGRAM_Q4_K:
      visitor(Tag<Q4K>{});
      return true;
    case ENGRAM_Q5_K:
      visitor(Tag<Q5K>{});
      return true;
    case ENGRAM_Q6_K:
      visitor(Tag<Q6K>{});
      return true;
    case ENGRAM_MXFP4:
      visitor(Tag<MXFP4>{});
      return true;
    case ENGRAM_E8M0_E4M3_32:
      visitor(Tag<E4M3Block>{});
      return true;
    case ENGRAM_E4M3_E8M0_32:
      visitor(Tag<E4M3>{});
      return true;
    case ENGRAM_E4M3_F32_32:
      visitor(Tag<E4M3F32>{});
      return true;
    default:
      return false;
  }
}

// Bytes of one row without scales that lie apart; -1 if row_values is no whole number of blocks.
inline int64_t code_bytes(int32_t format, int64_t row_values) {
  int64_t bytes = -1;
  visit_format(format, [&](auto tag) {
    using Format = typename decltype(tag)::type;
    if (row_values > 0 && row_values % Format::kBlockValues == 0)
      bytes = row_values / Format::kBlockValues * Format::kBlockBytes;
  });
  return bytes;
}

// Bytes of a scale that lies behind the codes, or apart; 0: scales are inside the blocks.
inline int64_t scale_width(int32_t format) {
  if (format == ENGRAM_E4M3_E8M0_32) return E4M3::kScaleBytes;
  return format == ENGRAM_E4M3_F32_32 ? E4M3F32::kScaleBytes : 0;
}

inline int64_t scale_bytes(int32_t format, int64_t row_values) {
  return scale_width(format) * (row_values / 32);
}

inline int64_t row_bytes(int32_t format, int64_t row_values) {
  const int64_t codes = code_bytes(format, row_values);
  return codes < 0 ? -1 : codes + scale_bytes(format, row_values);
}

// How far the scales of two blocks are apart, for formats that have them behind their codes.
template <class Format>
struct ScaleStep {
  static constexpr int kBytes = 0;
};

template <>
struct ScaleStep<E4M3> {
  static constexpr int kBytes = E4M3::kScaleBytes;
};

template <>
struct ScaleStep<E4M3F32> {
  static constexpr int kBytes = E4M3F32::kScaleBytes;
};

// Group g (eight values) of the row at `codes`; `scales` is the row's.
template <class Format>
ENGRAM_HD typename Format::Group load_row_group(const uint8_t* codes, const uint8_t* scales,
                                                int group) {
  constexpr int kGroups = Format::kBlockValues / 8;
  const int block = group / kGroups;
  return Format::load_group(codes + static_cast<int64_t>(block) * Format::kBlockBytes,
                            scales + block * ScaleStep<Format>::kBytes, group % kGroups);
}

template <class Format>
ENGRAM_HD void decode_row_group(const typename Format::Group& raw, int group, float (&y)[8]) {
  Format::decode(raw, group % (Format::kBlockValues / 8), y);
}

}  // namespace engram
