/* engine, the prefix cache seen from outside: why a page of a prompt had to be computed, where the
 * others were found, and the counters of both. Part of engine.h. */
#ifndef INGOT_ENGINE_PREFIX_H
#define INGOT_ENGINE_PREFIX_H

#include <stdint.h>

enum prefix_miss {                           /* why a whole page of a prompt was computed */
                   PREFIX_MISS_FIRST_SEEN,   /* as far as anybody remembers */
                   PREFIX_MISS_EVICTED,      /* it was known, and had to make room or cannot be read just now */
                   PREFIX_MISS_OTHER_MODEL,  /* the same text was seen, with other weights or rope
                                                settings */
                   PREFIX_MISS_OTHER_KV,     /* ... with another KV type */
                   PREFIX_MISS_OTHER_LAYOUT, /* ... by another version of ingot or kind of device */
                   PREFIX_MISS_OTHER_TENANT, /* ... by another tenant, whose pages are not shared */
                   PREFIX_MISS_CORRUPT,      /* the persistent tier had it, damaged */
                   PREFIX_MISS_IN_FLIGHT, /* another sequence was computing it at the same time */
                   PREFIX_MISS_END,
};
const char *prefix_miss_name(enum prefix_miss m); /* "first seen", "evicted", ... */

enum prefix_tier {
    PREFIX_RAM,  /* whole pages, shared in place */
    PREFIX_COPY, /* part of a page in RAM, copied on the device */
    PREFIX_DISK, /* whole pages of the persistent tier */
    PREFIX_SWAP, /* pages of a sequence that was swapped out, from host memory */
    PREFIX_TIER_END,
};
const char *prefix_tier_name(enum prefix_tier t); /* "ram", "copy", "disk", "swap" */

struct prefix_counters {
    uint64_t hit_tokens[PREFIX_TIER_END]; /* prompt tokens that were not computed */
    uint64_t hit_pages[PREFIX_TIER_END];
    uint64_t miss_pages[PREFIX_MISS_END]; /* whole prompt pages that were, by reason */
    uint64_t n_evicted;                   /* pages that left RAM */
    uint64_t n_stored;                    /* pages handed to the persistent tier */
    uint64_t n_refused;                   /* pages it had no room for in its queue */
    uint64_t fetch_ns;                    /* spent reading from it */
    uint32_t n_pages;                     /* in RAM now, those of running sequences included */
};

#endif
