#include "dockyard.h"

#include <errno.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

/* Blocks until the host has taken all. While it blocks, commands fill their pipes and wait: that is the
 * back-pressure. The host's reader never waits for anything but this socket, so there is no deadlock. */
static void send_all(int socket, struct iovec *parts, int count) {
    while (count > 0) {
        struct msghdr message = {.msg_iov = parts, .msg_iovlen = (size_t)count};
        ssize_t sent = sendmsg(socket, &message, MSG_NOSIGNAL);
        if (sent < 0) {
            if (errno == EINTR) continue;
            if (errno == EAGAIN) {
                struct pollfd writable = {.fd = socket, .events = POLLOUT};
                poll(&writable, 1, -1);
                continue;
            }
            _exit(0); /* the owner is gone, and with pid 1 the sandbox goes */
        }
        while (count > 0 && (size_t)sent >= parts->iov_len) {
            sent -= (ssize_t)parts->iov_len;
            parts++, count--;
        }
        if (count > 0) {
            parts->iov_base = (char *)parts->iov_base + sent;
            parts->iov_len -= (size_t)sent;
        }
    }
}

void send_frame(int socket, uint32_t id, uint32_t kind, const void *data, size_t length) {
    uint32_t header[3] = {(uint32_t)length, id, kind};
    struct iovec parts[2] = {{header, sizeof header}, {(void *)data, length}};
    send_all(socket, parts, length ? 2 : 1);
}

void send_done(int socket, uint32_t id, uint32_t error) {
    send_frame(socket, id, DONE, &error, sizeof error);
}
