/* ingot: the table of commands, nothing else. A new command is a file in cli/ and a row here. */
#include "cli/cli.h"

static const struct command *const commands[] = {
    &command_run,
    &command_import,
    &command_export,
    &command_list,
    &command_show,
    &command_copy,
    &command_remove,
    &command_verify,
    &command_cache,
    &command_devices,
    &command_bench,
    &command_bench_serve,
    &command_eval,
    &command_tokenize,
    &command_template,
    &command_version,
    &command_help,
    NULL,
};

int main(int argc, char **argv)
{
    return cli_main(argc, argv, commands);
}
