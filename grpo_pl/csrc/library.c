/* The kernels of this build, the fastest one first: what Python looks up by name. */
#include <stddef.h>

#include "library.h"

static const struct kernel *const kernels[] = {
#if defined(__x86_64__)
    &kernel_avx512, &kernel_avx2,
#endif
    &kernel_baseline};

/* The n-th of them, whether or not this processor supports it; NULL behind the last. The name has the number of the
 * structures in `library.h`, which each change of them raises: Python does not find a library that was built before. */
const struct kernel *grpo_pl_kernel_3(int32_t n)
{
    return n >= 0 && (size_t)n < sizeof kernels / sizeof *kernels ? kernels[n] : NULL;
}
