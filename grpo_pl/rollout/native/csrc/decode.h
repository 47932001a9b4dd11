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

enum outcome { DONE = 0, STOPPED = 1, NO_MEMORY = 2 };

struct kernel { /* the same code for one instruction set */
    const char *name;
    int32_t panel, lanes; /* outputs of a panel, and of a vector */
    int (*supported)(void);
    void (*pack)(const float *weight, int32_t first, int32_t out, int32_t in, float *panels);
    int32_t (*rollout)(const struct model *, const struct request *);
    int32_t (*advance)(const struct model *, const struct batch *);
    void (*multiply)(const struct matrix *, const float *x, int32_t rows, float *y); /* y has whole panels */
};

extern const struct kernel kernel_avx512, kernel_avx2, kernel_baseline;

#endif
