/* The kernels for x86-64 processors with AVX2 and FMA: 16 registers of 8 floats. */
#if defined(__x86_64__)
#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#else
#pragma GCC target("avx2,fma")
#endif
#define LANES 8
#define VECTORS 2
#define TILE 6
#include "vectors.h"
#include "decoding.h"
#include "training.h"

static int supported(void) { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }

const struct kernel kernel_avx2 = {"avx2", PANEL, LANES, supported, pack, rollout, advance, multiply_alone, attend_packed,
    norm_rows, gate_numbers};
#ifdef __clang__
#pragma clang attribute pop
#endif
#endif
