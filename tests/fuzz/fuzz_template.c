/* Fuzz target: template source, parsed and rendered with fixed messages and small budgets. Anything
 * but text or an error (crash, hang, leak) is a finding. */
#include "text/text.h"

#include <jansson.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static json_t *messages(void)
{
    static json_t *m;
    json_error_t je;
    if (!m)
        m = json_loads("[{\"role\":\"user\",\"content\":\"h\\u00e9llo <think>a</think> b\"},"
                       "{\"role\":\"assistant\",\"content\":null,\"tool_calls\":[{\"function\":"
                       "{\"name\":\"f\",\"arguments\":{\"x\":[1,2.5,true]}}}]},"
                       "{\"role\":\"tool\",\"content\":[{\"type\":\"text\",\"text\":\"t\"}]}]",
                       0, &je);
    return m;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct template *t = NULL;
    struct buf out = {0};
    struct err e = {0};
    struct template_args a = {.messages = messages(),
                              .tools = messages(),
                              .add_generation_prompt = true,
                              .bos_token = "<s>",
                              .eos_token = "</s>",
                              .now = 1768478400,
                              .max_steps = 20000,
                              .max_bytes = 1 << 20};
    if (!template_new(&t, (const char *)data, size, &e))
        template_render(&out, t, &a, &e);
    template_free(t);
    buf_fini(&out);
    return 0;
}
