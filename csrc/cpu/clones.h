// How a loop is compiled for several instruction sets of one architecture, chosen when it is
// loaded.
#pragma once
#include <stdint.h>  // tells whether this is glibc

#define ENGRAM_INLINE static inline __attribute__((always_inline))

// GCC with glibc's indirect functions; elsewhere the compiler's baseline serves (arm64's has NEON).
// ENGRAM_NO_CLONES: a test compiles the baseline alone.
#if defined(__x86_64__) && defined(__GLIBC__) && !defined(__clang__) && !defined(ENGRAM_NO_CLONES)
#define ENGRAM_HAS_CLONES 1
#if __GNUC__ >= 12
#define ENGRAM_CLONES __attribute__((target_clones("arch=x86-64-v4", "avx2", "default")))
#define ENGRAM_HAS_V4 (__builtin_cpu_supports("x86-64-v4"))
#else
#define ENGRAM_CLONES __attribute__((target_clones("avx2", "default")))
#define ENGRAM_HAS_V4 0
#endif
#else
#define ENGRAM_HAS_CLONES 0
#define ENGRAM_CLONES
#endif
