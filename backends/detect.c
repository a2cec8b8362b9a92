/* Which backends exist, and which one a name or "auto" means. Owns no memory. */
#include "backends/backend.h"

#include <string.h>

const struct backend *const backends[] = {&backend_cpu, NULL};

static bool backend_usable(const struct backend *b)
{
    struct device_info info[8];
    int n = b->probe(info, 8);
    for (int i = 0; i < MIN(n, 8); i++)
        if (info[i].usable)
            return true;
    return false;
}

int backend_choose(const struct backend **out, const char *name, struct err *e)
{
    bool any = !name || !strcmp(name, "auto");
    for (int i = 0; backends[i]; i++) {
        if (!any && strcmp(backends[i]->name, name))
            continue;
        if (backend_usable(backends[i])) {
            *out = backends[i];
            return 0;
        }
        if (!any)
            return err_set(e, ERR_DEVICE, "backend '%s' has no usable device here; "
                           "`ingot devices` says why", name);
    }
    return err_set(e, ERR_USAGE, "no backend '%s' in this build; use auto or cpu", name);
}
