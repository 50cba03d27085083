/* File operations, done by init inside the sandbox's own root, under all that confines it: no path of a sandbox is
 * ever resolved on the host, and nothing of the image is needed. What is read or listed is opened here and read by
 * the host; what is written is written here, since the kernel charges memory to who writes. Opens never block. */
#include "dockyard.h"

#include <sys/sendfile.h>
#include <sys/syscall.h>

enum { NO_REPLACE = 1, MAX_DEPTH = 128, MAX_ROUNDS = 100, MAX_STEPS = 1000, MOST_AT_ONCE = 1 << 30 };

static uint32_t num_moved, steps_left; /* directories, and entries to look at, by the removal under way */

static uint32_t write_file(const struct message *call, int content) {
    struct stat info;
    bool append = call->first;
    int how = O_WRONLY | O_CREAT | O_NONBLOCK | O_NOCTTY | O_CLOEXEC | (append ? 0 : O_TRUNC);
    int fd = open(call->path, how, call->second);
    if (fd < 0) return errno == ENXIO ? NOT_REGULAR : (uint32_t)errno; /* a FIFO without a reader, a socket */
    bool regular = !fstat(fd, &info) && S_ISREG(info.st_mode);
    bool ready = regular && (append ? lseek(fd, 0, SEEK_END) >= 0 : !fchmod(fd, call->second));
    off_t start = 0;
    ssize_t sent = ready ? 1 : -1;
    while (sent > 0) sent = sendfile(fd, content, &start, MOST_AT_ONCE);
    uint32_t error = !regular ? NOT_REGULAR : sent < 0 ? (uint32_t)errno : 0;
    if (close(fd) && !error) error = (uint32_t)errno;
    return error;
}

/* Directories deeper than MAX_DEPTH are moved up to the tree's own top, so neither the stack nor the number of open
 * files grows with the depth. */
static int move_up(int at, const char *name, int top) {
    char moved[32];
    do snprintf(moved, sizeof moved, ".dockyard-%u", num_moved++);
    while (syscall(SYS_renameat2, at, name, top, moved, NO_REPLACE) && errno == EEXIST);
    return errno;
}

/* 0 or an errno. What changes meanwhile is left for the next round: the directory around it is not empty then. */
static int remove_entry(int at, const char *name, int top, int depth) {
    if (!steps_left) return UNFINISHED; /* what runs may fill it as fast as it is emptied */
    steps_left--;
    if (!unlinkat(at, name, 0) || (errno == EISDIR && !unlinkat(at, name, AT_REMOVEDIR))) return 0;
    if (errno != ENOTEMPTY) return errno;
    if (depth == MAX_DEPTH) return move_up(at, name, top);
    int fd = openat(at, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC), error = 0;
    DIR *directory = fd < 0 ? NULL : fdopendir(fd);
    if (!directory) return errno;
    for (struct dirent *item; !error && (item = readdir(directory));) {
        if (!strcmp(item->d_name, ".") || !strcmp(item->d_name, "..")) continue;
        error = remove_entry(fd, item->d_name, depth ? top : fd, depth + 1);
        if (error == ENOENT || error == ENOTDIR || error == ELOOP || error == ENOTEMPTY) error = 0;
    }
    closedir(directory);
    return error || !unlinkat(at, name, AT_REMOVEDIR) ? error : errno;
}

static int remove_tree(const char *path) {
    int error = ENOTEMPTY;
    steps_left = MAX_STEPS;
    for (int round = 0; round < MAX_ROUNDS && error == ENOTEMPTY;) {
        uint32_t before = num_moved;
        error = remove_entry(AT_FDCWD, path, -1, 0);
        round += num_moved == before;
    }
    return error;
}

uint32_t serve_file(const struct message *call, int content, int *opened) {
    switch (call->kind) {
    case OPEN:
        *opened = open(call->path, (int)call->first | O_NONBLOCK | O_NOCTTY | O_CLOEXEC);
        return *opened < 0 ? (uint32_t)errno : 0;
    case WRITE: return write_file(call, content);
    case MKDIR: return mkdir(call->path, 0755) ? (uint32_t)errno : 0;
    case REMOVE: return (uint32_t)remove_tree(call->path);
    case RENAME: return rename(call->path, call->path + strlen(call->path) + 1) ? (uint32_t)errno : 0;
    default: return BAD_MESSAGE;
    }
}
