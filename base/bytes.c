/* Bounded reading of untrusted bytes, UTF-8, hexadecimal. Owns no memory. */
#include "base/base.h"

#include <string.h>

static uint64_t read_le(struct cursor *c, unsigned n)
{
    const uint8_t *p = cursor_bytes(c, n);
    uint64_t v = 0;
    for (unsigned i = 0; p && i < n; i++)
        v |= (uint64_t)p[i] << (8 * i);
    return v;
}

uint8_t cursor_u8(struct cursor *c)
{
    return (uint8_t)read_le(c, 1);
}

uint16_t cursor_u16(struct cursor *c)
{
    return (uint16_t)read_le(c, 2);
}

uint32_t cursor_u32(struct cursor *c)
{
    return (uint32_t)read_le(c, 4);
}

uint64_t cursor_u64(struct cursor *c)
{
    return read_le(c, 8);
}

const void *cursor_bytes(struct cursor *c, uint64_t n)
{
    if (c->bad || n > c->n - c->at) {
        c->bad = true;
        return NULL;
    }
    const uint8_t *p = c->p + c->at;
    c->at += (size_t)n;
    return p;
}

/* Well-formed UTF-8 by the table of the Unicode standard, section 3.9 (table 3-7): the second
 * byte's range depends on the first, all others are 80..BF. */
struct utf8_lead {
    int len;         /* 0: no lead byte */
    uint8_t lo, hi;  /* range of the second byte */
};

static struct utf8_lead utf8_lead_of(uint8_t b)
{
    if (b >= 0xc2 && b <= 0xdf)
        return (struct utf8_lead){2, 0x80, 0xbf};
    if (b >= 0xe0 && b <= 0xef)
        return (struct utf8_lead){3, b == 0xe0 ? 0xa0 : 0x80, b == 0xed ? 0x9f : 0xbf};
    if (b >= 0xf0 && b <= 0xf4)
        return (struct utf8_lead){4, b == 0xf0 ? 0x90 : 0x80, b == 0xf4 ? 0x8f : 0xbf};
    return (struct utf8_lead){0, 0, 0};
}

/* Bytes at p that start well: all of the character, or as many as are there and right. */
static int utf8_good_prefix(const uint8_t *p, size_t n, struct utf8_lead l)
{
    int i = 1;
    for (; i < l.len && (size_t)i < n; i++) {
        uint8_t lo = i == 1 ? l.lo : 0x80, hi = i == 1 ? l.hi : 0xbf;
        if (p[i] < lo || p[i] > hi)
            break;
    }
    return i;
}

int utf8_decode(uint32_t *cp, const char *s, size_t n)
{
    const uint8_t *p = (const uint8_t *)s;
    if (p[0] < 0x80) {
        *cp = p[0];
        return 1;
    }
    struct utf8_lead l = utf8_lead_of(p[0]);
    if (!l.len)
        return -1;
    int good = utf8_good_prefix(p, n, l);
    if (good < l.len)
        return -good;
    uint32_t v = p[0] & (0xffu >> (l.len + 1));
    for (int i = 1; i < l.len; i++)
        v = v << 6 | (p[i] & 0x3f);
    *cp = v;
    return l.len;
}

int utf8_encode(char out[4], uint32_t cp)
{
    if (cp > 0x10ffff || (cp >= 0xd800 && cp <= 0xdfff))
        cp = 0xfffd;
    if (cp < 0x80) {
        out[0] = (char)cp;
        return 1;
    }
    int n = cp < 0x800 ? 2 : cp < 0x10000 ? 3 : 4;
    for (int i = n - 1; i > 0; i--, cp >>= 6)
        out[i] = (char)(0x80 | (cp & 0x3f));
    out[0] = (char)((0xf00 >> n) | cp);
    return n;
}

bool utf8_valid(const char *p, size_t n)
{
    for (size_t i = 0; i < n;) {
        uint32_t cp;
        int len = utf8_decode(&cp, p + i, n - i);
        if (len < 0)
            return false;
        i += (size_t)len;
    }
    return true;
}

size_t utf8_tail(const char *s, size_t n)
{
    const uint8_t *p = (const uint8_t *)s;
    for (size_t back = 1; back <= 3 && back <= n; back++) {
        struct utf8_lead l = utf8_lead_of(p[n - back]);
        if (l.len > (int)back && utf8_good_prefix(p + n - back, back, l) == (int)back)
            return back;
        if ((p[n - back] & 0xc0) != 0x80)
            return 0;
    }
    return 0;
}

static int hex_digit(char c)
{
    return c >= '0' && c <= '9'   ? c - '0'
           : c >= 'a' && c <= 'f' ? c - 'a' + 10
           : c >= 'A' && c <= 'F' ? c - 'A' + 10
                                  : -1;
}

void hex_encode(char *out, const uint8_t *p, size_t n)
{
    static const char digits[] = "0123456789abcdef";
    for (size_t i = 0; i < n; i++) {
        out[2 * i] = digits[p[i] >> 4];
        out[2 * i + 1] = digits[p[i] & 15];
    }
    out[2 * n] = 0;
}

int hex_decode(uint8_t *out, size_t max, const char *hex, size_t n)
{
    if (n % 2 || n / 2 > max)
        return -1;
    for (size_t i = 0; i < n / 2; i++) {
        int hi = hex_digit(hex[2 * i]), lo = hex_digit(hex[2 * i + 1]);
        if (hi < 0 || lo < 0)
            return -1;
        out[i] = (uint8_t)(hi << 4 | lo);
    }
    return (int)(n / 2);
}
