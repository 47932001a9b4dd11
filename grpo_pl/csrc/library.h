/* What Python hands to the kernels and gets back; `extras/kernels/library.py`, `extras/kernels/decode_kernel.py` and
 * `kernel_slots.py` mirror these structures field by field.
 *
 * Tensors are float32 and contiguous. A matrix lies in panels, as `decoding.h` explains. Python checks every size and
 * index before the call: nothing is checked here. */
#ifndef GRPO_PL_LIBRARY_H
#define GRPO_PL_LIBRARY_H

#include <stdint.h>

struct matrix { /* x -> x W' + bias, with W (out, in) */
    const float *panels;
    const float *bias; /* filled up with zeros to whole panels; NULL is none */
    int32_t in, out;
};

struct layer {
    const float *attention_norm, *mlp_norm; /* (width) */
    const float *query_norm, *key_norm;     /* (head_size); NULL in families without */
    struct matrix qkv;                      /* query heads, key heads, value heads */
    struct matrix output;
    struct matrix gate_up; /* gates, then what they gate */
    struct matrix down;
};

struct model {
    int32_t layers, width, intermediate, vocabulary;
    int32_t query_heads, key_heads, head_size;
    float epsilon, head_epsilon, scale;
    const float *embedding;       /* (vocabulary, width) */
    const float *norm;            /* (width) */
    const float *cosines, *sines; /* (positions, head_size / 2), of the rotary embedding */
    const struct layer *layer;
    struct matrix head;
};

struct request {
    int32_t prompts, rows, length; /* length: columns of the tensors that are filled */
    int32_t stops, threads;
    float temperature; /* 0 takes the likeliest token */
    const int32_t *prompt_tokens;
    const int64_t *prompt_starts; /* (prompts + 1), where each begins in prompt_tokens */
    const int32_t *owners;        /* (rows) prompt of each row, ascending */
    const int64_t *keys;          /* (rows) sampling keys */
    const int32_t *limits;        /* (rows) most tokens of each, 1 to length */
    const int32_t *stop_tokens;   /* (stops) */
    int32_t (*ask)(int64_t tokens, int64_t finished); /* how far it is; whether to stop */
    int64_t *tokens;   /* (rows, length), zeros */
    float *logprobs;   /* (rows, length), zeros */
    int32_t *lengths;  /* (rows), zeros */
};

/* A prompt that is read into a cache: see `advance`. */
struct prompt {
    float *cache;          /* of `columns` tokens, whole panels */
    const int32_t *tokens; /* (length) */
    float *hidden;         /* (width), behind the last one: filled */
    float *logits;         /* (length - begin, vocabulary), behind each one: filled, unless NULL */
    int32_t columns, length;
    int32_t begin; /* tokens that the cache holds already */
};

/* A sequence that is drawn some tokens at a time. The kernel changes `drawn`, `fed`, `waiting`, `pending` and `last`, so
 * that the next call goes on. */
struct sequence {
    float *prompt;          /* the cache of its prompt, which others may share */
    float *own;             /* its cache behind that, of `columns` tokens, whole panels; NULL takes one for the call */
    const float *hidden;    /* (width), behind the prompt; used where nothing waits */
    const int32_t *pending; /* (waiting) tokens that are fed before one is drawn; NULL is `last` */
    const int32_t *stops;   /* (stop_count) tokens that end it */
    float *logits;          /* (vocabulary): filled, and no token is drawn; NULL draws */
    int64_t key;
    int32_t seen, columns, fed; /* tokens of the prompt, of room behind it, and that are there */
    int32_t waiting, stop_count;
    int32_t drawn, limit, last; /* tokens drawn so far, the most, the last one */
    float temperature;          /* 0 takes the likeliest token */
};

struct batch {
    int32_t prompts, sequences, steps, threads; /* steps: most tokens of each sequence */
    const struct prompt *prompt;
    struct sequence *sequence;
    int32_t (*ask)(int64_t tokens, int64_t finished); /* as in a request; NULL asks nobody */
    int64_t *tokens;   /* (sequences, steps) */
    float *logprobs;   /* (sequences, steps) */
    int32_t *lengths;  /* (sequences), zeros: how many tokens each has drawn in this call */
};

/* Calls `work(data)` in so many threads at once, this one among them: GOMP_parallel of the OpenMP that torch computes with,
 * since two pools of threads would take the processors from each other. */
typedef void parallel(void (*work)(void *), void *data, unsigned threads, unsigned flags);

/* Causal attention of packed tokens: each sequence looks at its prompt and itself, each prompt at itself. Queries and keys
 * are turned by the rotary embedding on the way. */
struct attention {
    int32_t prompts, query_heads, key_heads, head_size, threads;
    float scale;
    parallel *run;                                 /* may be NULL where threads is 1 */
    const int64_t *prompt_starts, *prompt_lengths; /* (prompts) its packed tokens */
    const int64_t *first_sequence;                 /* (prompts + 1) */
    const int64_t *starts, *lengths;               /* (sequences) */
    const float *query;                            /* (tokens, query_heads, head_size) */
    const float *key, *value;                      /* (tokens, key_heads, head_size) */
    const float *cosines, *sines;                  /* (tokens, head_size), of which both halves are equal */
    float *out;                                    /* like query */
    float *logsumexp;                              /* (tokens, query_heads), log of the sum of e^score */
    const float *grad;                             /* of out; NULL computes out and logsumexp, else these are read */
    float *to_query, *to_key, *to_value;           /* gradients */
};

struct norm {
    int64_t rows;
    int32_t width, threads; /* width: a multiple of 16 */
    float epsilon;
    parallel *run;
    const float *x, *weight;  /* (rows, width), (width) */
    float *y, *factors;       /* (rows, width), (rows) */
    const float *grad;        /* of y; NULL computes y and factors, else factors are read */
    float *to_x, *to_weights; /* (rows, width); (rows / 64 rounded up, width), of which the first is the gradient */
};

struct gate {
    int64_t size; /* a multiple of 16 */
    int32_t threads;
    parallel *run;
    const float *gate, *up; /* (size) */
    float *y;
    const float *grad; /* of y; NULL computes y */
    float *to_gate, *to_up;
};

enum outcome { DONE = 0, STOPPED = 1, NO_MEMORY = 2 };

struct kernel { /* the same code for one instruction set */
    const char *name;
    int32_t panel, lanes; /* outputs of a panel, and of a vector */
    int (*supported)(void);
    void (*pack)(const float *weight, int32_t first, int32_t out, int32_t in, float *panels);
    int32_t (*rollout)(const struct model *, const struct request *);
    int32_t (*advance)(const struct model *, const struct batch *);
    void (*multiply)(const struct matrix *, const float *x, int32_t rows, float *y); /* y has whole panels */
    int32_t (*attend)(const struct attention *);
    int32_t (*normalize)(const struct norm *);
    int32_t (*gate)(const struct gate *);
};

extern const struct kernel kernel_avx512, kernel_avx2, kernel_baseline;

#endif
