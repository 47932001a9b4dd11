/* The kernels for x86-64 processors with AVX-512: 32 registers of 16 floats. */
#if defined(__x86_64__)
#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx512f,avx512vl,avx512dq,avx512bw,avx2,fma"))), apply_to = function)
#else
#pragma GCC target("avx512f,avx512vl,avx512dq,avx512bw,avx2,fma")
#endif
#define LANES 16
#define VECTORS 2
#define TILE 12
#include "vectors.h"
#include "decoding.h"
#include "training.h"

static int supported(void)
{
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("fma");
}

const struct kernel kernel_avx512 = {"avx512", PANEL, LANES, supported, pack, rollout, advance, multiply_alone, attend_packed,
    norm_rows, gate_numbers};
#ifdef __clang__
#pragma clang attribute pop
#endif
#endif
