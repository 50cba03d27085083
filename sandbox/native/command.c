/* One command. Init forks a minder for it, the minder forks the program.
 *
 * The minder is the "child subreaper" of everything that the program starts: a process that daemonises is
 * handed to the minder, not to init, so the minder knows all of the command's processes, however they try to
 * leave. The rule: when the program ends, or when it is told to, the minder kills every one that is left and
 * only then reports, to the host itself. Nothing outlives its command. */
#include "dockyard.h"

#include <sys/ioctl.h>
#include <sys/mman.h>

_Noreturn static void give_up(int report, enum ending ending) {
    send_message(report, 0, EXIT, ending, (uint32_t)errno, -1);
    _exit(127);
}

/* The command's end of a terminal, whose other end goes to the host. The sandbox's own devpts bounds how many
 * there are. */
static int open_terminal(uint32_t size, int report) {
    struct winsize shown = {.ws_row = (uint16_t)size, .ws_col = (uint16_t)(size >> 16)};
    int locked = 0, master = open("/dev/ptmx", O_RDWR | O_NOCTTY | O_CLOEXEC | O_NONBLOCK);
    if (master < 0 || ioctl(master, TIOCSPTLCK, &locked) || ioctl(master, TIOCSWINSZ, &shown)) return -1;
    int slave = ioctl(master, TIOCGPTPEER, O_RDWR | O_NOCTTY | O_CLOEXEC);
    return slave >= 0 && send_message(report, 0, TERMINAL, 0, 0, master) ? slave : -1;
}

static bool take_streams(const struct message *call, const struct exec *exec) {
    int in = exec->in, out = exec->out, err = exec->err;
    if (call->first & EXEC_TERMINAL) in = out = err = open_terminal(call->second, exec->report);
    else if (!(call->first & EXEC_STDIN)) in = open("/dev/null", O_RDONLY | O_CLOEXEC);
    if (in < 0 || dup2(in, 0) < 0 || dup2(out, 1) < 0 || dup2(err, 2) < 0) return false;
    return !(call->first & EXEC_TERMINAL) || !ioctl(0, TIOCSCTTY, 0);
}

static char **take_strings(char **cursor, uint32_t count) {
    char **strings = calloc((size_t)count + 1, sizeof *strings);
    for (uint32_t i = 0; strings && i < count; i++) {
        strings[i] = *cursor;
        *cursor += strlen(*cursor) + 1;
    }
    return strings;
}

_Noreturn static void become_program(const struct message *call, const struct exec *exec, uint64_t data_bytes) {
    struct stat info;
    sigset_t none;
    sigemptyset(&none);
    setsid();
    if (data_bytes) setrlimit(RLIMIT_DATA, &(struct rlimit){data_bytes, data_bytes});
    if (!take_streams(call, exec) || fstat(exec->words, &info)) give_up(exec->report, FAILED_START);
    setrlimit(RLIMIT_NOFILE, &(struct rlimit){1024, 1024}); /* init and minder keep more, to be ahead of commands */
    uint32_t *words = mmap(NULL, (size_t)info.st_size, PROT_READ, MAP_PRIVATE, exec->words, 0);
    if (words == MAP_FAILED) give_up(exec->report, FAILED_START);
    char *cwd = (char *)(words + 2), *cursor = cwd + strlen(cwd) + 1;
    char **argv = take_strings(&cursor, words[0]);
    environ = take_strings(&cursor, words[1]);
    if (!argv || !environ) give_up(exec->report, FAILED_START);
    if (chdir(cwd)) give_up(exec->report, FAILED_CHDIR);
    sigprocmask(SIG_SETMASK, &none, NULL);
    execvp(argv[0], argv);
    give_up(exec->report, FAILED_EXEC);
}

/* The program's wait status; that of a killed one when init says (SIGTERM) that it is to end. */
static int wait_for_program(pid_t program) {
    sigset_t awaited;
    sigemptyset(&awaited);
    sigaddset(&awaited, SIGCHLD);
    sigaddset(&awaited, SIGTERM);
    for (int status;;) {
        for (pid_t ended; (ended = waitpid(-1, &status, WNOHANG)) > 0;)
            if (ended == program) return status;
        if (sigwaitinfo(&awaited, NULL) == SIGTERM) return SIGKILL;
    }
}

/* Without a child there is no descendant: all orphans are the minder's. Most commands end so. */
static bool has_children(void) {
    pid_t ended;
    while ((ended = waitpid(-1, NULL, WNOHANG | __WALL)) > 0) {}
    return ended == 0;
}

void run_minder(const struct message *call, const struct exec *exec, uint64_t data_bytes) {
    prctl(PR_SET_CHILD_SUBREAPER, 1);
    pid_t program = vfork(); /* the minder has nothing to do until it runs, and no page is copied */
    if (program == 0) become_program(call, exec, data_bytes);
    if (program < 0) give_up(exec->report, FAILED_START);
    close(exec->words), close(exec->out), close(exec->err), close(exec->in);
    int status = wait_for_program(program);
    if (has_children() && !kill_descendants(getpid(), NULL, 0)) _exit(1);
    if (WIFSIGNALED(status)) send_message(exec->report, 0, EXIT, ENDED_SIGNAL, (uint32_t)WTERMSIG(status), -1);
    else send_message(exec->report, 0, EXIT, ENDED_EXIT, (uint32_t)WEXITSTATUS(status), -1);
    _exit(0);
}
