/* Parent of one owner's sandboxes: launches begin as copies of this process, and what they leave is its to reap.
 *
 * An owner has some descriptors and a thread for each sandbox, and whatever it started by itself would begin with a
 * copy of all descriptors; this process has next to nothing. The first process of a sandbox that a runtime has made
 * becomes its child when the runtime goes (PR_SET_CHILD_SUBREAPER), so nobody has to stay between them. When the owner
 * is gone, so are its sandboxes soon, and then this process.
 *
 * Requests and answers (the other end: sandbox/nursery.py) are packets of a SEQPACKET socket. */
#define _GNU_SOURCE
#include "launch.h"

#include <linux/futex.h>
#include <poll.h>
#include <sched.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <time.h>

enum { MAX_GIVEN = 12 };
enum { ALL_AFTER_MS = 5, LOOKS_A_MS = 40 }; /* of children: what a look at all costs is 1% of the time between two */
enum { LAYERS_FROM = 32 /* above all else here */, UNSHARE_FILES = 2 /* of close_range */, LOOK_AGAIN_NS = 2000000 };
enum verb { START = 1, SETTLE = 2, END = 3, LEND = 4 };
enum answer { STARTED = 1, SETTLED = 2, ENDED = 3, LENT = 4 };
#define INTO_CGROUP 0x200000000ULL /* of clone3 */
#define SHARE_FILES 0x400ULL

/* With START come descriptors, for what launch says and those that its words name by their place among these; one is
 * of a file with these words, which a packet has no room for: a policy's places are many and may be long. */
struct request {
    uint32_t ticket, verb;
    int32_t first; /* of START: place of a cgroup to be born in; of SETTLE: a signal for the launcher; 0 = none */
    int32_t init;  /* of START: place of the words; of SETTLE: the process that stays when the launcher goes, 0 = it */
};

struct said {
    uint32_t ticket, what;
    int32_t value; /* of STARTED: a pid, or an errno below 0. Of SETTLED and LENT: 0 = there is a layer, or -1 */
    int32_t none;
};

/* struct clone_args of linux/sched.h, which cannot be included beside sched.h on every libc. */
struct birth {
    uint64_t flags, pidfd, child_tid, parent_tid, exit_signal, stack, stack_size, tls, set_tid, set_tid_size, cgroup;
};

struct child {
    uint32_t ticket;
    pid_t launcher, init; /* 0 = gone, or never there */
    int layer;
    bool settled; /* nothing more is to come: it has ended when both processes have */
};

static struct child *children;
static size_t num_children, room;
static int owner;
static pid_t owner_pid;
static uid_t owner_uid;
static int reports[2]; /* what launches hand in */
static _Atomic uint32_t *is_apart; /* in memory that launches share: the last one has its own table of descriptors */

static struct child *find(uint32_t ticket) {
    for (size_t i = 0; i < num_children; i++)
        if (children[i].ticket == ticket) return &children[i];
    return NULL;
}

/* One that the owner does not read any more is gone. `fd` travels along, -1 = none. */
static void answer_with(uint32_t ticket, enum answer what, int32_t value, int fd) {
    struct said said = {ticket, what, value, 0};
    struct iovec part = {&said, sizeof said};
    union {
        char bytes[CMSG_SPACE(sizeof fd)];
        struct cmsghdr head;
    } sent = {.head = {.cmsg_len = CMSG_LEN(sizeof fd), .cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS}};
    struct msghdr packet = {.msg_iov = &part, .msg_iovlen = 1};
    if (fd >= 0) {
        memcpy(CMSG_DATA(&sent.head), &fd, sizeof fd);
        packet.msg_control = sent.bytes, packet.msg_controllen = sizeof sent.bytes;
    }
    while (sendmsg(owner, &packet, MSG_NOSIGNAL) < 0 && errno == EINTR) continue;
}

static void answer(uint32_t ticket, enum answer what, int32_t value) {
    answer_with(ticket, what, value, -1);
}

/* A pid may be another's by now, but not while its process is a child that nobody has waited for. */
static bool is_ours(pid_t pid) {
    siginfo_t info;
    return waitid(P_PID, (id_t)pid, &info, WEXITED | WNOHANG | WNOWAIT) == 0;
}

static void look_whether_ended(struct child *child) {
    if (child->launcher || !child->settled) return;
    if (child->init && is_ours(child->init)) return;
    if (child->layer >= 0) close(child->layer);
    answer(child->ticket, ENDED, 0);
    *child = children[--num_children];
}

static void note_end(pid_t pid) {
    for (size_t i = num_children; i-- > 0;) { /* backwards: one that has ended leaves its place to the last */
        struct child *child = &children[i];
        if (child->launcher != pid && child->init != pid) continue;
        *(child->launcher == pid ? &child->launcher : &child->init) = 0;
        look_whether_ended(child);
    }
}

/* To wait for any child, the kernel looks at each: with thousands of them that is what the signal is to spare us. One
 * signal may stand for several ends, so all are looked at some time after. True when that is due. */
static bool reap_told(int signals) {
    struct signalfd_siginfo told;
    bool is_due = false;
    while (read(signals, &told, sizeof told) > 0) {
        is_due = true;
        pid_t pid = (pid_t)told.ssi_pid;
        if (pid > 0 && waitpid(pid, NULL, WNOHANG) > 0) note_end(pid);
    }
    return is_due;
}

static int64_t now_ms(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * INT64_C(1000) + now.tv_nsec / 1000000;
}

static void reap_all(void) {
    for (pid_t pid; (pid = waitpid(-1, NULL, WNOHANG)) > 0;) note_end(pid);
}

static bool make_room(void) {
    if (num_children < room) return true;
    struct child *grown = realloc(children, (room + 64) * sizeof *grown);
    if (!grown) return false;
    children = grown, room += 64;
    return true;
}

/* The program's own name for a process, where `ps` and an audit look for a sandbox's id. */
static void rename_self(char *place, const char *id) {
    size_t length = strlen(place);
    memset(place, 0, length);
    memcpy(place, id, strlen(id) < length ? strlen(id) : length);
}

/* In the new process: a table of descriptors of its own, without the layers of all others. A copy of the nursery's, as
 * a fork makes it, has one for each live sandbox, and so would that of what launch forks. */
static void leave_layers(void) {
    if (syscall(SYS_close_range, LAYERS_FROM, ~0U, UNSHARE_FILES) && unshare(CLONE_FILES)) _exit(125);
    atomic_store(is_apart, 1);
    syscall(SYS_futex, is_apart, FUTEX_WAKE, 1, NULL, NULL, 0);
}

/* Until then what is closed here would be closed there. */
static void await_leave(pid_t pid) {
    struct timespec some = {.tv_nsec = LOOK_AGAIN_NS};
    siginfo_t info = {0};
    while (!atomic_load(is_apart)) {
        syscall(SYS_futex, is_apart, FUTEX_WAIT, 0, &some, NULL, 0);
        if (waitid(P_PID, (id_t)pid, &info, WEXITED | WNOHANG | WNOWAIT) || info.si_pid) return;
    }
}

/* In the new process. Input is an empty file of its own: an OCI runtime gives the sandbox's uid what it finds there,
 * and as the owner of a device a sandbox could change its mode for everyone. */
static void become_launch(uint32_t ticket, char *name, char **words, int num_words, const int *fds) {
    sigset_t none;
    leave_layers();
    follow(owner_pid);
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
    rename_self(name, words[0]);
    if (dup2(memfd_create("dockyard", 0), 0) < 0 || dup2(fds[0], 1) < 0 || dup2(fds[0], 2) < 0) _exit(125);
    struct origin origin = {reports[1], ticket, fds};
    exit(launch(num_words - 1, words + 1, &origin));
}

static pid_t give_birth(int group) {
    struct birth birth = {.flags = SHARE_FILES | INTO_CGROUP, .exit_signal = SIGCHLD, .cgroup = (uint64_t)group};
    atomic_store(is_apart, 0);
    if (group < 0) return (pid_t)syscall(SYS_clone, SHARE_FILES | SIGCHLD, 0, 0, 0, 0);
    return (pid_t)syscall(SYS_clone3, &birth, sizeof birth);
}

struct words {
    char *text, **at;
    size_t length;
    int count;
};

/* The sandbox's id and the words of `launch`, each with a NUL at its end. False where there are none: errno says why */
static bool read_words(int fd, struct words *words) {
    struct stat info;
    if (fstat(fd, &info)) return false;
    errno = EINVAL;
    if (info.st_size <= 0) return false;
    words->length = (size_t)info.st_size;
    words->text = mmap(NULL, words->length, PROT_READ | PROT_WRITE, MAP_PRIVATE, fd, 0);
    if (words->text == MAP_FAILED) return words->text = NULL, false;
    words->text[words->length - 1] = 0;
    for (size_t at = 0; at < words->length; at += strlen(words->text + at) + 1) words->count++;
    words->at = calloc((size_t)words->count + 1, sizeof *words->at);
    if (!words->at) return false;
    char **next = words->at;
    for (size_t at = 0; at < words->length; at += strlen(words->text + at) + 1) *next++ = words->text + at;
    return true;
}

static void start(const struct request *request, char *name, const int *fds) {
    struct words words = {0};
    int group = request->first, file = request->init;
    errno = EINVAL;
    bool fits = group >= 0 && group < MAX_GIVEN && file >= 0 && file < MAX_GIVEN && read_words(fds[file], &words);
    pid_t pid = fits && make_room() ? give_birth(group ? fds[group] : -1) : -1;
    if (pid == 0) become_launch(request->ticket, name, words.at, words.count, fds);
    if (pid > 0) children[num_children++] = (struct child){request->ticket, pid, 0, -1, false};
    answer(request->ticket, STARTED, pid > 0 ? pid : -errno);
    if (pid > 0) await_leave(pid);
    free(words.at);
    if (words.text) munmap(words.text, words.length);
}

static int keep_layer(int fd) {
    int kept = fd < 0 ? -1 : fcntl(fd, F_DUPFD_CLOEXEC, LAYERS_FROM);
    if (fd >= 0) close(fd);
    return kept;
}

/* A launch hands in its layer's content before anything of the sandbox runs. */
static void take_reports(void) {
    struct message message;
    int fds[MAX_FDS];
    while (receive_message(reports[0], &message, fds)) {
        struct child *child = find(message.id);
        if (child && child->layer < 0) child->layer = keep_layer(fds[0]);
        else if (fds[0] >= 0) close(fds[0]);
    }
}

static void settle(const struct request *request) {
    take_reports();
    struct child *child = find(request->ticket);
    answer(request->ticket, SETTLED, child && child->layer >= 0 ? 0 : -1);
    if (!child) return;
    child->init = request->init, child->settled = true;
    if (child->launcher && request->first && is_ours(child->launcher)) kill(child->launcher, request->first);
    look_whether_ended(child);
}

/* The layer itself: the number that it has here says nothing once somebody else has our pid. */
static void lend(uint32_t ticket) {
    struct child *child = find(ticket);
    int layer = child ? child->layer : -1;
    answer_with(ticket, LENT, layer >= 0 ? 0 : -1, layer);
}

static void end(uint32_t ticket) {
    struct child *child = find(ticket);
    if (!child) return;
    child->settled = true;
    if (child->launcher && is_ours(child->launcher)) kill(child->launcher, SIGKILL);
    if (child->init && is_ours(child->init)) kill(child->init, SIGKILL);
    look_whether_ended(child);
}

/* `is_owner`: whether who asks is still the user whose process began this one. An owner that has dropped root is not,
 * and what runs in it is to have no way back. */
static ssize_t receive(struct request *request, int fds[MAX_GIVEN], bool *is_owner) {
    struct ucred *from;
    union {
        char bytes[CMSG_SPACE(MAX_GIVEN * sizeof(int)) + CMSG_SPACE(sizeof *from)];
        struct cmsghdr header;
    } received;
    struct iovec part = {request, sizeof *request};
    struct msghdr packet = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = received.bytes,
                            .msg_controllen = sizeof received.bytes};
    memset(fds, -1, MAX_GIVEN * sizeof *fds);
    ssize_t length = recvmsg(owner, &packet, MSG_CMSG_CLOEXEC);
    struct cmsghdr *header = length < 0 ? NULL : CMSG_FIRSTHDR(&packet);
    for (*is_owner = false; header; header = CMSG_NXTHDR(&packet, header)) {
        from = (struct ucred *)CMSG_DATA(header);
        if (header->cmsg_type == SCM_RIGHTS) memcpy(fds, CMSG_DATA(header), header->cmsg_len - CMSG_LEN(0));
        else if (header->cmsg_type == SCM_CREDENTIALS) *is_owner = from->uid == owner_uid;
    }
    return length;
}

/* False once the owner is gone. */
static bool serve(char *name) {
    struct request request;
    int fds[MAX_GIVEN];
    bool is_owner;
    ssize_t length = receive(&request, fds, &is_owner);
    if (length < (ssize_t)sizeof request) return length < 0 && errno == EINTR;
    if (request.verb == START && !is_owner) answer(request.ticket, STARTED, -EPERM);
    else if (request.verb == START) start(&request, name, fds);
    else if (request.verb == SETTLE) settle(&request);
    else if (request.verb == LEND) lend(is_owner ? request.ticket : 0);
    else if (request.verb == END) end(request.ticket);
    for (int i = 0; i < MAX_GIVEN; i++)
        if (fds[i] >= 0) close(fds[i]);
    return true;
}

/* Those that are this process's children now, launches and what has lost its own parent. */
static void kill_children(void) {
    char word[16];
    FILE *list = fopen("/proc/thread-self/children", "re");
    while (list && fscanf(list, "%15s", word) == 1) kill(atoi(word), SIGKILL);
    if (list) fclose(list);
}

/* The owner is gone. What runs ends by itself as its control socket closes; what is frozen cannot notice, and nobody
 * is left to thaw it. To be killed needs no thawing. One that the kernel does not let go of keeps no other's layer. */
static void end_all(void) {
    for (size_t i = 0; i < num_children; i++)
        if (children[i].layer >= 0) close(children[i].layer);
    do kill_children();
    while (waitpid(-1, NULL, 0) >= 0 || errno == EINTR);
}

/* nursery SOCKET NAME   NAME is as long as an id may be: a launch writes its own there. */
int nursery(int argc, char **argv) {
    sigset_t awaited;
    errno = EINVAL;
    if (argc != 2) fail("nursery needs a socket and a name");
    owner = atoi(argv[0]), owner_pid = getppid(), owner_uid = getuid();
    begin_anew();
    if (setresgid(getegid(), getegid(), getegid()) || setresuid(geteuid(), geteuid(), geteuid())) fail("be one user");
    prctl(PR_SET_DUMPABLE, 1); /* or what is ours in /proc would be root's, where the owner was two */
    struct rlimit files;
    if (!getrlimit(RLIMIT_NOFILE, &files)) setrlimit(RLIMIT_NOFILE, &(struct rlimit){files.rlim_max, files.rlim_max});
    setsid(); /* a Ctrl-C at the owner's terminal is the owner's to handle */
    sigemptyset(&awaited);
    sigaddset(&awaited, SIGCHLD);
    sigprocmask(SIG_BLOCK, &awaited, NULL);
    int signals = signalfd(-1, &awaited, SFD_CLOEXEC | SFD_NONBLOCK);
    if (signals < 0 || prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)) fail("become a parent of orphans");
    if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, reports)) fail("make a socket");
    is_apart = mmap(NULL, sizeof *is_apart, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (is_apart == MAP_FAILED) fail("share memory");
    struct pollfd awaiting[] = {{owner, POLLIN, 0}, {signals, POLLIN, 0}, {reports[0], POLLIN, 0}};
    int64_t due_ms = 0; /* when all are looked at; 0 = nothing has been told */
    for (bool has_owner = true; has_owner;) {
        int64_t left_ms = due_ms - now_ms();
        if (poll(awaiting, 3, due_ms == 0 ? -1 : left_ms > 0 ? (int)left_ms : 0) < 0) continue;
        if (reap_told(signals) && due_ms == 0) due_ms = now_ms() + ALL_AFTER_MS + (int64_t)num_children / LOOKS_A_MS;
        if (due_ms && now_ms() >= due_ms) reap_all(), due_ms = 0;
        if (awaiting[2].revents) take_reports();
        if (awaiting[0].revents) has_owner = serve(argv[1]);
    }
    end_all();
    return 0;
}
