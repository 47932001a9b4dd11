/* Vectors of LANES floats, functions of them, and products of matrices, for one vector width.
 *
 * The file that includes this one says how wide vectors are (LANES floats), how many of them make a panel (VECTORS), and
 * how many rows a tile of the product has (TILE), so that TILE x VECTORS sums, one panel's weights and one number stay
 * in registers. */
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <math.h>
#include <time.h>

#include "library.h"

#define PANEL (VECTORS * LANES)

#ifdef __clang__
#define UNROLL _Pragma("unroll")
#else
#define UNROLL _Pragma("GCC unroll 16") /* without it GCC keeps the sums of a tile in memory */
#endif
#define INLINE static inline __attribute__((always_inline))

typedef float vec __attribute__((vector_size(4 * LANES)));
typedef int32_t ivec __attribute__((vector_size(4 * LANES)));
typedef uint32_t uvec __attribute__((vector_size(4 * LANES)));
typedef float loose __attribute__((vector_size(4 * LANES), aligned(4), may_alias)); /* anywhere in memory */

INLINE vec load(const float *from) { return *(const loose *)from; }
INLINE void store(float *to, vec x) { *(loose *)to = x; }
INLINE vec all(float x) { return x - (vec){0}; }
INLINE vec choose(ivec mask, vec yes, vec no) { return (vec)((mask & (ivec)yes) | (~mask & (ivec)no)); }
INLINE vec larger(vec a, vec b) { return choose(a > b, a, b); }

/* Vectors are folded by quarters of four lanes, since a chain over all lanes would take longer than the work before it. */
typedef float quad __attribute__((vector_size(16)));
typedef int64_t pair __attribute__((vector_size(16)));
union lanes {
    vec v;
    ivec i;
    quad q[LANES / 4];
    pair p[LANES / 4];
};

INLINE int any(ivec mask)
{
    union lanes all = {.i = mask};
    UNROLL for (int i = 1; i < LANES / 4; i++) all.p[0] |= all.p[i];
    return (all.p[0][0] | all.p[0][1]) != 0;
}

INLINE float largest(vec x)
{
    union lanes all = {.v = x};
    float most[4];
    UNROLL for (int i = 1; i < LANES / 4; i++)
        UNROLL for (int j = 0; j < 4; j++) all.q[0][j] = all.q[i][j] > all.q[0][j] ? all.q[i][j] : all.q[0][j];
    UNROLL for (int j = 0; j < 4; j++) most[j] = all.q[0][j];
    for (int j = 0; j < 2; j++) most[j] = most[j + 2] > most[j] ? most[j + 2] : most[j];
    return most[1] > most[0] ? most[1] : most[0];
}

INLINE float total(vec x)
{
    union lanes all = {.v = x};
    UNROLL for (int i = 1; i < LANES / 4; i++) all.q[0] += all.q[i];
    return (all.q[0][0] + all.q[0][2]) + (all.q[0][1] + all.q[0][3]);
}

static int smaller(int a, int b) { return a < b ? a : b; }
static size_t larger_size(size_t a, size_t b) { return a > b ? a : b; }
static size_t round_up(size_t n, size_t to) { return (n + to - 1) / to * to; }

/* Floats from one row of `n` numbers to the next: whole panels, and not a power of two, which would put all rows into the
 * same places of the cache. */
static size_t stride(size_t n) { return round_up(n, 64) + 16; }

/* Memory on a line of the cache; what is large costs nothing until it is touched, unless malloc had it before. */
static float *zeros(size_t floats, void **memory)
{
    *memory = calloc(floats + 16, sizeof(float));
    return (float *)(((uintptr_t)*memory + 63) / 64 * 64);
}

/* ---- functions of vectors ---------------------------------------------------------------------------------------- */

/* e^x to 1e-7: e^x = 2^n e^r with |r| <= log(2) / 2, and a polynomial for e^r (Cephes, expf). 2e-38 below -87, NaN
 * where x is; x < 88. */
INLINE vec exponential(vec x)
{
    const float shift = 12582912.0f; /* 1.5 * 2^23: adding it rounds to an integer, held in the low bits */
    vec y = choose(x < -87.0f, all(-87.0f), x), shifted = y * 1.44269504f + shift, n = shifted - shift;
    vec r = y - n * 0.693359375f;
    r = r + n * 2.12194440e-4f;
    vec p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + (r + 1.0f);
    return (vec)((uvec)p + ((uvec)shifted << 23)); /* the exponent of p, which is near 1, is raised by n */
}

/* scores -> e^(score - largest), of `n` (whole vectors); their sum, and the largest. */
static float weigh(float *scores, size_t n, float *top_score)
{
    vec most = load(scores), sum = (vec){0};
    for (size_t i = LANES; i < n; i += LANES) most = larger(load(scores + i), most);
    vec top = all(*top_score = largest(most));
    for (size_t i = 0; i < n; i += LANES) {
        vec weight = exponential(load(scores + i) - top);
        store(scores + i, weight);
        sum += weight;
    }
    return total(sum);
}

static void hide(float *scores, size_t from, size_t to)
{
    for (size_t c = from; c < to; c++) scores[c] = -INFINITY;
}

/* ---- products ---------------------------------------------------------------------------------------------------- */

/* y (rows, outputs) = x (rows, in) times one panel, plus the bias, plus what is there if `add`; `rows` and `vectors`, the
 * width of the panel, are constants. The panel's weights of one input are `w_step` floats behind those of the one before,
 * and the inputs of one row `x_step`. */
INLINE void tile(const int rows, const int vectors, const float *panel, size_t w_step, int in, const float *x,
                 size_t x_stride, size_t x_step, float *y, size_t y_stride, const float *bias, int add)
{
    vec sum[TILE][VECTORS];
    UNROLL for (int r = 0; r < rows; r++) {
        UNROLL for (int v = 0; v < vectors; v++) sum[r][v] = (vec){0};
    }
    for (int k = 0; k < in; k++, panel += w_step, x += x_step) {
        vec weight[VECTORS];
        UNROLL for (int v = 0; v < vectors; v++) weight[v] = load(panel + v * LANES);
        UNROLL for (int r = 0; r < rows; r++) {
            vec input = all(x[r * x_stride]);
            UNROLL for (int v = 0; v < vectors; v++) sum[r][v] += input * weight[v];
        }
    }
    UNROLL for (int r = 0; r < rows; r++) {
        UNROLL for (int v = 0; v < vectors; v++) {
            float *to = y + r * y_stride + v * LANES;
            vec value = sum[r][v];
            if (bias != NULL) value += load(bias + v * LANES);
            if (add) value += load(to);
            store(to, value);
        }
    }
}

/* y (rows, out) = x (rows, in) times a matrix of panels that lie `panel_stride` floats apart. Rows are spread evenly over
 * the tiles; each panel meets all of them before the next one is read. */
INLINE void product_of(const int vectors, const float *panels, size_t panel_stride, size_t w_step, int in, int out,
                       const float *x, size_t x_stride, size_t x_step, int rows, float *y, size_t y_stride,
                       const float *bias, int add)
{
    int tiles = (rows + TILE - 1) / TILE;
    for (int o = 0; o < out; o += vectors * LANES, panels += panel_stride) {
        for (int t = 0; t < tiles; t++) {
            int first = (int)((int64_t)rows * t / tiles), last = (int)((int64_t)rows * (t + 1) / tiles);
            const float *from = x + first * x_stride, *offset = bias == NULL ? NULL : bias + o;
            float *to = y + first * y_stride + o;
#define TILE_OF(n)                                                                                                     \
    case n: tile(n, vectors, panels, w_step, in, from, x_stride, x_step, to, y_stride, offset, add); break;
            switch (last - first) {
                TILE_OF(1) TILE_OF(2) TILE_OF(3) TILE_OF(4) TILE_OF(5) TILE_OF(6)
#if TILE > 6
                TILE_OF(7) TILE_OF(8) TILE_OF(9) TILE_OF(10) TILE_OF(11) TILE_OF(12)
#endif
            }
        }
    }
}
