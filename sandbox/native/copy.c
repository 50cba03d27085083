/* A copy of a writable layer: from a sandbox to a snapshot, and from that to a new sandbox. What an overlay keeps in
 * it comes along: deletions (devices with the number 0), opaque directories and moved ones (attributes). So do modes,
 * times, hard links, holes, FIFOs, and sockets, to which nobody listens any more. Other devices a layer cannot hold,
 * and they are refused.
 *
 * Ids in the range that the copy comes from are moved to the range that it goes to; others, root's, stay. Contents
 * are shared where the file system can (reflink). The tree is a sandbox's and is not trusted: nothing is opened by
 * more than one name in an open directory, no link is followed, and whoever asks bounds the bytes. It does not
 * change meanwhile: its processes are frozen, or there are none. */
#define _GNU_SOURCE
#define ENTRY SEARCH_ENTRY /* of search.h, which has nothing to do with ours */
#include <search.h>
#undef ENTRY

#include "launch.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/fs.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <sys/xattr.h>
#include <unistd.h>

enum { TOO_MUCH = 3, NO_ROOM, FILE_LIMIT, TOO_DEEP, OTHER = 125 }; /* how it ended: in words there are a sandbox's */
enum { MAX_DEPTH = 200, NUM_IDS = 65536, BLOCK = 1 << 18, PAGE = 4096, ACL_HEAD = 4 };
enum { LEAST_ENTRIES = 1 << 16, BYTES_AN_ENTRY = 1024 }; /* a layer has an inode for every 8 KiB */

static struct copy {
    int target;             /* top of the new tree */
    uint32_t from, to;      /* first ids */
    uint64_t bytes, limit;  /* of contents, in whole pages */
    uint64_t entries;
    void *links;            /* struct seen, by inode */
    char path[PATH_MAX];    /* of what is being copied, relative to the top */
} copy;

struct seen {
    ino_t inode;
    char path[];
};

/* One member of the extended attribute in which access lists are kept: linux/posix_acl_xattr.h. */
struct acl_entry {
    uint16_t tag, permissions;
    uint32_t id;
};

/* Ends the process with a message. */
#define stop(...) fail_as(status(), __VA_ARGS__)

static int status(void) {
    if (errno == ENOSPC || errno == EDQUOT) return NO_ROOM;
    return errno == EFBIG ? FILE_LIMIT : errno == ENAMETOOLONG ? TOO_DEEP : OTHER;
}

static uint32_t moved(uint32_t id) {
    return id - copy.from < NUM_IDS ? id - copy.from + copy.to : id;
}

static void move_acl(char *value, size_t size) {
    for (size_t at = ACL_HEAD; at + sizeof(struct acl_entry) <= size; at += sizeof(struct acl_entry)) {
        struct acl_entry entry;
        memcpy(&entry, value + at, sizeof entry);
        if (entry.id != UINT32_MAX) entry.id = moved(entry.id);
        memcpy(value + at, &entry, sizeof entry);
    }
}

static void copy_attributes(const char *from, const char *to) {
    static char names[1 << 16], value[1 << 16]; /* the most that the kernel gives */
    ssize_t length = llistxattr(from, names, sizeof names);
    if (length < 0 && errno != ENOTSUP) stop("%s: list attributes", copy.path);
    for (char *name = names; length > 0 && name < names + length; name += strlen(name) + 1) {
        ssize_t size = lgetxattr(from, name, value, sizeof value);
        if (size < 0) stop("%s: read %s", copy.path, name);
        if (!strncmp(name, "system.posix_acl_", 17)) move_acl(value, (size_t)size);
        if (lsetxattr(to, name, value, (size_t)size, 0)) stop("%s: write %s", copy.path, name);
    }
}

/* What `name` has besides its content; a directory last, when nothing in it changes any more. */
static void copy_metadata(int from, int to, const char *name, const struct stat *info) {
    char source[64 + NAME_MAX], target[64 + NAME_MAX];
    struct timespec times[2] = {info->st_atim, info->st_mtim};
    snprintf(source, sizeof source, "/proc/self/fd/%d/%s", from, name);
    snprintf(target, sizeof target, "/proc/self/fd/%d/%s", to, name);
    if (fchownat(to, name, moved(info->st_uid), moved(info->st_gid), AT_SYMLINK_NOFOLLOW)) stop("%s: chown", copy.path);
    copy_attributes(source, target);
    if (!S_ISLNK(info->st_mode) && fchmodat(to, name, info->st_mode & 07777, 0)) stop("%s: chmod", copy.path);
    if (utimensat(to, name, times, AT_SYMLINK_NOFOLLOW)) stop("%s: set times", copy.path);
}

static void count(uint64_t bytes) {
    copy.bytes += bytes;
    if (copy.bytes <= copy.limit) return;
    fprintf(stderr, "dockyard-init: more than %llu bytes\n", (unsigned long long)copy.limit);
    exit(TOO_MUCH);
}

/* Names of one file cost a layer on disk next to nothing, and a copy of millions takes minutes. */
static void count_entry(void) {
    uint64_t most = LEAST_ENTRIES + copy.limit / BYTES_AN_ENTRY;
    if (++copy.entries <= most) return;
    fprintf(stderr, "dockyard-init: more than %llu entries\n", (unsigned long long)most);
    exit(TOO_MUCH);
}

/* A limit that the owner has for its files is ours too. */
static void fail_write(const char *what) {
    stop("%s: %s%s", copy.path, what, errno == EFBIG ? " beyond the `ulimit -f` of the sandbox's owner" : "");
}

static void copy_range(int from, int to, off_t start, off_t end) {
    static char block[BLOCK];
    while (start < end) {
        ssize_t length = pread(from, block, end - start < BLOCK ? (size_t)(end - start) : BLOCK, start);
        if (length <= 0) stop("%s: read", copy.path);
        count(((uint64_t)length + PAGE - 1) / PAGE * PAGE);
        for (ssize_t done = 0, written; done < length; done += written)
            if ((written = pwrite(to, block + done, (size_t)(length - done), start + done)) < 0)
                fail_write("write");
        start += length;
    }
}

static void copy_content(int from, int to, const struct stat *info) {
    if (info->st_size > 0 && !ioctl(to, FICLONE, from)) {
        count((uint64_t)info->st_blocks * 512);
        return;
    }
    for (off_t start = 0, end; (start = lseek(from, start, SEEK_DATA)) >= 0; start = end) {
        if ((end = lseek(from, start, SEEK_HOLE)) < 0) stop("%s: find a hole", copy.path);
        copy_range(from, to, start, end);
    }
    if (errno != ENXIO) stop("%s: find data", copy.path);
    if (ftruncate(to, info->st_size)) fail_write("set the size");
}

static void copy_file(int from, int to, const char *name, const struct stat *info) {
    int source = openat(from, name, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
    int target = openat(to, name, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    if (source < 0 || target < 0) stop("%s: open", copy.path);
    copy_content(source, target, info);
    close(source);
    if (close(target)) stop("%s: write", copy.path);
}

static void copy_link(int from, int to, const char *name) {
    char place[PATH_MAX];
    ssize_t length = readlinkat(from, name, place, sizeof place - 1);
    if (length < 0) stop("%s: read the link", copy.path);
    place[length] = 0;
    if (symlinkat(place, to, name)) stop("%s: make the link", copy.path);
}

static int by_inode(const void *one, const void *other) {
    ino_t a = ((const struct seen *)one)->inode, b = ((const struct seen *)other)->inode;
    return (a > b) - (a < b);
}

/* True when it is another name of what has been copied; else remembers it under this one. */
static bool is_linked(int to, const char *name, const struct stat *info) {
    if (info->st_nlink < 2) return false;
    struct seen *mine = malloc(sizeof *mine + strlen(copy.path) + 1);
    struct seen **found = NULL;
    if (mine) {
        mine->inode = info->st_ino;
        strcpy(mine->path, copy.path);
        found = tsearch(mine, &copy.links, by_inode);
    }
    if (!found) stop("%s: remember its names", copy.path);
    if (*found == mine) return false;
    if (linkat(copy.target, (*found)->path, to, name, 0)) stop("%s: link", copy.path);
    free(mine);
    return true;
}

static void copy_directory(int from, int to, int depth);

static void copy_entry(int from, int to, const char *name, int depth) {
    struct stat info;
    if (fstatat(from, name, &info, AT_SYMLINK_NOFOLLOW)) stop("%s: stat", copy.path);
    count_entry();
    if (!S_ISDIR(info.st_mode) && is_linked(to, name, &info)) return;
    errno = EINVAL;
    if (S_ISBLK(info.st_mode) || (S_ISCHR(info.st_mode) && info.st_rdev != makedev(0, 0)))
        stop("%s is a device", copy.path);
    if (S_ISDIR(info.st_mode)) {
        if (mkdirat(to, name, 0700)) stop("%s: mkdir", copy.path);
        int source = openat(from, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
        int target = openat(to, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
        if (source < 0 || target < 0) stop("%s: open", copy.path);
        copy_directory(source, target, depth + 1);
        close(target);
    } else if (S_ISREG(info.st_mode)) copy_file(from, to, name, &info);
    else if (S_ISLNK(info.st_mode)) copy_link(from, to, name);
    else if (mknodat(to, name, info.st_mode & (S_IFMT | 0777), 0)) stop("%s: mknod", copy.path);
    copy_metadata(from, to, name, &info);
}

/* Closes `from`. */
static void copy_directory(int from, int to, int depth) {
    size_t length = strlen(copy.path);
    DIR *directory = fdopendir(from);
    if (!directory) stop("%s: list", copy.path);
    errno = ENAMETOOLONG;
    if (depth > MAX_DEPTH) stop("%s: directories are nested deeper than %d", copy.path, MAX_DEPTH);
    for (struct dirent *item; errno = 0, (item = readdir(directory));) {
        if (!strcmp(item->d_name, ".") || !strcmp(item->d_name, "..")) continue;
        int more = snprintf(copy.path + length, sizeof copy.path - length, "%s%s", length ? "/" : "", item->d_name);
        errno = ENAMETOOLONG;
        if ((size_t)more >= sizeof copy.path - length) stop("a path is longer than %d bytes", PATH_MAX);
        copy_entry(from, to, item->d_name, depth);
        copy.path[length] = 0;
    }
    if (errno) stop("%s: list", copy.path);
    closedir(directory);
}

/* All of one directory into another, an empty one. Ends the process with a message when it cannot, and with a
 * status: TOO_MUCH where there are more bytes than `limit`, or more entries than go with it. */
void copy_layer(int from, int to, uint32_t first_from, uint32_t first_to, uint64_t limit) {
    struct stat info;
    copy = (struct copy){.target = to, .from = first_from, .to = first_to, .limit = limit};
    void (*before)(int) = signal(SIGXFSZ, SIG_IGN); /* which would end us without a word */
    int again = openat(from, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (again < 0 || fstat(again, &info)) stop("open the layer");
    copy_directory(again, to, 0);
    copy_metadata(from, to, ".", &info);
    signal(SIGXFSZ, before);
}

/* For the owner: FROM TO FIRST-FROM FIRST-TO LIMIT PARENT. Ends with its parent. Prints the bytes written and the
   number of entries. */
int copy_between(int argc, char **argv) {
    errno = EINVAL;
    if (argc != 6) stop("copy needs two directories, two ids, a number of bytes and its parent");
    prctl(PR_SET_PDEATHSIG, SIGKILL); /* or an owner that is killed leaves a writer behind, into what is being swept */
    if (getppid() != atoi(argv[5])) return 125; /* it has died already */
    int from = open(argv[0], O_PATH | O_DIRECTORY | O_CLOEXEC), to = open(argv[1], O_PATH | O_DIRECTORY | O_CLOEXEC);
    if (from < 0 || to < 0) stop("open %s or %s", argv[0], argv[1]);
    copy_layer(from, to, (uint32_t)strtoul(argv[2], NULL, 10), (uint32_t)strtoul(argv[3], NULL, 10),
               strtoull(argv[4], NULL, 10));
    printf("%llu %llu\n", (unsigned long long)copy.bytes, (unsigned long long)copy.entries);
    return 0;
}
