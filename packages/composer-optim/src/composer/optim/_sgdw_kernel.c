/* A step of SGD with decoupled weight decay over many dense tensors, each element touched once. See _sgdw_kernel.py. */

#include <stdint.h>
#include <stdlib.h>

/* Fused multiply-add where the processor has it, in the places where torch's unfused step has it: so both agree bit for
   bit. It is written out, for a compiler would choose other places for other elements. */
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA) || defined(__FP_FAST_FMAF)
#define FMAF(a, b, c) __builtin_fmaf(a, b, c)
#define FMA(a, b, c) __builtin_fma(a, b, c)
#else
#define FMAF(a, b, c) ((a) * (b) + (c))
#define FMA(a, b, c) ((a) * (b) + (c))
#endif

#define LEAST_ELEMENTS 32768 /* of a thread: as torch has it */

/* Runs a function on several threads: `GOMP_parallel` of the OpenMP runtime that torch has loaded, so that they are the
   threads of torch. Ones of our own would compete with those, which wait for their next work in a busy loop. */
typedef void (*Parallel)(void (*function)(void *), void *argument, unsigned threads, unsigned flags);

typedef struct {
    /* Five columns of `count` numbers: addresses of parameters, gradients and buffers, numbers of elements, and
       whether the buffer is new. */
    const uint64_t *table;
    int64_t count;
    double factor, lr, momentum, share, sign;
    int nesterov, is_double;
    int64_t total, parts; /* all elements, and how often that is divided */
    int64_t next;         /* the part that no thread has begun yet */
} Work;

/* `sign` is -1 to go up; multiplying by it is exact. */
#define DEFINE_UPDATE(NAME, REAL, MULTIPLY_ADD)                                                                        \
    static void NAME(const Work *work, REAL *restrict p, const REAL *restrict g, REAL *restrict b, int is_new,         \
                     int64_t size) {                                                                                   \
        const REAL factor = (REAL)work->factor, down = (REAL)-work->lr, momentum = (REAL)work->momentum;               \
        const REAL share = (REAL)work->share, sign = (REAL)work->sign;                                                 \
        if (b == NULL) {                                                                                               \
            for (int64_t i = 0; i < size; i++) p[i] = MULTIPLY_ADD(sign * g[i], down, factor * p[i]);                  \
        } else if (is_new) {                                                                                           \
            for (int64_t i = 0; i < size; i++) {                                                                       \
                b[i] = sign * g[i];                                                                                    \
                p[i] = MULTIPLY_ADD(work->nesterov ? MULTIPLY_ADD(b[i], momentum, b[i]) : b[i], down, factor * p[i]);  \
            }                                                                                                          \
        } else if (work->nesterov) {                                                                                   \
            for (int64_t i = 0; i < size; i++) {                                                                       \
                b[i] = MULTIPLY_ADD(sign * g[i], share, momentum * b[i]);                                              \
                p[i] = MULTIPLY_ADD(MULTIPLY_ADD(b[i], momentum, sign * g[i]), down, factor * p[i]);                   \
            }                                                                                                          \
        } else {                                                                                                       \
            for (int64_t i = 0; i < size; i++) {                                                                       \
                b[i] = MULTIPLY_ADD(sign * g[i], share, momentum * b[i]);                                              \
                p[i] = MULTIPLY_ADD(b[i], down, factor * p[i]);                                                        \
            }                                                                                                          \
        }                                                                                                              \
    }

DEFINE_UPDATE(update_float, float, FMAF)
DEFINE_UPDATE(update_double, double, FMA)

/* Update the elements from `begin` to `end`, counted over all tensors. */
static void update(const Work *work, int64_t begin, int64_t end) {
    const uint64_t *p = work->table, *g = p + work->count, *b = g + work->count, *size = b + work->count;
    const uint64_t *is_new = size + work->count;
    int64_t seen = 0;
    for (int64_t i = 0; i < work->count && seen < end; seen += (int64_t)size[i++]) {
        int64_t from = begin > seen ? begin - seen : 0;
        int64_t to = end - seen < (int64_t)size[i] ? end - seen : (int64_t)size[i];
        if (from >= to) continue;
        if (work->is_double) {
            double *buffer = (double *)(uintptr_t)b[i];
            update_double(work, (double *)(uintptr_t)p[i] + from, (const double *)(uintptr_t)g[i] + from,
                          buffer ? buffer + from : NULL, (int)is_new[i], to - from);
        } else {
            float *buffer = (float *)(uintptr_t)b[i];
            update_float(work, (float *)(uintptr_t)p[i] + from, (const float *)(uintptr_t)g[i] + from,
                         buffer ? buffer + from : NULL, (int)is_new[i], to - from);
        }
    }
}

/* What each thread does, however many there are. */
static void run(void *argument) {
    Work *work = argument;
    int64_t part, size = work->total / work->parts;
    while ((part = __atomic_fetch_add(&work->next, 1, __ATOMIC_RELAXED)) < work->parts)
        update(work, part * size, part + 1 < work->parts ? (part + 1) * size : work->total);
}

typedef struct {
    uint64_t begin, end;
    int is_written;
} Range;

static int compare(const void *left, const void *right) {
    uint64_t a = ((const Range *)left)->begin, b = ((const Range *)right)->begin;
    return (a > b) - (a < b);
}

/* Whether the memory may be used: it is there, and nothing that is written lies over anything else. */
static int is_usable(const uint64_t *table, int64_t count, uint64_t width, int has_buffers) {
    Range *ranges = malloc((size_t)(3 * count) * sizeof(Range));
    int64_t total = 0;
    int usable = ranges != NULL;
    for (int64_t i = 0; i < (has_buffers ? 3 : 2) * count && usable; i++) {
        uint64_t bytes = table[3 * count + i % count] * width;
        if (bytes == 0) continue;
        usable = table[i] != 0; /* a storage that was set free */
        ranges[total++] = (Range){table[i], table[i] + bytes, i / count != 1};
    }
    if (usable) qsort(ranges, (size_t)total, sizeof(Range), compare);
    uint64_t end = 0, written = 0; /* where what came so far ends */
    for (int64_t i = 0; i < total && usable; i++) {
        usable = ranges[i].begin >= (ranges[i].is_written ? end : written);
        if (ranges[i].end > end) end = ranges[i].end;
        if (ranges[i].is_written && ranges[i].end > written) written = ranges[i].end;
    }
    free(ranges);
    return usable;
}

/* Update all tensors, on at most `threads` threads; 0, and nothing done, if their memory is not fit for it. */
int composer_sgdw(const uint64_t *table, int64_t count, int is_double, double factor, double lr, double momentum,
                  double share, int nesterov, int maximize, Parallel parallel, int threads) {
    if (!is_usable(table, count, is_double ? sizeof(double) : sizeof(float), momentum != 0)) return 0;
    Work work = {table, count, factor, lr, momentum, share, maximize ? -1 : 1, nesterov, is_double, 0, 1, 0};
    for (int64_t i = 0; i < count; i++) work.total += (int64_t)table[3 * count + i];
    work.parts = work.total / LEAST_ELEMENTS;
    if (work.parts > threads) work.parts = threads;
    if (work.parts <= 1) {
        work.parts = 1;
        run(&work);
    } else {
        parallel(run, &work, (unsigned)work.parts, 0);
    }
    return 1;
}
