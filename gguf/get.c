/* Checked access to values of a parsed header. Owns no memory. */
#include "gguf/gguf_internal.h"

#include <float.h>
#include <math.h>
#include <string.h>

static uint64_t load_le(const uint8_t *p, size_t n)
{
    uint64_t v = 0;
    for (size_t i = 0; i < n; i++)
        v |= (uint64_t)p[i] << (8 * i);
    return v;
}

static bool is_integer(enum gguf_type t)
{
    return gguf_type_bytes(t) && t != GGUF_FLOAT32 && t != GGUF_FLOAT64 && t != GGUF_BOOL;
}

static bool is_signed(enum gguf_type t)
{
    return t == GGUF_I8 || t == GGUF_I16 || t == GGUF_I32 || t == GGUF_I64;
}

int64_t gguf_kv_int(const struct gguf_kv *kv, uint64_t i)
{
    size_t n = gguf_type_bytes(kv->elem_type);
    if (!is_integer(kv->elem_type) && kv->elem_type != GGUF_BOOL)
        return 0;
    uint64_t v = load_le(kv->data + i * n, n);
    if (is_signed(kv->elem_type)) {
        unsigned unused = (unsigned)(64 - 8 * n);
        return (int64_t)(v << unused) >> unused;
    }
    return v > INT64_MAX ? INT64_MAX : (int64_t)v;
}

double gguf_kv_number(const struct gguf_kv *kv, uint64_t i)
{
    if (kv->elem_type == GGUF_FLOAT32) {
        uint32_t bits = (uint32_t)load_le(kv->data + 4 * i, 4);
        float f;
        memcpy(&f, &bits, 4);
        return (double)f;
    }
    if (kv->elem_type == GGUF_FLOAT64) {
        uint64_t bits = load_le(kv->data + 8 * i, 8);
        double d;
        memcpy(&d, &bits, 8);
        return d;
    }
    if (kv->elem_type == GGUF_U64)
        return (double)load_le(kv->data + 8 * i, 8);
    return (double)gguf_kv_int(kv, i);
}

static int wrong_kind(const struct gguf_kv *kv, const char *wanted, struct err *e)
{
    bool array = kv->type == GGUF_ARRAY;
    return err_set(e, ERR_CORRUPT, "key '%.*s' is %s%s; %s is needed", SHOW(kv->key),
                   array ? "an array of " : "of type ", gguf_type_name(kv->elem_type), wanted);
}

int gguf_get_u32(const struct gguf *g, const char *key, uint32_t *v, struct err *e)
{
    const struct gguf_kv *kv = gguf_find(g, key);
    if (!kv)
        return 0;
    if (!is_integer(kv->type))
        return wrong_kind(kv, "an integer", e);
    int64_t x = gguf_kv_int(kv, 0);
    if (x < 0 || x > UINT32_MAX)
        return err_set(e, ERR_CORRUPT, "key '%.*s' is %lld; 0 to 4294967295 is allowed",
                       SHOW(kv->key), (long long)x);
    *v = (uint32_t)x;
    return 0;
}

int gguf_get_f32(const struct gguf *g, const char *key, float *v, struct err *e)
{
    const struct gguf_kv *kv = gguf_find(g, key);
    if (!kv)
        return 0;
    if (kv->type != GGUF_FLOAT32 && kv->type != GGUF_FLOAT64 && !is_integer(kv->type))
        return wrong_kind(kv, "a number", e);
    double x = gguf_kv_number(kv, 0);
    if (isfinite(x) && fabs(x) > (double)FLT_MAX)
        return err_set(e, ERR_CORRUPT, "key '%.*s' is %g, beyond a 32-bit float", SHOW(kv->key), x);
    *v = (float)x;
    return 0;
}

int gguf_get_bool(const struct gguf *g, const char *key, bool *v, struct err *e)
{
    const struct gguf_kv *kv = gguf_find(g, key);
    if (!kv)
        return 0;
    if (kv->type != GGUF_BOOL)
        return wrong_kind(kv, "a bool", e);
    *v = kv->data[0] != 0;
    return 0;
}

int gguf_get_str(const struct gguf *g, const char *key, struct gguf_str *v, struct err *e)
{
    const struct gguf_kv *kv = gguf_find(g, key);
    if (!kv)
        return 0;
    if (kv->type != GGUF_STRING)
        return wrong_kind(kv, "a string", e);
    *v = kv->strings[0];
    return 0;
}
