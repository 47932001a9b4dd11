/* Draws from a Llama-family policy: prompts, decoding and the keyed race, whole rollouts or some tokens, for one vector
 * width.
 *
 * Rows do not depend on each other, given the weights. So each thread takes some rows through all layers, all tokens
 * and the draw, and takes the next waiting row when one of its own ends; threads never wait for each other. A row's
 * numbers are added up in the same order whoever its neighbours are: its bits do not depend on the number of threads.
 *
 * Panels. A matrix W (out, in) lies in memory as (out / PANEL, in, PANEL): all weights of PANEL neighbouring outputs, one
 * input after the other, zeros filling up the last panel. A product reads them from front to back, and each input is
 * multiplied with a panel's PANEL weights at once. Cached keys and values are panels as well, so that attention is two
 * products: scores are queries times keys (columns are the outputs), and what is found is weights times values (columns
 * are the inputs). */
#define PREFILLED 64  /* most tokens of a prompt that pass the layers together */
#define MOST_ROWS 32  /* most rows that a thread takes together */
#define FEWER_ROWS 16 /* the same where the weights of a layer are few, so that caches matter more: measured on Zen 4 */
#define FEW (1 << 18) /* numbers */
#define LOOKING 24    /* queries that look into one sequence together */
#define SLICE 1024    /* tokens of the vocabulary that are raced at once: their logits stay in the cache */
#define RACED 2       /* vectors of tokens that are raced together: SLICE and panels are whole numbers of them */
#define ASK_EVERY 0.02 /* seconds between two calls into Python */

/* -log(1 - u) for 0 < u < 1, to float32's precision where u is small as well (Cephes, logf; 1 - u is rounded, and what
 * rounding took is put back). */
INLINE vec arrival_time(vec u)
{
    vec y = 1.0f - u, lost = (1.0f - y) - u;                /* 1 - u = y + lost, exactly */
    ivec bits = (ivec)y - (ivec)all(0.70710678f);
    vec n = __builtin_convertvector(bits >> 23, vec);
    vec f = (vec)((bits & 0x007fffff) + (ivec)all(0.70710678f)) - 1.0f; /* y = 2^n (1 + f) */
    vec p = f * 7.0376836292e-2f - 1.1514610310e-1f;
    p = p * f + 1.1676998740e-1f;
    p = p * f - 1.2420140846e-1f;
    p = p * f + 1.4249322787e-1f;
    p = p * f - 1.6668057665e-1f;
    p = p * f + 2.0000714765e-1f;
    p = p * f - 2.4999993993e-1f;
    p = p * f + 3.3333331174e-1f;
    vec square = f * f, low = n * -2.12194440e-4f + lost / y;
    low = low - square * 0.5f;
    low = low + square * (f * p);
    return -((f + low) + n * 0.693359375f);
}

/* ---- products of panels ------------------------------------------------------------------------------------------- */

static __attribute__((noinline)) void product(const float *panels, size_t panel_stride, int in, int out, const float *x, size_t x_stride, int rows,
                    float *y, size_t y_stride, const float *bias, int add)
{
    product_of(VECTORS, panels, panel_stride, PANEL, in, out, x, x_stride, 1, rows, y, y_stride, bias, add);
}

static void multiply(const struct matrix *m, const float *x, size_t x_stride, int rows, float *y, size_t y_stride, int add)
{
    product(m->panels, (size_t)m->in * PANEL, m->in, m->out, x, x_stride, rows, y, y_stride, m->bias, add);
}

static void multiply_alone(const struct matrix *m, const float *x, int32_t rows, float *y)
{
    multiply(m, x, m->in, rows, y, round_up(m->out, PANEL), 0);
}

/* Puts the outputs of `weight` (out, in) into panels, from output `first` on; the rest of the last panel becomes zeros,
 * unless more outputs follow. */
static void pack(const float *weight, int32_t first, int32_t out, int32_t in, float *panels)
{
    int32_t end = (int32_t)round_up(first + out, PANEL);
    for (int32_t o = first; o < end; o++) {
        float *to = panels + (size_t)(o / PANEL) * PANEL * in + o % PANEL;
        const float *from = weight + (size_t)(o - first) * in;
        if (o < first + out)
            for (int32_t k = 0; k < in; k++) to[(size_t)k * PANEL] = from[k];
        else
            for (int32_t k = 0; k < in; k++) to[(size_t)k * PANEL] = 0.0f;
    }
}

/* ---- sequences and their keys and values ------------------------------------------------------------------------- */

/* The cache of a sequence of up to `columns` tokens (whole panels of them): by layer and key head the keys in panels of
 * columns, (columns / PANEL, head_size, PANEL), then the values in panels of components, (head_size / PANEL, columns,
 * PANEL); of small heads in one of a single vector, (columns, LANES). */
struct cache {
    float *start;
    size_t columns;
};

static size_t value_panel(const struct model *m) { return m->head_size <= LANES ? LANES : PANEL; }

static size_t floats_of_values(const struct model *m, size_t columns)
{
    return columns * round_up(m->head_size, value_panel(m));
}

static size_t floats_of_head(const struct model *m, size_t columns)
{
    return columns * m->head_size + floats_of_values(m, columns);
}

static size_t floats_of_cache(const struct model *m, size_t columns)
{
    return floats_of_head(m, columns) * m->key_heads * m->layers;
}

static float *keys_of(const struct model *m, struct cache c, int layer, int head)
{
    return c.start + floats_of_head(m, c.columns) * ((size_t)layer * m->key_heads + head);
}

static float *values_of(const struct model *m, struct cache c, int layer, int head)
{
    return keys_of(m, c, layer, head) + c.columns * m->head_size;
}

static void remember(const struct model *m, struct cache c, int layer, int head, size_t column, const float *key,
                     const float *value)
{
    size_t size = m->head_size, panel = value_panel(m);
    float *keys = keys_of(m, c, layer, head) + column / PANEL * PANEL * size + column % PANEL;
    float *values = values_of(m, c, layer, head) + column * panel;
    for (size_t d = 0; d < size; d++) keys[d * PANEL] = key[d];
    for (size_t d = 0; d < size; d += panel, values += c.columns * panel)
        memcpy(values, value + d, (size - d < panel ? size - d : panel) * sizeof(float));
}

/* One token on its way through the layers: of a prompt, or of a sequence behind its prompt. */
struct place {
    struct cache shared; /* of the prompt */
    struct cache own;    /* of the sequence, behind the prompt; columns 0 while a prompt is read */
    int32_t seen;        /* columns of the prompt that the token looks at */
    int32_t behind;      /* own columns that it looks at, of which the last is its own */
    int32_t token;
    struct sequence *sequence;
};

static int position_of(const struct place *p) { return p->own.columns ? p->seen + p->behind - 1 : p->seen - 1; }

/* ---- the memory of a thread -------------------------------------------------------------------------------------- */

struct race { /* how far the race of one row's next token is */
    float most;       /* largest logit so far, to which probabilities are relative */
    double sum;       /* of these probabilities */
    float best;       /* largest probability / arrival time, or largest logit where it is greedy */
    float logit;      /* of the token that has it */
    int32_t token;
    uint32_t low, high; /* halves of the token's key */
    float temperature;
    float *logits; /* where they go; NULL where a token is drawn */
};

struct work {
    struct place *place; /* of each row */
    struct race *race;
    float *x, *normed, *wide, *hidden, *mixed; /* rows of activations */
    float *queries, *scores, *found;           /* rows of LOOKING queries at most */
    size_t x_stride, wide_stride, hidden_stride, mixed_stride, head_stride, score_stride;
    void *memory[3];
};

static void release(struct work *w)
{
    for (int i = 0; i < 3; i++) free(w->memory[i]);
}

/* Memory for `rows` rows that look at `prompt` columns of a prompt and `own` ones behind it; 0 if there is none. */
static int reserve(struct work *w, const struct model *m, int rows, size_t prompt, size_t own)
{
    size_t heads = m->query_heads, size = m->head_size, group = heads / m->key_heads;
    size_t looking = group > LOOKING ? group : LOOKING, projected = (heads + 2 * m->key_heads) * size;
    size_t widest = projected > 2 * (size_t)m->intermediate ? projected : 2 * (size_t)m->intermediate;
    w->x_stride = stride(m->width), w->wide_stride = stride(widest > SLICE ? widest : SLICE);
    w->hidden_stride = stride(m->intermediate), w->mixed_stride = stride(heads * size), w->head_stride = stride(size);
    w->score_stride = stride(round_up(prompt, PANEL) + round_up(own, PANEL));
    size_t floats = rows * (2 * w->x_stride + w->wide_stride + w->hidden_stride + w->mixed_stride);
    floats += looking * (2 * w->head_stride + w->score_stride);
    float *next = zeros(floats, &w->memory[0]);
    w->memory[1] = calloc(rows, sizeof(struct place)), w->memory[2] = calloc(rows, sizeof(struct race));
    if (!w->memory[0] || !w->memory[1] || !w->memory[2]) return 0;
    w->place = w->memory[1], w->race = w->memory[2];
    w->x = next, next += rows * w->x_stride;
    w->normed = next, next += rows * w->x_stride;
    w->wide = next, next += rows * w->wide_stride;
    w->hidden = next, next += rows * w->hidden_stride;
    w->mixed = next, next += rows * w->mixed_stride;
    w->queries = next, next += looking * w->head_stride;
    w->found = next, next += looking * w->head_stride;
    w->scores = next;
    return 1;
}

/* ---- the layers -------------------------------------------------------------------------------------------------- */

/* y = weight x / sqrt(mean(x^2) + epsilon); squares are added up in 16 sums whatever the width of vectors is. */
static void normalize(const float *x, const float *weight, float epsilon, int n, float *y)
{
    float sums[16] = {0}, sum = 0.0f;
    for (int i = 0; i + 16 <= n; i += 16)
        for (int j = 0; j < 16; j++) sums[j] += x[i + j] * x[i + j];
    for (int i = n / 16 * 16; i < n; i++) sums[i % 16] += x[i] * x[i];
    for (int j = 0; j < 4; j++) sum += (sums[j] + sums[j + 4]) + (sums[j + 8] + sums[j + 12]);
    float factor = 1.0f / sqrtf(sum / (float)n + epsilon);
    for (int i = 0; i < n; i++) y[i] = x[i] * factor * weight[i];
}

/* Turns the pairs (i, i + half) of a head by the angles of its position. */
static void rotate(float *restrict head, const float *restrict cosines, const float *restrict sines, int half)
{
    for (int i = 0; i < half; i++) {
        float a = head[i], b = head[i + half], turned = b * sines[i], other = a * sines[i];
        head[i] = a * cosines[i] - turned;
        head[i + half] = b * cosines[i] + other;
    }
}

/* found (queries, head_size) = weights (queries, columns) times the values of a cache, plus what is there if `add`. */
static void weighted(const struct model *m, struct cache c, int layer, int head, int columns, const float *weights,
                     size_t weight_stride, int queries, float *found, size_t found_stride, int add)
{
    const float *values = values_of(m, c, layer, head);
    if (m->head_size <= LANES)
        product_of(1, values, 0, LANES, columns, LANES, weights, weight_stride, 1, queries, found, found_stride, NULL,
                   add);
    else
        product(values, c.columns * PANEL, columns, m->head_size, weights, weight_stride, queries, found, found_stride, NULL,
                add);
}

/* What the queries of one key head's group, in the rows from `first` to `last` of one prompt, find: into `mixed`. Their
 * scores lie side by side, those of the prompt (`shared` columns) and then those of the row's own tokens. */
static void look(const struct model *m, struct work *w, int layer, int head, int first, int last)
{
    int group = m->query_heads / m->key_heads, size = m->head_size, queries = (last - first) * group;
    size_t at = (size_t)head * group * size;
    const struct place *place = w->place + first;
    int shared = place[last - first - 1].seen;
    size_t behind = round_up(shared, PANEL);
    for (int q = 0; q < queries; q++) {
        const float *from = w->wide + (first + q / group) * w->wide_stride + at + (size_t)(q % group) * size;
        for (int d = 0; d < size; d++) w->queries[q * w->head_stride + d] = from[d] * m->scale;
    }
    product(keys_of(m, place->shared, layer, head), (size_t)size * PANEL, size, shared, w->queries, w->head_stride,
            queries, w->scores, w->score_stride, NULL, 0);
    float sums[queries];
    for (int r = 0; r < last - first; r++) {
        float *scores = w->scores + (size_t)r * group * w->score_stride;
        int own = place[r].own.columns ? place[r].behind : 0;
        if (own)
            product(keys_of(m, place[r].own, layer, head), (size_t)size * PANEL, size, own,
                    w->queries + (size_t)r * group * w->head_stride, w->head_stride, group, scores + behind,
                    w->score_stride, NULL, 0);
        size_t end = behind + round_up(own, PANEL);
        for (int g = 0; g < group; g++, scores += w->score_stride) {
            hide(scores, place[r].seen, behind);
            hide(scores, behind + own, end);
            float top;
            sums[r * group + g] = weigh(scores, end, &top);
        }
    }
    weighted(m, place->shared, layer, head, shared, w->scores, w->score_stride, queries, w->found, w->head_stride, 0);
    for (int r = 0; r < last - first; r++)
        if (place[r].own.columns)
            weighted(m, place[r].own, layer, head, place[r].behind,
                     w->scores + (size_t)r * group * w->score_stride + behind, w->score_stride, group,
                     w->found + (size_t)r * group * w->head_stride, w->head_stride, 1);
    for (int q = 0; q < queries; q++) {
        float *to = w->mixed + (first + q / group) * w->mixed_stride + at + (size_t)(q % group) * size;
        for (int d = 0; d < size; d++) to[d] = w->found[q * w->head_stride + d] / sums[q];
    }
}

/* Norms and turns the heads of each row, and puts keys and values into its cache. */
static void place_heads(const struct model *m, const struct layer *l, struct work *w, int layer, int rows)
{
    int size = m->head_size, half = size / 2;
    for (int r = 0; r < rows; r++) {
        const struct place *p = w->place + r;
        float *heads = w->wide + r * w->wide_stride, *keys = heads + (size_t)m->query_heads * size;
        size_t position = position_of(p);
        for (int h = 0; h < m->query_heads + m->key_heads; h++) {
            float *head = heads + (size_t)h * size;
            const float *norm = h < m->query_heads ? l->query_norm : l->key_norm;
            if (norm != NULL) normalize(head, norm, m->head_epsilon, size, head);
            rotate(head, m->cosines + position * half, m->sines + position * half, half);
        }
        struct cache cache = p->own.columns ? p->own : p->shared;
        size_t column = p->own.columns ? p->behind - 1 : p->seen - 1;
        const float *values = keys + (size_t)m->key_heads * size;
        for (int h = 0; h < m->key_heads; h++)
            remember(m, cache, layer, h, column, keys + (size_t)h * size, values + (size_t)h * size);
    }
}

/* Neighbouring rows of one prompt look into it together. */
static void attend(const struct model *m, struct work *w, int layer, int rows)
{
    int group = m->query_heads / m->key_heads, most = LOOKING / group > 1 ? LOOKING / group : 1;
    for (int first = 0, last; first < rows; first = last) {
        const float *prompt = w->place[first].shared.start;
        for (last = first + 1; last < rows && last - first < most && w->place[last].shared.start == prompt; last++)
            ;
        for (int head = 0; head < m->key_heads; head++) look(m, w, layer, head, first, last);
    }
}

/* hidden = SiLU(gate) up, with SiLU(g) = g / (1 + e^-g) */
static void activate(const struct model *m, struct work *w, int rows)
{
    for (int r = 0; r < rows; r++) {
        const float *gate = w->wide + r * w->wide_stride, *up = gate + m->intermediate;
        float *hidden = w->hidden + r * w->hidden_stride;
        for (int i = 0; i < m->intermediate; i += LANES) {
            vec g = load(gate + i), shown = choose(g < -86.0f, all(86.0f), -g);
            store(hidden + i, g / (1.0f + exponential(shown)) * load(up + i));
        }
    }
}

/* The last hidden states of the rows' tokens, into `x`. */
static void forward(const struct model *m, struct work *w, int rows)
{
    for (int r = 0; r < rows; r++)
        memcpy(w->x + r * w->x_stride, m->embedding + (size_t)w->place[r].token * m->width, m->width * sizeof(float));
    for (int i = 0; i < m->layers; i++) {
        const struct layer *l = m->layer + i;
        for (int r = 0; r < rows; r++)
            normalize(w->x + r * w->x_stride, l->attention_norm, m->epsilon, m->width, w->normed + r * w->x_stride);
        multiply(&l->qkv, w->normed, w->x_stride, rows, w->wide, w->wide_stride, 0);
        place_heads(m, l, w, i, rows);
        attend(m, w, i, rows);
        multiply(&l->output, w->mixed, w->mixed_stride, rows, w->x, w->x_stride, 1);
        for (int r = 0; r < rows; r++)
            normalize(w->x + r * w->x_stride, l->mlp_norm, m->epsilon, m->width, w->normed + r * w->x_stride);
        multiply(&l->gate_up, w->normed, w->x_stride, rows, w->wide, w->wide_stride, 0);
        activate(m, w, rows);
        multiply(&l->down, w->hidden, w->hidden_stride, rows, w->x, w->x_stride, 1);
    }
}

/* ---- the draw: `functional/sampling.py` ---------------------------------------------------------------------------- */

/* splitmix64(key + golden (position + 1)), as `token_keys`. */
static uint64_t token_key(int64_t key, int64_t position)
{
    uint64_t z = (uint64_t)key + ((uint64_t)position + 1) * 0x9E3779B97F4A7C15u;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
}

/* u of LANES tokens from `first` on, as `arrival_times`. */
INLINE vec uniforms(uvec ids, const struct race *race)
{
    uvec h = (ids * 0x9E3779B1u) ^ race->low;
    h += (uvec)((ivec)h >> 16);
    h *= 0x7FEB352Du;
    h += (uvec)((ivec)h >> 15);
    h += race->high;
    h *= 0x846CA68Bu;
    vec size = (vec)((ivec)__builtin_convertvector((ivec)h, vec) & 0x7fffffff);
    return size * (0x1p-31f * (1.0f - 0x1p-23f)) + 0x1p-33f;
}

/* Races `count` more tokens, from `first` on; their logits are filled up to whole vectors, RACED of them.
 *
 * A token wins by probability / arrival time. The time is at least u, so that most tokens cannot win whatever their
 * logarithm is: times are computed only where u * best <= probability. */
static void run(struct race *race, float *logits, int count, int first)
{
    float temperature = race->temperature;
    int end = (int)round_up(count, RACED * LANES);
    hide(logits, count, end);
    vec most = all(-INFINITY), sum = (vec){0};
    for (int i = 0; i < end; i += LANES) {
        vec l = load(logits + i);
        if (temperature != 0.0f && temperature != 1.0f) store(logits + i, l = l / temperature);
        most = larger(l, most); /* a NaN shows in the sum of probabilities, and so in the log-probability */
    }
    float top = largest(most);
    if (!(top <= race->most)) {
        float shrunk = largest(exponential(all(race->most - top)));
        race->sum *= shrunk, race->most = top;
        if (temperature != 0.0f) race->best *= shrunk;
    }
    uvec ids;
    for (int i = 0; i < LANES; i++) ids[i] = (uint32_t)(first + i);
    for (int i = 0; i < end; i += RACED * LANES) { /* one look at whether any of these can win */
        ivec may = {0};
        vec chance[RACED], u[RACED] = {{0}};
        UNROLL for (int j = 0; j < RACED; j++, ids += LANES) {
            chance[j] = exponential(load(logits + i + j * LANES) - race->most);
            sum += chance[j];
            if (temperature == 0.0f) continue;
            u[j] = uniforms(ids, race);
            may |= u[j] * race->best <= chance[j] * 1.00001f; /* more than what the rounding of both may be */
        }
        if (temperature != 0.0f && !any(may)) continue;
        for (int j = 0; j < RACED; j++) {
            vec l = load(logits + i + j * LANES), score = temperature == 0.0f ? l : chance[j] / arrival_time(u[j]);
            if (!any(score > race->best)) continue;
            for (int k = 0; k < LANES; k++)
                if (score[k] > race->best)
                    race->best = score[k], race->token = first + i + j * LANES + k, race->logit = l[k];
        }
    }
    race->sum += total(sum);
}

/* The final norm and the head: hands out the logits of each row, or races its tokens. */
static void score(const struct model *m, struct work *w, int rows)
{
    size_t panel = (size_t)m->width * PANEL;
    for (int r = 0; r < rows; r++)
        normalize(w->x + r * w->x_stride, m->norm, m->epsilon, m->width, w->normed + r * w->x_stride);
    for (int first = 0; first < m->vocabulary; first += SLICE) {
        int count = smaller(m->vocabulary - first, SLICE);
        const float *bias = m->head.bias == NULL ? NULL : m->head.bias + first;
        product(m->head.panels + first / PANEL * panel, panel, m->width, count, w->normed, w->x_stride, rows, w->wide,
                w->wide_stride, bias, 0);
        for (int r = 0; r < rows; r++) {
            float *logits = w->wide + r * w->wide_stride, *to = w->race[r].logits;
            if (to == NULL)
                run(w->race + r, logits, count, first);
            else
                memcpy(to + first, logits, count * sizeof(float));
        }
    }
}

/* ---- threads ------------------------------------------------------------------------------------------------------- */

struct job {
    const struct model *model;
    const struct batch *batch;
    int slots;                    /* rows that a thread takes together */
    size_t longest, own;          /* most columns of a prompt, and behind one */
    atomic_int next_prompt, next_sequence;
    atomic_int outcome;
    atomic_llong tokens, finished;
    double asked;                 /* when; only the calling thread asks */
    int working;                  /* helping threads, below the lock */
    pthread_mutex_t lock;
    pthread_cond_t through;
};

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* The calling thread tells how far the work is, and hears whether to stop; all threads do if it is. */
static int stopped(struct job *job, int calling)
{
    if (calling && job->batch->ask != NULL && now() - job->asked >= ASK_EVERY) {
        if (job->batch->ask(atomic_load(&job->tokens), atomic_load(&job->finished)))
            atomic_store(&job->outcome, STOPPED);
        job->asked = now();
    }
    return atomic_load(&job->outcome) != DONE;
}

/* Reads prompts until none is left, each in parts of about equal size. */
static void read_prompts(struct job *job, int calling)
{
    const struct model *m = job->model;
    struct work w = {0};
    if (!reserve(&w, m, PREFILLED, job->longest, 0)) atomic_store(&job->outcome, NO_MEMORY);
    for (int n; !stopped(job, calling) && (n = atomic_fetch_add(&job->next_prompt, 1)) < job->batch->prompts;) {
        const struct prompt *p = job->batch->prompt + n;
        struct cache cache = {p->cache, p->columns};
        int64_t length = p->length - p->begin, parts = (length + PREFILLED - 1) / PREFILLED, last = 0;
        for (int64_t part = 0; part < parts && !stopped(job, calling); part++) {
            int64_t first = last;
            last = length * (part + 1) / parts;
            int rows = (int)(last - first);
            for (int r = 0; r < rows; r++) {
                int32_t at = p->begin + (int32_t)first + r;
                w.place[r] = (struct place){.shared = cache, .seen = at + 1, .token = p->tokens[at]};
            }
            forward(m, &w, rows);
            memcpy(p->hidden, w.x + (rows - 1) * w.x_stride, m->width * sizeof(float));
            if (p->logits == NULL) continue;
            for (int r = 0; r < rows; r++) w.race[r].logits = p->logits + (size_t)(first + r) * m->vocabulary;
            score(m, &w, rows);
        }
    }
    release(&w);
}

/* Lets `held` waiting tokens pass the layers; where one is the last of its row, its hidden states go into the row's `x`. */
static void pass(const struct model *m, struct work *w, struct work *reading, const int *ends, int held)
{
    forward(m, reading, held);
    for (int i = 0; i < held; i++)
        if (ends[i] >= 0)
            memcpy(w->x + ends[i] * w->x_stride, reading->x + i * w->x_stride, m->width * sizeof(float));
}

/* Feeds the waiting tokens of the rows from `first` to `live`. */
static void feed(const struct model *m, struct work *w, struct work *reading, int first, int live)
{
    int ends[PREFILLED], held = 0; /* the row whose last token it is, or -1 */
    for (int r = first; r < live; r++) {
        struct place *p = w->place + r;
        const struct sequence *s = p->sequence;
        for (int i = 0; i < s->waiting; i++) {
            p->behind++, p->token = s->pending == NULL ? s->last : s->pending[i];
            ends[held] = i + 1 == s->waiting ? r : -1;
            reading->place[held++] = *p;
            if (held == PREFILLED) pass(m, w, reading, ends, held), held = 0;
        }
    }
    if (held) pass(m, w, reading, ends, held);
}

/* Lets waiting sequences take the free places behind `live` rows; how many live then. */
static int admit(struct job *job, struct work *w, struct work *reading, float **free_caches, int live)
{
    int room = job->slots - live, before = live;
    int first = room ? atomic_fetch_add(&job->next_sequence, room) : job->batch->sequences;
    for (int n = first; n < first + room && n < job->batch->sequences; n++, live++) {
        struct sequence *s = job->batch->sequence + n;
        struct cache shared = {s->prompt, round_up(s->seen, PANEL)}, own = {s->own, s->columns};
        if (s->own == NULL) own = (struct cache){free_caches[job->slots - 1 - live], job->own};
        w->place[live] = (struct place){shared, own, .seen = s->seen, .behind = s->fed, .sequence = s};
        if (s->waiting == 0) memcpy(w->x + live * w->x_stride, s->hidden, job->model->width * sizeof(float));
    }
    feed(job->model, w, reading, before, live);
    return live;
}

/* The next token of each row and its log-probability, from the hidden states `x`; or logits, where those are asked for. */
static void draw(struct job *job, struct work *w, int rows)
{
    const struct batch *batch = job->batch;
    for (int r = 0; r < rows; r++) {
        const struct sequence *s = w->place[r].sequence;
        uint64_t key = token_key(s->key, s->drawn);
        float least = s->temperature == 0.0f ? -INFINITY : 0.0f;
        w->race[r] = (struct race){.most = -INFINITY,
                                   .best = least,
                                   .low = (uint32_t)key,
                                   .high = (uint32_t)(key >> 32),
                                   .temperature = s->temperature,
                                   .logits = s->logits};
    }
    score(job->model, w, rows);
    for (int r = 0; r < rows; r++) {
        const struct race *race = w->race + r;
        struct place *p = w->place + r;
        struct sequence *s = p->sequence;
        if (s->logits != NULL) continue;
        int64_t n = s - batch->sequence;
        size_t at = (size_t)n * batch->steps + batch->lengths[n]++;
        batch->tokens[at] = s->last = p->token = race->token;
        batch->logprobs[at] = (float)((double)race->logit - race->most - log(race->sum));
        s->drawn++, p->behind++;
    }
}

static int ends(const struct batch *batch, const struct sequence *s)
{
    if (s->logits != NULL || s->drawn == s->limit || batch->lengths[s - batch->sequence] == batch->steps) return 1;
    for (int i = 0; i < s->stop_count; i++)
        if (s->stops[i] == s->last) return 1;
    return 0;
}

/* Drops the rows that are through, the others keeping their order; how many are left. */
static int retire(struct job *job, struct work *w, float **free_caches, int live)
{
    int kept = 0;
    for (int r = 0, spare = job->slots - live; r < live; r++) {
        struct place *p = w->place + r;
        struct sequence *s = p->sequence;
        if (!ends(job->batch, s)) {
            w->place[kept++] = *p;
            continue;
        }
        free_caches[spare++] = p->own.start;
        s->waiting = s->logits == NULL; /* the last token, which has not passed the layers */
        s->fed = p->behind - s->waiting, s->pending = NULL;
    }
    atomic_fetch_add(&job->tokens, live);
    atomic_fetch_add(&job->finished, live - kept);
    return kept;
}

/* Draws sequences until none is left. */
static void draw_rows(struct job *job, int calling)
{
    const struct model *m = job->model;
    struct work w = {0}, reading = {0};
    void *memory = NULL;
    float *free_caches[MOST_ROWS];
    int lent = job->batch->sequence->own == NULL; /* a row's cache goes to the next one */
    size_t floats = lent ? floats_of_cache(m, job->own) : 0;
    float *caches = zeros(floats * job->slots, &memory);
    if (!memory || !reserve(&w, m, job->slots, job->longest, job->own) ||
        !(lent || reserve(&reading, m, PREFILLED, job->longest, job->own)))
        atomic_store(&job->outcome, NO_MEMORY);
    for (int i = 0; i < job->slots; i++) free_caches[i] = caches + (size_t)i * floats;
    for (int live = 0; !stopped(job, calling) && (live = admit(job, &w, &reading, free_caches, live)) > 0;) {
        draw(job, &w, live);
        live = retire(job, &w, free_caches, live);
        forward(m, &w, live);
    }
    release(&w);
    release(&reading);
    free(memory);
}

typedef void stage(struct job *, int calling);

struct helper {
    struct job *job;
    stage *stage;
};

static void *help(void *given)
{
    const struct helper *helper = given;
    struct job *job = helper->job;
    helper->stage(job, 0);
    pthread_mutex_lock(&job->lock);
    if (--job->working == 0) pthread_cond_signal(&job->through);
    pthread_mutex_unlock(&job->lock);
    return NULL;
}

/* Runs a stage in this thread and in as many more as there can be; returns when all are through it. */
static void together(struct job *job, stage *stage, int threads)
{
    pthread_t started[threads];
    struct helper helper = {job, stage};
    int others = 0;
    job->working = threads - 1;
    for (; others < threads - 1; others++)
        if (pthread_create(&started[others], NULL, help, &helper)) break; /* those that there are do all the work */
    pthread_mutex_lock(&job->lock);
    job->working -= threads - 1 - others;
    pthread_mutex_unlock(&job->lock);
    stage(job, 1);
    pthread_mutex_lock(&job->lock);
    while (job->working > 0) { /* still listens to whether to stop */
        struct timespec until;
        clock_gettime(CLOCK_REALTIME, &until);
        until.tv_nsec += (long)(1e9 * ASK_EVERY);
        until.tv_sec += until.tv_nsec / 1000000000, until.tv_nsec %= 1000000000;
        pthread_cond_timedwait(&job->through, &job->lock, &until);
        pthread_mutex_unlock(&job->lock);
        stopped(job, 1);
        pthread_mutex_lock(&job->lock);
    }
    pthread_mutex_unlock(&job->lock);
    for (int i = 0; i < others; i++) pthread_join(started[i], NULL);
}

/* Most rows that a thread takes together: many of them share one read of the weights, few of them keep their keys and
 * values in the cache. */
static int rows_together(const struct model *m)
{
    const struct matrix *all[] = {&m->layer->qkv, &m->layer->output, &m->layer->gate_up, &m->layer->down};
    size_t numbers = 0;
    for (int i = 0; i < 4; i++) numbers += (size_t)all[i]->in * all[i]->out;
    return numbers <= FEW ? FEWER_ROWS : MOST_ROWS;
}

/* Reads the prompts of a batch, and then draws from its sequences. */
static int32_t advance(const struct model *m, const struct batch *batch)
{
    struct job job = {.model = m, .batch = batch, .asked = now(), .lock = PTHREAD_MUTEX_INITIALIZER};
    pthread_cond_init(&job.through, NULL);
    for (int p = 0; p < batch->prompts; p++) job.longest = larger_size(job.longest, batch->prompt[p].length);
    for (int n = 0; n < batch->sequences; n++) {
        const struct sequence *s = batch->sequence + n;
        job.longest = larger_size(job.longest, s->seen);
        job.own = larger_size(job.own, round_up(s->fed + s->waiting + batch->steps, PANEL));
    }
    if (batch->prompts) together(&job, read_prompts, smaller(batch->threads, batch->prompts));
    if (batch->sequences && job.outcome == DONE) {
        int threads = smaller(batch->threads, batch->sequences);
        job.slots = smaller(rows_together(m), (batch->sequences + threads - 1) / threads);
        together(&job, draw_rows, threads);
    }
    pthread_cond_destroy(&job.through);
    return job.outcome;
}

/* Draws whole completions: `advance` with caches that last as long as the call. */
static int32_t rollout(const struct model *m, const struct request *request)
{
    size_t floats = 0;
    for (int p = 0; p < request->prompts; p++)
        floats += floats_of_cache(m, round_up(request->prompt_starts[p + 1] - request->prompt_starts[p], PANEL));
    void *memory = NULL;
    float *next = zeros(floats, &memory);
    float *hidden = calloc((size_t)request->prompts * m->width, sizeof(float));
    struct prompt *prompts = calloc((size_t)request->prompts, sizeof(struct prompt));
    struct sequence *sequences = calloc((size_t)request->rows, sizeof(struct sequence));
    int32_t outcome = NO_MEMORY;
    if (memory && hidden && prompts && sequences) {
        for (int p = 0; p < request->prompts; p++) {
            int64_t begin = request->prompt_starts[p], length = request->prompt_starts[p + 1] - begin;
            size_t columns = round_up(length, PANEL);
            prompts[p] = (struct prompt){.cache = next,
                                         .tokens = request->prompt_tokens + begin,
                                         .hidden = hidden + (size_t)p * m->width,
                                         .columns = (int32_t)columns,
                                         .length = (int32_t)length};
            next += floats_of_cache(m, columns);
        }
        for (int r = 0; r < request->rows; r++) {
            const struct prompt *p = prompts + request->owners[r];
            sequences[r] = (struct sequence){.prompt = p->cache,
                                             .hidden = p->hidden,
                                             .stops = request->stop_tokens,
                                             .stop_count = request->stops,
                                             .key = request->keys[r],
                                             .seen = p->length,
                                             .limit = request->limits[r],
                                             .temperature = request->temperature};
        }
        struct batch batch = {.prompts = request->prompts,
                              .sequences = request->rows,
                              .steps = request->length,
                              .threads = request->threads,
                              .prompt = prompts,
                              .sequence = sequences,
                              .ask = request->ask,
                              .tokens = request->tokens,
                              .logprobs = request->logprobs,
                              .lengths = request->lengths};
        outcome = advance(m, &batch);
    }
    free(memory);
    free(hidden);
    free(prompts);
    free(sequences);
    return outcome;
}
