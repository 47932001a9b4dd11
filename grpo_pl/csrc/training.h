/* What a policy computes in an update beside its matrix products: attention over packed tokens, RMS norms and SiLU gates,
 * and their gradients, for one vector width.
 *
 * The work falls into units, which threads take one after the other: a prompt and its completions for one key head, some
 * rows of a norm, some numbers of a gate. No two units write to the same place, and what several have to add up is added
 * in the order of the units: no bit depends on the number of threads. */

#define QUERIES 48   /* rows of queries that look at a sequence together */
#define COLUMNS 256  /* tokens that gradients pass together: their keys and values stay in the cache */
#define NORM_ROWS 64 /* rows of a norm in a unit */
#define GATED 8192   /* numbers of a gate in a unit */

struct units {
    const void *call;
    int64_t count;
    atomic_llong next;
    atomic_int outcome;
};

static int32_t in_units(void (*work)(void *), const void *call, int64_t count, int threads, parallel *run)
{
    struct units units = {.call = call, .count = count};
    if (threads > 1 && count > 1)
        run(work, &units, (unsigned)threads, 0);
    else
        work(&units);
    return units.outcome;
}

/* ---- attention ------------------------------------------------------------------------------------------------------ */

/* The tokens that one prompt and one of its completions have in one key head, which the queries of a thread attend
 * to: `columns` rows of keys and values, both also with tokens from left to right. */
struct view {
    const struct attention *a;
    int head;
    size_t row, across, scored; /* floats from one row to the next, of one with a token a column, and of scores */
    float *keys, *values, *keys_across, *values_across;
    float *to_keys, *to_values;     /* gradients of the rows */
    float *queries, *grads, *found; /* QUERIES rows of a head */
    float *weights, *slopes;        /* QUERIES rows of scores */
    void *memory;
};

static int queries_together(const struct attention *a)
{
    int group = a->query_heads / a->key_heads;
    return group > QUERIES ? group : QUERIES / group * group;
}

static int open_view(struct view *v, const struct attention *a)
{
    size_t columns = 0, size = a->head_size, queries = queries_together(a);
    for (int32_t p = 0; p < a->prompts; p++) {
        columns = larger_size(columns, a->prompt_lengths[p]);
        for (int64_t s = a->first_sequence[p]; s < a->first_sequence[p + 1]; s++)
            columns = larger_size(columns, a->prompt_lengths[p] + a->lengths[s]);
    }
    *v = (struct view){.a = a, .row = stride(size), .across = stride(columns)};
    v->scored = a->grad == NULL ? v->across : stride(COLUMNS);
    float *next = zeros(4 * columns * v->row + 2 * size * v->across + queries * (3 * v->row + 2 * v->scored), &v->memory);
    if (v->memory == NULL) return 0;
    v->keys = next, next += columns * v->row;
    v->values = next, next += columns * v->row;
    v->to_keys = next, next += columns * v->row;
    v->to_values = next, next += columns * v->row;
    v->keys_across = next, next += size * v->across;
    v->values_across = next, next += size * v->across;
    v->queries = next, next += queries * v->row;
    v->grads = next, next += queries * v->row;
    v->found = next, next += queries * v->row;
    v->weights = next, next += queries * v->scored;
    v->slopes = next;
    return 1;
}

/* Turns the pairs (i, i + half) of a head by the angles of its token, or back. */
static void turn(float *restrict head, const struct attention *a, int64_t token, float direction)
{
    int half = a->head_size / 2;
    const float *restrict cosines = a->cosines + token * a->head_size, *restrict sines = a->sines + token * a->head_size;
    for (int i = 0; i < half; i++) {
        float left = head[i], right = head[i + half], sine = direction * sines[i];
        head[i] = left * cosines[i] - right * sine;
        head[i + half] = right * cosines[i] + left * sine;
    }
}

/* Reads keys and values of `count` tokens into the view, from row `column` on. */
static void read_tokens(struct view *v, int64_t token, int64_t count, size_t column)
{
    const struct attention *a = v->a;
    size_t size = a->head_size;
    for (int64_t t = token; t < token + count; t++, column++) {
        size_t from = (t * a->key_heads + v->head) * size;
        float *key = v->keys + column * v->row, *value = v->values + column * v->row;
        memcpy(key, a->key + from, size * sizeof(float));
        memcpy(value, a->value + from, size * sizeof(float));
        turn(key, a, t, 1.0f);
        for (size_t d = 0; d < size; d++) {
            v->keys_across[d * v->across + column] = key[d];
            v->values_across[d * v->across + column] = value[d];
        }
        memset(v->to_keys + column * v->row, 0, size * sizeof(float));
        memset(v->to_values + column * v->row, 0, size * sizeof(float));
    }
}

static void write_gradients(struct view *v, int64_t token, int64_t count, size_t column)
{
    const struct attention *a = v->a;
    size_t size = a->head_size;
    for (int64_t t = token; t < token + count; t++, column++) {
        size_t to = (t * a->key_heads + v->head) * size;
        float *key = v->to_keys + column * v->row;
        turn(key, a, t, -1.0f);
        memcpy(a->to_key + to, key, size * sizeof(float));
        memcpy(a->to_value + to, v->to_values + column * v->row, size * sizeof(float));
    }
}

/* y (rows, columns) = x (rows, head_size) times what lies across. */
static void across(const struct view *v, const float *panels, const float *x, int rows, size_t columns, float *y)
{
    product_of(VECTORS, panels, PANEL, v->across, v->a->head_size, (int)columns, x, v->row, 1, rows, y, v->scored, NULL, 0);
}

/* y (rows, head_size) = x (rows, inner) times rows (inner, head_size), plus what is there if `add`; numbers of x are
 * `x_stride` apart from row to row and `x_step` within one. */
static void along(const struct view *v, const float *matrix, int inner, const float *x, size_t x_stride, size_t x_step,
                  int rows, float *y, int add)
{
    int size = v->a->head_size;
    if (size <= LANES)
        product_of(1, matrix, 0, v->row, inner, LANES, x, x_stride, x_step, rows, y, v->row, NULL, add);
    else
        product_of(VECTORS, matrix, PANEL, v->row, inner, size, x, x_stride, x_step, rows, y, v->row, NULL, add);
}

/* Which row of a tensor (tokens, query heads, …) the query of a block is. */
static int64_t query_at(const struct view *v, int64_t token, int query)
{
    int group = v->a->query_heads / v->a->key_heads;
    return (token + query / group) * v->a->query_heads + v->head * group + query % group;
}

/* The scores of the queries and some columns of the view, of which the first own one of `token` is `own`: those of a token
 * and the ones behind it are hidden from the tokens before it. */
static void score_columns(struct view *v, size_t from, size_t columns, int queries, size_t own)
{
    int group = v->a->query_heads / v->a->key_heads;
    across(v, v->keys_across + from, v->queries, queries, columns, v->weights);
    for (int q = 0; q < queries; q++) {
        size_t seen = own + q / group + 1;
        hide(v->weights + q * v->scored, seen > from ? seen - from : 0, round_up(columns, LANES));
    }
}

/* The output of some queries, and the log of the sum of e^score that their gradients need. */
static void forward_block(struct view *v, int64_t token, int queries, size_t columns, size_t own)
{
    const struct attention *a = v->a;
    float factors[queries];
    score_columns(v, 0, columns, queries, own);
    for (int q = 0; q < queries; q++) {
        float *weights = v->weights + q * v->scored, top, sum = weigh(weights, round_up(columns, LANES), &top);
        a->logsumexp[query_at(v, token, q)] = top + logf(sum);
        factors[q] = 1.0f / sum;
    }
    along(v, v->values, (int)columns, v->weights, v->scored, 1, queries, v->found, 0);
    for (int q = 0; q < queries; q++) {
        float *to = a->out + query_at(v, token, q) * a->head_size, *from = v->found + q * v->row;
        for (int d = 0; d < a->head_size; d++) to[d] = from[d] * factors[q];
    }
}

/* o = sum w v with w = softmax(s): ds = w (do v' - delta), where delta = do o, as the weights add up to 1. */
static void backward_block(struct view *v, int64_t token, int queries, size_t columns, size_t own)
{
    const struct attention *a = v->a;
    int size = a->head_size, group = a->query_heads / a->key_heads;
    float logsumexp[queries], deltas[queries];
    for (int q = 0; q < queries; q++) {
        int64_t at = query_at(v, token, q);
        const float *out = a->out + at * size, *grad = memcpy(v->grads + q * v->row, a->grad + at * size, size * sizeof(float));
        logsumexp[q] = a->logsumexp[at], deltas[q] = 0.0f;
        for (int d = 0; d < size; d++) deltas[q] += grad[d] * out[d];
    }
    for (size_t from = 0; from < columns; from += COLUMNS) {
        size_t count = columns - from < COLUMNS ? columns - from : COLUMNS;
        score_columns(v, from, count, queries, own);
        across(v, v->values_across + from, v->grads, queries, count, v->slopes);
        for (int q = 0; q < queries; q++) {
            float *weights = v->weights + q * v->scored, *slopes = v->slopes + q * v->scored;
            for (size_t c = 0; c < count; c += LANES) {
                vec weight = exponential(load(weights + c) - logsumexp[q]);
                store(weights + c, weight);
                store(slopes + c, weight * (load(slopes + c) - deltas[q]));
            }
        }
        along(v, v->grads, queries, v->weights, 1, v->scored, (int)count, v->to_values + from * v->row, 1);
        along(v, v->queries, queries, v->slopes, 1, v->scored, (int)count, v->to_keys + from * v->row, 1);
        along(v, v->keys + from * v->row, (int)count, v->slopes, v->scored, 1, queries, v->found, from > 0);
    }
    for (int q = 0; q < queries; q++) {
        float *from = v->found + q * v->row, *to = a->to_query + query_at(v, token, q) * size;
        turn(from, a, token + q / group, -1.0f);
        for (int d = 0; d < size; d++) to[d] = from[d] * a->scale;
    }
}

/* Attention of `count` tokens from packed token `first` on, to `before` rows of the view and to the rows behind those, which
 * are their own, up to the token itself. */
static void attend_tokens(struct view *v, int64_t first, int64_t count, size_t before)
{
    const struct attention *a = v->a;
    int group = a->query_heads / a->key_heads, most = queries_together(a) / group, size = a->head_size;
    for (int64_t begin = 0; begin < count; begin += most) {
        int tokens = smaller(most, (int)(count - begin)), queries = tokens * group;
        int64_t token = first + begin;
        for (int q = 0; q < queries; q++) {
            float *to = memcpy(v->queries + q * v->row, a->query + query_at(v, token, q) * size, size * sizeof(float));
            turn(to, a, token + q / group, 1.0f);
            for (int d = 0; d < size; d++) to[d] *= a->scale;
        }
        size_t own = before + begin;
        if (a->grad == NULL)
            forward_block(v, token, queries, own + tokens, own);
        else
            backward_block(v, token, queries, own + tokens, own);
    }
}

static void attend_units(void *given)
{
    struct units *units = given;
    const struct attention *a = units->call;
    struct view v;
    if (!open_view(&v, a)) {
        units->outcome = NO_MEMORY;
        return;
    }
    for (int64_t unit; (unit = atomic_fetch_add(&units->next, 1)) < units->count;) {
        int64_t p = unit / a->key_heads, read = a->prompt_lengths[p];
        v.head = (int)(unit % a->key_heads);
        read_tokens(&v, a->prompt_starts[p], read, 0);
        attend_tokens(&v, a->prompt_starts[p], read, 0);
        for (int64_t s = a->first_sequence[p]; s < a->first_sequence[p + 1]; s++) {
            read_tokens(&v, a->starts[s], a->lengths[s], read);
            attend_tokens(&v, a->starts[s], a->lengths[s], read);
            if (a->grad != NULL) write_gradients(&v, a->starts[s], a->lengths[s], read);
        }
        if (a->grad != NULL) write_gradients(&v, a->prompt_starts[p], read, 0);
    }
    free(v.memory);
}

static int32_t attend_packed(const struct attention *a)
{
    return in_units(attend_units, a, (int64_t)a->prompts * a->key_heads, a->threads, a->run);
}

/* ---- norms ---------------------------------------------------------------------------------------------------------- */

/* y = weight x f with f = 1 / sqrt(mean(x^2) + epsilon); with g = weight dy: dx = f (g - x f^2 mean(g x)). */
static void norm_units(void *given)
{
    struct units *units = given;
    const struct norm *n = units->call;
    size_t width = n->width;
    for (int64_t unit; (unit = atomic_fetch_add(&units->next, 1)) < units->count;) {
        int64_t end = unit * NORM_ROWS + NORM_ROWS < n->rows ? unit * NORM_ROWS + NORM_ROWS : n->rows;
        float *to_weight = n->grad == NULL ? NULL : n->to_weights + unit * width;
        if (to_weight != NULL) memset(to_weight, 0, width * sizeof(float));
        for (int64_t row = unit * NORM_ROWS; row < end; row++) {
            const float *x = n->x + row * width;
            vec sum = {0};
            if (n->grad == NULL) {
                for (size_t i = 0; i < width; i += LANES) sum += load(x + i) * load(x + i);
                float factor = n->factors[row] = 1.0f / sqrtf(total(sum) / (float)width + n->epsilon);
                for (size_t i = 0; i < width; i += LANES)
                    store(n->y + row * width + i, load(x + i) * factor * load(n->weight + i));
                continue;
            }
            const float *grad = n->grad + row * width;
            float factor = n->factors[row];
            for (size_t i = 0; i < width; i += LANES) sum += load(grad + i) * load(n->weight + i) * load(x + i);
            float share = total(sum) / (float)width * factor * factor;
            for (size_t i = 0; i < width; i += LANES) {
                vec given = load(grad + i), own = load(x + i);
                store(n->to_x + row * width + i, (given * load(n->weight + i) - own * share) * factor);
                store(to_weight + i, load(to_weight + i) + given * own * factor);
            }
        }
    }
}

static int32_t norm_rows(const struct norm *n)
{
    int64_t count = (n->rows + NORM_ROWS - 1) / NORM_ROWS;
    int32_t outcome = in_units(norm_units, n, count, n->threads, n->run);
    if (n->grad != NULL)
        for (int64_t unit = 1; unit < count; unit++)
            for (int i = 0; i < n->width; i++) n->to_weights[i] += n->to_weights[unit * n->width + i];
    return outcome;
}

/* ---- gates ---------------------------------------------------------------------------------------------------------- */

/* y = g s up with s = 1 / (1 + e^-g), and d (g s) / dg = s (1 + g (1 - s)). */
static void gate_units(void *given)
{
    struct units *units = given;
    const struct gate *g = units->call;
    for (int64_t unit; (unit = atomic_fetch_add(&units->next, 1)) < units->count;) {
        int64_t end = unit * GATED + GATED < g->size ? unit * GATED + GATED : g->size;
        for (int64_t i = unit * GATED; i < end; i += LANES) {
            vec gate = load(g->gate + i), up = load(g->up + i), shown = choose(gate < -86.0f, all(86.0f), -gate);
            vec open = 1.0f / (1.0f + exponential(shown));
            if (g->grad == NULL) {
                store(g->y + i, gate * open * up);
                continue;
            }
            vec grad = load(g->grad + i);
            store(g->to_gate + i, grad * up * open * (1.0f + gate * (1.0f - open)));
            store(g->to_up + i, grad * gate * open);
        }
    }
}

static int32_t gate_numbers(const struct gate *g)
{
    return in_units(gate_units, g, (g->size + GATED - 1) / GATED, g->threads, g->run);
}
