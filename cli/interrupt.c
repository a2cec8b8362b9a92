/* Ctrl-C while something runs: noted, passed on through an eventfd, and taken for good the second
 * time. One at a time a process; owns no memory. */
#include "cli/cli_internal.h"

#include <errno.h>
#include <signal.h>
#include <unistd.h>

static volatile sig_atomic_t seen;
static volatile sig_atomic_t wake = -1;

static void on_interrupt(int sig)
{
    int saved = errno;
    if (seen) { /* nobody reacts: end as if there were no handler */
        signal(sig, SIG_DFL);
        raise(sig);
    }
    seen = 1;
    uint64_t one = 1;
    if (wake >= 0 && write(wake, &one, sizeof one) < 0)
        signal(sig, SIG_DFL);
    errno = saved;
}

void interrupt_begin(int wake_fd)
{
    struct sigaction sa = {.sa_handler = on_interrupt, .sa_flags = SA_RESTART};
    seen = 0;
    wake = wake_fd;
    sigaction(SIGINT, &sa, NULL);
}

bool interrupt_seen(void)
{
    return seen;
}

void interrupt_end(void)
{
    struct sigaction sa = {.sa_handler = SIG_DFL};
    sigaction(SIGINT, &sa, NULL);
    wake = -1;
}
