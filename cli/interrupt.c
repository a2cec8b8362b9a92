/* Ctrl-C while something runs: noted, passed on through an eventfd, and left to what was in force
 * before the second time. One at a time a process; owns no memory. */
#include "cli/cli_internal.h"

#include <errno.h>
#include <signal.h>
#include <unistd.h>

static volatile sig_atomic_t seen;
static volatile sig_atomic_t wake = -1;
static struct sigaction before;

static void on_interrupt(int sig)
{
    int saved = errno;
    uint64_t one = 1;
    if (seen) { /* nobody reacts yet: as if there were no handler */
        sigaction(sig, &before, NULL);
        raise(sig);
    } else if (wake >= 0 && write(wake, &one, sizeof one) < 0) {
        sigaction(sig, &before, NULL);
    }
    seen = 1;
    errno = saved;
}

void interrupt_begin(int wake_fd)
{
    struct sigaction sa = {.sa_handler = on_interrupt, .sa_flags = SA_RESTART};
    seen = 0;
    wake = wake_fd;
    sigaction(SIGINT, &sa, &before);
}

bool interrupt_seen(void)
{
    return seen;
}

void interrupt_end(void)
{
    sigaction(SIGINT, &before, NULL);
    wake = -1;
}
