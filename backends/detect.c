/* Which backends exist, and which one a name or "auto" means. Owns no memory. */
#include "backends/backend.h"

#include <stdio.h>
#include <string.h>

const struct backend *const backends[] = {&backend_cpu, NULL};

enum { MAX_DEVICES = 8, WHY_BYTES = sizeof((struct device_info *)0)->why_not };

/* Else why holds the first device's reason. */
static bool backend_usable(char why[WHY_BYTES], const struct backend *b)
{
    struct device_info info[MAX_DEVICES] = {0};
    int n = MIN(b->probe(info, MAX_DEVICES), MAX_DEVICES);
    for (int i = 0; i < n; i++)
        if (info[i].usable)
            return true;
    snprintf(why, WHY_BYTES, "%s", n > 0 ? info[0].why_not : "none was found");
    return false;
}

int backend_choose(const struct backend **out, const char *name, struct err *e)
{
    bool any = !name || !strcmp(name, "auto");
    const struct backend *tried = NULL;
    char why[WHY_BYTES];
    for (int i = 0; backends[i]; i++) {
        if (!any && strcmp(backends[i]->name, name))
            continue;
        tried = backends[i];
        if (backend_usable(why, tried)) {
            *out = tried;
            return 0;
        }
    }
    if (tried)
        return err_set(e, ERR_DEVICE, "backend '%s' has no usable device: %s", tried->name, why);
    return err_set(e, ERR_USAGE, "no backend '%s' in this build; use auto or cpu", name);
}
