/* Calls every entry of every kernel that this processor supports on the inputs of standard input, and writes what each
 * gives to standard output: `test_kernel_driver.py` makes the one and checks the other. It needs no Python, so that it
 * runs under an emulator of another processor. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "library.h"

const struct kernel *grpo_pl_kernel_3(int32_t n);

static const char *input; /* where the next number is */

static void *bytes(size_t size)
{
    void *read = malloc(size ? size : 1); /* of the very size */
    memcpy(read, input, size);
    input += size;
    return read;
}

static int32_t number(void) { return *(int32_t *)bytes(4); }
static float real(void) { return *(float *)bytes(4); }
static float *floats(size_t n) { return bytes(4 * n); }
static int32_t *ints(size_t n) { return bytes(4 * n); }
static int64_t *longs(size_t n) { return bytes(8 * n); }
static float *room(size_t n) { return calloc(n, sizeof(float)); }
static size_t whole(size_t n, size_t of) { return (n + of - 1) / of * of; }

static void give(const void *from, size_t size)
{
    if (fwrite(from, 1, size, stdout) != size) exit(3);
}

static void done(int32_t outcome)
{
    if (outcome != DONE) exit(4);
}

/* Two threads, as torch's OpenMP would start them. */
struct call {
    void (*work)(void *);
    void *data;
};

static void *called(void *given)
{
    struct call *call = given;
    call->work(call->data);
    return NULL;
}

static void in_two(void (*work)(void *), void *data, unsigned threads, unsigned flags)
{
    struct call call = {work, data};
    pthread_t other;
    if (threads != 2 || flags != 0 || pthread_create(&other, NULL, called, &call)) exit(5);
    work(data);
    pthread_join(other, NULL);
}

/* A matrix (out, in) and its bias, packed as one after `first` outputs and the rest. */
static struct matrix matrix(const struct kernel *k, int first)
{
    int32_t out = number(), in = number(), biased = number();
    const float *weight = floats((size_t)out * in), *bias = floats(biased ? out : 0);
    float *panels = room(whole(out, k->panel) * in), *padded = room(whole(out, k->panel));
    if (first) k->pack(weight, 0, first, in, panels);
    k->pack(weight + (size_t)first * in, first, out - first, in, panels);
    memcpy(padded, bias, biased ? out * sizeof(float) : 0);
    return (struct matrix){panels, biased ? padded : NULL, in, out};
}

static void products(const struct kernel *k)
{
    for (int cases = number(); cases > 0; cases--) {
        int32_t rows = number(), first = number();
        struct matrix m = matrix(k, first);
        const float *x = floats((size_t)rows * m.in);
        size_t width = whole(m.out, k->panel);
        float *y = room(rows * width);
        k->multiply(&m, x, rows, y);
        for (int32_t r = 0; r < rows; r++) give(y + r * width, m.out * sizeof(float));
    }
}

static void attentions(const struct kernel *k)
{
    for (int cases = number(); cases > 0; cases--) {
        struct attention a = {.run = in_two};
        int32_t sequences, tokens;
        a.prompts = number(), sequences = number(), tokens = number();
        a.query_heads = number(), a.key_heads = number(), a.head_size = number(), a.threads = number();
        a.scale = real();
        a.prompt_starts = longs(a.prompts), a.prompt_lengths = longs(a.prompts);
        a.first_sequence = longs(a.prompts + 1), a.starts = longs(sequences), a.lengths = longs(sequences);
        size_t heads = (size_t)tokens * a.query_heads, queries = heads * a.head_size;
        size_t keys = (size_t)tokens * a.key_heads * a.head_size;
        a.query = floats(queries), a.key = floats(keys), a.value = floats(keys);
        a.cosines = floats((size_t)tokens * a.head_size), a.sines = floats((size_t)tokens * a.head_size);
        const float *grad = floats(queries);
        a.out = room(queries), a.logsumexp = room(heads);
        a.to_query = room(queries), a.to_key = room(keys), a.to_value = room(keys);
        done(k->attend(&a));
        a.grad = grad;
        done(k->attend(&a));
        give(a.out, queries * sizeof(float)), give(a.logsumexp, heads * sizeof(float));
        give(a.to_query, queries * sizeof(float));
        give(a.to_key, keys * sizeof(float)), give(a.to_value, keys * sizeof(float));
    }
}

static void norms(const struct kernel *k)
{
    struct norm n = {.run = in_two, .threads = 2};
    n.rows = number(), n.width = number(), n.epsilon = real();
    size_t size = n.rows * n.width;
    n.x = floats(size), n.weight = floats(n.width);
    const float *grad = floats(size);
    n.y = room(size), n.factors = room(n.rows), n.to_x = room(size), n.to_weights = room((n.rows + 63) / 64 * n.width);
    done(k->normalize(&n));
    n.grad = grad;
    done(k->normalize(&n));
    give(n.y, size * sizeof(float)), give(n.to_x, size * sizeof(float)), give(n.to_weights, n.width * sizeof(float));
}

static void gates(const struct kernel *k)
{
    struct gate g = {.run = in_two, .threads = 2};
    g.size = number();
    g.gate = floats(g.size), g.up = floats(g.size);
    const float *grad = floats(g.size);
    g.y = room(g.size), g.to_gate = room(g.size), g.to_up = room(g.size);
    done(k->gate(&g));
    g.grad = grad;
    done(k->gate(&g));
    give(g.y, g.size * sizeof(float)), give(g.to_gate, g.size * sizeof(float)), give(g.to_up, g.size * sizeof(float));
}

static struct model policy(const struct kernel *k)
{
    struct model m = {.layers = number()};
    m.width = number(), m.intermediate = number(), m.vocabulary = number();
    m.query_heads = number(), m.key_heads = number(), m.head_size = number();
    int32_t head_norms = number(), positions = number();
    m.epsilon = real(), m.head_epsilon = real(), m.scale = real();
    m.embedding = floats((size_t)m.vocabulary * m.width), m.norm = floats(m.width);
    m.cosines = floats((size_t)positions * m.head_size / 2), m.sines = floats((size_t)positions * m.head_size / 2);
    struct layer *layers = calloc(m.layers, sizeof *layers);
    for (int i = 0; i < m.layers; i++) {
        layers[i].attention_norm = floats(m.width), layers[i].mlp_norm = floats(m.width);
        layers[i].query_norm = head_norms ? floats(m.head_size) : NULL;
        layers[i].key_norm = head_norms ? floats(m.head_size) : NULL;
        layers[i].qkv = matrix(k, 0), layers[i].output = matrix(k, 0);
        layers[i].gate_up = matrix(k, 0), layers[i].down = matrix(k, 0);
    }
    m.layer = layers, m.head = matrix(k, 0);
    return m;
}

static int32_t goes_on(int64_t tokens, int64_t finished) { return tokens < finished; /* never */ }

/* Whole completions by `rollout`; by `advance` the logits of prompts, half as long completions, and the logits behind them. */
static void draws(const struct kernel *k)
{
    struct model m = policy(k);
    struct request r = {.ask = goes_on};
    r.prompts = number(), r.rows = number(), r.length = number(), r.stops = number(), r.threads = number();
    r.temperature = real();
    int64_t *starts = longs(r.prompts + 1);
    r.prompt_starts = starts, r.prompt_tokens = ints(starts[r.prompts]), r.owners = ints(r.rows);
    r.keys = longs(r.rows), r.limits = ints(r.rows), r.stop_tokens = ints(r.stops);
    size_t drawn = (size_t)r.rows * r.length;
    r.tokens = calloc(drawn, 8), r.logprobs = room(drawn), r.lengths = calloc(r.rows, 4);
    done(k->rollout(&m, &r));
    give(r.tokens, 8 * drawn), give(r.logprobs, 4 * drawn), give(r.lengths, 4 * r.rows);

    size_t values = whole(m.head_size, m.head_size <= k->lanes ? k->lanes : k->panel);
    size_t column = m.layers * m.key_heads * (m.head_size + values);
    struct prompt *prompts = calloc(r.prompts, sizeof *prompts);
    struct sequence *sequences = calloc(r.rows, sizeof *sequences);
    for (int p = 0; p < r.prompts; p++) {
        struct prompt *to = prompts + p;
        to->length = (int32_t)(starts[p + 1] - starts[p]), to->columns = (int32_t)whole(to->length, k->panel);
        to->cache = room(column * to->columns), to->hidden = room(m.width), to->tokens = r.prompt_tokens + starts[p];
        to->logits = room((size_t)to->length * m.vocabulary);
    }
    for (int n = 0; n < r.rows; n++) {
        struct sequence *to = sequences + n;
        const struct prompt *p = prompts + r.owners[n];
        int32_t columns = (int32_t)whole(r.length + 1, k->panel);
        *to = (struct sequence){.prompt = p->cache, .own = room(column * columns), .hidden = p->hidden,
                                .stops = r.stop_tokens, .stop_count = r.stops, .key = r.keys[n], .seen = p->length,
                                .columns = columns, .limit = r.limits[n], .temperature = r.temperature};
    }
    struct batch b = {.prompts = r.prompts, .threads = r.threads, .prompt = prompts, .ask = goes_on};
    done(k->advance(&m, &b));
    for (int p = 0; p < r.prompts; p++) give(prompts[p].logits, (size_t)prompts[p].length * m.vocabulary * sizeof(float));
    int32_t steps = r.length / 2, *lengths = calloc(r.rows, 4);
    int64_t *tokens = calloc((size_t)r.rows * steps, 8);
    float *logprobs = room((size_t)r.rows * steps);
    b = (struct batch){.sequences = r.rows, .steps = steps, .threads = r.threads, .sequence = sequences, .ask = goes_on,
                       .tokens = tokens, .logprobs = logprobs, .lengths = lengths};
    done(k->advance(&m, &b));
    give(tokens, 8 * r.rows * steps), give(logprobs, 4 * r.rows * steps), give(lengths, 4 * r.rows);
    for (int n = 0; n < r.rows; n++) sequences[n].logits = room(m.vocabulary);
    done(k->advance(&m, &b));
    for (int n = 0; n < r.rows; n++) give(sequences[n].logits, m.vocabulary * sizeof(float));
}

int main(void)
{
    size_t size = 0, most = 1 << 20;
    char *all = malloc(most);
    for (size_t got; (got = fread(all + size, 1, most - size, stdin)) > 0;)
        if ((size += got) == most) all = realloc(all, most *= 2);
    const struct kernel *k;
    for (int32_t n = 0; (k = grpo_pl_kernel_3(n)) != NULL; n++) {
        if (!k->supported()) continue;
        char name[16] = {0};
        strncpy(name, k->name, 15);
        give(name, 16);
        input = all;
        products(k), attentions(k), norms(k), gates(k);
        for (int cases = number(); cases > 0; cases--) draws(k);
        if (input != all + size) exit(6);
    }
    return grpo_pl_kernel_3(-1) != NULL;
}
