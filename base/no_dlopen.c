/* In the static binary nothing can load shared objects: glibc's dlopen would want its own shared
 * copy at run time, and the linker warns of it. SQLite's extension loader, which ingot never switches
 * on, gets this answer instead (the linker is told --wrap=dlopen). */
#include <stddef.h>

void *__wrap_dlopen(const char *file, int mode);

void *__wrap_dlopen(const char *file, int mode)
{
    return NULL;
}
