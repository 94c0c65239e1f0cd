// Small steps judged: what the session pool lets one read or append without a word in general, the
// keys of its kv, and what the library is.

#include "clones.h"
#include "engram_cpu.h"

namespace {

constexpr int32_t DEAD = -1;
constexpr int64_t PAGE = ENGRAM_CPU_PAGE;

// One session of the pool.
struct Session {
  int64_t length, base, epoch, opened;
  const int64_t* starts;

  Session(const engram_cpu_sessions& all, int64_t row)
      : length(all.fence[row]),
        base(all.fence[all.num_rows + row]),
        epoch(all.fence[2 * all.num_rows + row]),
        opened(all.fence[3 * all.num_rows + row]),
        starts(all.starts + row * all.pages_per_row) {}

  bool is_fresh(int64_t asked) const {
    return epoch == (asked == ENGRAM_CPU_EPOCH_OPENED ? opened : asked);
  }
  // Ids that its last page still takes: none of a page that is full, or not there yet.
  int64_t room() const { return length % PAGE ? PAGE - length % PAGE : 0; }
  int64_t place_of(int64_t position) const { return starts[position / PAGE] + position % PAGE; }
};

// Whether spots hold an append to a row: its ids lie where others would be written.
bool is_appended_to(const engram_cpu_spot* spots, int64_t count, int64_t row, int64_t length) {
  for (int64_t i = 0; i < count; ++i)
    if (spots[i].row == row && spots[i].length > length) return true;
  return false;
}

// Ids behind the end of a session, where nobody reads them yet. False: one is out of range.
bool write_behind(const engram_cpu_batch& batch, const int64_t* token_ids, int64_t count,
                  int32_t* to) {
  for (int64_t i = 0; i < count; ++i) {
    // Seen as unsigned, a negative id is a huge one.
    if (uint64_t(token_ids[i]) >= uint64_t(batch.vocab_size)) return false;
    to[i] = batch.token_map[token_ids[i]];
  }
  return true;
}

// Key and dead flag of one position: tenant, layer, window (newest first, after blocking).
void write_key(const engram_cpu_batch& batch, const int32_t* ids, const Session& session,
               int32_t tenant, int64_t position, int32_t* key, uint8_t* is_dead) {
  key[0] = tenant;
  key[1] = batch.layer;
  bool is_blocked = false;
  for (int32_t n = 0; n < batch.max_ngram_size; ++n) {
    const int64_t at = position - n;
    // From the first dead position, or the start, on everything older is padding.
    const int32_t id = is_blocked || at < 0 ? DEAD : ids[session.place_of(at)];
    is_blocked = id == DEAD;
    key[2 + n] = is_blocked ? batch.pad_id : id;
    if (n == 0) *is_dead = is_blocked;
  }
}

}  // namespace

extern "C" int32_t engram_cpu_abi_version(void) { return ENGRAM_CPU_ABI_VERSION; }

extern "C" const char* engram_cpu_target(void) {
#if ENGRAM_HAS_CLONES
  __builtin_cpu_init();
  if (ENGRAM_HAS_V4) return "avx512";
  return __builtin_cpu_supports("avx2") ? "avx2" : "baseline";
#else
  return "baseline";
#endif
}

extern "C" int64_t engram_cpu_judge(const engram_cpu_sessions* sessions, engram_cpu_batch* batch,
                                    const engram_cpu_ask* ask) {
  if (ask->begins) batch->num_tokens = batch->num_spots = batch->num_ids = 0;
  const bool appends = ask->num_ids >= 0;
  if (appends) {
    const int64_t held = sessions->held_tokens + batch->num_ids;
    if (ask->num_ids > sessions->max_held_tokens - held) return 0;
  }
  const int64_t* segment = reinterpret_cast<const int64_t*>(ask + 1);
  const int64_t* token_ids = segment + 4 * ask->num_segments;
  int64_t token = batch->num_tokens, spot = batch->num_spots;
  int64_t left = appends ? ask->num_ids : batch->max_tokens - token;
  if (left > batch->max_tokens - token) return 0;
  int32_t* key = batch->keys + token * (2 + batch->max_ngram_size);
  for (int64_t i = 0; i < ask->num_segments; ++i, segment += 4) {
    const int64_t row = segment[0], position = segment[1], count = segment[2];
    if (row < 0 || count < 1 || count > left) return 0;
    const Session session(*sessions, row);
    if (!session.is_fresh(segment[3])) return 0;
    if (appends) {
      if (position != session.length || count > session.room()) return 0;
      if (is_appended_to(batch->spots, spot, row, session.length)) return 0;
      if (!write_behind(*batch, token_ids, count, sessions->ids + session.place_of(position)))
        return 0;
      token_ids += count;
    } else if (position < session.base || position > session.length - count) {
      return 0;
    }
    const int64_t length = appends ? position + count : session.length;
    batch->spots[spot++] = {row, length, session.base, session.epoch};
    for (int64_t t = 0; t < count; ++t, ++token, key += 2 + batch->max_ngram_size)
      write_key(*batch, sessions->ids, session, int32_t(ask->tenant), position + t, key,
                batch->is_dead + token);
    left -= count;
  }
  if (appends && left) return 0;
  const int64_t num_tokens = token - batch->num_tokens;
  batch->num_tokens = token;
  batch->num_spots = spot;
  if (appends) batch->num_ids += num_tokens;
  return num_tokens;
}

extern "C" void engram_cpu_settle(engram_cpu_sessions* sessions, const engram_cpu_batch* batch,
                                  double now_s) {
  for (int64_t i = 0; i < batch->num_spots; ++i) {
    const engram_cpu_spot& spot = batch->spots[i];
    // A session may have been read, too, before what is appended here.
    int64_t& length = sessions->fence[spot.row];
    if (spot.length > length) length = spot.length;
    sessions->last_used_s[spot.row] = now_s;
  }
  sessions->held_tokens += batch->num_ids;
}
