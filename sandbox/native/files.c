/* File operations, done by init inside the sandbox's own root: no path of a sandbox is ever resolved on the
 * host, and nothing of the image is needed. Opens never block (O_NONBLOCK), and only regular files are read
 * or written, so a FIFO or a device cannot hold init up. */
#define _GNU_SOURCE
#include "dockyard.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { MAX_DEPTH = 128, MAX_MOVES = 1 << 20, MAX_ROUNDS = 100 };

struct entry {
    uint32_t type, mode; /* type: 'f' file, 'd' directory, 'l' link, 'o' anything else */
    uint64_t size;
    int64_t modified_ns;
};

static uint32_t type_letter(mode_t mode) {
    return S_ISREG(mode) ? 'f' : S_ISDIR(mode) ? 'd' : S_ISLNK(mode) ? 'l' : 'o';
}

/* `name` in the directory `at`, with its target if it is a link: struct entry, name, NUL, target. */
static int send_entry(int socket, uint32_t id, int at, const char *name, const char *shown) {
    char message[sizeof(struct entry) + 2 * PATH_MAX];
    struct stat info;
    if (fstatat(at, name, &info, AT_SYMLINK_NOFOLLOW)) return errno;
    struct entry entry = {type_letter(info.st_mode), info.st_mode & 07777, (uint64_t)info.st_size,
                          (int64_t)info.st_mtim.tv_sec * 1000000000 + info.st_mtim.tv_nsec};
    memcpy(message, &entry, sizeof entry);
    size_t length = sizeof entry + strlen(shown) + 1;
    memcpy(message + sizeof entry, shown, strlen(shown) + 1); /* a name: at most NAME_MAX */
    ssize_t target = S_ISLNK(info.st_mode) ? readlinkat(at, name, message + length, PATH_MAX) : 0;
    send_frame(socket, id, ENTRY, message, length + (size_t)(target > 0 ? target : 0));
    return 0;
}

static int open_regular(int at, const char *path, int flags, mode_t mode) {
    struct stat info;
    int fd = openat(at, path, flags | O_NONBLOCK | O_NOCTTY | O_CLOEXEC, mode);
    if (fd < 0) {
        if (errno == ENXIO) errno = NOT_REGULAR; /* a FIFO without a reader, a socket */
        return -1;
    }
    if (!fstat(fd, &info) && S_ISREG(info.st_mode)) return fd;
    errno = S_ISDIR(info.st_mode) ? EISDIR : NOT_REGULAR;
    int reason = errno;
    close(fd);
    errno = reason;
    return -1;
}

/* Makes `path` and its parents; with `parents_only`, all but the last part. */
static int make_directories(char *path, bool parents_only) {
    for (char *slash = strchr(path + 1, '/'); slash; slash = strchr(slash + 1, '/')) {
        *slash = 0;
        int made = mkdir(path, 0755);
        *slash = '/';
        if (made && errno != EEXIST && errno != EROFS) return errno;
    }
    if (parents_only || !mkdir(path, 0755)) return 0;
    struct stat info;
    int reason = errno;
    return reason == EEXIST && !stat(path, &info) && S_ISDIR(info.st_mode) ? 0 : reason;
}

static int read_file(int socket, uint32_t id, uint64_t offset, uint64_t count, const char *path) {
    static char chunk[CHUNK];
    int fd = open_regular(AT_FDCWD, path, O_RDONLY, 0);
    if (fd < 0) return errno;
    int error = 0;
    while (count > 0) {
        ssize_t length = pread(fd, chunk, count < CHUNK ? count : CHUNK, (off_t)offset);
        if (length < 0) error = errno;
        if (length <= 0) break;
        send_frame(socket, id, DATA, chunk, (size_t)length);
        offset += (uint64_t)length;
        count -= (uint64_t)length;
    }
    close(fd);
    return error;
}

static int write_file(uint32_t flags, uint32_t mode, char *path, const char *data, size_t length) {
    if (flags & WRITE_PARENTS) {
        int error = make_directories(path, true);
        if (error) return error;
    }
    int how = O_WRONLY | O_CREAT | (flags & WRITE_TRUNCATE ? O_TRUNC : O_APPEND);
    int fd = open_regular(AT_FDCWD, path, how, mode & 07777);
    if (fd < 0) return errno;
    int error = flags & WRITE_TRUNCATE && fchmod(fd, mode & 07777) ? errno : 0;
    while (length > 0 && !error) {
        ssize_t written = write(fd, data, length);
        if (written < 0) error = errno;
        else data += written, length -= (size_t)written;
    }
    if (close(fd) && !error) error = errno;
    return error;
}

static int list_directory(int socket, uint32_t id, const char *path) {
    DIR *directory = opendir(path);
    if (!directory) return errno;
    for (struct dirent *item; (item = readdir(directory));)
        if (strcmp(item->d_name, ".") && strcmp(item->d_name, ".."))
            send_entry(socket, id, dirfd(directory), item->d_name, item->d_name); /* gone by now: no entry */
    closedir(directory);
    return 0;
}

/* Directories deeper than MAX_DEPTH are moved up to the tree's own top, so neither the stack nor the number of
 * open files grows with the depth. */
struct removal {
    int top; /* the tree's first directory */
    unsigned num_moved;
};

static int remove_entry(struct removal *removal, int at, const char *name, int depth);

static int move_up(struct removal *removal, int at, const char *name) {
    char moved[32];
    while (removal->num_moved < MAX_MOVES) {
        snprintf(moved, sizeof moved, ".dockyard-%u", removal->num_moved++);
        if (!renameat2(at, name, removal->top, moved, RENAME_NOREPLACE)) return 0;
        if (errno != EEXIST) return errno;
    }
    return TOO_DEEP;
}

static int empty_directory(struct removal *removal, int fd, int depth) {
    int copy = fcntl(fd, F_DUPFD_CLOEXEC, 0), error = 0;
    DIR *directory = copy < 0 ? NULL : fdopendir(copy);
    if (!directory) return errno;
    rewinddir(directory);
    for (struct dirent *item; !error && (item = readdir(directory));)
        if (strcmp(item->d_name, ".") && strcmp(item->d_name, ".."))
            error = remove_entry(removal, fd, item->d_name, depth);
    closedir(directory);
    return error == ENOENT ? 0 : error; /* someone else was quicker */
}

/* True when it is gone; else errno says why. */
static bool remove_one(int at, const char *name) {
    if (!unlinkat(at, name, 0)) return true;
    return (errno == EISDIR || errno == EPERM) && !unlinkat(at, name, AT_REMOVEDIR);
}

static bool is_filled(int reason) {
    return reason == ENOTEMPTY || reason == EEXIST;
}

static int remove_entry(struct removal *removal, int at, const char *name, int depth) {
    if (remove_one(at, name)) return 0;
    if (!is_filled(errno)) return errno;
    if (depth >= MAX_DEPTH) return move_up(removal, at, name);
    int fd = openat(at, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (fd < 0) return errno == ENOTDIR || errno == ELOOP ? 0 : errno; /* changed: for the next round */
    int error = empty_directory(removal, fd, depth + 1);
    close(fd);
    if (error || !unlinkat(at, name, AT_REMOVEDIR)) return error;
    return is_filled(errno) || errno == ENOENT || errno == ENOTDIR ? 0 : errno;
}

/* A tree that is written to meanwhile is gone over again, up to MAX_ROUNDS times. */
static int remove_tree(const char *path) {
    if (remove_one(AT_FDCWD, path)) return 0;
    if (!is_filled(errno)) return errno;
    struct removal removal = {.top = openat(AT_FDCWD, path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC)};
    if (removal.top < 0) return errno;
    int error = 0;
    for (int round = 0; !error && round < MAX_ROUNDS;) {
        unsigned before = removal.num_moved;
        error = empty_directory(&removal, removal.top, 1);
        if (error || !unlinkat(AT_FDCWD, path, AT_REMOVEDIR)) break;
        error = is_filled(errno) ? 0 : errno;
        round += removal.num_moved == before;
        if (round == MAX_ROUNDS) error = ENOTEMPTY;
    }
    close(removal.top);
    return error;
}

static int serve(int socket, const struct frame *frame, const char *fixed, char *path, size_t rest) {
    uint64_t wide;
    uint32_t first, second;
    switch (frame->kind) {
    case READ:
        memcpy(&wide, fixed, sizeof wide);
        memcpy(&first, fixed + 8, sizeof first);
        return read_file(socket, frame->id, wide, first, path);
    case WRITE:
        memcpy(&first, fixed, sizeof first);
        memcpy(&second, fixed + 4, sizeof second);
        return write_file(first, second, path, path + strlen(path) + 1, rest);
    case LIST: return list_directory(socket, frame->id, path);
    case STAT: return send_entry(socket, frame->id, AT_FDCWD, path, "");
    case MKDIR: return make_directories(path, false);
    case REMOVE: return remove_tree(path);
    default: return BAD_FRAME;
    }
}

void serve_file(int socket, const struct frame *frame) {
    size_t fixed = frame->kind == READ ? 12 : frame->kind == WRITE ? 8 : 0;
    const char *end = frame->length > fixed ? memchr(frame->payload + fixed, 0, frame->length - fixed) : NULL;
    if (!end || frame->payload[fixed] != '/') {
        send_done(socket, frame->id, BAD_FRAME);
        return;
    }
    size_t rest = (size_t)(frame->payload + frame->length - end) - 1;
    int error = serve(socket, frame, frame->payload, frame->payload + fixed, rest);
    send_done(socket, frame->id, (uint32_t)error);
}
