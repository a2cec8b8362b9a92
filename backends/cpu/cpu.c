/* The CPU backend's face to the engine: probe, open, load (repacking by all threads), and the
 * table. Owns the packed weights. */
#include "backends/cpu/cpu_internal.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/sysinfo.h>

static const struct {
    const struct kernels *k;
    const char *needs;
} levels[] = {
/* best first */
#if defined(__x86_64__)
    {&kernels_avx512vnni, "avx512vnni"},
    {&kernels_avx512, "avx512bw"},
    {&kernels_avx2, "avx2"},
#endif
    {&kernels_scalar, NULL},
};

/* A test that links emulated kernels says so with a function of this name. */
__attribute__((weak)) bool cpu_emulates(const char *needs)
{
    return false;
}

#if defined(__x86_64__)
/* CPUID leaf 1, ECX bit 29; not every compiler's built-in knows the name. */
static bool cpu_has_f16c(void)
{
    unsigned a, b, c, d;
    return __get_cpuid(1, &a, &b, &c, &d) && (c >> 29 & 1);
}
#endif

static bool cpu_has(const char *needs)
{
    if (!needs || cpu_emulates(needs))
        return true;
#if defined(__x86_64__)
    __builtin_cpu_init();
    bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && cpu_has_f16c() &&
                __builtin_cpu_supports("bmi2");
    bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                  __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
                  __builtin_cpu_supports("avx512cd");
    if (!strcmp(needs, "avx2"))
        return avx2;
    if (!strcmp(needs, "avx512bw"))
        return avx512;
    if (!strcmp(needs, "avx512vnni"))
        return avx512 && __builtin_cpu_supports("avx512vnni");
#endif
    return false;
}

const struct kernels *kernels_at(size_t i, bool *runs_here)
{
    if (i >= ARRAY_LEN(levels))
        return NULL;
    *runs_here = cpu_has(levels[i].needs);
    return levels[i].k;
}

int kernels_choose(const struct kernels **out, struct err *e)
{
    const char *want = getenv("INGOT_ISA");
    char known[128] = "";
    for (size_t i = 0; i < ARRAY_LEN(levels); i++) {
        bool named = want && *want && !strcmp(want, levels[i].k->name);
        if ((named || !want || !*want) && cpu_has(levels[i].needs)) {
            *out = levels[i].k;
            return 0;
        }
        if (named)
            return err_set(e, ERR_DEVICE, "INGOT_ISA=%s: this CPU does not have it", want);
        snprintf(known + strlen(known), sizeof known - strlen(known), "%s%s", i ? ", " : "",
                 levels[i].k->name);
    }
    return err_set(e, ERR_USAGE, "INGOT_ISA=%s is not known; it may be %s", want, known);
}

static uint64_t read_number(const char *path)
{
    unsigned long long v = UINT64_MAX; /* also for "max" and for a file that is not there */
    FILE *f = fopen(path, "re");
    if (f && fscanf(f, "%llu", &v) != 1)
        v = UINT64_MAX;
    if (f)
        fclose(f);
    return v;
}

/* The number behind a name at a line's start; 0 when there is none. */
static uint64_t read_field(const char *path, const char *name)
{
    unsigned long long v = 0;
    size_t n = strlen(name);
    char line[128];
    FILE *f = fopen(path, "re");
    while (f && fgets(line, sizeof line, f))
        if (!strncmp(line, name, n) && sscanf(line + n, "%llu", &v) == 1)
            break;
    if (f)
        fclose(f);
    return v;
}

/* What a control group (version 2) leaves: a container's limit is below what the machine has. Its
 * file cache counts as used there, but makes room when asked to. */
static uint64_t cgroup_bytes(void)
{
    char line[512] = "", path[700];
    FILE *f = fopen("/proc/self/cgroup", "re");
    if (f && fgets(line, sizeof line, f))
        line[strcspn(line, "\n")] = 0;
    if (f)
        fclose(f);
    const char *dir = strncmp(line, "0::", 3) ? "" : line + 3;
    snprintf(path, sizeof path, "/sys/fs/cgroup%s/memory.max", dir);
    uint64_t max = read_number(path);
    snprintf(path, sizeof path, "/sys/fs/cgroup%s/memory.current", dir);
    uint64_t used = read_number(path);
    snprintf(path, sizeof path, "/sys/fs/cgroup%s/memory.stat", dir);
    used -= MIN(used, read_field(path, "inactive_file "));
    return max == UINT64_MAX ? UINT64_MAX : max - MIN(used, max);
}

static uint64_t available_bytes(void)
{
    uint64_t bytes = read_field("/proc/meminfo", "MemAvailable:") << 10;
    struct sysinfo s;
    if (!bytes && sysinfo(&s) == 0)
        bytes = (uint64_t)s.freeram * s.mem_unit;
    return MIN(bytes, cgroup_bytes());
}

static void cpu_brand(char *out, size_t n)
{
    snprintf(out, n, "CPU");
    FILE *f = fopen("/proc/cpuinfo", "re");
    char line[256];
    while (f && fgets(line, sizeof line, f)) {
        char *colon = strchr(line, ':');
        if (strncmp(line, "model name", 10) || !colon)
            continue;
        colon[strcspn(colon, "\n")] = 0;
        snprintf(out, n, "%s", colon + 2);
        break;
    }
    if (f)
        fclose(f);
}

static int cpu_probe(struct device_info *out, int max)
{
    if (max < 1)
        return 1;
    *out = (struct device_info){.usable = true};
    struct err e = {0};
    const struct kernels *k = NULL;
    if (kernels_choose(&k, &e)) {
        out->usable = false;
        snprintf(out->why_not, sizeof out->why_not, "%.159s", e.msg);
    }
    cpu_brand(out->name, sizeof out->name);
    size_t at = 0;
    for (size_t i = 0; i < ARRAY_LEN(levels); i++)
        if (cpu_has(levels[i].needs) && at < sizeof out->detail)
            at +=
                (size_t)snprintf(out->detail + at, sizeof out->detail - at, "%s%s%s", at ? " " : "",
                                 levels[i].k->name, levels[i].k == k ? " (used)" : "");
    struct sysinfo s;
    if (sysinfo(&s) == 0)
        out->total_bytes = (uint64_t)s.totalram * s.mem_unit;
    out->free_bytes = available_bytes();
    return 1;
}

static int cpu_open(struct device **out, int index, const struct device_config *c, struct err *e)
{
    struct device *d = mem_zalloc(sizeof *d);
    if (!d)
        return err_set(e, ERR_MEMORY, "out of memory opening the CPU backend");
    if (kernels_choose(&d->k, e) || pool_new(&d->pool, c ? c->n_threads : 0, e)) {
        mem_free(d);
        return -1;
    }
    snprintf(d->describe, sizeof d->describe, "%s, %d thread%s", d->k->name, pool_threads(d->pool),
             pool_threads(d->pool) == 1 ? "" : "s");
    *out = d;
    return 0;
}

static void free_load_bufs(struct device *d);

static void cpu_close(struct device *d)
{
    if (!d)
        return;
    for (struct weight *w = d->weights, *next; w; w = next) {
        next = w->next;
        mem_pages_free(w->data, w->n_bytes);
        mem_free(w);
    }
    free_load_bufs(d);
    pool_free(d->pool);
    mem_free(d);
}

/* ---- loading ---- */

enum { LOAD_STEP_BYTES = 1 << 20 }; /* source bytes that a thread takes at a time */

static void weight_shape(struct weight *w, const struct device *d, const struct weight_src *src)
{
    *w = (struct weight){.info = pack_info_find(src->type), .n_in = src->n_in, .n_out = src->n_out};
    if (!src->n_out) {
        w->n_bytes = ((size_t)src->n_in + 15) / 16 * 16 * sizeof(float);
        return;
    }
    w->lanes = d->k->lanes;
    w->n_panels = (src->n_out + w->lanes - 1) / w->lanes;
    if (w->info) {
        w->panel_bytes = pack_panel_bytes(w->info, src->n_in, w->lanes);
        w->n_bytes = w->panel_bytes * (size_t)w->n_panels;
    }
}

static uint64_t cpu_weight_bytes(struct device *d, const struct weight_src *src)
{
    struct weight w;
    weight_shape(&w, d, src);
    return w.n_bytes;
}

/* All threads take panels, read their source rows (unless they are in memory) and repack them. */
struct load_job {
    struct weight *w;
    const struct weight_src *src;
    size_t row_bytes;
    int64_t step;     /* panels taken at a time */
    uint8_t **bufs;   /* [threads], NULL with a mapped source */
    struct err *errs; /* [threads] */
    atomic_bool failed;
};

static void load_panels(struct load_job *j, int64_t first, int64_t end, int32_t thread)
{
    struct weight *w = j->w;
    int64_t row0 = first * w->lanes, row1 = MIN(end * w->lanes, w->n_out);
    size_t off = (size_t)row0 * j->row_bytes;
    const uint8_t *src = (const uint8_t *)j->src->map + (j->src->map ? off : 0);
    if (!j->src->map) {
        src = j->bufs[thread];
        if (j->src->read(j->src->user, j->bufs[thread], off, (size_t)(row1 - row0) * j->row_bytes,
                         &j->errs[thread])) {
            atomic_store(&j->failed, true);
            return;
        }
    }
    for (int64_t p = first; p < end; p++)
        pack_panel(w, w->data + (size_t)p * w->panel_bytes,
                   src + (size_t)((p - first) * w->lanes) * j->row_bytes, j->row_bytes,
                   (int32_t)MIN((int64_t)w->lanes, w->n_out - p * w->lanes));
}

static void load_task(void *ctx, int32_t task, int32_t thread)
{
    struct load_job *j = ctx;
    int64_t first = task * j->step;
    if (!atomic_load(&j->failed))
        load_panels(j, first, MIN(first + j->step, j->w->n_panels), thread);
}

/* A buffer a thread of at least n bytes: fresh memory for each weight would cost as much as
 * reading. */
static bool grow_load_bufs(struct device *d, size_t n)
{
    int32_t threads = pool_threads(d->pool);
    if (!d->load_bufs && !(d->load_bufs = mem_array((size_t)threads, sizeof *d->load_bufs)))
        return false;
    if (d->load_buf_bytes >= n)
        return true;
    d->load_buf_bytes = 0;
    for (int32_t i = 0; i < threads; i++) {
        mem_free(d->load_bufs[i]);
        if (!(d->load_bufs[i] = mem_alloc(n)))
            return false;
    }
    d->load_buf_bytes = n;
    return true;
}

static void free_load_bufs(struct device *d)
{
    for (int32_t i = 0; d->load_bufs && i < pool_threads(d->pool); i++)
        mem_free(d->load_bufs[i]);
    mem_free(d->load_bufs);
    d->load_bufs = NULL;
    d->load_buf_bytes = 0;
}

static int load_matrix(struct device *d, struct weight *w, const struct weight_src *src,
                       struct err *e)
{
    const struct gguf_dtype_info *t = gguf_dtype_find(src->type);
    int32_t n = pool_threads(d->pool);
    struct load_job j = {.w = w, .src = src};
    j.row_bytes = (size_t)src->n_in / t->block_len * t->block_bytes;
    j.step = MAX((int64_t)(LOAD_STEP_BYTES / (j.row_bytes * (size_t)w->lanes + 1)), (int64_t)1);
    j.errs = mem_array((size_t)n, sizeof *j.errs);
    int rc = 0;
    if (!j.errs ||
        (!src->map && !grow_load_bufs(d, (size_t)j.step * (size_t)w->lanes * j.row_bytes))) {
        mem_free(j.errs);
        return err_set(e, ERR_MEMORY, "out of memory loading %s; use a smaller quantization", src->name);
    }
    j.bufs = d->load_bufs;
    struct pool_work work = {.task = load_task, .ctx = &j};
    work.n_tasks = (int32_t)((w->n_panels + j.step - 1) / j.step);
    if (work.n_tasks == 1)
        load_task(&j, 0, 0); /* too small to wake the others for */
    else
        pool_run(d->pool, &work);
    for (int32_t i = 0; i < n; i++)
        if (!rc && j.errs[i].code)
            rc = err_set(e, j.errs[i].code, "%s", j.errs[i].msg);
    if (!rc && atomic_load(&j.failed))
        rc = err_set(e, ERR_IO, "cannot read %s", src->name);
    mem_free(j.errs);
    return rc;
}

static int load_vector(struct weight *w, const struct weight_src *src, struct err *e)
{
    const struct gguf_dtype_info *t = gguf_dtype_find(src->type);
    size_t bytes = (size_t)src->n_in / t->block_len * t->block_bytes;
    if (src->map) {
        t->to_f32((float *)w->data, src->map, (size_t)src->n_in);
        return 0;
    }
    void *tmp = mem_alloc(bytes);
    if (!tmp)
        return err_set(e, ERR_MEMORY, "out of memory loading %s; use a smaller quantization", src->name);
    int rc = src->read(src->user, tmp, 0, bytes, e);
    if (!rc)
        t->to_f32((float *)w->data, tmp, (size_t)src->n_in);
    mem_free(tmp);
    return rc;
}

static int cpu_load(struct device *d, struct weight **out, const struct weight_src *src,
                    struct err *e)
{
    const struct gguf_dtype_info *t = gguf_dtype_find(src->type);
    if (!t || !pack_info_find(src->type))
        return err_set(e, ERR_UNSUPPORTED,
                       "tensor %s has block type %u, which the CPU backend lacks", src->name,
                       src->type);
    if (src->n_in < 1 || src->n_out < 0 || src->n_in % t->block_len)
        return err_set(e, ERR_CORRUPT, "tensor %s: rows of %lld values do not divide into blocks",
                       src->name, (long long)src->n_in);
    struct weight *w = mem_alloc(sizeof *w);
    if (!w)
        return err_set(e, ERR_MEMORY, "out of memory loading %s; use a smaller quantization", src->name);
    weight_shape(w, d, src);
    w->data = mem_pages(w->n_bytes);
    int rc = !w->data ? err_set(e, ERR_MEMORY, "out of memory loading %s (%zu bytes); use a smaller quantization", src->name,
                                w->n_bytes)
             : src->n_out ? load_matrix(d, w, src, e)
                          : load_vector(w, src, e);
    if (rc) {
        mem_pages_free(w->data, w->n_bytes);
        mem_free(w);
        return -1;
    }
    w->next = d->weights;
    w->at = &d->weights;
    if (w->next)
        w->next->at = &w->next;
    d->weights = w;
    *out = w;
    return 0;
}

static void cpu_unload(struct device *d, struct weight *w)
{
    *w->at = w->next;
    if (w->next)
        w->next->at = w->at;
    mem_pages_free(w->data, w->n_bytes);
    mem_free(w);
}

/* The weights are there by now. */
static int cpu_prepare(struct device *d, struct exec **out, const struct plan *p, struct err *e)
{
    free_load_bufs(d);
    return exec_new(d, out, p, e);
}

static int cpu_kv_read(struct exec *x, void *dst, int32_t page, struct err *e)
{
    memcpy(dst, exec_page(x, page), exec_page_bytes(x));
    return 0;
}

static int cpu_kv_write(struct exec *x, int32_t page, const void *src, struct err *e)
{
    memcpy(exec_page(x, page), src, exec_page_bytes(x));
    return 0;
}

static void cpu_kv_copy(struct exec *x, int32_t to, int32_t from)
{
    memcpy(exec_page(x, to), exec_page(x, from), exec_page_bytes(x));
}

static const char *cpu_describe(struct device *d)
{
    return d->describe;
}

static const char *cpu_kv_kind(struct device *d)
{
    return d->k->name;
}

const struct backend backend_cpu = {
    .name = "cpu",
    .probe = cpu_probe,
    .open = cpu_open,
    .close = cpu_close,
    .weight_bytes = cpu_weight_bytes,
    .load = cpu_load,
    .unload = cpu_unload,
    .plan_bytes = exec_bytes,
    .prepare = cpu_prepare,
    .exec_free = exec_free,
    .run = exec_run,
    .kv_page_bytes = exec_page_bytes,
    .kv_read = cpu_kv_read,
    .kv_write = cpu_kv_write,
    .kv_copy = cpu_kv_copy,
    .describe = cpu_describe,
    .kv_kind = cpu_kv_kind,
};
