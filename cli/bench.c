/* ingot bench: how fast a model reads prompts and writes answers here, beside what the machine's
 * memory and arithmetic allow. Random ids from a fixed seed; medians of several runs. */
#include "cli/cli_internal.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

struct bench_opts {
    struct common_opts common;
    struct engine_opts engine;
    uint32_t prompt, gen, reps;
    bool json;
};

#define AT(field) offsetof(struct bench_opts, field)
static const struct option bench_options[] = {
    {"prompt", "n-prompt", 'p', false, OPTION_U32, "N", AT(prompt), 0, 1 << 20,
     "Tokens of the prompt; 0 leaves it out"},
    {"gen", "n-gen", 'n', false, OPTION_U32, "N", AT(gen), 0, 1 << 20,
     "Tokens of the answer; 0 leaves it out"},
    {"reps", "repetitions", 'r', false, OPTION_U32, "N", AT(reps), 1, 1000,
     "Runs, of which the median counts"},
    {"json", NULL, 0, false, OPTION_FLAG, NULL, AT(json), 0, 0, "For programs"},
    {0},
};
#undef AT

static void bench_defaults(void *opts)
{
    struct bench_opts *o = opts;
    o->prompt = 512;
    o->gen = 128;
    o->reps = 3;
}

struct series { /* tokens a second of each run, then sorted */
    double *v;
    uint32_t n;
};

static int compare_doubles(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double series_median(const struct series *s)
{
    return s->n % 2 ? s->v[s->n / 2] : (s->v[s->n / 2 - 1] + s->v[s->n / 2]) / 2;
}

struct bench {
    const struct bench_opts *o;
    const char *ref; /* the model's name in the store, or its path */
    struct engine *engine;
    int32_t *ids; /* MAX(prompt, 1) of them */
    struct series prompt, gen;
    double read_bytes_s, int8_macs_s;
    uint64_t prompt_macs, answer_bytes; /* what a token costs at least */
    uint64_t resident;                  /* after the runs */
};

/* A prompt token costs a multiply-add for every weight of the layers' matrices: its embedding is
 * one row that is looked up, and the output matrix runs for the last token alone. (What attention
 * multiplies besides grows with the position and is left out.) An answer's token reads everything
 * but, where it is not the output matrix as well, the table of embeddings. */
static void count_costs(struct bench *b, const struct gguf *g)
{
    bool tied = !gguf_find_tensor(g, "output.weight");
    for (uint64_t i = 0; i < g->n_tensors; i++) {
        const struct gguf_tensor *t = &g->tensors[i];
        if (t->n_dims > 1 && !strncmp(t->name, "blk.", 4))
            b->prompt_macs += t->ne[0] * t->ne[1] * t->ne[2] * t->ne[3];
        if (tied || strcmp(t->name, "token_embd.weight"))
            b->answer_bytes += t->n_bytes;
    }
}

/* Ids from splitmix64 (Steele et al., OOPSLA 2014) with a fixed seed. */
static void fill_ids(int32_t *ids, size_t n, uint32_t n_vocab)
{
    uint64_t state = 42;
    for (size_t i = 0; i < n; i++) {
        uint64_t z = state += 0x9e3779b97f4a7c15u;
        z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
        z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
        ids[i] = (int32_t)((z ^ (z >> 31)) % n_vocab);
    }
}

static int bench_request(struct request_stats *s, struct bench *b, uint32_t n_ids, uint32_t n_gen,
                         struct err *e)
{
    struct request r = {
        .ids = b->ids, .n_ids = n_ids, .max_tokens = n_gen, .ignore_eog = true, .no_reuse = true};
    sample_defaults(&r.sample);
    r.sample.temperature = 0;
    return engine_run(b->engine, &r, s, e);
}

/* A person sees that something goes on; what == NULL: it is over. */
static void show_run(const struct bench *b, const char *what, uint32_t run)
{
    if (b->o->common.quiet || !isatty(2) || term_plain())
        return;
    fputs("\r\x1b[K", stderr);
    if (what)
        fprintf(stderr, "%smeasuring: %s, run %u of %u%s", style(2, STYLE_DIM), what, run,
                b->o->reps, style(2, STYLE_NONE));
}

static int too_long(const struct bench *b, struct err *e)
{
    const struct engine_info *i = engine_info(b->engine);
    return err_set(e, ERR_LIMIT, "the context of %u tokens ends before the answer of %u; use a %s",
                   i->n_ctx, b->o->gen,
                   i->n_ctx < i->n_ctx_train ? "larger --ctx" : "smaller --gen");
}

static int bench_runs(struct bench *b, struct err *e)
{
    struct request_stats s;
    const struct bench_opts *o = b->o;
    /* The first run touches pages and wakes threads; it does not count. */
    if (bench_request(&s, b, MIN(MAX(o->prompt, 1u), 32u), 2, e))
        return -1;
    for (uint32_t i = 0; i < o->reps; i++) {
        if (o->prompt) {
            show_run(b, "prompt", i + 1);
            if (bench_request(&s, b, o->prompt, 1, e))
                return -1;
            b->prompt.v[b->prompt.n++] = o->prompt * 1e9 / (double)MAX(s.prompt_ns, 1u);
        }
        if (o->gen) {
            show_run(b, "answer", i + 1);
            if (bench_request(&s, b, 1, o->gen + 1, e))
                return -1;
            if (s.n_generated != o->gen + 1)
                return too_long(b, e);
            b->gen.v[b->gen.n++] = (s.n_generated - 1) * 1e9 / (double)MAX(s.decode_ns, 1u);
        }
        if (interrupt_seen())
            return err_set(e, ERR_CANCELLED, "bench was interrupted");
    }
    qsort(b->prompt.v, b->prompt.n, sizeof(double), compare_doubles);
    qsort(b->gen.v, b->gen.n, sizeof(double), compare_doubles);
    return 0;
}

/* Parts of what the machine allows. */
static double prompt_part(const struct bench *b)
{
    double macs_s = series_median(&b->prompt) * (double)b->prompt_macs;
    return b->int8_macs_s > 0 ? macs_s / b->int8_macs_s : 0;
}

static double gen_part(const struct bench *b)
{
    double bytes_s = series_median(&b->gen) * (double)b->answer_bytes;
    return b->read_bytes_s > 0 ? bytes_s / b->read_bytes_s : 0;
}

static void print_series(const char *name, uint32_t n, const struct series *s, double part,
                         const char *of)
{
    printf("%-7s %5u  %9.1f tok/s  (%.1f to %.1f)  %5.1f %% of %s\n", name, n, series_median(s),
           s->v[0], s->v[s->n - 1], 100 * part, of);
}

static void bench_print(const struct bench *b)
{
    const struct engine_info *i = engine_info(b->engine);
    char bytes[16], params[16], rate[16], macs[16], read[16], kv[64];
    struct buf name = {0};
    put_clean(&name, b->ref, strlen(b->ref), 60);
    if (i->name[0] && strcmp(i->name, b->ref)) {
        buf_puts(&name, " (");
        put_clean(&name, i->name, strlen(i->name), 60);
        buf_putc(&name, ')');
    }
    format_bytes(bytes, i->weight_file_bytes);
    format_count(params, i->n_params);
    format_bytes(rate, (uint64_t)b->read_bytes_s);
    printf("model    %s: %s, %s parameters, %s\n", buf_str(&name), i->arch, params, bytes);
    printf("device   %s\n", i->describe);
    printf("machine  reads %s/s, %.1f G int8 multiply-adds/s\n", rate, b->int8_macs_s / 1e9);
    format_count(macs, b->prompt_macs);
    format_bytes(read, b->answer_bytes);
    printf("a token  %s multiply-adds in a prompt, %s read in an answer\n", macs, read);
    format_kv(kv, &i->placement);
    printf("kv       %s\n", kv);
    printf("load     %.3f s\n", i->load_seconds);
    struct buf memory = {0};
    format_memory(&memory, &i->placement, b->resident);
    printf("memory:  %s\n", buf_str(&memory));
    buf_fini(&memory);
    if (b->prompt.n)
        print_series("prompt", b->o->prompt, &b->prompt, prompt_part(b), "the int8 peak");
    if (b->gen.n)
        print_series("answer", b->o->gen, &b->gen, gen_part(b), "the read bandwidth");
    buf_fini(&name);
}

static json_t *series_json(uint32_t n, const struct series *s, double part)
{
    json_t *runs = json_array();
    for (uint32_t i = 0; i < s->n; i++)
        json_array_append_new(runs, json_real(s->v[i]));
    return json_pack("{sI sf sf so}", "tokens", (json_int_t)n, "tok_s", series_median(s),
                     "part_of_peak", part, "runs", runs);
}

static json_t *bench_json(const struct bench *b)
{
    const struct engine_info *i = engine_info(b->engine);
    json_t *j = json_pack(
        "{so ss sI sI so so sf sf sf sI sI}", "model", json_text(i->name, strlen(i->name)), "arch",
        i->arch, "params", (json_int_t)i->n_params, "bytes", (json_int_t)i->weight_file_bytes,
        "device", json_text(i->describe, strlen(i->describe)), "kv", kv_json(&i->placement),
        "load_s", i->load_seconds, "read_bytes_s", b->read_bytes_s, "int8_macs_s", b->int8_macs_s,
        "prompt_macs", (json_int_t)b->prompt_macs, "answer_bytes", (json_int_t)b->answer_bytes);
    if (j)
        json_object_set_new(j, "memory", memory_json(&i->placement, b->resident));
    if (j && b->prompt.n)
        json_object_set_new(j, "prompt", series_json(b->o->prompt, &b->prompt, prompt_part(b)));
    if (j && b->gen.n)
        json_object_set_new(j, "decode", series_json(b->o->gen, &b->gen, gen_part(b)));
    return j;
}

static int bench_run(const struct command_args *a, struct err *e)
{
    const struct bench_opts *o = a->opts;
    struct bench b = {.o = o};
    struct engine_opts eo = o->engine;
    struct model_ref s = {0};
    if (!o->prompt && !o->gen)
        return usage_error(e, "bench: --prompt and --gen are both 0; nothing is left to measure");
    int rc = model_ref_open(&s, a->words[0], &o->common, e);
    if (rc)
        goto out;
    if (!eo.ctx)
        eo.ctx = MAX(o->prompt + 1, o->gen + 2);
    b.ref = model_file_name(s.file);
    rc = load_engine(&b.engine, &s, &eo, &o->common, e);
    if (rc && e->code == ERR_LIMIT && !o->engine.ctx)
        err_prefix(e, "use a smaller --prompt or --gen");
    if (rc)
        goto out;
    size_t n_ids = MAX(o->prompt, 1u);
    b.ids = mem_array(n_ids, sizeof *b.ids);
    b.prompt.v = mem_array(o->reps, sizeof(double));
    b.gen.v = mem_array(o->reps, sizeof(double));
    if (!b.ids || !b.prompt.v || !b.gen.v) {
        rc = err_set(e, ERR_MEMORY, "out of memory for %zu ids", n_ids);
        goto out;
    }
    fill_ids(b.ids, n_ids, engine_info(b.engine)->n_vocab);
    count_costs(&b, model_file_gguf(s.file));
    interrupt_begin(-1);
    rc = bench_runs(&b, e);
    interrupt_end();
    show_run(&b, NULL, 0);
    if (rc)
        goto out;
    b.resident = mem_resident_bytes(); /* measuring the machine takes memory of its own */
    cpu_measure(&b.read_bytes_s, &b.int8_macs_s, eo.threads > 0 ? eo.threads : cpu_count());
    if (o->json)
        rc = print_json(bench_json(&b), e);
    else
        bench_print(&b);
out:
    engine_close(b.engine);
    model_ref_close(&s);
    mem_free(b.ids);
    mem_free(b.prompt.v);
    mem_free(b.gen.v);
    return rc;
}

const struct command command_bench = {
    .name = "bench",
    .summary = "measure prompt, answer and load speed",
    .usage = "MODEL [--prompt 512] [--gen 128] [--reps 3] [--json]",
    .about =
        "Measure how fast a model reads a prompt and writes an answer, beside the machine's\n"
        "measured read bandwidth and int8 peak: a prompt's token costs the multiply-adds of the\n"
        "layers' matrices, an answer's token reads the weights. Medians over --reps runs.",
    .examples = "  ingot bench smollm2\n"
                "  ingot bench model.gguf --threads 2 --reps 5\n"
                "  ingot bench smollm2 --prompt 2048 --gen 0 --json\n",
    .opts_bytes = sizeof(struct bench_opts),
    .groups = {{"Bench", bench_options, 0}, ENGINE_GROUP(struct bench_opts), COMMON_GROUP},
    .min_words = 1,
    .max_words = 1,
    .defaults = bench_defaults,
    .run = bench_run,
};
