/* The kernels for vectors of 4 floats: NEON on aarch64 (32 registers), and SSE2 on x86-64, for tests alone. */
#define LANES 4
#define VECTORS 4
#define TILE 6
#include "vectors.h"
#include "decoding.h"
#include "training.h"

static int supported(void) { return 1; }

const struct kernel kernel_baseline = {
#if defined(__aarch64__)
    "neon",
#else
    "sse2",
#endif
    PANEL, LANES, supported, pack, rollout, advance, multiply_alone, attend_packed,
    norm_rows, gate_numbers};
