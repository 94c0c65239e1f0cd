/* The contract of libengram_cuda: the Engram layer on one CUDA device, plain C.
 *
 * Every call returns a status; engram_last_error() is the text of the calling thread's last
 * failure. A launcher checks its parameters, returns ENGRAM_OK if there is nothing to do, and
 * enqueues on `stream`: it never allocates, synchronises or reads the environment. Pointers are
 * device pointers unless they say `host`; pinned host memory counts as device memory here.
 * Tables must have 16 readable bytes behind their last row (engram_device_alloc adds them).
 *
 * T tokens, N = max_ngram_size, C = n_hash_cols, K = C * head_dim, HC = hc_mult,
 * out_features = (HC + 1) * dim.
 */
#ifndef ENGRAM_H
#define ENGRAM_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define ENGRAM_ABI_VERSION 5
#define ENGRAM_MAX_NGRAM 8
#define ENGRAM_MAX_HASH_COLS 64
#define ENGRAM_INLINE_TOKENS 64 /* windows and slots of so many travel inside the launch */

typedef enum {
  ENGRAM_OK = 0,
  ENGRAM_INVALID = 1,     /* parameters refused; nothing was copied or launched */
  ENGRAM_CUDA_ERROR = 2,  /* the device is not to be trusted any more */
  ENGRAM_UNSUPPORTED = 3, /* no library, no such algorithm, no image for this device */
  ENGRAM_TIMEOUT = 4,     /* a launch did not finish in time */
  ENGRAM_IO_ERROR = 5,    /* a file could not be read */
  ENGRAM_CANCELLED = 6    /* the progress callback asked to stop */
} engram_status;

/* Row formats: ggml's type numbers, then our own. */
typedef enum {
  ENGRAM_F32 = 0,
  ENGRAM_F16 = 1,
  ENGRAM_Q8_0 = 8,
  ENGRAM_Q2_K = 10,
  ENGRAM_Q3_K = 11,
  ENGRAM_Q4_K = 12,
  ENGRAM_Q5_K = 13,
  ENGRAM_Q6_K = 14,
  ENGRAM_BF16 = 30,
  ENGRAM_MXFP4 = 39,
  ENGRAM_E8M0_E4M3_32 = 64,   /* blocks of an e8m0 scale and 32 e4m3 codes */
  ENGRAM_E4M3_E8M0_32 = 1000, /* e4m3 codes, one e8m0 scale per 32 of them */
  ENGRAM_E4M3_F32_32 = 1001   /* the same with float scales */
} engram_format;

typedef void* engram_stream; /* a cudaStream_t */
typedef void* engram_event;  /* a cudaEvent_t */

const char* engram_last_error(void);
int32_t engram_abi_version(void);
const char* engram_architectures(void);                       /* embedded images, "80 90a ..." */
int64_t engram_row_bytes(int32_t format, int64_t row_values); /* -1: no such row */

/* ---- devices, memory, streams ---- */

typedef struct {
  char name[256];
  int32_t major, minor, num_sms;
  int32_t integrated; /* CPU and GPU share one memory: ask MemAvailable, not the device */
  int32_t has_image;  /* 1 if this library holds code that runs on the device */
  int64_t total_bytes, free_bytes; /* free_bytes is -1 on integrated devices: never asked */
} engram_device;

engram_status engram_device_count(int32_t* count);
engram_status engram_device_info(int32_t index, engram_device* info);
engram_status engram_device_select(int32_t index); /* for the calling thread */
engram_status engram_device_alloc(int64_t num_bytes, void** pointer);
engram_status engram_device_free(void* pointer);
engram_status engram_host_alloc(int64_t num_bytes, void** pointer); /* pinned, mapped, portable */
engram_status engram_host_free(void* pointer);
/* Has the device work in host memory made by somebody else (whole pages), as in host_alloc's, until
 * it is unregistered; that comes before it is unmapped. ENGRAM_UNSUPPORTED: not this memory. */
engram_status engram_host_register(void* pointer, int64_t num_bytes);
engram_status engram_host_unregister(void* pointer);
engram_status engram_stream_create(int32_t is_urgent, engram_stream* stream);
engram_status engram_stream_destroy(engram_stream stream);
engram_status engram_event_create(int32_t is_timed, engram_event* event);
engram_status engram_event_destroy(engram_event event);
engram_status engram_event_record(engram_event event, engram_stream stream);
engram_status engram_event_elapsed_us(engram_event begin, engram_event end, float* us);
engram_status engram_stream_wait(engram_stream stream, engram_event event);
engram_status engram_event_is_done(engram_event event, int32_t* is_done);
/* Waits on the host: spins shortly, then sleeps in 20 us steps; ENGRAM_TIMEOUT after timeout_ms. */
engram_status engram_event_wait(engram_event event, int64_t timeout_ms);
/* Pageable memory on either side is refused: such a copy may return before it has read. */
engram_status engram_copy(void* to, const void* from, int64_t num_bytes, engram_stream stream);
engram_status engram_fill(void* to, int32_t byte, int64_t num_bytes, engram_stream stream);

/* ---- graphs: launches captured once at start, which read what changes when they run ---- */

/* In pinned host memory, filled in before each replay; nothing is captured again. */
typedef struct {
  int64_t slots[ENGRAM_INLINE_TOKENS];
  int32_t windows[ENGRAM_INLINE_TOKENS * 4]; /* [T, N], N <= 4 */
  uint8_t is_dead[ENGRAM_INLINE_TOKENS];
  const void* residual; /* device, or pinned host memory */
  void* out;
} engram_descriptor;

typedef void* engram_graph; /* a cudaGraphExec_t */

/* What the calling thread enqueues on `stream` between the two is captured and not run. The end
 * must come after a failed launch too: ENGRAM_UNSUPPORTED then, and the stream is usable again. */
engram_status engram_capture_begin(engram_stream stream);
engram_status engram_capture_end(engram_stream stream, engram_graph* graph);
engram_status engram_graph_launch(engram_graph graph, engram_stream stream);
engram_status engram_graph_destroy(engram_graph graph);

/* ---- gather: windows or row ids -> rows ---- */

typedef struct {
  int32_t format;   /* engram_format */
  int32_t head_dim; /* values a row */
  int64_t num_rows;
  const uint8_t* codes;  /* [num_rows, row_bytes]; row_bytes without scales if scales is set */
  const uint8_t* scales; /* [num_rows, head_dim / 32], or NULL: inside the row, behind the codes.
                          * E4M3_E8M0_32 and E4M3_F32_32 alone; float ones at multiples of 4 */
} engram_table;

typedef struct {
  int32_t max_ngram_size; /* N */
  int32_t num_heads;      /* C = (N - 1) * num_heads */
  int64_t multipliers[ENGRAM_MAX_NGRAM];
  int64_t primes[ENGRAM_MAX_HASH_COLS];
  int64_t offsets[ENGRAM_MAX_HASH_COLS];
  uint64_t reciprocals[ENGRAM_MAX_HASH_COLS]; /* filled by engram_hash_prepare */
} engram_hash;

engram_status engram_hash_prepare(engram_hash* hash, int64_t num_rows); /* checks the buckets */

typedef enum {
  ENGRAM_OUT_BF16 = 0,        /* bf16 [T, C, head_dim] */
  ENGRAM_OUT_REQUANTIZED = 1, /* the same through e4m3 per 32, power-of-two scale */
  ENGRAM_OUT_STORED = 2       /* uint8 [T, C, row_bytes]; split scales follow their codes */
} engram_gather_output;

typedef struct {
  const engram_table* table; /* host */
  const engram_hash* hash;   /* host; prepared; needed with windows */
  const int32_t* windows;    /* [T, N] newest first, after blocking; or NULL. Host memory if
                              * T <= ENGRAM_INLINE_TOKENS and N <= 4, else device */
  const int64_t* hash_ids;   /* [T, C]; exactly one of the two. Not checked on the device */
  const engram_descriptor* descriptor; /* or NULL; instead of the two, T <= ENGRAM_INLINE_TOKENS:
                                        * windows are read there when the launch runs */
  int64_t* slots_out; /* device, with a descriptor: its slots [T], for the projection behind; or
                       * NULL */
  int64_t num_tokens;
  int32_t num_cols;          /* C */
  int32_t output;            /* engram_gather_output */
  void* out;                 /* 16-byte aligned */
  int32_t is_released_early; /* the kernel behind may start at once: what it asks for before it
                              * waits does not hold the rows up (a projection over wkv as stored) */
  engram_stream stream;
} engram_gather_params;

engram_status engram_gather(const engram_gather_params* params);

/* Stored weights -> bf16 [num_rows, row_values]. One scale row serves rows_per_scale rows
 * (wkv of FP8 checkpoints: 32, scales [num_rows / 32, row_values / 32]). */
typedef struct {
  int32_t format;
  int32_t rows_per_scale;
  int64_t num_rows, row_values;
  const uint8_t* codes;
  const uint8_t* scales; /* or NULL */
  void* out;
  engram_stream stream;
} engram_dequantize_params;

engram_status engram_dequantize(const engram_dequantize_params* params);

/* ---- projection: kv = rows @ wkv^T, one f32 accumulator a value, k ascending ---- */

typedef struct {
  const void* rows;        /* bf16 [T, K] */
  const void* wkv;         /* bf16 [out_features, K] */
  void* kv;                /* bf16 [num_slots, out_features] */
  const int64_t* slots;    /* [T] distinct, or NULL: token t goes to slot t. Host memory if
                            * T <= ENGRAM_INLINE_TOKENS and not slots_on_device, else device */
  int32_t slots_on_device; /* 1: at every T, so that a graph can read them when it runs */
  int64_t num_tokens;
  int64_t in_features, out_features; /* K % 8 == 0, out_features % 8 == 0 */
  engram_stream stream;
} engram_project_params;

engram_status engram_project_chain(const engram_project_params* params);

/* wkv as stored, for T <= ENGRAM_INLINE_TOKENS: its bytes are arranged once in the order in which
 * tensor cores take them, and read as they are. The weights multiplied are the bf16-rounded
 * dequantised ones; the same bits as engram_project_chain over engram_dequantize's output. */
int64_t engram_arranged_bytes(int32_t format, int64_t out_features,
                              int64_t in_features); /* or -1 */

typedef struct {
  int32_t format; /* E4M3_E8M0_32 with scales of 32 x 32, Q8_0, Q2_K, Q3_K or Q4_K */
  int64_t out_features, in_features;
  const uint8_t* codes;
  const uint8_t* scales;
  void* arranged;
  int32_t* is_exotic; /* device; becomes 1 if the weights hold values the kernel has no exact way
                       * for: e4m3 NaN codes, scales above 2^7. It must not serve them then */
  engram_stream stream;
} engram_arrange_params;

engram_status engram_arrange(const engram_arrange_params* params);

/* Two kernels over the same arranged bytes, the same bits. */
typedef enum {
  ENGRAM_STORED_MMA = 0,  /* mma.sync: every architecture */
  ENGRAM_STORED_WGMMA = 1 /* compute capability 9.0, else ENGRAM_UNSUPPORTED */
} engram_stored_form;

typedef struct {
  engram_project_params project; /* wkv: what engram_arrange wrote */
  int32_t format;
  int32_t form; /* engram_stored_form */
} engram_project_stored_params;

engram_status engram_project_stored(const engram_project_stored_params* params);

/* cublasLt, opened at run time. One algorithm a batch class; slots must be NULL. */
typedef struct engram_gemm engram_gemm;
engram_status engram_gemm_create(const char* library_path, int64_t in_features,
                                 int64_t out_features, int32_t num_sms, void* workspace,
                                 int64_t workspace_bytes, engram_gemm** gemm);
engram_status engram_gemm_destroy(engram_gemm* gemm);
/* Fixes the algorithm for T up to max_tokens (above the class before it): the rank-th of those
 * the library proposes that neither split k nor reduce. */
engram_status engram_gemm_add_class(engram_gemm* gemm, int64_t max_tokens, int32_t rank);
engram_status engram_gemm_run(engram_gemm* gemm, const engram_project_params* params);
int64_t engram_gemm_version(const engram_gemm* gemm);

/* bf16 [T, out_features] -> slots */
typedef struct {
  const void* from;
  void* kv;
  const int64_t* slots; /* [T], as above */
  int32_t slots_on_device;
  int64_t num_tokens, out_features;
  engram_stream stream;
} engram_scatter_params;

engram_status engram_scatter_kv(const engram_scatter_params* params);

/* ---- gate and kv read-out ---- */

typedef struct {
  const void* kv;         /* bf16 [num_slots, out_features] */
  const int64_t* slots;   /* host if T <= ENGRAM_INLINE_TOKENS, else device: [T]; NULL: slot t */
  const uint8_t* is_dead; /* likewise; [T] or NULL */
  const float* qk;        /* f32 [HC, dim] */
  const void* residual;   /* [T, HC, dim] bf16, or f32 if is_f32 */
  void* out;              /* the same; may be residual itself */
  const engram_descriptor* descriptor; /* or NULL; T <= ENGRAM_INLINE_TOKENS: slots, is_dead,
                                        * residual and out are read there when the launch runs */
  int64_t num_tokens;
  int32_t dim, hc_mult; /* dim % 8 == 0, dim <= 8192, hc_mult 1..4 */
  float eps;
  int32_t is_f32;
  engram_stream stream;
} engram_gate_params;

engram_status engram_gate(const engram_gate_params* params);

/* ---- projections and gates as the host asks for them: one call each ---- */

/* Which projection each slot waits for: what projects writes it, what reads waits on it. */
typedef struct {
  int64_t num_slots;
  int64_t* made_by;         /* host [num_slots]: the number of the projection, from 1 on */
  int64_t* finished;        /* host: all up to here are known to have ended */
  const engram_event* ends; /* host: projection s ends at ends[s % num_ends] */
  int64_t num_ends;
} engram_projections;

/* A projection of windows through a graph: refuses slots, fills the descriptor in, launches. */
typedef struct {
  engram_graph graph;
  engram_descriptor* descriptor; /* what the graph reads; no replay that reads it may run */
  const engram_projections* projections;
  int32_t max_ngram_size;
  engram_stream stream;
} engram_replay_params;

engram_status engram_replay(const engram_replay_params* params, const int64_t* slots,
                            const int32_t* windows, int64_t num_tokens, int64_t sequence);

/* A piece of a residual on its way through the device. */
typedef struct {
  void* device;         /* of ENGRAM_INLINE_TOKENS, f32 */
  void* stage;          /* host, pinned: the same */
  engram_stream stream; /* of a worker's pieces */
  engram_event arrived, computed;
  engram_event done[2]; /* the second: of the upper half of device and stage */
} engram_lane;

/* Threads that copy between pageable memory and the lanes' stages. */
typedef struct engram_workers engram_workers;
engram_status engram_workers_create(int32_t num_threads, int32_t device, engram_workers** workers);
engram_status engram_workers_destroy(engram_workers* workers);

typedef enum {
  ENGRAM_WAY_MAPPED = 0, /* the kernel reads and writes host memory in place: no lanes */
  ENGRAM_WAY_COPIED = 1  /* pieces are copied up, gated, and copied down */
} engram_way;

/* The gate between host buffers, and the wait for its end. */
typedef struct {
  engram_gate_params gate; /* kv, qk, sizes, and the stream of gates between pinned buffers */
  int32_t way;             /* engram_way */
  int32_t is_pageable;  /* residual or out is no pinned memory: through the lanes' stages, copied by
                         * the workers (one piece: by the calling thread, in place in its stage) */
  int64_t piece_tokens; /* the largest piece; of pageable memory half a lane at most */
  int32_t num_lanes;
  const engram_lane* lanes;       /* host */
  engram_stream upload, download; /* of pieces between pinned buffers */
  engram_workers* workers;
  const engram_projections* projections;
  const engram_graph* graphs; /* host [ENGRAM_INLINE_TOKENS + 1], by T: NULL there, or altogether:
                               * launches. Mapped batches of one piece alone */
  engram_descriptor* descriptor; /* what the graphs read */
  const engram_event* marks;     /* NULL, or host [4]: timed, around the first piece's way up, gate
                                  * and way down; not of mapped batches */
  int64_t timeout_ms;
} engram_gate_host_params;

/* slots, is_dead: host [T]; slots of dead tokens are not looked at. residual, out: host. */
engram_status engram_gate_host(const engram_gate_host_params* params, const int64_t* slots,
                               const uint8_t* is_dead, const void* residual, void* out,
                               int64_t num_tokens);

typedef struct {
  const void* kv;
  const int64_t* slots;   /* as in the gate */
  const uint8_t* is_dead; /* dead: keys +0, value -0 */
  void* out;              /* bf16 [T, HC + 1, dim] */
  int64_t num_tokens;
  int32_t dim, hc_mult;
  engram_stream stream;
} engram_read_kv_params;

engram_status engram_read_kv(const engram_read_kv_params* params);

/* ---- loading ---- */

/* Reads [offset, offset + num_bytes) of a file into device memory through two pinned stages of
 * stage_bytes each, num_threads readers; drops the pages behind itself. */
typedef struct {
  const char* path;
  int64_t offset, num_bytes;
  void* to;
  void* stages; /* host, pinned: 2 * stage_bytes */
  int64_t stage_bytes;
  int32_t num_threads;
  int32_t keep_pages; /* 1: leave the page cache alone (memory-backed storage) */
  int (*progress)(void* context, int64_t done_bytes); /* non-zero cancels; may be NULL */
  void* context;
  engram_stream stream;
} engram_load_params;

engram_status engram_load(const engram_load_params* params);

#ifdef __cplusplus
}
#endif
#endif
