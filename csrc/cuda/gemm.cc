// cublasLt, opened at run time: the projection of larger batches.
//
// Row-major kv[T, M] = rows[T, K] @ wkv[M, K]^T is, column-major, wkv^T[M x K] * rows[K x T].
// Algorithms that split k or reduce are never taken; whether the others keep the bits of the chain
// is for the caller's self-check to find out.
#include <cuda_runtime.h>
#include <dlfcn.h>
#include <string.h>

#include <memory>
#include <vector>

#include "../status.h"
#include "cublaslt_abi.h"

using engram::fail;

namespace {

struct Library {
  void* handle = nullptr;
#define ENGRAM_LT(name) decltype(&::name) name = nullptr;
#include "cublaslt_functions.inc"
#undef ENGRAM_LT
  ~Library() {
    if (handle != nullptr) dlclose(handle);
  }
};

engram_status open_library(const char* path, Library& lt) {
  lt.handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (lt.handle == nullptr) return fail(ENGRAM_UNSUPPORTED, "cannot open cublasLt: %s", dlerror());
#define ENGRAM_LT(name)                                                   \
  lt.name = reinterpret_cast<decltype(lt.name)>(dlsym(lt.handle, #name)); \
  if (lt.name == nullptr) return fail(ENGRAM_UNSUPPORTED, "%s has no " #name, path);
#include "cublaslt_functions.inc"
#undef ENGRAM_LT
  return ENGRAM_OK;
}

struct BatchClass {
  int64_t max_tokens;
  cublasLtMatmulAlgo_t algorithm;
};

}  // namespace

struct engram_gemm {
  Library lt;
  cublasLtHandle_t handle = nullptr;
  cublasLtMatmulDesc_t operation = nullptr;
  cublasLtMatrixLayout_t weights = nullptr, tokens = nullptr, output = nullptr;
  int64_t in_features = 0, out_features = 0;
  void* workspace = nullptr;
  size_t workspace_bytes = 0;
  std::vector<BatchClass> classes;  // ascending

  ~engram_gemm() {
    if (output != nullptr) lt.cublasLtMatrixLayoutDestroy(output);
    if (tokens != nullptr) lt.cublasLtMatrixLayoutDestroy(tokens);
    if (weights != nullptr) lt.cublasLtMatrixLayoutDestroy(weights);
    if (operation != nullptr) lt.cublasLtMatmulDescDestroy(operation);
    if (handle != nullptr) lt.cublasLtDestroy(handle);
  }
};

#define ENGRAM_BLAS(call)                                                                      \
  do {                                                                                         \
    const int status_ = (call);                                                                \
    if (status_ != 0) return fail(ENGRAM_UNSUPPORTED, "%s: cublas status %d", #call, status_); \
  } while (0)

static engram_status set_tokens(engram_gemm& gemm, int64_t num_tokens) {
  const uint64_t columns = static_cast<uint64_t>(num_tokens);
  ENGRAM_BLAS(gemm.lt.cublasLtMatrixLayoutSetAttribute(gemm.tokens, kLayoutCols, &columns, 8));
  ENGRAM_BLAS(gemm.lt.cublasLtMatrixLayoutSetAttribute(gemm.output, kLayoutCols, &columns, 8));
  return ENGRAM_OK;
}

static engram_status create(engram_gemm& gemm, const char* path, int32_t num_sms) {
  if (const engram_status status = open_library(path, gemm.lt)) return status;
  ENGRAM_BLAS(gemm.lt.cublasLtCreate(&gemm.handle));
  ENGRAM_BLAS(gemm.lt.cublasLtMatmulDescCreate(&gemm.operation, kCompute32F, kReal32F));
  const int32_t transpose = 1;
  ENGRAM_BLAS(gemm.lt.cublasLtMatmulDescSetAttribute(gemm.operation, kDescTransA, &transpose, 4));
  if (num_sms > 0)
    ENGRAM_BLAS(
        gemm.lt.cublasLtMatmulDescSetAttribute(gemm.operation, kDescSmCountTarget, &num_sms, 4));
  const uint64_t k = static_cast<uint64_t>(gemm.in_features);
  const uint64_t m = static_cast<uint64_t>(gemm.out_features);
  ENGRAM_BLAS(gemm.lt.cublasLtMatrixLayoutCreate(&gemm.weights, kReal16BF, k, m, gemm.in_features));
  ENGRAM_BLAS(gemm.lt.cublasLtMatrixLayoutCreate(&gemm.tokens, kReal16BF, k, 1, gemm.in_features));
  ENGRAM_BLAS(gemm.lt.cublasLtMatrixLayoutCreate(&gemm.output, kReal16BF, m, 1, gemm.out_features));
  return ENGRAM_OK;
}

engram_status engram_gemm_create(const char* library_path, int64_t in_features,
                                 int64_t out_features, int32_t num_sms, void* workspace,
                                 int64_t workspace_bytes, engram_gemm** gemm) {
  ENGRAM_REQUIRE(in_features > 0 && out_features > 0 && workspace_bytes >= 0,
                 "gemm: expected positive sizes, got %lld x %lld, workspace %lld",
                 static_cast<long long>(out_features), static_cast<long long>(in_features),
                 static_cast<long long>(workspace_bytes));
  auto made = std::make_unique<engram_gemm>();
  made->in_features = in_features;
  made->out_features = out_features;
  made->workspace = workspace;
  made->workspace_bytes = static_cast<size_t>(workspace_bytes);
  if (const engram_status status = create(*made, library_path, num_sms)) return status;
  *gemm = made.release();
  return ENGRAM_OK;
}

engram_status engram_gemm_destroy(engram_gemm* gemm) {
  delete gemm;
  return ENGRAM_OK;
}

int64_t engram_gemm_version(const engram_gemm* gemm) {
  return static_cast<int64_t>(gemm->lt.cublasLtGetVersion());
}

// Neither split along k nor a reduction: one accumulator a value.
static bool is_plain(const engram_gemm& gemm, const cublasLtMatmulAlgo_t& algorithm) {
  int32_t split = 1;
  uint32_t reduction = 0;
  size_t written = 0;
  if (gemm.lt.cublasLtMatmulAlgoConfigGetAttribute(&algorithm, kAlgoSplitK, &split, sizeof split,
                                                   &written) != 0)
    return false;
  if (gemm.lt.cublasLtMatmulAlgoConfigGetAttribute(&algorithm, kAlgoReduction, &reduction,
                                                   sizeof reduction, &written) != 0)
    return false;
  return (split == 0 || split == 1) && reduction == 0;
}

engram_status engram_gemm_add_class(engram_gemm* gemm, int64_t max_tokens, int32_t rank) {
  ENGRAM_REQUIRE(
      max_tokens > 0 && (gemm->classes.empty() || gemm->classes.back().max_tokens < max_tokens),
      "gemm: expected classes in ascending order, got %lld", static_cast<long long>(max_tokens));
  if (const engram_status status = set_tokens(*gemm, max_tokens)) return status;
  cublasLtMatmulPreference_t preference = nullptr;
  ENGRAM_BLAS(gemm->lt.cublasLtMatmulPreferenceCreate(&preference));
  const uint64_t bytes = gemm->workspace_bytes;
  const uint32_t no_reduction = 0;
  gemm->lt.cublasLtMatmulPreferenceSetAttribute(preference, kPrefWorkspaceBytes, &bytes, 8);
  gemm->lt.cublasLtMatmulPreferenceSetAttribute(preference, kPrefReductionMask, &no_reduction, 4);
  constexpr int kAsked = 16;
  cublasLtMatmulHeuristicResult_t results[kAsked];
  int found = 0;
  const int status = gemm->lt.cublasLtMatmulAlgoGetHeuristic(
      gemm->handle, gemm->operation, gemm->weights, gemm->tokens, gemm->output, gemm->output,
      preference, kAsked, results, &found);
  gemm->lt.cublasLtMatmulPreferenceDestroy(preference);
  if (status != 0)
    return fail(ENGRAM_UNSUPPORTED, "cublasLt has no algorithm for %lld tokens: status %d",
                static_cast<long long>(max_tokens), status);
  for (int i = 0; i < found; ++i) {
    if (results[i].state != 0 || !is_plain(*gemm, results[i].algo)) continue;
    if (rank-- > 0) continue;
    gemm->classes.push_back({max_tokens, results[i].algo});
    return ENGRAM_OK;
  }
  return fail(ENGRAM_UNSUPPORTED, "cublasLt has no further plain algorithm for %lld tokens",
              static_cast<long long>(max_tokens));
}

engram_status engram_gemm_run(engram_gemm* gemm, const engram_project_params* params) {
  ENGRAM_REQUIRE(params->slots == nullptr, "gemm: expected slots NULL");
  ENGRAM_REQUIRE(
      params->in_features == gemm->in_features && params->out_features == gemm->out_features,
      "gemm: expected %lld x %lld, got %lld x %lld", static_cast<long long>(gemm->out_features),
      static_cast<long long>(gemm->in_features), static_cast<long long>(params->out_features),
      static_cast<long long>(params->in_features));
  if (params->num_tokens == 0) return ENGRAM_OK;
  const BatchClass* chosen = nullptr;
  for (const BatchClass& candidate : gemm->classes)
    if (params->num_tokens <= candidate.max_tokens) {
      chosen = &candidate;
      break;
    }
  ENGRAM_REQUIRE(chosen != nullptr, "gemm: no class for %lld tokens",
                 static_cast<long long>(params->num_tokens));
  if (const engram_status status = set_tokens(*gemm, params->num_tokens)) return status;
  const float one = 1.0f, zero = 0.0f;
  ENGRAM_BLAS(gemm->lt.cublasLtMatmul(
      gemm->handle, gemm->operation, &one, params->wkv, gemm->weights, params->rows, gemm->tokens,
      &zero, params->kv, gemm->output, params->kv, gemm->output, &chosen->algorithm,
      gemm->workspace, gemm->workspace_bytes, static_cast<cudaStream_t>(params->stream)));
  return ENGRAM_OK;
}
