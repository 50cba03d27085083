/* A command's terminal: its two ends, and its size. The sandbox's own devpts bounds how many there are. */
#define _GNU_SOURCE
#include "dockyard.h"

#include <fcntl.h>
#include <sys/ioctl.h>
#include <unistd.h>

void resize_terminal(int master, uint32_t size) {
    struct winsize shown = {.ws_row = (uint16_t)size, .ws_col = (uint16_t)(size >> 16)};
    ioctl(master, TIOCSWINSZ, &shown);
}

bool open_terminal(uint32_t size, int *master, int *slave) {
    *master = open("/dev/ptmx", O_RDWR | O_NOCTTY | O_CLOEXEC | O_NONBLOCK);
    if (*master < 0) return false;
    int locked = 0;
    ioctl(*master, TIOCSPTLCK, &locked);
    resize_terminal(*master, size);
    *slave = ioctl(*master, TIOCGPTPEER, O_RDWR | O_NOCTTY | O_CLOEXEC);
    return *slave >= 0;
}
