// The part of cublasLt's C interface that gemm.cc uses, written down here because neither the
// build nor the machines that compile in CI have its headers. Types, names and numbers are those
// of NVIDIA's documentation (cuBLAS 12 and 13).
#pragma once

#include <cuda_runtime.h>
#include <stddef.h>
#include <stdint.h>

extern "C" {

typedef struct cublasLtContext* cublasLtHandle_t;
typedef struct cublasLtMatmulDescOpaque* cublasLtMatmulDesc_t;
typedef struct cublasLtMatrixLayoutOpaque* cublasLtMatrixLayout_t;
typedef struct cublasLtMatmulPreferenceOpaque* cublasLtMatmulPreference_t;

typedef struct {
  uint64_t data[8];
} cublasLtMatmulAlgo_t;

typedef struct {
  cublasLtMatmulAlgo_t algo;
  size_t workspaceSize;
  int state;
  float wavesCount;
  int reserved[4];
} cublasLtMatmulHeuristicResult_t;

int cublasLtCreate(cublasLtHandle_t*);
int cublasLtDestroy(cublasLtHandle_t);
size_t cublasLtGetVersion(void);
int cublasLtMatmulDescCreate(cublasLtMatmulDesc_t*, int compute_type, int scale_type);
int cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t);
int cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t, int, const void*, size_t);
int cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t*, int type, uint64_t rows, uint64_t cols,
                               int64_t ld);
int cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t);
int cublasLtMatrixLayoutSetAttribute(cublasLtMatrixLayout_t, int, const void*, size_t);
int cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t*);
int cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t);
int cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t, int, const void*, size_t);
int cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t, cublasLtMatmulDesc_t, cublasLtMatrixLayout_t,
                                   cublasLtMatrixLayout_t, cublasLtMatrixLayout_t,
                                   cublasLtMatrixLayout_t, cublasLtMatmulPreference_t, int,
                                   cublasLtMatmulHeuristicResult_t*, int*);
int cublasLtMatmulAlgoConfigGetAttribute(const cublasLtMatmulAlgo_t*, int, void*, size_t, size_t*);
int cublasLtMatmul(cublasLtHandle_t, cublasLtMatmulDesc_t, const void* alpha, const void* a,
                   cublasLtMatrixLayout_t, const void* b, cublasLtMatrixLayout_t, const void* beta,
                   const void* c, cublasLtMatrixLayout_t, void* d, cublasLtMatrixLayout_t,
                   const cublasLtMatmulAlgo_t*, void* workspace, size_t, cudaStream_t);
}

constexpr int kCompute32F = 68, kReal32F = 0, kReal16BF = 14;
constexpr int kDescTransA = 3, kDescSmCountTarget = 15;
constexpr int kLayoutCols = 3;
constexpr int kPrefWorkspaceBytes = 1, kPrefReductionMask = 3;
constexpr int kAlgoSplitK = 2, kAlgoReduction = 3;
