/* What launch makes besides mounts: a network that ends at the loopback, limits on what is queued, and a user
 * namespace that the sandbox's own uid pays for. Each ends the process with a message when it cannot. */
#define _GNU_SOURCE
#include "launch.h"

#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <net/if.h>
#include <netinet/in.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

/* As sandbox/egress/links.py: least, first, most; bytes of one direction of a TCP connection. */
#define BUFFER_SIZES "4096 16384 65536"

enum { SYS_FSOPEN = 430, SYS_FSCONFIG = 431, SYS_FSMOUNT = 432, FSOPEN_CLOSED = 1, FSCONFIG_CREATE = 6 };
enum { MAX_SIGNALS = 4096, MAX_QUEUE_BYTES = 819200 }; /* queued at one time: signals, messages */

/* A /proc that nobody else looks into, where we may have one: why, sandbox/egress/settings.py says. */
static int open_proc(void) {
    int context = (int)syscall(SYS_FSOPEN, "proc", FSOPEN_CLOSED), place = -1;
    if (context >= 0 && !syscall(SYS_FSCONFIG, context, FSCONFIG_CREATE, NULL, NULL, 0))
        place = (int)syscall(SYS_FSMOUNT, context, FSOPEN_CLOSED, 0);
    if (context >= 0) close(context);
    return place >= 0 ? place : open("/proc", O_PATH | O_DIRECTORY | O_CLOEXEC);
}

/* A read-only /proc/sys, as in a container, leaves the host's values. */
static void write_setting(int proc, const char *path, const char *value) {
    int fd = openat(proc, path, O_WRONLY | O_CLOEXEC);
    if (fd < 0 && errno == EROFS) return;
    if (fd < 0 || write(fd, value, strlen(value)) < 0) fail("write '%s' to /proc/%s", value, path);
    close(fd);
}

/* Of what is charged to an ordinary user whose namespace this is, and who wants some of it himself. */
void lower_counts(void) {
    int proc = open_proc();
    write_setting(proc, "sys/user/max_inotify_instances", "64");
    write_setting(proc, "sys/user/max_inotify_watches", "16384");
    close(proc);
}

void map_own_id(uid_t uid, gid_t gid) {
    char map[64];
    write_text("/proc/self/setgroups", "deny");
    snprintf(map, sizeof map, "0 %u 1", uid);
    write_text("/proc/self/uid_map", map);
    snprintf(map, sizeof map, "0 %u 1", gid);
    write_text("/proc/self/gid_map", map);
}

static int open_resolver(void) {
    struct sockaddr_in place = {
        .sin_family = AF_INET, .sin_port = htons(53), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    int fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (fd < 0 || bind(fd, (struct sockaddr *)&place, sizeof place)) fail("make a socket for a resolver");
    int proc = open_proc();
    write_setting(proc, "sys/net/ipv6/conf/default/accept_ra", "0"); /* of the link, which is not there yet */
    close(proc);
    return fd;
}

void await_word(int adopter) {
    char byte;
    if (read(adopter, &byte, 1) != 1) exit(125); /* the owner says why */
}

void await_adoption(int adopter, bool linked) {
    int resolver = linked ? open_resolver() : -1;
    if (!send_message(adopter, 0, HELLO, WIRE_VERSION, 0, resolver)) fail("hand over a resolver's socket");
    close(resolver);
    await_word(adopter);
}

/* The buffer sizes are what a connection may hold although the limit on socket memory is reached: the kernel
 * always grants each one a little, in proportion to these. */

void start_loopback(void) {
    struct ifreq loopback = {.ifr_name = "lo"};
    int fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (fd < 0 || ioctl(fd, SIOCGIFFLAGS, &loopback)) fail("find the loopback");
    loopback.ifr_flags |= IFF_UP;
    if (ioctl(fd, SIOCSIFFLAGS, &loopback)) fail("start the loopback");
    close(fd);
    int proc = open_proc();
    write_setting(proc, "sys/net/ipv4/tcp_rmem", BUFFER_SIZES);
    write_setting(proc, "sys/net/ipv4/tcp_wmem", BUFFER_SIZES);
    close(proc);
}

static void lower_limit(int resource, rlim_t most) {
    struct rlimit limit;
    if (getrlimit(resource, &limit)) fail("read a limit");
    if (limit.rlim_max > most) limit.rlim_max = most;
    if (limit.rlim_cur > limit.rlim_max) limit.rlim_cur = limit.rlim_max;
    if (setrlimit(resource, &limit)) fail("set a limit");
}

/* In a user namespace of ours our own id may be the only one, and it is there already. */
void drop_to(uid_t uid) {
    if (uid == geteuid()) return;
    if (setgroups(0, NULL) || setresgid(uid, uid, uid) || setresuid(uid, uid, uid)) fail("become uid %u", uid);
}

void begin_anew(void) {
    sigset_t none;
    umask(022);
    for (int number = 1; number < NSIG; number++) signal(number, SIG_DFL);
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
}

/* What a limit was lowered to, an ordinary user does not raise again, nor a priority: then ours stay. */
void follow(pid_t owner) {
    struct rlimit limit;
    cpu_set_t processors;
    for (int resource = 0; resource < RLIM_NLIMITS; resource++) {
        if (prlimit(owner, resource, NULL, &limit)) continue;
        if (resource == RLIMIT_NOFILE) limit.rlim_cur = limit.rlim_max;
        setrlimit(resource, &limit);
    }
    if (!sched_getaffinity(owner, sizeof processors, &processors))
        sched_setaffinity(0, sizeof processors, &processors);
    errno = 0;
    int priority = getpriority(PRIO_PROCESS, (id_t)owner);
    if (!errno) setpriority(PRIO_PROCESS, 0, priority);
}

void lower_limits(void) {
    lower_limit(RLIMIT_SIGPENDING, MAX_SIGNALS);
    lower_limit(RLIMIT_MSGQUEUE, MAX_QUEUE_BYTES);
}

static void make_namespaces(const struct order *order, int ready, int finished) {
    char byte = 0;
    if (order->network && unshare(CLONE_NEWNET)) fail("make a network namespace");
    if (order->network) start_loopback();
    if (order->num_ids) {
        drop_to(order->owner);
        /* Or what is ours in /proc would be root's of the machine, whom a user namespace does not know. */
        if (order->within && prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)) fail("show itself");
        if (unshare(CLONE_NEWUSER)) fail("make a user namespace");
    }
    if (write(ready, &byte, 1) != 1 || read(finished, &byte, 1) < 0) fail("hand over namespaces");
    _exit(0);
}

/* Namespaces take about as long to make as a sandbox's mounts, so they are made beside them. */
struct maker start_maker(const struct order *order) {
    int ready[2], finished[2];
    if (!order->network && !order->num_ids) return (struct maker){0};
    if (pipe2(ready, O_CLOEXEC) || pipe2(finished, O_CLOEXEC)) fail("make pipes");
    pid_t maker = fork();
    if (maker < 0) fail("fork");
    if (maker == 0) {
        close(ready[0]), close(finished[1]);
        make_namespaces(order, ready[1], finished[0]);
    }
    close(ready[1]), close(finished[0]);
    return (struct maker){maker, ready[0], finished[1]};
}

static void write_map(pid_t maker, const char *kind, const struct order *order) {
    char path[64], map[64];
    snprintf(path, sizeof path, "/proc/%d/%s_map", maker, kind);
    snprintf(map, sizeof map, "0 %u %u", order->owner, order->num_ids);
    write_text(path, map);
}

/* What is counted in a user namespace (queued signals, inotify instances) is charged to whoever made it, up to
 * that user's own limit. So the sandbox's uid makes it, and root only says which ids are in it. */
static void keep_user_namespace(pid_t maker, const char *place, const struct order *order) {
    char path[64];
    write_map(maker, "uid", order);
    write_map(maker, "gid", order);
    snprintf(path, sizeof path, "/proc/%d/ns/user", maker);
    int file = open(place, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    if (file < 0 || mount(path, place, NULL, MS_BIND, NULL)) fail("keep a user namespace at %s", place);
    close(file);
}

static void enter_network(pid_t maker) {
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/ns/net", maker);
    int network = open(path, O_RDONLY | O_CLOEXEC);
    if (network < 0 || setns(network, CLONE_NEWNET)) fail("enter a network namespace");
    close(network);
}

void take_namespaces(const struct maker *maker, const char *place, const struct order *order) {
    char byte;
    if (!maker->pid) return;
    if (read(maker->ready, &byte, 1) != 1) exit(125); /* it has said why */
    if (order->network) enter_network(maker->pid);
    if (order->num_ids) keep_user_namespace(maker->pid, place, order);
    close(maker->ready), close(maker->finished);
    if (waitpid(maker->pid, NULL, 0) < 0) fail("wait");
}
