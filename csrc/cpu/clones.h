// How a loop is compiled for several instruction sets of one architecture, chosen when it is loaded.
#pragma once
#include <stdint.h>  // tells whether this is glibc

#define ENGRAM_INLINE static inline __attribute__((always_inline))

// GCC with glibc's indirect functions; elsewhere the compiler's baseline serves (arm64's has NEON).
// ENGRAM_NO_CLONES: a test compiles the baseline alone.
#if defined(__x86_64__) && defined(__GLIBC__) && !defined(__clang__) && !defined(ENGRAM_NO_CLONES)
#define ENGRAM_CLONES __attribute__((target_clones("avx2", "default")))
#define ENGRAM_HAS_CLONES 1
#else
#define ENGRAM_CLONES
#define ENGRAM_HAS_CLONES 0
#endif
