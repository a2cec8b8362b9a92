/* Terminal width of a character, from utf8proc's tables. */
#include "base/base.h"

#include <utf8proc.h>

int utf8_width(uint32_t cp)
{
    int w = utf8proc_charwidth((utf8proc_int32_t)cp);
    return w < 0 ? 0 : w;
}
