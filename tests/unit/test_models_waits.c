/* Who waits for a model gets what it asked for itself: neither the refusal of a shape that somebody
 * else wanted, nor the end of a load that somebody else gave up. */
#include "engine/models.h"
#include "tests/unit/asks.h"

static struct models *ms;
static struct {
    struct models_lease lease;
    struct err e;
    int rc;
    bool asked;
} second;

static bool open_models(const struct backend *be)
{
    struct models_config c;
    struct err e = {0};
    models_defaults(&c);
    c.engine = (struct engine_config){.n_ctx = 256, .n_threads = 1};
    return OK_CALL(models_open_on(&ms, &c, be, &e), e);
}

/* Called while the first one waits: the second asks for the model as it is. */
static int ask_meanwhile(void *user, uint64_t done, uint64_t total)
{
    if (!second.asked) {
        second.asked = true;
        second.rc = models_get(ms, &second.lease, asks_model(3, 512), NULL, &second.e);
    }
    return 0;
}

static void test_a_refused_shape_is_the_answer_of_who_wanted_it_only(void)
{
    struct models_options much = {.n_ctx = 100000, .progress = ask_meanwhile};
    struct models_lease l;
    struct err e = {0}, e2 = {0};
    memset(&second, 0, sizeof second);
    if (!open_models(&backend_cpu) || !OK_CALL(models_get(ms, &l, asks_model(3, 512), NULL, &e), e))
        return;
    models_release(ms, &l);
    /* while the second has its lease the shape is refused as busy, before it as too large */
    OK(models_get(ms, &l, asks_model(3, 512), &much, &e2) && e2.code && !l.engine);
    OK_MSG(second.asked && !second.rc && second.lease.engine, "the second got: %s", second.e.msg);
    models_release(ms, &second.lease);
    models_close(ms);
}

static int slow_load(struct device *d, struct weight **out, const struct weight_src *src,
                     struct err *e)
{
    usleep(300);
    return backend_cpu.load(d, out, src, e);
}

static void slow_close(struct device *d)
{
    usleep(1000);
    backend_cpu.close(d);
}

static int give_up(void *user, uint64_t done, uint64_t total)
{
    return 1;
}

static void *impatient(void *arg)
{
    struct models_options o = {.progress = give_up};
    struct models_lease l;
    struct err e = {0};
    if (models_get(ms, &l, asks_model(3, 512), &o, &e))
        OK(e.code == ERR_CANCELLED);
    models_release(ms, &l);
    return NULL;
}

static void test_a_load_that_others_gave_up_is_begun_again(void)
{
    struct backend be = backend_cpu;
    uint64_t rng = 8;
    be.load = slow_load;
    be.close = slow_close;
    asks_model(3, 512);
    if (!open_models(&be))
        return;
    for (int i = 0; i < (SANITIZED ? 20 : 60); i++) {
        struct models_lease l;
        struct err e = {0};
        pthread_t t;
        CHECK(!pthread_create(&t, NULL, impatient, NULL));
        usleep((useconds_t)(unit_rand(&rng) % 4000));
        OK_CALL(models_get(ms, &l, asks_model(3, 512), NULL, &e), e);
        pthread_join(t, NULL);
        models_release(ms, &l);
        struct err gone = {0};
        OK_CALL(models_unload(ms, asks_model(3, 512), &gone), gone);
    }
    models_close(ms);
}

int main(int argc, char **argv)
{
#define T(f)                                                                                       \
    {                                                                                              \
#f, test_##f                                                                               \
    }
    static const struct unit_test tests[] = {
        T(a_refused_shape_is_the_answer_of_who_wanted_it_only),
        T(a_load_that_others_gave_up_is_begun_again),
    };
    log_threshold = LOG_ERROR;
    return unit_main(argc, argv, tests, ARRAY_LEN(tests));
}
