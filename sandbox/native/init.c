/* Pid 1 of a sandbox: one loop that waits for a signal, be it of a message or of a child's end.
 *
 * When the control socket closes, the owner is gone: init ends, and the kernel ends everything in its pid
 * namespace. Init and minders are not dumpable, so the sandbox's own processes (same uid) cannot trace them. */
#include "dockyard.h"

static pid_t minders[MAX_COMMANDS]; /* 0 = free */
static uint32_t ids[MAX_COMMANDS];  /* of their commands */
static uint64_t max_data_bytes; /* of a process */
static int control;
static int own_score; /* of the OOM killer, for this process; opened while it may still be */

static int find_minder(pid_t minder) {
    int place = 0;
    while (place < MAX_COMMANDS && minders[place] != minder) place++;
    return place;
}

/* The kernel takes a command before it takes init: a command begins with init's score, raised meanwhile. */
static pid_t fork_offered_to_oom_killer(void) {
    ssize_t raised = write(own_score, "500", 3);
    pid_t minder = fork();
    if (minder != 0 && raised == 3) raised = write(own_score, "0", 1);
    return minder;
}

static void start_command(const struct message *call, const int fds[MAX_FDS]) {
    struct exec exec = {fds[0], fds[1], fds[2], fds[3], fds[4]};
    int place = find_minder(0);
    errno = exec.report < 0 ? EMFILE : EBUSY;
    pid_t minder = exec.report >= 0 && place < MAX_COMMANDS ? fork_offered_to_oom_killer() : -1;
    if (minder == 0) {
        close(control), close(own_score);
        run_minder(call, &exec, max_data_bytes);
    }
    if (minder < 0) send_message(control, call->id, EXIT, FAILED_START, (uint32_t)errno, -1);
    else minders[place] = minder, ids[place] = call->id;
}

static void kill_command(uint32_t id) {
    for (int place = 0; place < MAX_COMMANDS; place++)
        if (minders[place] && ids[place] == id) kill(minders[place], SIGTERM);
}

static void serve(const struct message *call, const int fds[MAX_FDS]) {
    if (call->kind == EXEC) start_command(call, fds);
    else if (call->kind == KILL) kill_command(call->id);
    else {
        int opened = -1;
        uint32_t error = serve_file(call, fds[0], &opened);
        if (!send_message(control, call->id, DONE, error, 0, opened))
            send_message(control, call->id, DONE, (uint32_t)errno, 0, -1);
        close(opened);
    }
}

/* Init's only children are minders; any other process was handed over by a minder that a command managed to
 * kill, so it is a stray and goes. If even that fails, the sandbox as a whole goes. */
static void bury(int place, int status) {
    minders[place] = 0;
    if (WIFEXITED(status) && WEXITSTATUS(status) == 0) return; /* it has reported */
    if (!kill_descendants(getpid(), minders, MAX_COMMANDS)) _exit(1);
    send_message(control, ids[place], EXIT, MINDER_DIED, 0, -1);
}

/* Nobody but a command stops a minder, and a stopped one ends nothing: it is killed, so that its command ends
 * as that of a minder does which a command has killed itself. */
static void reap(void) {
    int status, place;
    for (pid_t child; (child = waitpid(-1, &status, WNOHANG | WUNTRACED)) > 0;) {
        if (WIFSTOPPED(status)) kill(child, SIGKILL);
        else if ((place = find_minder(child)) < MAX_COMMANDS) bury(place, status);
    }
}

_Noreturn static void serve_forever(const sigset_t *awaited) {
    static struct message message;
    int fds[MAX_FDS];
    for (;;) {
        reap();
        while (receive_message(control, &message, fds)) {
            serve(&message, fds);
            for (int i = 0; i < MAX_FDS; i++) close(fds[i]);
        }
        sigwaitinfo(awaited, NULL);
    }
}

/* For good: nothing that is confined may change to another profile, unless the profile says so. */
static void enter_profile(const char *name) {
    char words[256];
    snprintf(words, sizeof words, "changeprofile %s", name);
    write_text("/proc/self/attr/apparmor/current", words);
}

/* init CONTROL_FD ID MAX_PROCESSES MAX_DATA_BYTES PROFILE [PLACE ...]   0 = no such limit. ID makes the process
 * findable. PROFILE is of AppArmor, - for none. With places, all writes are to be beneath one of them. */
int run_init(int argc, char **argv) {
    if (argc < 5) return 125;
    control = atoi(argv[0]);
    uint64_t max_processes = strtoull(argv[2], NULL, 10);
    max_data_bytes = strtoull(argv[3], NULL, 10);
    prctl(PR_SET_DUMPABLE, 0);
    umask(022);
    setrlimit(RLIMIT_CORE, &(struct rlimit){0, 0});
    struct rlimit most;
    if (!getrlimit(RLIMIT_NOFILE, &most)) setrlimit(RLIMIT_NOFILE, &(struct rlimit){most.rlim_max, most.rlim_max});
    own_score = open("/proc/self/oom_score_adj", O_WRONLY | O_CLOEXEC);
    if (strcmp(argv[4], "-")) enter_profile(argv[4]);
    if (argc > 5) restrict_writes(argv + 5, argc - 5);
    if (max_processes) setrlimit(RLIMIT_NPROC, &(struct rlimit){max_processes, max_processes});
    for (int number = 1; number < NSIG; number++) signal(number, SIG_DFL); /* an owner in the background ignores some */
    sigset_t awaited;
    sigemptyset(&awaited);
    sigaddset(&awaited, SIGCHLD);
    sigaddset(&awaited, SIGIO); /* the control socket has something */
    sigaddset(&awaited, SIGTERM); /* a minder's to take; blocked before the fork, so that none is lost */
    sigprocmask(SIG_BLOCK, &awaited, NULL);
    fcntl(control, F_SETFD, FD_CLOEXEC);
    if (fcntl(control, F_SETOWN, getpid()) || fcntl(control, F_SETFL, O_ASYNC)) return 125;
    send_message(control, 0, HELLO, WIRE_VERSION, 0, -1);
    serve_forever(&awaited);
}
