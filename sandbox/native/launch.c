/* From the owner's process to the sandbox's root, then on to bubblewrap or an OCI runtime.
 *
 * Everything is mounted in a mount namespace of this process: the host's mount table never changes, the cost
 * does not grow with the number of sandboxes, and nothing is left when the last process ends. The staging
 * place is /tmp of that namespace, since every host has one and any uid may walk through it:
 *     /tmp/root    overlay: the image's skeleton below, the writable layer above
 *     /tmp/upper   the writable layer, on the bounded tmpfs that is mounted at /tmp
 *     /tmp/layer   or else: a layer on disk, which the owner hands over as a mount, with its own `upper`
 *     /tmp/bundle  config.json, for an OCI runtime
 *     /tmp/pts     terminals, for bubblewrap, whose own have no limit but the machine's
 *     /tmp/user    a user namespace, for an OCI runtime
 * The network namespace is made or entered here too. One that is handed over is set up, with a filtered veth; without
 * one there is a loopback and nothing else.
 * Sources are opened before /tmp is covered, because they may lie in it, and after the namespace is made,
 * because a mount of another namespace cannot be mounted from. */
#define _GNU_SOURCE
#include "launch.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/capability.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

enum { MAX_ITEMS = 64, CONTROL_FD = 3, FILTER_FD = 4, LAYER_FD = 5, PROGRAM_FD = 6, NUM_KEPT = 4 };
enum { SYS_MOVE_MOUNT = 429, SYS_MOUNT_SETATTR = 442, RECURSIVE = 0x8000 };
enum { JOIN_SESSION_KEYRING = 1 }; /* of keyctl */
enum { FROM_EMPTY_PATH = 4 };         /* of move_mount */
enum { ATTR_RDONLY = 1, ATTR_NOSUID = 2, ATTR_NODEV = 4 };

/* From linux/mount.h, which cannot be included beside sys/mount.h on every libc. */
struct attributes {
    uint64_t set, clear, propagation, userns;
};

struct bind {
    const char *source, *target;
    int fd;
};

struct plan {
    const char *skeleton, *layer_bytes, *layer_inodes, *terminals, *host;
    const char *cgroups[MAX_ITEMS], *hidden[MAX_ITEMS], *masks[MAX_ITEMS], *writable[MAX_ITEMS];
    struct bind binds[MAX_ITEMS];
    int num_cgroups, num_hidden, num_masks, num_writable, num_binds;
    int control, config, filter;
    int program;            /* what is run, if not the file of its first word */
    int layer, content; /* a mount to write to in place of the tmpfs; what it has in it at first */
    uid_t content_ids;  /* the first of those in `content` */
    uid_t owner;       /* of the writable directories */
    uid_t num_ids;     /* in a user namespace for the runtime to join; 0 = it makes its own */
    bool drop, userns; /* become the owner; make a user namespace, for want of privilege */
    bool detached;     /* the program goes away once the sandbox runs */
    bool no_network;   /* make a network namespace with nothing but a loopback */
    bool linked;       /* make one at once, for the adopter to put a link in */
    int adopter;       /* socket of who gives our user namespace ids, and us to a cgroup; -1 = it has our own id */
    int network;       /* or enter this one */
    const struct origin *origin;
};

static const char *next(int *i, int argc, char **argv) {
    if (++*i < argc) return argv[*i];
    errno = EINVAL;
    fail("option %s needs a value", argv[*i - 1]);
    return NULL;
}

static void add(const char **items, int *count, const char *item) {
    errno = E2BIG;
    if (*count == MAX_ITEMS) fail("more than %d of one option", MAX_ITEMS);
    items[(*count)++] = item;
}

static void add_bind(struct plan *plan, const char *source, const char *target) {
    errno = E2BIG;
    if (plan->num_binds == MAX_ITEMS) fail("more than %d binds", MAX_ITEMS);
    plan->binds[plan->num_binds++] = (struct bind){source, target, -1};
}

static int descriptor(const struct plan *plan, const char *word) {
    return plan->origin ? plan->origin->fds[atoi(word)] : atoi(word);
}

/* Reads options up to `--`; the index of the program's first word. */
static int read_plan(struct plan *plan, int argc, char **argv) {
    for (int i = 0; i < argc; i++) {
        const char *option = argv[i];
        if (!strcmp(option, "--")) return i + 1;
        if (!strcmp(option, "--drop")) plan->drop = true;
        else if (!strcmp(option, "--detached")) plan->detached = true;
        else if (!strcmp(option, "--userns")) plan->userns = true;
        else if (!strcmp(option, "--no-network")) plan->no_network = true;
        else if (!strcmp(option, "--linked")) plan->linked = true;
        else if (!strcmp(option, "--adopter")) plan->adopter = descriptor(plan, next(&i, argc, argv));
        else if (!strcmp(option, "--network")) plan->network = descriptor(plan, next(&i, argc, argv));
        else if (!strcmp(option, "--skeleton")) plan->skeleton = next(&i, argc, argv);
        else if (!strcmp(option, "--layer-bytes")) plan->layer_bytes = next(&i, argc, argv);
        else if (!strcmp(option, "--layer-inodes")) plan->layer_inodes = next(&i, argc, argv);
        else if (!strcmp(option, "--terminals")) plan->terminals = next(&i, argc, argv);
        else if (!strcmp(option, "--layer")) plan->layer = descriptor(plan, next(&i, argc, argv));
        else if (!strcmp(option, "--content")) plan->content = descriptor(plan, next(&i, argc, argv));
        else if (!strcmp(option, "--content-ids")) plan->content_ids = (uid_t)strtoul(next(&i, argc, argv), NULL, 10);
        else if (!strcmp(option, "--host")) plan->host = next(&i, argc, argv);
        else if (!strcmp(option, "--control")) plan->control = descriptor(plan, next(&i, argc, argv));
        else if (!strcmp(option, "--config")) plan->config = descriptor(plan, next(&i, argc, argv));
        else if (!strcmp(option, "--filter")) plan->filter = descriptor(plan, next(&i, argc, argv));
        else if (!strcmp(option, "--program")) plan->program = descriptor(plan, next(&i, argc, argv));
        else if (!strcmp(option, "--owner")) plan->owner = (uid_t)strtoul(next(&i, argc, argv), NULL, 10);
        else if (!strcmp(option, "--ids")) plan->num_ids = (uid_t)strtoul(next(&i, argc, argv), NULL, 10);
        else if (!strcmp(option, "--cgroup")) add(plan->cgroups, &plan->num_cgroups, next(&i, argc, argv));
        else if (!strcmp(option, "--hide")) add(plan->hidden, &plan->num_hidden, next(&i, argc, argv));
        else if (!strcmp(option, "--mask")) add(plan->masks, &plan->num_masks, next(&i, argc, argv));
        else if (!strcmp(option, "--writable")) add(plan->writable, &plan->num_writable, next(&i, argc, argv));
        else if (!strcmp(option, "--bind")) {
            const char *source = next(&i, argc, argv);
            add_bind(plan, source, next(&i, argc, argv));
        } else {
            errno = EINVAL;
            fail("unknown option %s", option);
        }
    }
    errno = EINVAL;
    fail("no program after --");
    return 0;
}

static int open_place(const char *path) {
    int fd = open(path, O_PATH | O_CLOEXEC);
    if (fd < 0) fail("open %s", path);
    return fd;
}

/* Version 1 lets a thread move itself at once; with whole processes, and in version 2, the kernel waits some
 * milliseconds until nobody forks, so into that one we are born. This process has one thread. */
static void join_cgroups(const struct plan *plan) {
    char path[4096];
    for (int i = 0; i < plan->num_cgroups; i++) {
        snprintf(path, sizeof path, "%s/tasks", plan->cgroups[i]);
        if (access(path, W_OK)) snprintf(path, sizeof path, "%s/cgroup.procs", plan->cgroups[i]);
        write_text(path, "0");
    }
}

/* Without privilege: a user namespace in which our own uid is 0, so that mounting is allowed. */
static void enter_namespaces(const struct plan *plan) {
    int user = plan->userns ? CLONE_NEWUSER : 0, network = plan->linked ? CLONE_NEWNET : 0;
    uid_t uid = geteuid();
    gid_t gid = getegid();
    if (unshare(CLONE_NEWNS | user | network)) fail(user ? "make a user namespace" : "make namespaces");
    if (network) start_loopback();
    if (plan->adopter >= 0) await_adoption(plan->adopter, plan->linked);
    else if (user) map_own_id(uid, gid);
    if (user) lower_counts();
    if (mount("none", "/", NULL, MS_REC | MS_PRIVATE, NULL)) fail("make mounts private");
    if (plan->network >= 0 && setns(plan->network, CLONE_NEWNET)) fail("enter the network namespace");
}

/* Covered by an empty file system: what a more powerful namespace has mounted cannot be taken away. */
static void hide(const char *place) {
    const char *options = "size=4k,nr_inodes=2,mode=555";
    unsigned long flags = MS_NOSUID | MS_NODEV | MS_NOEXEC | MS_RDONLY;
    if (mount("dockyard", place, "tmpfs", flags, options)) fail("hide %s", place);
}

static void make_directory(const char *path, mode_t mode) {
    if (mkdir(path, mode)) fail("mkdir %s", path);
}

static int make_place(const char *base, const char *name, mode_t mode) {
    char path[4096];
    snprintf(path, sizeof path, "%s/%s", base, name);
    make_directory(path, mode);
    return open_place(path);
}

/* An overlay writes with the powers of who mounts it, and with this one no quota and no reserve holds. */
static void give_up_exceeding(void) {
    struct __user_cap_header_struct head = {_LINUX_CAPABILITY_VERSION_3, 0};
    struct __user_cap_data_struct data[_LINUX_CAPABILITY_U32S_3];
    if (syscall(SYS_capget, &head, data)) fail("read capabilities");
    data[0].effective &= ~(1U << CAP_SYS_RESOURCE);
    if (syscall(SYS_capset, &head, data)) fail("give up a capability");
}

/* A name that is not the image's, which programs look up: the first line of /etc/hosts. */
static void name_host(int upper, const char *name) {
    if (mkdirat(upper, "etc", 0555) && errno != EEXIST) fail("mkdir etc");
    int etc = openat(upper, "etc", O_PATH | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    unlinkat(etc, "hosts", 0);
    int fd = openat(etc, "hosts", O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0444);
    if (fd < 0 || dprintf(fd, "127.0.0.1\tlocalhost %s\n::1\tlocalhost\n", name) < 0) fail("write etc/hosts");
    close(fd), close(etc);
}

/* What the sandbox's uid may write to is made in the layer before the overlay is mounted, with the skeleton's modes:
 * to give it away through the overlay would copy each directory up. */
static void make_writable(const struct plan *plan, const char *path, int skeleton, int upper) {
    struct stat info;
    char part[4096];
    for (size_t length = 0; path[length];) {
        length += 1 + strcspn(path + length + 1, "/");
        snprintf(part, sizeof part, "%.*s", (int)length - 1, path + 1);
        if (fstatat(skeleton, part, &info, AT_SYMLINK_NOFOLLOW)) fail("look at %s", part);
        if (!mkdirat(upper, part, 0700) ? fchmodat(upper, part, info.st_mode & 07777, 0) : errno != EEXIST)
            fail("make %s", part);
    }
    if (fchownat(upper, part, plan->owner, plan->owner, AT_SYMLINK_NOFOLLOW)) fail("chown %s", path);
}

/* Returns a descriptor of the layer's content, for the owner to find in the nursery, or at LAYER_FD where we stay. */
static int mount_layer(const struct plan *plan, int skeleton) {
    char options[256];
    const char *base = plan->layer < 0 ? "/tmp" : "/tmp/layer";
    snprintf(options, sizeof options, "size=%s,nr_inodes=%s,mode=755", plan->layer_bytes, plan->layer_inodes);
    if (mount("dockyard", "/tmp", "tmpfs", MS_NOSUID | MS_NODEV, options)) fail("mount tmpfs (%s)", options);
    make_directory("/tmp/root", 0755);
    if (plan->layer >= 0) {
        give_up_exceeding();
        make_directory(base, 0755);
        if (syscall(SYS_MOVE_MOUNT, plan->layer, "", AT_FDCWD, base, FROM_EMPTY_PATH)) fail("mount the layer");
    }
    int work = make_place(base, "work", 0755), upper = make_place(base, "upper", 0555); /* the mode of its / */
    if (plan->content >= 0) copy_layer(plan->content, upper, plan->content_ids, plan->owner, UINT64_MAX);
    for (int i = 0; i < plan->num_writable; i++) make_writable(plan, plan->writable[i], skeleton, upper);
    if (plan->host) name_host(upper, plan->host);
    snprintf(options, sizeof options,
             "lowerdir=/proc/self/fd/%d,upperdir=/proc/self/fd/%d,workdir=/proc/self/fd/%d%s%s", skeleton, upper, work,
             plan->layer < 0 ? "" : ",volatile", plan->userns ? ",userxattr" : "");
    if (mount("dockyard", "/tmp/root", "overlay", MS_NOSUID | MS_NODEV, options)) fail("mount overlay");
    return upper;
}

static void set_read_only(const char *target) {
    struct attributes attributes = {.set = ATTR_RDONLY | ATTR_NOSUID | ATTR_NODEV};
    if (syscall(SYS_MOUNT_SETATTR, AT_FDCWD, target, RECURSIVE, &attributes, sizeof attributes))
        fail("make %s read-only", target);
}

static void bind_read_only(const char *source, const char *target_in_root) {
    char target[4096];
    snprintf(target, sizeof target, "/tmp/root%s", target_in_root);
    if (mount(source, target, NULL, MS_BIND | MS_REC, NULL)) fail("bind %s on %s", source, target_in_root);
    set_read_only(target);
}

static void mount_image(const struct plan *plan) {
    char path[4096];
    for (int i = 0; i < plan->num_binds; i++) {
        snprintf(path, sizeof path, "/proc/self/fd/%d", plan->binds[i].fd);
        bind_read_only(path, plan->binds[i].target);
    }
    for (int i = 0; i < plan->num_masks; i++) bind_read_only("/tmp/root/.dockyard/empty", plan->masks[i]);
}

static void mount_terminals(const char *most) {
    char options[64];
    snprintf(options, sizeof options, "newinstance,ptmxmode=0666,mode=0620,max=%s", most);
    make_directory("/tmp/pts", 0755);
    if (mount("devpts", "/tmp/pts", "devpts", MS_NOSUID | MS_NOEXEC, options)) fail("mount devpts (%s)", options);
}

static void copy_config(int from) {
    char chunk[8192];
    make_directory("/tmp/bundle", 0700);
    int to = open("/tmp/bundle/config.json", O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    if (to < 0) fail("make config.json");
    for (ssize_t length; (length = read(from, chunk, sizeof chunk)) > 0;)
        if (write(to, chunk, (size_t)length) != length) fail("write config.json");
    close(to);
}

/* The control socket at CONTROL_FD, the filter behind it, then the layer and the program (each where there is one), and
 * nothing else. The first two are for the program. */
static void keep_only(const struct plan *plan, int layer) {
    int kept[NUM_KEPT] = {plan->control, plan->filter, layer, plan->program}, last = 0;
    for (int i = 0; i < NUM_KEPT; i++) /* out of the way of each other's places */
        if (kept[i] >= 0 && (kept[i] = fcntl(kept[i], F_DUPFD_CLOEXEC, CONTROL_FD + NUM_KEPT)) < 0) fail("move files");
    for (int i = 0; i < NUM_KEPT; i++)
        if (kept[i] < 0) close(CONTROL_FD + i);
        else if (dup3(kept[i], CONTROL_FD + (last = i), i < 2 ? 0 : O_CLOEXEC) < 0) fail("move files");
    if (syscall(SYS_close_range, CONTROL_FD + last + 1, ~0U, 0)) fail("close files");
}

/* Keys of the owner's session are nothing for a sandbox, nor are another sandbox's; a runtime is told to make no
 * keyring of its own. A user has room for some 200: beyond them, where there is no runtime, the filter alone keeps
 * sandboxes from keys, as it does anyway. */
static void leave_session_keyring(const struct plan *plan) {
    if (syscall(SYS_keyctl, JOIN_SESSION_KEYRING, NULL) >= 0 || errno == ENOSYS) return;
    if (errno != EDQUOT || plan->detached) fail("make a session keyring");
}

static void become(char **words, int program) {
    if (program < 0) execv(words[0], words);
    else syscall(SYS_execveat, PROGRAM_FD, "", words, environ, AT_EMPTY_PATH);
    fail("run %s", words[0]);
}

/* Without privilege: runs the program and stays, as the process of its user namespace in which the layer is copied, and
 * holds that. A runtime that stays too (SIGUSR1 says that the sandbox runs) is ended: that takes less than having it
 * fork twice to get out of the way. */
static int run_and_stay(const struct plan *plan, char **words) {
    int status = 0;
    sigset_t awaited;
    sigemptyset(&awaited);
    sigaddset(&awaited, SIGCHLD), sigaddset(&awaited, SIGUSR1);
    sigprocmask(SIG_BLOCK, &awaited, NULL);
    if (prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)) fail("become a parent of orphans");
    pid_t runtime = fork();
    if (runtime < 0) fail("fork");
    if (runtime == 0) {
        sigprocmask(SIG_UNBLOCK, &awaited, NULL);
        become(words, plan->program);
    }
    close(CONTROL_FD), close(PROGRAM_FD); /* the first's end is the sandbox's */
    while (waitpid(runtime, &status, WNOHANG) == 0)
        if (sigwaitinfo(&awaited, NULL) == SIGUSR1) kill(runtime, SIGKILL);
    if (WIFEXITED(status) && WEXITSTATUS(status)) return WEXITSTATUS(status);
    while (waitpid(-1, &status, 0) >= 0 || errno == EINTR) continue;
    return 0;
}

int launch(int argc, char **argv, const struct origin *origin) {
    struct plan plan = {
        .control = -1, .config = -1, .filter = -1, .program = -1, .network = -1, .layer = -1, .content = -1};
    plan.adopter = -1, plan.origin = origin;
    int program = read_plan(&plan, argc, argv);
    if (program >= argc || plan.control < 0 || !plan.skeleton || !plan.layer_bytes || !plan.layer_inodes) {
        errno = EINVAL;
        fail("launch needs --control, --skeleton, --layer-bytes, --layer-inodes and a program");
    }
    bool stays = plan.detached && plan.userns;
    if (!origin) begin_anew(); /* as the nursery has for all */
    setsid(); /* a Ctrl-C at the owner's terminal is the owner's to handle */
    join_cgroups(&plan);
    lower_limits(); /* before there is a user namespace, which takes them over */
    enter_namespaces(&plan);
    struct order order = {plan.no_network, plan.userns, plan.owner, plan.num_ids};
    struct maker maker = start_maker(&order);
    int skeleton = open_place(plan.skeleton);
    for (int i = 0; i < plan.num_binds; i++) plan.binds[i].fd = open_place(plan.binds[i].source);
    for (int i = 0; i < plan.num_hidden; i++) hide(plan.hidden[i]);
    int layer = mount_layer(&plan, skeleton);
    mount_image(&plan);
    if (plan.terminals) mount_terminals(plan.terminals);
    if (plan.config >= 0) copy_config(plan.config);
    take_namespaces(&maker, "/tmp/user", &order);
    if (plan.adopter >= 0) await_word(plan.adopter); /* nothing of the sandbox runs before it is in its cgroups */
    if (plan.detached && !stays && origin) send_message(origin->reports, origin->ticket, DONE, 0, 0, layer);
    keep_only(&plan, stays ? layer : -1);
    if (chdir("/")) fail("chdir /");
    if (plan.drop) drop_to(plan.owner);
    leave_session_keyring(&plan);
    if (stays) return run_and_stay(&plan, argv + program);
    become(argv + program, plan.program);
    return 125;
}
