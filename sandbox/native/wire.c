#include "dockyard.h"

#include <sys/socket.h>
#include <sys/uio.h>

union passed {
    char bytes[CMSG_SPACE(MAX_FDS * sizeof(int))];
    struct cmsghdr head;
};

/* Blocks while the host's end is full. The kernel counts descriptors under way by user: commands' are among them. */
bool send_message(int socket, uint32_t id, enum kind kind, uint32_t first, uint32_t second, int fd) {
    uint32_t words[4] = {id, kind, first, second};
    struct iovec part = {words, sizeof words};
    union passed sent = {.head = {.cmsg_len = CMSG_LEN(sizeof fd), .cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS}};
    struct msghdr packet = {.msg_iov = &part, .msg_iovlen = 1};
    if (fd >= 0) {
        memcpy(CMSG_DATA(&sent.head), &fd, sizeof fd);
        packet.msg_control = sent.bytes;
        packet.msg_controllen = CMSG_SPACE(sizeof fd);
    }
    ssize_t length;
    while ((length = sendmsg(socket, &packet, MSG_NOSIGNAL)) < 0 && errno == EINTR) {}
    if (length < 0 && fd < 0) _exit(1);
    return length >= 0;
}

bool receive_message(int socket, struct message *message, int fds[MAX_FDS]) {
    union passed received;
    struct iovec part = {message, sizeof *message - 2};
    struct msghdr packet = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = received.bytes,
                            .msg_controllen = sizeof received.bytes};
    memset(fds, -1, MAX_FDS * sizeof *fds);
    ssize_t length = recvmsg(socket, &packet, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    if (length < 0 && (errno == EAGAIN || errno == EINTR)) return false;
    if (length < (ssize_t)offsetof(struct message, path)) _exit(0);
    memset((char *)message + length, 0, 2); /* the end of a path, and of a second one where there is none */
    struct cmsghdr *header = CMSG_FIRSTHDR(&packet);
    if (header && header->cmsg_type == SCM_RIGHTS) memcpy(fds, CMSG_DATA(header), header->cmsg_len - CMSG_LEN(0));
    return true;
}
