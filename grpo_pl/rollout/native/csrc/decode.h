/* What Python hands to the decode kernel and gets back; `decode_kernel.py` mirrors these structures field by field.
 *
 * Tensors are float32 and contiguous. A matrix lies in panels, as `body.h` explains. Python checks every size and index
 * before the call: nothing is checked here. */
#ifndef GRPO_PL_DECODE_H
#define GRPO_PL_DECODE_H

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
    int32_t *lengths;  /* (rows) */
};

enum outcome { DONE = 0, STOPPED = 1, NO_MEMORY = 2 };

struct kernel { /* the same code for one instruction set */
    const char *name;
    int32_t panel; /* outputs of a panel */
    int (*supported)(void);
    void (*pack)(const float *weight, int32_t out, int32_t in, float *panels);
    int32_t (*rollout)(const struct model *, const struct request *);
    void (*multiply)(const struct matrix *, const float *x, int32_t rows, float *y); /* y has whole panels */
};

extern const struct kernel kernel_avx512, kernel_avx2, kernel_baseline;

#endif
